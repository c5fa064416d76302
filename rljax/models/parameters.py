"""How parameters are declared: shape, logical axes, first values, and whether weight decay is for them.

Owns nothing else: which parameters there are is told by the modules that use them.
"""

import jax
import jax.numpy as jnp
from flax import nnx

INIT_STD = 0.02
"""Standard deviation of random weights."""


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """Declare a matrix, or a stack of them: random, and subject to weight decay."""
    return nnx.Param(jax.random.normal(rngs.params(), shape) * INIT_STD, axes=axes, decays=True)


def constant(value: float, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    """Declare a scale, a bias or the like: constant at first, and not subject to weight decay."""
    return nnx.Param(jnp.full(shape, value), axes=axes, decays=False)
