"""What a batch of rollouts, and an optimizer step on it, look like as metrics.

Owns the translation into the names of telemetry/metrics.py. Refuses to own the sums themselves and where they go.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rljax.algorithms.advantages import group_outcomes, least_scored
from rljax.algorithms.losses import gap_quantile
from rljax.algorithms.value import explained_variance
from rljax.config import Config
from rljax.data.packing import Batch, length_metrics
from rljax.records import Group
from rljax.rollouts.batching import shaped_rewards


def rollout_metrics(groups: Sequence[Group], config: Config) -> dict[str, float]:
    """Return rewards, lengths, failures and the use of groups, over all that was sampled for a batch.

    Rewards are left out when nothing was scored. Lengths are of rollouts in which the model spoke, scored or not.
    """
    owners = [index for index, group in enumerate(groups) for _ in group.rollouts]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [rollout.score for rollout in rollouts if rollout.score.status == "score"]
    lengths = length_metrics([rollout for rollout in rollouts if rollout.turns])
    outcomes = group_outcomes([rollout.score.value for rollout in rollouts], owners, least_scored(config.algorithm))
    values: dict[str, float] = {f"completion/{name.removeprefix('completion_')}": value for name, value in lengths.items()}
    values |= {
        "rollouts/error_fraction": float(np.mean([rollout.score.status == "error" for rollout in rollouts])),
        "rollouts/timeout_fraction": float(np.mean([rollout.score.status == "timeout" for rollout in rollouts])),
        "groups/zero_variance_fraction": float(np.mean([group.zero_variance for group in outcomes])),
        "groups/dropped": sum(group.dropped is not None for group in outcomes),
        "groups/sampled": len(groups),
        "tokens/generated": sum(rollout.completion_length for rollout in rollouts),
    }
    if scored:
        rewards = [score.value for score in scored if score.value is not None]
        values |= {"reward/mean": float(np.mean(rewards)), "reward/std": float(np.std(rewards))}
        shaped = [value for value in shaped_rewards(rollouts, config) if value is not None]
        values["reward/overlong_penalty"] = float(np.mean(shaped) - np.mean(rewards))
        parts: dict[str, list[float]] = defaultdict(list)
        for score in scored:
            for name, value in score.components.items():
                parts[name].append(value)
        values |= {f"reward/component/{name}": float(np.mean(found)) for name, found in parts.items()}
    return values


def update_metrics(batch: Batch, sums: Mapping[str, Any], logp_prox: np.ndarray) -> dict[str, float]:
    """Return the metrics of one optimizer step; those of tokens are left out where no token has a row.

    Args:
        batch: What it was made on.
        sums: The loss's sums and maxima over the step, as `StepOutput.metrics` holds them, on the host.
        logp_prox: Log-probabilities of the scored tokens in the learner before the step, [m, r, j], nats.
    """
    tokens = float(sums["tokens"])
    whole = {
        "loss/total": float(sums["loss"]),
        "loss/policy": float(sums["policy_loss"]),
        "pack/padding_fraction": batch.padding_fraction,
        "pack/skipped_fraction": batch.skipped_fraction,
        "tokens/trained": tokens,
    }
    if not tokens:
        return whole

    def mean(name: str) -> float:
        return float(sums[name]) / tokens

    return whole | {
        "loss/kl": mean("kl_ref"),
        "policy/entropy": mean("entropy"),
        "policy/clip_fraction": mean("clipped_low") + mean("clipped_high") + mean("clipped_dual"),
        "policy/clip_low_fraction": mean("clipped_low"),
        "policy/clip_high_fraction": mean("clipped_high"),
        "policy/clip_dual_fraction": mean("clipped_dual"),
        "policy/ratio_mean": mean("ratio"),
        "policy/ratio_max": float(sums["ratio_max"]),
        "gap/logp_mean": mean("gap"),
        "gap/logp_p95": gap_quantile(logp_prox, batch.logp_behavior, batch.mask, 0.95),
        "gap/logp_max": float(sums["gap_max"]),
        "gap/outside_fraction": mean("gap_outside"),
        "gap/is_truncated_fraction": mean("is_truncated"),
        "gap/effective_sample_fraction": float(sums["is_weight"]) ** 2 / max(tokens * float(sums["is_weight_square"]), 1e-30),
    }


def critic_metrics(batch: Batch, values: np.ndarray, returns: np.ndarray, sums: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of one update of the critic; explained variance is left out where all returns are equal.

    Args:
        batch: What it was made on.
        values: The critic's values when the returns were computed, [m, r, j].
        returns: What they should have been, [m, r, j].
        sums: The loss's sums over the step, as `CriticOutput.metrics` holds them, on the host.
    """
    known, target = values[batch.mask], returns[batch.mask]
    found = {
        "critic/value_loss": float(sums["value_loss"]),
        "critic/clip_fraction": float(sums["value_clipped"]) / max(len(known), 1),
    }
    if len(known):
        found |= {"critic/value_mean": float(np.mean(known)), "critic/return_mean": float(np.mean(target))}
    explained = explained_variance(known, target)
    return found if explained is None else found | {"critic/explained_variance": explained}
