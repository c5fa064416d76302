"""The loss of one optimizer step and its derivative, one rollout and one token at a time, in plain Python.

Every formula and every derivative is written out from the papers; nothing is shared with rljax.
"""

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
    entropy: float = 0.0


def importance(tokens: list[Token], config: Any) -> list[float]:
    """Return the importance ratio of each token."""
    differences = [t.logp - (t.behavior if config.proximal == "behavior" else t.prox) for t in tokens]
    if config.importance_sampling_level == "token":
        return [math.exp(d) for d in differences]
    return [math.exp(sum(differences) / len(tokens))] * len(tokens)


def slope_and_value(ratio: float, logp: float, advantage: float, config: Any) -> tuple[float, float, bool]:
    """Return a surrogate's value, its slope, and whether the slope is by the ratio (else by logp)."""
    if config.surrogate == "reinforce":
        return -advantage * logp, -advantage, False
    if config.surrogate == "cispo":
        bounded = min(max(ratio, 1 - config.epsilon), 1 + config.epsilon_high)
        return -bounded * advantage * logp, -bounded * advantage, False
    if config.surrogate == "sapo":
        tau = config.sapo_temperature_pos if advantage > 0 else config.sapo_temperature_neg
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * advantage, True
    clipped = min(max(ratio, 1 - config.epsilon), 1 + config.epsilon_high)
    objective, slope = ratio * advantage, advantage
    if clipped * advantage < objective:
        objective, slope = clipped * advantage, 0.0
    if config.epsilon_c is not None and advantage < 0 and config.epsilon_c * advantage > objective:
        objective, slope = config.epsilon_c * advantage, 0.0
    return -objective, -slope, True


def corrections(tokens: list[Token], config: Any) -> list[float]:
    """Return the importance weight of each token against the sampler."""
    if config.rollout_is == "none":
        return [1.0] * len(tokens)
    gaps = [t.prox - t.behavior for t in tokens]
    if config.rollout_is == "sequence":
        gaps = [sum(gaps)] * len(tokens)
    if config.rollout_is == "geometric":
        gaps = [sum(gaps) / len(tokens)] * len(tokens)
    raw = [math.exp(gap) for gap in gaps]
    low, high = config.rollout_is_threshold_lower, config.rollout_is_threshold
    if config.rollout_is_mode == "mask":
        return [w if low <= w <= high else 0.0 for w in raw]
    return [min(max(w, low), high) for w in raw]


def kl(token: Token, config: Any) -> tuple[float, float]:
    """Return an estimate of KL(policy || reference) and its derivative by logp."""
    d = token.logp - token.ref
    k3, k3_slope = math.exp(-d) + d - 1, 1 - math.exp(-d)
    ratio = math.exp(token.logp - (token.behavior if config.proximal == "behavior" else token.prox))
    return {
        "k1": (d, d),
        "k2": (d * d / 2, d),
        "k3": (k3, k3_slope),
        "k3+": (k3, d),
        "k3-ratio": (ratio * k3, ratio * (k3 + k3_slope)),
    }[config.kl_estimator]


def rollout_losses(tokens: list[Token], advantage: float, config: Any) -> tuple[list[float], list[list[float]]]:
    """Return the loss of each token, and the derivative of each of them by each token's logp."""
    values, slopes = [], []
    ratios, weights = importance(tokens, config), corrections(tokens, config)
    for place, (token, ratio, weight) in enumerate(zip(tokens, ratios, weights, strict=True)):
        value, slope, by_ratio = slope_and_value(ratio, token.logp, advantage, config)
        row = [0.0] * len(tokens)
        if by_ratio and config.importance_sampling_level == "sequence":
            row = [weight * slope * ratio / len(tokens)] * len(tokens)
        else:
            row[place] = weight * slope * (ratio if by_ratio else 1.0)
        value *= weight
        if config.beta > 0 and not config.kl_in_reward:
            estimate, pull = kl(token, config)
            value += config.beta * estimate
            row[place] += config.beta * pull
        values.append(value - config.entropy_coef * token.entropy)
        slopes.append(row)
    return values, slopes


def step_loss(
    rollouts: list[list[Token]], advantages: list[float], config: Any, longest: int
) -> tuple[float, list[list[float]]]:
    """Return the loss over all rollouts, aggregated as the mode's name says, and its derivative by every logp."""
    counted = [tokens for tokens in rollouts if tokens]
    total = sum(map(len, counted))
    value, gradient = 0.0, []
    for tokens, advantage in zip(rollouts, advantages, strict=True):
        losses, slopes = rollout_losses(tokens, advantage, config)
        share = {
            "token-mean": 1 / total,
            "seq-mean-token-sum": 1 / len(counted),
            "seq-mean-token-mean": 1 / (len(counted) * max(len(tokens), 1)),
            "seq-mean-token-sum-norm": 1 / (len(counted) * longest),
        }[config.loss_agg_mode]
        value += share * sum(losses)
        gradient.append([share * sum(row[place] for row in slopes) for place in range(len(tokens))])
    return value, gradient
