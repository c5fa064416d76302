"""The loss of a learned critic: per-token values against returns, and the sums that become metrics.

Owns the clipped value loss. Refuses to own the critic's network, returns (credit.py) and division by counts: the weight
of a token holds the denominator, and sums of micro-batches and devices simply add up.

As in losses.py, what stands at a masked position (0, -inf, NaN) changes no bit of a value or a gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

ValueMetrics = dict[str, Float[Array, ""]]
"""Float32 sums over the masked tokens of one micro-batch, by the names in `VALUE_METRICS`."""

VALUE_METRICS = ("value_loss", "value_clipped")
"""`value_loss` is a weighted sum, `value_clipped` a count."""


def value_loss(
    value: Float[Array, "*n"],
    value_old: Float[Array, "*n"],
    returns: Float[Array, "*n"],
    weight: Float[Array, ""],
    mask: Bool[Array, "*n"],
    cliprange: float | None,
) -> tuple[Float[Array, ""], ValueMetrics]:
    """Return weight * sum of max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2 over the masked tokens.

    The squared error of GAE (arXiv:1506.02438, section 5), bounded as PPO's implementations do (arXiv:2403.17031): a value
    that has moved by more than c towards its return has no gradient. Written as a selection, so that inside the range the
    gradient is the whole one.

    Args:
        value: The critic's values now.
        value_old: Its values when the returns were computed.
        returns: What they should be.
        weight: 1 over the masked tokens of the whole optimizer step.
        mask: Whether the token counts.
        cliprange: c; None for no bound.
    """
    value, old, target = (jnp.where(mask, known, 0.0) for known in (value, value_old, returns))
    error = jnp.square(value - target)
    clipped = jnp.zeros(mask.shape, bool)
    if cliprange is not None:
        bounded = jnp.square(jnp.clip(value, old - cliprange, old + cliprange) - target)
        clipped = bounded > error
        error = jnp.where(clipped, bounded, error)
    loss = 0.5 * weight * jnp.sum(jnp.where(mask, error, 0.0))
    metrics = {"value_loss": loss, "value_clipped": jnp.sum(jnp.where(mask, clipped, False).astype(jnp.float32))}
    return loss, jax.lax.stop_gradient(metrics)


def explained_variance(values: Float[np.ndarray, " t"], returns: Float[np.ndarray, " t"]) -> float | None:
    """Return 1 - Var(R - V) / Var(R), on the host: 1 for a perfect critic, 0 for a constant; None when all R are equal."""
    wide = np.asarray(returns, np.float64)
    spread = float(np.var(wide)) if len(wide) else 0.0
    if spread <= 1e-12:
        return None
    return 1.0 - float(np.var(wide - np.asarray(values, np.float64))) / spread
