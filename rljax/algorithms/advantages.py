"""Group-relative advantages, on the host.

Owns the step from rewards to one advantage per rollout, and the verdict which groups carry a signal. Refuses to own
rewards, packing and losses. Grouping is by id, never by position, so slicing and shuffling change nothing.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

ZERO_VARIANCE_TOLERANCE = 1e-6
"""Rewards whose range is at most this (times their magnitude, if above 1) are equal: rounding is not a preference."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What became of one group.

    Example:
        GroupOutcome(id="arithmetic/train/17", rollouts=8, scored=7, mean=0.25, zero_variance=False, dropped=None)
    """

    id: Hashable
    """The group's id, as given."""
    rollouts: int
    """Number of its rollouts."""
    scored: int
    """Number of them with a reward."""
    mean: float | None
    """Mean reward of the scored ones; None when there are none."""
    zero_variance: bool
    """Whether its rewards are equal (or it was dropped), so that all its advantages are 0."""
    dropped: str | None
    """Why the group is not trained on, or None."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of one batch of rollouts, in the order given.

    Example:
        Advantages(values=np.array([0.7, -0.7, 0], np.float32), used=np.array([True, True, False]), groups=(outcome,))
    """

    values: Float[np.ndarray, " n"]
    """Advantage of each rollout, float32; 0 where it is not used."""
    used: Bool[np.ndarray, " n"]
    """Whether the rollout is scored and its group not dropped; only these may enter the loss and its denominators."""
    groups: tuple[GroupOutcome, ...]
    """The groups, in order of first appearance."""


def group_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[Hashable],
    scale_rewards: Literal["group", "batch", "none"],
) -> Advantages:
    """Centre each reward by its group's mean and scale it (GRPO, arXiv:2402.03300 section 4.1.2).

    advantage = (reward - mean(group)) / std, with the sample standard deviation (ddof = 1) of the group's rewards for
    `group`, of all used rewards for `batch`, and 1 for `none` (arXiv:2503.20783). No epsilon is added: groups without
    variance are recognised by the range of their rewards and get exactly 0.

    A reward of None (not scored) enters no statistics. Groups with fewer than two scored rollouts are dropped. Sums
    are exact, so the order of the rollouts does not change a bit. Raises ValueError for a reward that is not finite.
    """
    assert len(rewards) == len(group_ids), (len(rewards), len(group_ids))
    members: dict[Hashable, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        members.setdefault(group_id, []).append(index)
    known = {index: reward for index, reward in enumerate(rewards) if reward is not None}
    for index, reward in known.items():
        if not math.isfinite(reward):
            raise ValueError(
                f"rollout {index} of group {group_ids[index]!r} has reward {reward}; report a failure to score as None"
            )

    values = np.zeros(len(rewards), np.float64)
    used = np.zeros(len(rewards), bool)
    outcomes = []
    for group_id, indices in members.items():
        scored = [index for index in indices if index in known]
        own = [known[index] for index in scored]
        mean = math.fsum(own) / len(own) if own else None
        equal = _are_equal(own)
        dropped = None
        if len(scored) < 2:
            dropped = f"{len(scored)} of {len(indices)} rollouts scored; a group needs at least 2"
        else:
            used[scored] = True
        if mean is not None and not equal:
            scale = sample_std(own) if scale_rewards == "group" else 1.0
            values[scored] = [(reward - mean) / scale for reward in own]
        outcomes.append(GroupOutcome(group_id, len(indices), len(scored), mean, equal, dropped))

    if scale_rewards == "batch":
        batch = [known[int(index)] for index in np.flatnonzero(used)]
        if not _are_equal(batch):  # otherwise every advantage is 0 already
            values /= sample_std(batch)
    return Advantages(values.astype(np.float32), used, tuple(outcomes))


def sample_std(values: Sequence[float]) -> float:
    """Return the sample standard deviation, sqrt(sum((x - mean)^2) / (n - 1)), of at least two values."""
    assert len(values) >= 2, "a sample standard deviation needs two values"
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _are_equal(rewards: Sequence[float]) -> bool:
    if len(rewards) < 2:
        return True
    magnitude = max(1.0, max(abs(reward) for reward in rewards))
    return max(rewards) - min(rewards) <= ZERO_VARIANCE_TOLERANCE * magnitude
