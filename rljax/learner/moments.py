"""How moments are kept between two updates: in float32, in 16 bits, or in 8 with a scale per block; all rounded at random.

Owns the types, the code of 8 bits and its blocks, and the draws. Refuses to own what moments are (optimizer.py, rules.py):
arithmetic between two updates is float32 whatever they are kept in. How they lie on a mesh is in state.py.

    moment [l, d, f]  ->  codes [l, d, f] int8, of a second moment uint8;  scale [l, d, f / block] float32, max |x| of each
    block: 64 to 127 neighbours along the last dim that has as many, so that codes and scales lie on a mesh as the moment does
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Integer, UInt32

from rljax.learner.rules import Names, by_path, dims_of
from rljax.pytree import owner_of, pytree

SMALLEST = 4096
"""Parameters with fewer numbers keep moments of float32 where others have 8 bits."""

_SMALLEST_BLOCK = 64
_APART = {"layers", "experts", "vocab"}  # gradients of two of them may differ by far
_ROUNDING = 0x0B17  # purpose of random draws
_MURMUR, _MURMUR_LAST = ((16, 0x85EBCA6B), (13, 0xC2B2AE35)), 16
_SECOND = "nu"  # how optax calls the field of second moments


@pytree
class Int8Moment:
    """A moment in codes of 8 bits with a scale per block (arXiv:2110.02861 section 2.1)."""

    codes: Integer[Array, "*dims"]
    """Signed for averages of gradients, unsigned for those of squares."""
    scale: Float32[Array, "*blocks"]
    """Largest magnitude of each block: the dims of the codes, with one number per block along the dim of the blocks."""


def kept(moments: Any, dtype: Any, updates: Int[Array, ""], axes: Any) -> Any:
    """Return what is kept of float32 moments: rounded up or down at random, so that the mean over many updates is exact.

    Rounded to nearest, an average would stop moving: with b2 = 0.999 the increments of a second moment are below half of the
    distance between two numbers of bfloat16 (arXiv:2010.06192), and far below that of two codes. The draws depend on the
    number of the update, the leaf and the place in it alone. What is not finite stays so, in 8 bits with all of its block.

    Args:
        moments: State of an update rule; counters are returned as they are.
        dtype: float32, bfloat16 or int8. With int8, what is no matrix, has fewer than `SMALLEST` numbers or no dim long
            enough for a block stays in float32.
        updates: Number of the update.
        axes: Logical axis names of every parameter.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.float32:
        return moments
    assert dtype in (jnp.bfloat16, jnp.int8), dtype
    key, names = jax.random.fold_in(jax.random.key(_ROUNDING), updates), by_path(axes)

    def one(index: int, path: Any, x: Array) -> Any:
        if x.dtype != jnp.float32:
            return x
        draws = _mixed(jax.random.key_data(jax.random.fold_in(key, index)), x.shape) >> 16
        if dtype == jnp.bfloat16:
            return to_bfloat16(x, draws)
        block = block_of(owner_of(path, names), x.shape)
        second = any(getattr(step, "name", None) == _SECOND for step in path)
        return x if block is None else to_codes(x, draws, *block, signed=not second)

    leaves, structure = jax.tree_util.tree_flatten_with_path(moments)
    return jax.tree.unflatten(structure, [one(index, *leaf) for index, leaf in enumerate(leaves)])


def restored(moments: Any) -> Any:
    """Return kept moments in float32."""
    return wide(jax.tree.map(lambda leaf: from_codes(leaf) if is_int8(leaf) else leaf, moments, is_leaf=is_int8))


def wide(tree: Any) -> Any:
    """Return a tree with its floating-point leaves in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def _mixed(key: UInt32[Array, " 2"], shape: tuple[int, ...]) -> UInt32[Array, "*s"]:
    """Return 32 random bits for each place of an array: its number, mixed twice with the key by MurmurHash3's finaliser.

    Unlike `jax.random.bits`, whose rounds are a loop over whole arrays on some backends, this becomes a part of the update's
    own loop and takes no memory.
    """
    places = jnp.zeros(shape, jnp.uint32)
    for dim, size in enumerate(shape):
        places = places * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    for word in key:
        places = places ^ word
        for shift, factor in _MURMUR:
            places = (places ^ (places >> shift)) * jnp.uint32(factor)
        places = places ^ (places >> _MURMUR_LAST)
    return places


def is_int8(node: Any) -> bool:
    """Say whether a node of a tree is a moment in 8 bits."""
    return isinstance(node, Int8Moment)


def to_bfloat16(x: Float[Array, "*dims"], draws: Integer[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Round to a neighbour: the sixteen bits that bfloat16 lacks carry into the others with the probability they stand for."""
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + draws.astype(jnp.uint32)) & jnp.uint32(0xFFFF0000)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(bits, jnp.float32), x).astype(jnp.bfloat16)


def block_of(names: Names | None, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the dim along which a moment has blocks and how many numbers are in one; None where it keeps float32.

    The last dim of at least 64 is halved down to 64 to 127, or as long as it is even: so the number of blocks has as many
    factors of two as can be, for a mesh to split. Vectors (scales, biases) and small matrices stay as they are: they take no
    room and are the most sensitive. No block holds numbers of two tokens of an embedding, two layers or two experts.
    """
    if names is None or not dims_of(names).inputs or math.prod(shape) < SMALLEST:
        return None
    fits = [dim for dim, name in enumerate(names) if name not in _APART and shape[dim] >= _SMALLEST_BLOCK]
    if not fits:
        return None
    block = shape[fits[-1]]
    while block % 2 == 0 and block >= 2 * _SMALLEST_BLOCK:
        block //= 2
    return fits[-1], block


def to_codes(x: Float[Array, "*dims"], draws: Integer[Array, "*dims"], dim: int, block: int, *, signed: bool) -> Int8Moment:
    """Return a moment in codes: of the two next to x / max |x| over its block, one at random, the nearer the likelier.

    A second moment above 0 never gets the code 0: its root divides. It gets the lowest of the others, which makes
    steps smaller, not larger.
    """
    bits = 7 if signed else 8
    split = x.reshape(*x.shape[:dim], -1, block, *x.shape[dim + 1 :])
    largest = jnp.max(jnp.abs(split), axis=dim + 1)
    scale = jnp.where(largest == 0, 1.0, largest)
    size = (jnp.abs(split) / jnp.expand_dims(scale, dim + 1)).reshape(x.shape)
    below = _code_below(size, bits)
    low, high = _magnitude(below, bits), _magnitude(below + 1, bits)
    draw = (draws.astype(jnp.float32) + 0.5) / 2**16
    code = below + ((draw * (high - low) < size - low) | (size >= 1)).astype(jnp.int32)
    if signed:
        return Int8Moment(jnp.where(x < 0, -code, code).astype(jnp.int8), largest)
    return Int8Moment(jnp.where(x > 0, jnp.maximum(code, 1), 0).astype(jnp.uint8), largest)


def from_codes(moment: Int8Moment) -> Float[Array, "*dims"]:
    """Return codes times scales."""
    codes, scale = moment.codes.astype(jnp.int32), moment.scale
    dim = next(dim for dim, (numbers, blocks) in enumerate(zip(codes.shape, scale.shape, strict=True)) if numbers != blocks)
    size = jnp.sign(codes).astype(jnp.float32) * _magnitude(jnp.abs(codes), 7 if moment.codes.dtype == jnp.int8 else 8)
    split = size.reshape(*scale.shape[: dim + 1], -1, *scale.shape[dim + 1 :])
    return (split * jnp.expand_dims(scale, dim + 1)).reshape(codes.shape)


def _line(bits: int, lead: int) -> tuple[float, float, float]:
    """Return lower bound, slope and base of magnitudes whose code has its first one at bit `lead`: slope * code + base.

    The dynamic tree (arXiv:2110.02861 section 1.3): zeros before the first one are a decimal exponent, and the bits after it
    divide 0.1 to 1 evenly; a magnitude is the middle of its part. All are divided by the largest, so that it is 1.
    """
    decade = 10.0 ** (lead + 1 - bits) / (1.0 - 0.45 / 2 ** (bits - 1))
    slope = 0.9 * decade / 2**lead
    return 0.1 * decade, slope, 0.1 * decade + slope * (0.5 - 2**lead)


def _magnitude(codes: Int[Array, "*dims"], bits: int) -> Float[Array, "*dims"]:
    """Return the magnitude of each code from 0 to 2^bits - 1; lines, since a table would be gathered from for each number."""
    _, slope, base = _line(bits, 0)
    for lead in range(1, bits):
        _, own_slope, own_base = _line(bits, lead)
        slope, base = (jnp.where(codes >= 2**lead, own, old) for own, old in ((own_slope, slope), (own_base, base)))
    return jnp.where(codes == 0, 0.0, slope * codes.astype(jnp.float32) + base)


def _code_below(size: Float[Array, "*dims"], bits: int) -> Int[Array, "*dims"]:
    """Return the largest code whose magnitude is not above a size from 0 to 1, but the last."""
    _, slope, base = _line(bits, 0)
    for lead in range(1, bits):
        bound, own_slope, own_base = _line(bits, lead)
        slope, base = (jnp.where(size >= bound, own, old) for own, old in ((own_slope, slope), (own_base, base)))
    return jnp.clip(jnp.floor((size - base) / slope), 0, 2**bits - 2).astype(jnp.int32)
