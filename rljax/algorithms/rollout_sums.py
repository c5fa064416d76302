"""Sums over the scored tokens of a rollout, inside the row that it is packed in, and the levels made from them.

Owns the importance ratio's levels: token, sequence, geometric. Refuses to own what is done with a ratio.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

MAX_LOG_RATIO = 20.0
"""Differences of log-probabilities are cut here before exp (nats): exp(20) is 5e8, far outside any clip range."""


def rollout_sum(values: Float[Array, "*n"], rollout: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """Return, at each token, the sum over the tokens of its rollout; these stand next to each other in the last dim.

    Neighbours in the row have no part in it: a difference of cumulative sums would round by their size.
    """
    return _rollout_sum(values, rollout)


def log_ratio_at(
    level: str, difference: Float[Array, "*n"], rollout: Int[Array, "*n"], mask: Bool[Array, "*n"]
) -> Float[Array, "*n"]:
    """Return the log importance ratio at a level, from each token's difference of log-probabilities (0 where masked).

    `token`: the difference. `sequence-sum`: its sum over the rollout, the ratio of whole rollouts. `sequence` and
    `geometric`: its mean over the rollout's n tokens, so the ratio is the n-th root (GSPO, arXiv:2507.18071 eq. 7).
    `sequence-token`: the value of `sequence` with the gradient of `token` (the same, eq. 14).
    """
    if level == "token":
        return difference
    total = rollout_sum(difference, rollout)
    if level == "sequence-sum":
        return total
    mean = total / jnp.maximum(rollout_sum(mask.astype(jnp.float32), rollout), 1.0)
    if level == "sequence-token":
        return jax.lax.stop_gradient(mean - difference) + difference
    assert level in ("sequence", "geometric"), level
    return mean


@jax.custom_vjp
def _rollout_sum(values: Array, rollout: Array) -> Array:
    size = rollout.shape[-1]
    is_new = jnp.concatenate([jnp.ones_like(rollout[..., :1], bool), rollout[..., 1:] != rollout[..., :-1]], axis=-1)

    def add(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

    sums, _ = jax.lax.associative_scan(add, (values, is_new), axis=values.ndim - 1)
    is_last = jnp.concatenate([is_new[..., 1:], jnp.ones_like(is_new[..., :1])], axis=-1)
    places = jnp.where(is_last, jnp.arange(size, dtype=jnp.int32).reshape((1,) * (values.ndim - 1) + (size,)), size)
    last = jax.lax.cummin(places, axis=values.ndim - 1, reverse=True)
    return jnp.take_along_axis(sums, last, axis=-1)


def _forward(values: Array, rollout: Array) -> tuple[Array, Array]:
    return _rollout_sum(values, rollout), rollout


def _backward(rollout: Array, cotangent: Array) -> tuple[Array, None]:
    # The sum is linear and symmetric. Written out, since the transpose of the gather would be a scatter.
    return _rollout_sum(cotangent, rollout), None


_rollout_sum.defvjp(_forward, _backward)
