"""From groups to batches: advantages before any split, denominators over the step, failures in neither."""

from collections.abc import Sequence

import numpy as np
import pytest

from rljax.config import Config
from rljax.data.packing import Batch
from rljax.recipe import load
from rljax.records import FinishReason, Group, Provenance, Rollout, Score, Task
from rljax.rollouts.batching import Prepared, batch_shape, prepare

PROMPT = 3  # tokens


def settings(*more: str) -> Config:
    return load(
        None,
        [
            *("sampler.slots=4", "sampler.max_prompt_length=4", "sampler.max_completion_length=8"),
            *("algorithm.num_generations=4", "train.rollout_batch_size=2", "train.micro_batch_size_per_device=2", *more),
        ],
    )


def rollout(task: str, attempt: int, reward: float | None, length: int, reason: FinishReason = "stop") -> Rollout:
    n = PROMPT + length
    by_model = np.arange(n) >= PROMPT
    return Rollout(
        task_id=task,
        attempt=attempt,
        tokens=np.full(n, attempt + 1, np.int32),
        provenance=np.where(by_model, Provenance.MODEL, Provenance.PROMPT).astype(np.int8),
        logp_behavior=np.where(by_model, -1.0, 0.0).astype(np.float32),
        versions=np.where(by_model, 0, -1).astype(np.int32),
        finish_reason=reason,
        score=Score("error", None) if reward is None else Score("score", reward),
        turns=1,
        text="",
    )


def group(name: str, rewards: Sequence[float | None], lengths: Sequence[int] = (2, 3, 4, 5)) -> Group:
    members = [rollout(name, index, *pair) for index, pair in enumerate(zip(rewards, lengths, strict=True))]
    return Group(Task(name, ()), tuple(members))


def made(groups: Sequence[Group], *more: str) -> Prepared:
    config = settings(*more)
    return prepare(groups, config, batch_shape(config, 1))


def of(batch: Batch, field: str, index: int) -> list[float]:
    """Return a field at the scored tokens of one packed rollout."""
    return getattr(batch, field)[batch.rollout == index].tolist()


ONE = group("one", [1.0, 0.0, 0.0, 0.0])
TWO = group("two", [0.0, 0.0, 1.0, 1.0])


def test_advantages_are_of_the_group_whatever_the_portions() -> None:
    whole = made([ONE, TWO])
    assert whole.advantages.values.tolist() == pytest.approx(
        [1.5, -0.5, -0.5, -0.5, *(sign * 0.5 * 3**0.5 for sign in (-1, -1, 1, 1))], rel=1e-6
    )
    for more in (["train.mini_batch_size=1"], ["train.micro_batch_size_per_device=8"], ["train.micro_batch_size_per_device=1"]):
        assert made([ONE, TWO], *more).advantages.values.tolist() == whole.advantages.values.tolist()
    turned = made([TWO, ONE]).advantages.values.tolist()
    assert turned == [*whole.advantages.values[4:].tolist(), *whole.advantages.values[:4].tolist()]


def test_every_token_is_packed_once_with_its_own_advantage_and_weight() -> None:
    (batch,) = made([ONE, TWO]).batches
    values = made([ONE, TWO]).advantages.values
    assert batch.num_rollouts == 8
    for index, length in enumerate([2, 3, 4, 5] * 2):
        assert of(batch, "advantage", index) == [values[index]] * length
        assert of(batch, "weight", index) == pytest.approx([1 / 28] * length)


def test_mini_batches_are_steps_of_their_own() -> None:
    first, second = made([ONE, TWO], "train.mini_batch_size=1").batches
    assert (first.num_rollouts, second.num_rollouts) == (4, 4)
    for batch in (first, second):
        assert batch.weight.sum() == pytest.approx(1.0), "the denominator is counted over the mini-batch"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", lambda length: 1 / 14),
        ("seq-mean-token-sum", lambda length: 1 / 4),
        ("seq-mean-token-mean", lambda length: 1 / (4 * length)),
        ("seq-mean-token-sum-norm", lambda length: 1 / (4 * 8)),
    ],
)
def test_weights_follow_the_mode(mode: str, expected: object) -> None:
    (batch,) = made([ONE], f"algorithm.loss_agg_mode={mode}").batches
    assert callable(expected)
    for index, length in enumerate([2, 3, 4, 5]):
        assert of(batch, "weight", index) == pytest.approx([expected(length)] * length)


def test_what_was_not_scored_is_in_no_row_and_no_denominator() -> None:
    (batch,) = made([group("one", [1.0, None, 0.0, None])]).batches
    assert batch.num_rollouts == 2
    assert sorted(set(batch.rollout[batch.mask].tolist())) == [0, 2]
    assert of(batch, "weight", 0) == pytest.approx([1 / 6] * 2)


def test_a_group_with_one_score_is_left_out_whole() -> None:
    prepared = made([group("one", [None, None, 1.0, None]), TWO])
    (batch,) = prepared.batches
    assert prepared.advantages.groups[0].dropped == "1 of 4 rollouts scored; a group needs at least 2"
    assert sorted(set(batch.rollout[batch.mask].tolist())) == [4, 5, 6, 7]
    assert batch.weight.sum() == pytest.approx(1.0)


def test_a_group_without_a_signal_is_kept_whole_with_advantage_zero() -> None:
    """Its tokens count in the denominator and in the KL divergence, as the formula says."""
    prepared = made([group("one", [1.0, 1.0, 1.0, 1.0]), ONE])
    (batch,) = prepared.batches
    assert [found.zero_variance for found in prepared.advantages.groups] == [True, False]
    assert batch.num_rollouts == 8
    assert of(batch, "advantage", 0) == [0.0, 0.0]
    assert of(batch, "weight", 4) == pytest.approx([1 / 28] * 2)


def test_groups_are_used_whole_or_not_at_all() -> None:
    for rewards in ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]):
        prepared = made([group("one", rewards)])
        assert prepared.batches[0].num_rollouts == 4
        assert np.all(prepared.advantages.values != 0)


def test_a_batch_without_any_score_is_empty() -> None:
    (batch,) = made([group("one", [None] * 4), group("two", [None] * 4)]).batches
    assert (batch.num_micro, batch.num_rollouts, batch.mask.any()) == (0, 0, False)


@pytest.mark.parametrize("masked", [False, True])
def test_truncated_rollouts_leave_the_loss_on_request_and_stay_in_the_statistics(masked: bool) -> None:
    cut = rollout("one", 3, 0.0, 5, "length")
    groups = [Group(ONE.task, (*ONE.rollouts[:3], cut))]
    prepared = made(groups, f"algorithm.mask_truncated_completions={str(masked).lower()}")
    (batch,) = prepared.batches
    assert prepared.advantages.values.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert of(batch, "weight", 0) == pytest.approx([1 / (9 if masked else 14)] * 2)
    assert (3 in batch.rollout) is not masked


def test_any_batch_of_the_run_fits_its_shape() -> None:
    config = settings("train.pack_length=24")
    shape = batch_shape(config, data_shards=2)
    assert (shape.rows, shape.length) == (4, 24)
    longest = [group(name, [1.0, 0.0, 0.0, 1.0], [8, 8, 8, 8]) for name in ("one", "two")]
    assert prepare(longest, config, shape).batches[0].num_micro <= shape.micro_batches
