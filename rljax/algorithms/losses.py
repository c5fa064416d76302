"""The policy loss of one micro-batch: per-token terms, and their sum with weights that already hold the denominator.

Owns the importance ratio and the surrogates (rows of `SURROGATES`), the entropy bonus, the aggregation weights and the
sums that become metrics. Refuses to own log-probabilities, advantages, the KL estimators (kl.py), the weights against
the sampler (correction.py) and division by counts: sums of micro-batches and devices simply add up.

`policy_loss` and `aggregate` select before and after every non-linear step, so what stands at a masked position (0,
-inf, NaN) changes no bit of a value or a gradient. The per-token functions take no mask.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rljax.algorithm_config import AlgorithmConfig
from rljax.algorithms.correction import importance_weights
from rljax.algorithms.kl import KL_ESTIMATORS, kl_k3
from rljax.algorithms.rollout_sums import MAX_LOG_RATIO, log_ratio_at

RATIO_BAND = (0.9, 1.1)
"""A sampler-learner ratio outside this band counts as a visible gap."""


class ScoredTokens(NamedTuple):
    """What the loss needs to know about each scored token besides the current log-probabilities.

    All have one shape, whose last dim is a row; where `mask` is False the other entries mean nothing.
    """

    mask: Bool[Array, "*n"]
    """Whether the token is in the loss."""
    advantage: Float[Array, "*n"]
    """Advantage of the token."""
    weight: Float[Array, "*n"]
    """Its share of the loss; see `token_weights`."""
    logp_behavior: Float[Array, "*n"]
    """Log-probability when it was sampled, nats."""
    logp_prox: Float[Array, "*n"]
    """Log-probability under the policy at the start of the update, scored by the learner, nats."""
    rollout: Int[Array, "*n"]
    """Number of its rollout; the tokens of a rollout stand next to each other in one row."""
    logp_ref: Float[Array, "*n"] | None = None
    """Log-probability under the reference policy, nats; None when `beta` is 0."""


Metrics = dict[str, Float[Array, ""]]
"""Float32 scalars of one micro-batch: sums and counts, and maxima under the names in `MAXIMA`."""


def policy_loss(
    logp: Float[Array, "*n"],
    entropy: Float[Array, "*n"],
    tokens: ScoredTokens,
    config: AlgorithmConfig,
    beta: Float[Array, ""] | float | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """Return the weighted loss sum of a micro-batch and its metrics.

    loss = sum(weight * (is_weight * surrogate + beta * kl - entropy_coef * entropy)) over the masked tokens.
    `surrogate` is a row of `SURROGATES` with the importance ratio against `logp_prox` (`logp_behavior` with
    proximal = "behavior"), `is_weight` is `importance_weights` (1 with rollout_is = "none"), `kl` one of
    `KL_ESTIMATORS` against `logp_ref` (only measured with kl_in_reward). `beta` is the weight of this step; default:
    that of the configuration. The sum over all micro-batches of an optimizer step is the loss; no further division is
    due. Pass `logp` itself as `logp_prox` for a single on-policy update: its gradient is stopped here.
    Raises ValueError when beta > 0 and `logp_ref` is missing.
    """
    mask = tokens.mask
    logp = jnp.where(mask, logp, 0.0)
    learner = jnp.where(mask, jax.lax.stop_gradient(tokens.logp_prox), 0.0)
    behavior = jnp.where(mask, tokens.logp_behavior, 0.0)
    advantage = jnp.where(mask, tokens.advantage, 0.0)
    weight = jnp.where(mask, tokens.weight, 0.0)

    prox = behavior if config.proximal == "behavior" else learner
    log_ratio = log_ratio_at(config.importance_sampling_level, logp - prox, tokens.rollout, mask)
    ratio = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    surrogate = SURROGATES[config.surrogate](logp, ratio, advantage, config)
    correction = importance_weights(learner - behavior, tokens.rollout, mask, config)
    per_token = correction.weight * surrogate.loss
    kl = jnp.zeros_like(logp)
    if config.beta > 0:
        if tokens.logp_ref is None:
            raise ValueError("algorithm.beta is above 0, so the loss needs logp_ref, the reference log-probabilities")
        kl = KL_ESTIMATORS[config.kl_estimator](logp, jnp.where(mask, tokens.logp_ref, 0.0), prox)
    whole = per_token
    if config.beta > 0 and not config.kl_in_reward:
        whole = whole + (config.beta if beta is None else beta) * kl
    if config.entropy_coef > 0:
        whole = whole - config.entropy_coef * jnp.where(mask, entropy, 0.0)
    loss = aggregate(whole, weight, mask)

    gap = learner - behavior
    gap_ratio = jnp.exp(jnp.clip(gap, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    metrics = {
        "loss": loss,
        "policy_loss": aggregate(per_token, weight, mask),
        "tokens": _total(mask, mask),
        "kl_ref": _total(kl, mask),
        "entropy": _total(entropy, mask),
        "clipped_low": _total(surrogate.clipped_low, mask),
        "clipped_high": _total(surrogate.clipped_high, mask),
        "clipped_dual": _total(surrogate.clipped_dual, mask),
        "ratio": _total(ratio, mask),
        "ratio_max": _largest(ratio, mask),
        "is_weight": _total(correction.weight, mask),
        "is_weight_square": _total(jnp.square(correction.weight), mask),
        "is_truncated": _total(correction.truncated, mask),
        "gap": _total(jnp.abs(gap), mask),
        "gap_max": _largest(jnp.abs(gap), mask),
        "gap_outside": _total((gap_ratio < RATIO_BAND[0]) | (gap_ratio > RATIO_BAND[1]), mask),
        "kl_behavior": _total(kl_k3(behavior, learner, behavior), mask),
    }
    return loss, jax.lax.stop_gradient(metrics)


class Surrogate(NamedTuple):
    """The policy's part of the loss of each token and what a clip did."""

    loss: Float[Array, "*n"]
    """Per-token loss."""
    clipped_low: Bool[Array, "*n"]
    """Whether the lower bound was in force."""
    clipped_high: Bool[Array, "*n"]
    """Whether the upper bound was in force."""
    clipped_dual: Bool[Array, "*n"]
    """Whether the dual bound was in force."""


def clip_loss(
    logp: Float[Array, "*n"], ratio: Float[Array, "*n"], advantage: Float[Array, "*n"], config: AlgorithmConfig
) -> Surrogate:
    """Return -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon_high) * A), and for A < 0 at most -epsilon_c * A.

    PPO's clipped objective (arXiv:1707.06347 eq. 7) with the two bounds apart (DAPO, arXiv:2503.14476 eq. 10) and the
    dual clip (arXiv:1912.09729). Written as a selection, so that at a bound the gradient is the whole one and
    not the half that `minimum` gives at a tie.
    """
    low, high = 1.0 - config.epsilon, 1.0 + config.epsilon_high
    clipped_low = (advantage < 0) & (ratio < low)
    clipped_high = (advantage > 0) & (ratio > high)
    used = jnp.where(clipped_low, low, jnp.where(clipped_high, high, ratio))
    clipped_dual = jnp.zeros(ratio.shape, bool)
    if config.epsilon_c is not None:
        clipped_dual = (advantage < 0) & (ratio > config.epsilon_c)
        used = jnp.where(clipped_dual, config.epsilon_c, used)
    return Surrogate(-used * advantage, clipped_low, clipped_high, clipped_dual)


def cispo_loss(
    logp: Float[Array, "*n"], ratio: Float[Array, "*n"], advantage: Float[Array, "*n"], config: AlgorithmConfig
) -> Surrogate:
    """Return -clip(ratio, 1 - epsilon, 1 + epsilon_high) * A * logp, the clipped ratio without gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585 eq. 4): every token keeps a gradient, and only its weight is bounded.
    """
    low, high = 1.0 - config.epsilon, 1.0 + config.epsilon_high
    bounded = jax.lax.stop_gradient(jnp.clip(ratio, low, high))
    return Surrogate(-bounded * advantage * logp, ratio < low, ratio > high, jnp.zeros(ratio.shape, bool))


def sapo_loss(
    logp: Float[Array, "*n"], ratio: Float[Array, "*n"], advantage: Float[Array, "*n"], config: AlgorithmConfig
) -> Surrogate:
    """Return -(4 / tau) * sigmoid(tau * (ratio - 1)) * A with tau by the sign of A (SAPO, arXiv:2511.20347).

    At ratio 1 the gradient is that of the ratio itself; away from it, it fades smoothly instead of being cut.
    """
    tau = jnp.where(advantage > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
    gate = 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0))
    free = jnp.zeros(ratio.shape, bool)
    return Surrogate(-gate * advantage, free, free, free)


def reinforce_loss(
    logp: Float[Array, "*n"], ratio: Float[Array, "*n"], advantage: Float[Array, "*n"], config: AlgorithmConfig
) -> Surrogate:
    """Return -A * logp (REINFORCE, Williams 1992): the ratio is only measured."""
    free = jnp.zeros(ratio.shape, bool)
    return Surrogate(-advantage * logp, free, free, free)


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


SURROGATES: dict[str, Callable[[Array, Array, Array, AlgorithmConfig], Surrogate]] = {
    "clip": clip_loss,
    "cispo": cispo_loss,
    "sapo": sapo_loss,
    "reinforce": reinforce_loss,
}
"""Per-token losses of the policy, from (logp, importance ratio, advantage, config), by the names of `surrogate`."""

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
    *("loss", "policy_loss", "tokens", "kl_ref", "entropy", "clipped_low", "clipped_high", "clipped_dual"),
    *("ratio", "ratio_max", "is_weight", "is_weight_square", "is_truncated"),
    *("gap", "gap_max", "gap_outside", "kl_behavior"),
)
"""Every metric of `policy_loss`."""
