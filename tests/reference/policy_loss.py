"""The loss of one optimizer step, written token by token in plain Python."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass
class Token:
    """One loss token."""

    logp: float
    prox: float
    behavior: float
    ref: float


def surrogate(token: Token, advantage: float, config: Any) -> float:
    """Return the clipped objective with a minus sign, times the truncated importance weight."""
    ratio = math.exp(token.logp - token.prox)
    clipped = min(max(ratio, 1 - config.epsilon), 1 + config.epsilon_high)
    weight = min(math.exp(token.prox - token.behavior), config.rollout_is_threshold) if config.rollout_is == "token" else 1.0
    return -weight * min(ratio * advantage, clipped * advantage)


def kl(token: Token, name: str) -> float:
    """Return an estimate of KL(policy || reference)."""
    difference = token.logp - token.ref
    return {"k1": difference, "k2": difference**2 / 2, "k3": math.exp(-difference) + difference - 1}[name]


def step_loss(rollouts: list[list[Token]], advantages: list[float], config: Any, longest: int) -> float:
    """Return the loss over all rollouts, aggregated as the mode's name says."""
    losses = [
        [surrogate(token, advantage, config) + config.beta * kl(token, config.kl_estimator) for token in tokens]
        for tokens, advantage in zip(rollouts, advantages, strict=True)
    ]
    losses = [row for row in losses if row]
    if config.loss_agg_mode == "token-mean":
        return sum(map(sum, losses)) / sum(map(len, losses))
    if config.loss_agg_mode == "seq-mean-token-sum":
        return sum(map(sum, losses)) / len(losses)
    if config.loss_agg_mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in losses) / len(losses)
    return sum(sum(row) / longest for row in losses) / len(losses)
