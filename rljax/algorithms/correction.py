"""Correction for tokens that another policy drew than the one that is trained.

Owns importance weights against the sampler, on the device, and the rejection of what is too far from it, on the host.
Refuses to own the ratio of the update itself (losses.py). All ratios here are the learner's policy at the start of the
update over the sampler's, so the progress of the update is not counted twice (decoupled PPO, arXiv:2505.24298).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rljax.algorithm_config import AlgorithmConfig
from rljax.algorithms.rollout_sums import MAX_LOG_RATIO, log_ratio_at

_LEVELS = {"token": "token", "sequence": "sequence-sum", "geometric": "geometric"}


class Correction(NamedTuple):
    """Importance weights and what their bounds did."""

    weight: Float[Array, "*n"]
    """Factor of each token's policy loss, without gradient."""
    truncated: Bool[Array, "*n"]
    """Whether a bound was in force: the weight was cut, or made 0."""


def importance_weights(
    gap: Float[Array, "*n"], rollout: Int[Array, "*n"], mask: Bool[Array, "*n"], config: AlgorithmConfig
) -> Correction:
    """Return the bounded importance weight of each token, from gap = logp_prox - logp_behavior (0 where masked).

    w = exp(gap) for `token`, exp(sum of the rollout's gaps) for `sequence`, exp(their mean) for `geometric`.
    `truncate`: min(max(w, lower), upper), truncated importance sampling. `mask`: w inside [lower, upper] and 0 outside.
    """
    if config.rollout_is == "none":
        return Correction(jnp.ones_like(gap), jnp.zeros(gap.shape, bool))
    log_ratio = log_ratio_at(_LEVELS[config.rollout_is], jax.lax.stop_gradient(gap), rollout, mask)
    raw = jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    low, high = config.rollout_is_threshold_lower, config.rollout_is_threshold
    outside = (raw < low) | (raw > high)
    return Correction(jnp.where(outside, 0.0, raw) if config.rollout_is_mode == "mask" else jnp.clip(raw, low, high), outside)


def kept_tokens(
    gap: Float[np.ndarray, " t"], lengths: Int[np.ndarray, " n"], config: AlgorithmConfig
) -> Bool[np.ndarray, " t"]:
    """Return which loss tokens stay, on the host: those whose ratio lies within the bounds of `rollout_rs`.

    `gap` is logp_prox - logp_behavior of the loss tokens, one rollout after the other; `lengths` says how many each has.
    Levels as in `importance_weights`; at `sequence` and `geometric` a rollout stays or goes as a whole.
    """
    if config.rollout_rs == "none":
        return np.ones(len(gap), bool)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    log_ratio = np.asarray(gap, np.float64)
    if config.rollout_rs != "token":
        of_rollout = np.bincount(owners, log_ratio, minlength=len(lengths))
        if config.rollout_rs == "geometric":
            of_rollout = of_rollout / np.maximum(lengths, 1)
        log_ratio = of_rollout[owners]
    ratio = np.exp(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return (ratio >= config.rollout_rs_threshold_lower) & (ratio <= config.rollout_rs_threshold)
