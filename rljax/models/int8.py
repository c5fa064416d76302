"""Weights as 8-bit integers, one scale per output: what the sampler multiplies with when its weights are quantised.

Owns codes and scales of one weight in the sampler's layout, and the product with it. Refuses to own which weights of which
copy are quantised (rollouts/weights.py), and the frozen base of an adapter (quantized.py), which is for the learner.

    W [outputs, inputs]  ->  codes [outputs, inputs] int8,  scale [outputs] float32
    y = (x codes^T) scale        an output has one scale, so it may as well be multiplied with the sum
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

from rljax.matmul import product_outputs_first
from rljax.pytree import pytree, with_fields

LARGEST = 127
"""Largest code. Codes are symmetric: -128 is not used."""


@pytree
class Int8Weight:
    """A weight with its output dims first."""

    codes: Int8[Array, "*outputs_and_inputs"]
    """The weight, as multiples of the scale of its output."""
    scale: Float32[Array, "*outputs"]
    """One factor per output."""


def to_int8(weight: Float[Array, "*outputs_and_inputs"], inputs: int) -> Int8Weight:
    """Return a weight, whose last `inputs` dims are contracted, as the nearest multiples of max |W_o| / 127 per output o.

    Outputs that are zero have scale 1. What is not finite makes the scale of its output so.
    """
    weight = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(weight), axis=tuple(range(-inputs, 0))) / LARGEST
    scale = jnp.where(scale == 0, 1.0, scale)
    codes = jnp.round(weight / jnp.expand_dims(scale, tuple(range(-inputs, 0))))
    return Int8Weight(codes.astype(jnp.int8), scale)


def axes_of(names: tuple[str, ...], inputs: int) -> Any:
    """Return the logical axis names of codes and scale, from those of the weight."""
    return with_fields(Int8Weight, codes=names, scale=names[:-inputs])


def int8_product(x: Float[Array, "*rows k"], codes: Int8[Array, "*n k"], scale: Float32[Array, "*n"]) -> Float[Array, "*rows_and_n"]:
    """Multiply x by the transpose of codes times scale, in the type of x, with float32 sums and a float32 result.

    Codes are exact in every type of x, so nothing is rounded that the product of arrays would not round.
    """
    # Without the barrier a compiler may turn all codes into arrays before a loop over tokens and keep those.
    codes, x = jax.lax.optimization_barrier((codes, x))
    out = product_outputs_first(x, codes.astype(x.dtype))
    return out * scale.reshape((1,) * (x.ndim - 1) + scale.shape)
