"""What a batch of rollouts looks like as metrics: rewards of what was scored, lengths of what was said."""

import numpy as np
import pytest

from rljax.algorithms.losses import METRICS
from rljax.data.packing import Batch, PackShape, pack
from rljax.recipe import load
from rljax.records import FinishReason, Group, Provenance, Rollout, Score, Task
from rljax.rollouts.statistics import critic_metrics, rollout_metrics, update_metrics
from rljax.telemetry.metrics import as_numbers


def rollout(score: Score, length: int, reason: FinishReason = "stop", turns: int = 1) -> Rollout:
    n = length + 1 if turns else 0
    by_model = np.arange(n) > 0
    return Rollout(
        task_id="t",
        attempt=0,
        tokens=np.ones(n, np.int32),
        provenance=np.where(by_model, Provenance.MODEL, Provenance.PROMPT).astype(np.int8),
        logp_behavior=np.where(by_model, -1.0, 0.0).astype(np.float32),
        versions=np.zeros(n, np.int32),
        finish_reason=reason,
        score=score,
        turns=turns,
        text="",
    )


def scored(value: float, length: int = 2, reason: FinishReason = "stop", **components: float) -> Rollout:
    return rollout(Score("score", value, components), length, reason)


CONFIG = load(None, ["algorithm.overlong_buffer_len=4", "sampler.max_completion_length=8"])
FAILED = rollout(Score("error", None, detail="broken"), 4)
NEVER_BEGUN = rollout(Score("timeout", None, detail="late"), 0, "length", turns=0)


def metrics(*groups: tuple[Rollout, ...]) -> dict[str, float]:
    found = rollout_metrics([Group(Task("t", ()), group) for group in groups], CONFIG)
    assert set(as_numbers(found)) == set(found), "every metric is declared"
    return found


def test_lengths_are_of_what_was_said_whatever_the_loss_leaves_out() -> None:
    found = metrics((scored(1.0, 3), scored(0.0, 5, "length")))
    names = ("length_mean", "length_min", "length_max", "truncated_fraction")
    assert [found[f"completion/{name}"] for name in names] == [4.0, 3.0, 5.0, 0.5]
    assert found["tokens/generated"] == 8


def test_a_rollout_that_never_began_has_no_length_and_is_not_truncated() -> None:
    found = metrics((scored(1.0, 3), scored(0.0, 5), NEVER_BEGUN, FAILED))
    assert (found["completion/length_min"], found["completion/length_mean"]) == (3.0, 4.0)
    assert found["completion/truncated_fraction"] == 0.0
    assert (found["rollouts/error_fraction"], found["rollouts/timeout_fraction"]) == (0.25, 0.25)


def test_failures_are_no_rewards() -> None:
    found = metrics((scored(1.0, answer=1.0), scored(0.5, answer=0.0), FAILED, NEVER_BEGUN))
    assert (found["reward/mean"], found["reward/std"]) == (0.75, 0.25)
    assert found["reward/component/answer"] == 0.5


def test_without_a_score_or_a_word_there_is_no_mean() -> None:
    found = metrics((NEVER_BEGUN, NEVER_BEGUN))
    assert not [name for name in found if name.startswith(("reward/", "completion/"))]
    assert (found["rollouts/timeout_fraction"], found["groups/dropped"], found["tokens/generated"]) == (1.0, 1, 0)


def test_groups_without_a_signal_are_counted() -> None:
    found = metrics((scored(1.0), scored(1.0)), (scored(1.0), scored(0.0)), (scored(1.0), FAILED), (scored(0.0), scored(0.0)))
    assert (found["groups/zero_variance_fraction"], found["groups/dropped"], found["groups/sampled"]) == (0.75, 1, 4)


def test_the_penalty_on_length_is_told_apart_from_the_reward() -> None:
    found = metrics((scored(1.0, 6), scored(0.0, 2), FAILED))
    assert (found["reward/mean"], found["reward/overlong_penalty"]) == (0.5, -0.25)


def a_batch() -> Batch:
    rollouts = [scored(1.0, 2), scored(0.0, 3)]
    used, values = np.ones(2, bool), np.array([1.0, -1.0], np.float32)
    return pack(rollouts, values, np.full(2, 0.2, np.float32), used, PackShape(1, 1, 16), mask_truncated=False)


def test_sums_of_a_step_become_means_over_its_tokens() -> None:
    batch = a_batch()
    sums = {name: np.float32(index + 1) for index, name in enumerate(METRICS)} | {"tokens": np.float32(5)}
    found = update_metrics(batch, sums, np.where(batch.mask, -1.25, 0.0).astype(np.float32))
    assert set(as_numbers(found)) == set(found)
    assert found["loss/kl"] == pytest.approx(float(sums["kl_ref"]) / 5)
    assert found["policy/entropy"] == pytest.approx(float(sums["entropy"]) / 5)
    parts = [float(sums[f"clipped_{bound}"]) / 5 for bound in ("low", "high", "dual")]
    assert [found[f"policy/clip_{bound}_fraction"] for bound in ("low", "high", "dual")] == pytest.approx(parts)
    assert found["policy/clip_fraction"] == pytest.approx(sum(parts))
    assert found["gap/effective_sample_fraction"] == pytest.approx(
        float(sums["is_weight"]) ** 2 / (5 * float(sums["is_weight_square"]))
    )
    assert (found["loss/total"], found["policy/ratio_max"]) == (float(sums["loss"]), float(sums["ratio_max"]))
    assert found["gap/logp_p95"] == pytest.approx(0.25)
    assert found["tokens/trained"] == 5.0


def test_a_step_without_tokens_has_no_metrics_of_tokens() -> None:
    found = update_metrics(a_batch(), dict.fromkeys(METRICS, np.float32(0)), a_batch().logp_behavior)
    whole = {"loss/total", "loss/policy", "pack/padding_fraction", "pack/skipped_fraction", "tokens/trained"}
    assert set(as_numbers(found)) == whole
    assert all(np.isfinite(value) for value in found.values())


def test_a_critic_is_measured_on_the_trained_tokens() -> None:
    batch = a_batch()
    values, returns = (np.full(batch.mask.shape, np.nan, np.float32) for _ in range(2))
    values[batch.mask], returns[batch.mask] = [0.0, 1.0, 0.0, 1.0, 0.5], [1.0, 1.0, 0.0, 0.0, 0.5]
    found = critic_metrics(batch, values, returns, {"value_loss": np.float32(0.2), "value_clipped": np.float32(2)})
    assert as_numbers(found) == {
        "critic/value_loss": pytest.approx(0.2),
        "critic/clip_fraction": pytest.approx(0.4),
        "critic/value_mean": pytest.approx(0.5),
        "critic/return_mean": pytest.approx(0.5),
        "critic/explained_variance": pytest.approx(1 - (2 / 5) / (1 / 5)),
    }
    nothing = {"value_loss": np.float32(0), "value_clipped": np.float32(0)}
    assert "critic/explained_variance" not in critic_metrics(batch, values, np.ones_like(returns), nothing)


def test_with_a_critic_a_single_score_is_no_dropped_group() -> None:
    groups = [Group(Task("t", ()), (scored(1.0),)), Group(Task("u", ()), (FAILED,))]
    config = load(None, ["algorithm.advantage=gae", "algorithm.num_generations=1"])
    assert rollout_metrics(groups, config)["groups/dropped"] == 1
    assert rollout_metrics(groups, CONFIG)["groups/dropped"] == 2
