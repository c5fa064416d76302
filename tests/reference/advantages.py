"""Advantages as the papers write them, for groups given as lists, with numpy."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def std(values: Any) -> float:
    """Return the sample standard deviation."""
    return float(np.std(np.asarray(values, np.float64), ddof=1))


def grpo(groups: Sequence[Sequence[float]], config: Any) -> list[float]:
    """Return (R - mean) / std."""
    batch = [reward for group in groups for reward in group]
    out = []
    for group in groups:
        scale = {"group": std(group), "batch": std(batch), "none": 1.0}[config.scale_rewards]
        out += [(reward - np.mean(group)) / scale for reward in group]
    return out


def rloo(groups: Sequence[Sequence[float]]) -> list[float]:
    """Return each reward minus the mean of the others."""
    return [reward - np.mean([*group[:i], *group[i + 1 :]]) for group in groups for i, reward in enumerate(group)]


def whitened(values: Sequence[float], lengths: Sequence[int]) -> list[float]:
    """Whiten over all tokens."""
    tokens = np.repeat(values, lengths)
    return [(value - tokens.mean()) / std(tokens) for value in values]


def reinforce_pp(groups: Sequence[Sequence[float]], costs: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return, per rollout, the whitened return of each token: its reward minus what it and later tokens cost."""
    rewards = [reward for group in groups for reward in group]
    returns = [[reward - sum(cost[token:]) for token in range(len(cost))] for reward, cost in zip(rewards, costs, strict=True)]
    flat = np.concatenate([np.array(row) for row in returns])
    return [[(value - flat.mean()) / std(flat) for value in row] for row in returns]


def reinforce_pp_baseline(groups: Sequence[Sequence[float]], lengths: Sequence[int]) -> list[float]:
    """Return the centred rewards, whitened."""
    return whitened([reward - np.mean(group) for group in groups for reward in group], lengths)


def maxrl(groups: Sequence[Sequence[float]]) -> list[float]:
    """Return (R - mean) / mean."""
    return [(reward - np.mean(group)) / np.mean(group) for group in groups for reward in group]


def gdpo(named: Mapping[str, Sequence[Sequence[float]]], weights: Mapping[str, float]) -> list[float]:
    """Normalise each named reward in the group, add them, and whiten over rollouts."""
    total = 0.0
    for name, groups in named.items():
        total += weights[name] * np.array([(r - np.mean(group)) / std(group) for group in groups for r in group])
    total = np.asarray(total)
    return list((total - total.mean()) / std(total))
