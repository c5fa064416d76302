"""Numbers as 8-bit integers with scales: what the sampler multiplies with when its weights or its cache are quantised.

Owns codes and scales, and the products with a weight in the sampler's layout. Refuses to own which weights of which copy are
quantised (rollouts/weights.py), the form of the cache (sampler/cache.py) with the products of attention (attention.py), and
the frozen base of an adapter (quantized.py), which is for the learner.

    W [outputs, inputs]  ->  codes [outputs, inputs] int8, scale [outputs] float32; experts [x, inputs, outputs], [x, outputs]
    y = (x codes^T) scale        an output has one scale, so it may as well be multiplied with the sum
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int8

from rljax.matmul import product_outputs_first
from rljax.pytree import pytree, with_fields

LARGEST = 127
"""Largest code. Codes are symmetric: -128 is not used."""


@pytree
class Int8Weight:
    """A weight whose outputs have a scale each."""

    codes: Int8[Array, "*dims"]
    """The weight, as multiples of the scale of its output."""
    scale: Float32[Array, "*outputs"]
    """One factor per output: the dims of the codes but those that are contracted."""


def to_int8(weight: Float[Array, "*dims"], contracted: tuple[int, ...]) -> Int8Weight:
    """Return a weight as the nearest multiples of max |W_o| / 127, the maximum over the contracted dims of each output o.

    Outputs that are zero have scale 1. What is not finite makes the scale of its output so.
    """
    weight = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(weight), axis=contracted, keepdims=True) / LARGEST
    scale = jnp.where(scale == 0, 1.0, scale)
    return Int8Weight(jnp.round(weight / scale).astype(jnp.int8), jnp.squeeze(scale, contracted))


def axes_of(names: tuple[str | None, ...], contracted: tuple[int, ...]) -> Any:
    """Return the logical axis names of codes and scale, from those of the weight."""
    kept = tuple(name for dim, name in enumerate(names) if dim - len(names) not in contracted)
    return with_fields(Int8Weight, codes=names, scale=kept)


def int8_product(
    x: Float[Array, "*rows k"], codes: Int8[Array, "*n k"], scale: Float32[Array, "*n"]
) -> Float[Array, "*rows_and_n"]:
    """Multiply x by the transpose of codes times scale, with float32 sums and a float32 result.

    Codes are exact in every type of x, so nothing is rounded that the product of arrays would not round.
    """
    codes, x = kept_small(codes, x)
    out = product_outputs_first(x, codes.astype(x.dtype))
    return out * scale.reshape((1,) * (x.ndim - 1) + scale.shape)


def grouped_int8_product(
    x: Float[Array, "n d"],
    codes: Int8[Array, "x d f"],
    scale: Float32[Array, "x f"],
    sizes: Int[Array, " x"],
    owner: Int[Array, " n"],
) -> Float[Array, "n f"]:
    """Multiply each run of rows by its own weight, as `moe.grouped_matmul` does, with a float32 result.

    `owner` says to which weight each row belongs; what it says of rows beyond all runs, which give 0, does not matter.
    """
    codes, x = kept_small(codes, x)
    out = jax.lax.ragged_dot(x, codes.astype(x.dtype), sizes, preferred_element_type=jnp.float32)
    return out * jnp.take(scale, owner, axis=0)


def kept_small(codes: Any, x: Array) -> tuple[Any, Array]:
    """Return the same, so that a compiler cannot turn codes into arrays before a loop over tokens, and keep those."""
    return jax.lax.optimization_barrier((codes, x))
