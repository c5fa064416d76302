"""Estimators of the divergence from the reference policy, and the controller of its weight.

Owns value and gradient of each estimator per token. Refuses to own masks, weights and where the estimate goes.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.algorithms.rollout_sums import MAX_LOG_RATIO

MAX_KL_ERROR = 0.2
"""Largest relative error that the controller answers to (arXiv:1909.08593, section 2.2)."""


def kl_k1(logp: Float[Array, "*n"], logp_ref: Float[Array, "*n"], logp_prox: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return logp - logp_ref, the plain unbiased estimate of KL(policy || reference), with the gradient of `kl_k2`.

    The derivative of the plain estimate is the constant 1, whose expected policy gradient is zero: it would not pull
    towards the reference at all. The gradient of k2 is the one whose expectation is the gradient of the KL.
    """
    return _with_gradient_of_k2(logp - logp_ref, logp, logp_ref, logp_prox)


def kl_k2(logp: Float[Array, "*n"], logp_ref: Float[Array, "*n"], logp_prox: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return (logp - logp_ref)^2 / 2; its derivative is logp - logp_ref (Schulman, "Approximating KL divergence")."""
    return 0.5 * jnp.square(logp - logp_ref)


def kl_k3(logp: Float[Array, "*n"], logp_ref: Float[Array, "*n"], logp_prox: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return exp(d) - d - 1 with d = logp_ref - logp; its derivative is 1 - exp(d) (GRPO, arXiv:2402.03300 eq. 4)."""
    difference = jnp.minimum(logp_ref - logp, MAX_LOG_RATIO)
    return jnp.exp(difference) - difference - 1.0


def kl_k3_plus(logp: Float[Array, "*n"], logp_ref: Float[Array, "*n"], logp_prox: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return the value of `kl_k3` with the gradient of `kl_k2`, whose expectation is the gradient of the KL."""
    return _with_gradient_of_k2(kl_k3(logp, logp_ref, logp_prox), logp, logp_ref, logp_prox)


def kl_k3_ratio(logp: Float[Array, "*n"], logp_ref: Float[Array, "*n"], logp_prox: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Return exp(logp - logp_prox) * k3, differentiated as a whole (DeepSeek-V3.2, arXiv:2512.02556).

    For tokens drawn from the proximal policy, value and gradient have the expectations of the current policy's KL and
    of its gradient, however far the two have moved apart.
    """
    ratio = jnp.exp(jnp.clip(logp - logp_prox, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    return ratio * kl_k3(logp, logp_ref, logp_prox)


def next_beta(beta: Float[Array, ""], kl: Float[Array, ""], target: float, gain: float) -> Float[Array, ""]:
    """Return the next step's weight of the divergence: beta * (1 + gain * clip(kl / target - 1, -0.2, 0.2)).

    The proportional controller of arXiv:1909.08593, section 2.2, whose gain is 0.1.
    """
    return beta * (1.0 + gain * jnp.clip(kl / target - 1.0, -MAX_KL_ERROR, MAX_KL_ERROR))


def _with_gradient_of_k2(value: Array, logp: Array, logp_ref: Array, logp_prox: Array) -> Array:
    pull = kl_k2(logp, logp_ref, logp_prox)
    return jax.lax.stop_gradient(value - pull) + pull


KL_ESTIMATORS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "k3+": kl_k3_plus,
    "k3-ratio": kl_k3_ratio,
}
"""Per-token estimators of KL(policy || reference) from (logp, logp_ref, logp_prox), for tokens sampled from the policy."""
