"""From groups to batches: advantages before any split, denominators over the step, failures in neither."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from rljax.config import Config
from rljax.data.packing import Batch
from rljax.recipe import load
from rljax.records import FinishReason, Group, Provenance, Rollout, Score, Task
from rljax.rollouts.batching import (
    Prepared,
    batch_shape,
    informative_groups,
    needs_logprobs,
    only_advantages_teach,
    prepare,
    revise,
)
from tests.reference import critic

PROMPT = 3  # tokens


def settings(*more: str) -> Config:
    return load(
        None,
        [
            *("sampler.slots=4", "sampler.max_prompt_length=4", "sampler.max_completion_length=8"),
            *("algorithm.num_generations=4", "train.rollout_batch_size=2", "train.micro_batch_size_per_device=2", *more),
        ],
    )


def test_the_shape_follows_from_a_budget_of_tokens_on_every_mesh() -> None:
    config = load(None, ["train.micro_batch_tokens=1200", "algorithm.num_generations=4", "train.rollout_batch_size=2"])
    for shards in (1, 4):
        shape = batch_shape(config, shards)
        assert (shape.rows, shape.length) == (2 * shards, 512), "two rows of 512 on each device"
        assert shape.micro_batches * shape.rows * (512 // 256) >= 2 * 4, "the longest rollouts fit"


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
    prepared = made([group("one", [1.0, 1.0, 1.0, 1.0]), ONE], "train.skip_zero_advantages=false")
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


def test_a_penalty_on_length_is_in_the_advantage_and_not_in_the_score() -> None:
    """Lengths are 2, 3, 4 and 5 of at most 8 tokens; in a buffer of 5 they cost 0, 0, 0.2 and 0.4."""
    options = ("algorithm.overlong_buffer_len=5", "algorithm.scale_rewards=none")
    prepared = made([ONE, TWO], *options)
    assert prepared.advantages.values[:4].tolist() == pytest.approx([0.9, -0.1, -0.3, -0.5])
    assert made([ONE, TWO], *options, "algorithm.overlong_penalty_factor=0.5").advantages.values[0] == pytest.approx(0.825)
    assert ONE.rollouts[3].score.value == 0.0


def test_the_penalty_is_on_the_longest_message_of_a_conversation() -> None:
    first = rollout("one", 0, 1.0, 8)
    first.provenance[PROMPT + 4] = Provenance.ENVIRONMENT  # messages of 4 and 3 tokens
    groups = [Group(ONE.task, (first, *ONE.rollouts[1:]))]
    got = made(groups, "algorithm.overlong_buffer_len=5", "algorithm.scale_rewards=none").advantages.values
    assert got[0] - got[1] == pytest.approx(0.8)


def test_groups_are_informative_by_their_scores_as_a_whole() -> None:
    config = settings("algorithm.overlong_buffer_len=5", "algorithm.dynamic_sampling=true")
    rewards = ([1.0, 0.0, 0.0, 0.0], [1.0] * 3 + [0.0], [1.0, 1.0, 0.0, 0.0], [1.0] * 4, [0.0] * 4, [None, None, 1.0, None])
    groups = [group(str(index), row) for index, row in enumerate(rewards)]
    assert informative_groups(groups, config) == [True, True, True, False, False, False]


def scores_like(prepared: Prepared, of_rollout: Callable[[int], float]) -> list[np.ndarray]:
    """Return log-probabilities that are one number per rollout; NaN in filler."""
    out, first = [], 0
    for batch in prepared.batches:
        values = np.full(batch.mask.shape, np.nan, np.float32)
        for index in range(4 * (1 if len(prepared.batches) > 1 else 2)):
            values[batch.rollout == index] = of_rollout(first + index)
        first += 4
        out.append(values)
    return out


@pytest.mark.parametrize("portions", [(), ("train.mini_batch_size=1",)])
def test_the_divergence_comes_off_the_reward_of_each_rollout(portions: tuple[str, ...]) -> None:
    options = (*portions, "algorithm.kl_in_reward=true", "algorithm.beta=0.1", "algorithm.kl_estimator=k1")
    config = settings(*options, "algorithm.scale_rewards=none")
    assert needs_logprobs(config)
    prepared = prepare([ONE, TWO], config, batch_shape(config, 1))
    prox, ref = scores_like(prepared, lambda index: -1.0), scores_like(prepared, lambda index: -1.0 - 0.5 * (index % 4))
    revised = revise(prepared, [ONE, TWO], config, prox, ref, None, 0.2)  # the weight of this step, not of the recipe
    net = np.array([1.0, 0.0, 0.0, 0.0]) - 0.2 * 0.5 * np.arange(4) * np.array([2, 3, 4, 5])
    assert revised.advantages.values[:4].tolist() == pytest.approx((net - net.mean()).tolist(), rel=1e-5)
    assert of(revised.batches[0], "advantage", 3) == pytest.approx([net[3] - net.mean()] * 5, rel=1e-5)
    assert revised.rejected_fraction == 0.0
    for before, after in zip(prepared.batches, revised.batches, strict=True):
        assert (before.weight == after.weight).all()
        assert (before.tokens == after.tokens).all()


def test_each_token_has_the_return_of_what_comes_after_it() -> None:
    config = settings("algorithm.preset=reinforce_pp", "algorithm.beta=0.1")
    prepared = prepare([ONE, TWO], config, batch_shape(config, 1))
    prox, ref = scores_like(prepared, lambda index: -1.0), scores_like(prepared, lambda index: -2.0)
    (batch,) = revise(prepared, [ONE, TWO], config, prox, ref, None, 0.1).batches
    got = of(batch, "advantage", 0)  # 2 tokens: 1 - 0.2 and 1 - 0.1, whitened
    all_returns = np.concatenate(
        [[r - 0.1 * (n - t) for t in range(n)] for r, n in zip([1, 0, 0, 0, 0, 0, 1, 1], [2, 3, 4, 5] * 2, strict=True)]
    )
    want = (np.array([0.8, 0.9]) - all_returns.mean()) / all_returns.std(ddof=1)
    assert got == pytest.approx(want.tolist(), rel=1e-4)


@pytest.mark.parametrize(("level", "gone"), [("token", [1, 2]), ("sequence", [1, 2, 3]), ("geometric", [1, 2])])
def test_what_is_too_far_from_the_sampler_leaves_the_loss_and_its_denominators(level: str, gone: list[int]) -> None:
    """Ratios per token are 1, 3, 1/3 and 1.2 (1.2^5 = 2.5) for the rollouts of ONE, and 1 for those of TWO."""
    config = settings(f"algorithm.rollout_rs={level}", "train.mini_batch_size=1")
    prepared = prepare([ONE, TWO], config, batch_shape(config, 1))
    far = np.log([1.0, 3.0, 1 / 3, 1.2])
    prox = scores_like(prepared, lambda index: -1.0 + float(far[index % 4]) * (index < 4))
    revised = revise(prepared, [ONE, TWO], config, prox, None, None, 0.0)
    first, second = revised.batches
    assert sorted(set(first.rollout[first.mask].tolist())) == [index for index in range(4) if index not in gone]
    remaining = sum([2, 3, 4, 5][index] for index in range(4) if index not in gone)
    assert first.mask.sum() == remaining
    assert first.weight[first.mask].tolist() == pytest.approx([1 / remaining] * remaining)
    assert first.weight[~first.mask].tolist() == [0.0] * int((~first.mask).sum())
    assert (second.mask == prepared.batches[1].mask).all()
    assert revised.rejected_fraction == pytest.approx(sum([2, 3, 4, 5][index] for index in gone) / 28)
    assert of(first, "advantage", 0) == [1.5, 1.5], "the rewards stay in the statistics"
    assert revised.advantages.values.tolist() == prepared.advantages.values.tolist()


@pytest.mark.parametrize("portions", [(), ("train.mini_batch_size=1",)])
def test_a_critics_values_become_advantages_and_returns_in_the_slots_of_their_tokens(portions: tuple[str, ...]) -> None:
    options = ("algorithm.preset=ppo", "algorithm.whiten_advantages=false", "algorithm.gamma=0.9", "algorithm.gae_lambda=0.5")
    config = settings(*portions, *options)
    prepared = prepare([ONE, TWO], config, batch_shape(config, 1))
    assert prepared.returns == ()
    expected = [values + np.arange(values.shape[-1], dtype=np.float32) / 8 for values in scores_like(prepared, lambda i: i / 4)]
    prox, ref = scores_like(prepared, lambda index: -1.0), scores_like(prepared, lambda index: -1.5)
    revised = revise(prepared, [ONE, TWO], config, prox, ref, expected, 0.2)
    per_batch = 8 // len(revised.batches)
    for number, rollout in enumerate([*ONE.rollouts, *TWO.rollouts]):
        part, index = divmod(number, per_batch)
        batch, returns = revised.batches[part], revised.returns[part]
        values = expected[part][batch.rollout == index].tolist()
        rewards = critic.rewards_of([(rollout.score.value, len(values))], rollout.score.value or 0.0, [0.1] * len(values))
        want = critic.advantages(rewards, values, 0.9, 0.5)
        assert of(batch, "advantage", index) == pytest.approx(want, abs=1e-6)
        own = returns[batch.rollout == index]
        assert own.tolist() == pytest.approx([a + v for a, v in zip(want, values, strict=True)], abs=1e-6)
    for batch, returns in zip(revised.batches, revised.returns, strict=True):
        assert (returns[~batch.mask] == 0).all()


def test_a_critic_needs_no_log_probabilities_of_its_own() -> None:
    config = settings(
        "algorithm.advantage=gae", "algorithm.mask_truncated_completions=true", "algorithm.whiten_advantages=false"
    )
    assert not needs_logprobs(config)
    cut = group("one", [1.0, None, 0.5, 1.0])
    cut = Group(cut.task, (*cut.rollouts[:3], rollout("one", 3, 1.0, 5, "length")))
    prepared = prepare([cut, TWO], config, batch_shape(config, 1))
    (batch,) = revise(prepared, [cut, TWO], config, None, None, scores_like(prepared, lambda index: 0.0), 0.0).batches
    assert of(batch, "advantage", 0) == pytest.approx([0.95, 1.0])
    assert not {1, 3} & set(batch.rollout[batch.mask].tolist()), "not scored, and cut"


def conversation(attempt: int, rewards: tuple[float | None, ...]) -> Rollout:
    """Return a rollout of two messages, of 2 and 3 tokens, with what the environment gave for them."""
    whole = rollout("one", attempt, sum(reward or 0.0 for reward in rewards), 6)
    whole.provenance[PROMPT + 2] = Provenance.ENVIRONMENT
    return replace(whole, turns=2, turn_rewards=rewards)


def test_rewards_of_turns_are_compared_with_those_of_the_same_turn() -> None:
    rows = ((1.0, 0.0), (0.0, 1.0), (None, 0.5), (0.0, 0.5))
    members = tuple(conversation(attempt, row) for attempt, row in enumerate(rows))
    (batch,) = made([Group(ONE.task, members)], "algorithm.credit=turn", "algorithm.scale_rewards=none").batches
    first, second = np.array([1.0, 1.0, 0.5, 0.5]) - 0.75, np.array([0.0, 1.0, 0.5, 0.5]) - 0.5
    for index in range(4):
        assert of(batch, "advantage", index) == pytest.approx([first[index]] * 2 + [second[index]] * 3)


def test_where_turns_are_not_judged_the_score_is_that_of_the_last_one() -> None:
    members = tuple(replace(conversation(attempt, (None, float(attempt))), turn_rewards=()) for attempt in range(4))
    options = ("algorithm.credit=turn", "algorithm.scale_rewards=none", "algorithm.gamma=0.5")
    (batch,) = made([Group(ONE.task, members)], *options).batches
    assert of(batch, "advantage", 3) == pytest.approx([0.75] * 2 + [1.5] * 3)


def test_turns_may_differ_where_the_sums_do_not() -> None:
    members = tuple(conversation(attempt, (float(attempt % 2), float(1 - attempt % 2))) for attempt in range(4))
    groups = [Group(ONE.task, members), Group(ONE.task, tuple(conversation(attempt, (0.5, None)) for attempt in range(4)))]
    assert informative_groups(groups, settings("algorithm.credit=turn")) == [True, False]
    assert informative_groups(groups, settings()) == [False, False]


def test_a_reward_for_each_turn_or_none() -> None:
    with pytest.raises(ValueError, match="turn_rewards has 1 entries for 2 turns"):
        conversation(0, (1.0,))


SOLVED = group("solved", [1.0, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    "option",
    [
        "algorithm.beta=0.1",
        "algorithm.entropy_coef=0.01",
        "algorithm.rollout_rs=token",
        "algorithm.advantage=gae",
        "algorithm.router_z_loss_coef=0.1",
        "algorithm.router_balance_loss_coef=0.1",
        "lora.dropout=0.1 lora.rank=4",
        "train.skip_zero_advantages=false",
    ],
)
def test_rollouts_that_something_else_is_learned_from_are_packed(option: str) -> None:
    batch = made([ONE, SOLVED], *option.split()).batches[0]
    assert (batch.num_rollouts, batch.skipped_fraction) == (8, 0)
    assert only_advantages_teach(settings(*option.split())) == option.startswith("train.")


def test_rollouts_that_teach_nothing_have_no_row_but_stay_in_the_denominators() -> None:
    assert only_advantages_teach(settings())
    batch = made([ONE, SOLVED]).batches[0]
    assert (batch.num_rollouts, batch.skipped_fraction) == (4, 0.5)
    assert of(batch, "weight", 3) == pytest.approx([1 / 28] * 5)  # twice 2 + 3 + 4 + 5 tokens
    assert not (batch.rollout >= 4).any()
    first, second = made([ONE, SOLVED], "train.mini_batch_size=1").batches
    assert (first.num_rollouts, second.num_rollouts, second.num_micro, second.skipped_fraction) == (4, 0, 0, 1.0)
    # With a mean over the batch a solved group teaches something.
    assert made([ONE, SOLVED], "algorithm.advantage=reinforce_pp").batches[0].num_rollouts == 8
