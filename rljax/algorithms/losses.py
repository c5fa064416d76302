"""The policy loss of one micro-batch: per-token terms, and their sum with weights that already hold the denominator.

Owns the clipped surrogate, the KL estimators, the truncated importance weights, the aggregation weights and the sums
that become metrics. Refuses to own log-probabilities, advantages and division by counts: sums of micro-batches and
devices simply add up.

`policy_loss` and `aggregate` select before and after every non-linear step, so what stands at a masked position (0,
-inf, NaN) changes no bit of a value or a gradient. The per-token functions take no mask.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rljax.config import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are cut here before exp (nats): exp(20) is 5e8, far outside any clip range."""

RATIO_BAND = (0.9, 1.1)
"""A sampler-learner ratio outside this band counts as a visible gap."""


class ScoredTokens(NamedTuple):
    """What the loss needs to know about each scored token besides the current log-probabilities.

    All have one shape; where `mask` is False the other entries mean nothing.
    """

    mask: Bool[Array, "*n"]
    """Whether the token is in the loss."""
    advantage: Float[Array, "*n"]
    """Advantage of its rollout."""
    weight: Float[Array, "*n"]
    """Its share of the loss; see `token_weights`."""
    logp_behavior: Float[Array, "*n"]
    """Log-probability when it was sampled, nats."""
    logp_prox: Float[Array, "*n"]
    """Log-probability under the policy at the start of the update, scored by the learner, nats."""
    logp_ref: Float[Array, "*n"] | None = None
    """Log-probability under the reference policy, nats; None when `beta` is 0."""


Metrics = dict[str, Float[Array, ""]]
"""Float32 scalars of one micro-batch: sums and counts, and maxima under the names in `MAXIMA`."""


def policy_loss(
    logp: Float[Array, "*n"], entropy: Float[Array, "*n"], tokens: ScoredTokens, config: AlgorithmConfig
) -> tuple[Float[Array, ""], Metrics]:
    """Return the weighted loss sum of a micro-batch and its metrics.

    loss = sum(weight * (is_weight * surrogate + beta * kl)) over the masked tokens. `surrogate` is `clip_loss` against
    `logp_prox`, `is_weight` is `importance_weights` (1 with rollout_is = "none"), `kl` one of `KL_ESTIMATORS` against
    `logp_ref`. The sum over all micro-batches of an optimizer step is the loss; no further division is due.
    Pass `logp` itself as `logp_prox` for a single on-policy update: its gradient is stopped here.
    Raises ValueError when beta > 0 and `logp_ref` is missing.
    """
    mask = tokens.mask
    logp = jnp.where(mask, logp, 0.0)
    prox = jnp.where(mask, jax.lax.stop_gradient(tokens.logp_prox), 0.0)
    behavior = jnp.where(mask, tokens.logp_behavior, 0.0)
    advantage = jnp.where(mask, tokens.advantage, 0.0)
    weight = jnp.where(mask, tokens.weight, 0.0)

    surrogate = clip_loss(logp, prox, advantage, config.epsilon, config.epsilon_high)
    is_weight, is_truncated = importance_weights(prox, behavior, config.rollout_is_threshold)
    if config.rollout_is == "none":
        is_weight, is_truncated = jnp.ones_like(logp), jnp.zeros(logp.shape, bool)
    per_token = is_weight * surrogate.loss
    kl = jnp.zeros_like(logp)
    if config.beta > 0:
        if tokens.logp_ref is None:
            raise ValueError("algorithm.beta is above 0, so the loss needs logp_ref, the reference log-probabilities")
        kl = KL_ESTIMATORS[config.kl_estimator](logp, jnp.where(mask, tokens.logp_ref, 0.0))
    loss = aggregate(per_token + config.beta * kl, weight, mask)

    ratio, gap = surrogate.ratio, prox - behavior
    gap_ratio = jnp.exp(jnp.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    metrics = {
        "loss": loss,
        "policy_loss": aggregate(per_token, weight, mask),
        "tokens": _total(mask, mask),
        "kl_ref": _total(kl, mask),
        "entropy": _total(entropy, mask),
        "clipped_low": _total(surrogate.clipped_low, mask),
        "clipped_high": _total(surrogate.clipped_high, mask),
        "ratio": _total(ratio, mask),
        "ratio_max": _largest(ratio, mask),
        "is_weight": _total(is_weight, mask),
        "is_truncated": _total(is_truncated, mask),
        "gap": _total(jnp.abs(gap), mask),
        "gap_max": _largest(jnp.abs(gap), mask),
        "gap_outside": _total((gap_ratio < RATIO_BAND[0]) | (gap_ratio > RATIO_BAND[1]), mask),
        "kl_behavior": _total(kl_k3(behavior, prox), mask),
    }
    return loss, jax.lax.stop_gradient(metrics)


class ClipLoss(NamedTuple):
    """The clipped surrogate of each token and what the clip did."""

    loss: Float[Array, "*n"]
    """Per-token loss."""
    ratio: Float[Array, "*n"]
    """Importance ratio current / proximal, before the clip."""
    clipped_low: Bool[Array, "*n"]
    """Whether the lower bound cut the gradient (advantage < 0)."""
    clipped_high: Bool[Array, "*n"]
    """Whether the upper bound cut the gradient (advantage > 0)."""


def clip_loss(
    logp: Float[Array, "*n"],
    logp_prox: Float[Array, "*n"],
    advantage: Float[Array, "*n"],
    epsilon: float,
    epsilon_high: float,
) -> ClipLoss:
    """Return -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A) of each token.

    PPO's clipped objective (arXiv:1707.06347 eq. 7) with the two bounds apart (DAPO, arXiv:2503.14476 eq. 10);
    ratio = exp(logp - logp_prox). Written as a selection, so that at a bound the gradient is the whole one and not
    the half that `minimum` gives at a tie.
    """
    ratio = jnp.exp(jnp.clip(logp - logp_prox, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    low, high = 1.0 - epsilon, 1.0 + epsilon_high
    clipped_low = (advantage < 0) & (ratio < low)
    clipped_high = (advantage > 0) & (ratio > high)
    used = jnp.where(clipped_low, low, jnp.where(clipped_high, high, ratio))
    return ClipLoss(-used * advantage, ratio, clipped_low, clipped_high)


def importance_weights(
    logp_prox: Float[Array, "*n"], logp_behavior: Float[Array, "*n"], threshold: float
) -> tuple[Float[Array, "*n"], Bool[Array, "*n"]]:
    """Return min(exp(logp_prox - logp_behavior), threshold) of each token, without gradient, and where it was cut.

    Truncated importance sampling for the gap between sampler and learner: the learner's policy at the start of the
    update over the sampler's, never the current policy, which the ratio in `clip_loss` already covers.
    """
    gap = jnp.clip(logp_prox - logp_behavior, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight = jax.lax.stop_gradient(jnp.exp(gap))
    return jnp.minimum(weight, threshold), weight > threshold


def kl_k1(logp: Float[Array, "*n"], logp_ref: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return logp - logp_ref, the plain unbiased estimate of KL(policy || reference), with the gradient of `kl_k2`.

    The derivative of the plain estimate is the constant 1, whose expected policy gradient is zero: it would not pull
    towards the reference at all. The gradient of k2 is the one whose expectation is the gradient of the KL.
    """
    pull = kl_k2(logp, logp_ref)
    return jax.lax.stop_gradient(logp - logp_ref - pull) + pull


def kl_k2(logp: Float[Array, "*n"], logp_ref: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return (logp - logp_ref)^2 / 2; its derivative is logp - logp_ref (Schulman, "Approximating KL divergence")."""
    return 0.5 * jnp.square(logp - logp_ref)


def kl_k3(logp: Float[Array, "*n"], logp_ref: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return exp(d) - d - 1 with d = logp_ref - logp; its derivative is 1 - exp(d) (GRPO, arXiv:2402.03300 eq. 4)."""
    difference = jnp.minimum(logp_ref - logp, MAX_LOG_RATIO)
    return jnp.exp(difference) - difference - 1.0


def token_weights(
    lengths: Int[np.ndarray, " n"], mode: str, *, tokens: int, rollouts: int, max_completion_length: int
) -> Float[np.ndarray, " n"]:
    """Return, per rollout, the weight of each of its loss tokens, on the host (float32).

    `lengths` are loss tokens per rollout; `tokens` and `rollouts` count the loss tokens, and the rollouts that have
    any, of the whole optimizer step over all hosts and micro-batches. Rollouts without loss tokens get 0.
    Formulas are in `AGGREGATIONS` and docs/math.md.
    """
    if mode not in AGGREGATIONS:
        raise ValueError(f"loss_agg_mode {mode!r} is unknown; choose one of {', '.join(AGGREGATIONS)}")
    known = np.asarray(lengths, np.float64)
    safe = np.maximum(known, 1.0)
    weights = AGGREGATIONS[mode](safe, max(tokens, 1), max(rollouts, 1), max_completion_length)
    return np.where(known > 0, weights, 0.0).astype(np.float32)


def aggregate(per_token: Float[Array, "*n"], weight: Float[Array, "*n"], mask: Bool[Array, "*n"]) -> Float[Array, ""]:
    """Return the sum of weight * per_token over the masked tokens; the weights hold the denominator."""
    return jnp.sum(jnp.where(mask, jnp.where(mask, per_token, 0.0) * jnp.where(mask, weight, 0.0), 0.0))


def empty_metrics() -> Metrics:
    """Return the metrics of no token, where `combine_metrics` starts."""
    return {name: jnp.zeros((), jnp.float32) for name in METRICS}


def combine_metrics(left: Metrics, right: Metrics) -> Metrics:
    """Add two micro-batches' metrics; maxima stay maxima."""
    return {name: jnp.maximum(left[name], right[name]) if name in MAXIMA else left[name] + right[name] for name in METRICS}


def gap_quantile(
    logp_prox: Float[np.ndarray, "*n"], logp_behavior: Float[np.ndarray, "*n"], mask: Bool[np.ndarray, "*n"], quantile: float
) -> float:
    """Return a quantile of |logp_prox - logp_behavior| over the masked tokens, in nats, on the host; 0 without tokens."""
    gaps = np.abs(np.asarray(logp_prox)[mask] - np.asarray(logp_behavior)[mask])
    return float(np.quantile(gaps, quantile)) if gaps.size else 0.0


def _total(values: Array, mask: Array) -> Array:
    return jnp.sum(jnp.where(mask, values, 0).astype(jnp.float32))


def _largest(values: Array, mask: Array) -> Array:
    return jnp.max(jnp.where(mask, values, 0.0), initial=0.0)


KL_ESTIMATORS: dict[str, Callable[[Array, Array], Array]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
"""Per-token estimators of KL(policy || reference), for tokens sampled from the policy."""

AGGREGATIONS: dict[str, Callable[[np.ndarray, int, int, int], np.ndarray]] = {
    "token-mean": lambda lengths, tokens, rollouts, longest: np.full_like(lengths, 1.0 / tokens),
    "seq-mean-token-sum": lambda lengths, tokens, rollouts, longest: np.full_like(lengths, 1.0 / rollouts),
    "seq-mean-token-mean": lambda lengths, tokens, rollouts, longest: 1.0 / (rollouts * lengths),
    "seq-mean-token-sum-norm": lambda lengths, tokens, rollouts, longest: np.full_like(lengths, 1.0 / (rollouts * longest)),
}
"""Weight of a token by mode, from (loss tokens of its rollout, all loss tokens, all rollouts, max_completion_length)."""

MAXIMA = frozenset({"ratio_max", "gap_max"})
"""Metrics that combine by maximum; all others are sums over tokens (`loss` and `policy_loss`: weighted sums)."""

METRICS = (
    *("loss", "policy_loss", "tokens", "kl_ref", "entropy", "clipped_low", "clipped_high", "ratio", "ratio_max"),
    *("is_weight", "is_truncated", "gap", "gap_max", "gap_outside", "kl_behavior"),
)
"""Every metric of `policy_loss`."""
