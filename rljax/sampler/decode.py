"""The compiled programs of the sampler: fill the cache from prompts, extend it, and decode a chunk of tokens in all slots.

Owns what runs on the device. Refuses to own the queue and the choice of what runs next (engine.py).

A prompt's last token is not prefilled: it is the first token the decode loop feeds, so that every draw, the first one
included, is made by the same code.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from rljax.mesh import DATA_AXES
from rljax.models.arch import Arch
from rljax.models.block import KeyValue
from rljax.models.decoder import logits, merge
from rljax.pytree import Params, pytree
from rljax.sampler.cache import LayerCache, Progress, Slots
from rljax.sampler.paged import Pieces, Tables, paged_attention, pieces_attention, store_prompts

_BLOCK = 256  # vocabulary entries per block of the two-level draw


@pytree
class Prompts:
    """Prompts to compute, as rows, and the blocks they go to."""

    tokens: Int[Array, "a s"]
    """Prompt tokens but the last, padded at the end."""
    lengths: Int[Array, " a"]
    """How many of them are real."""
    blocks: Int[Array, "a i"]
    """Blocks of the prompt pool (counted within the row's data shard) that receive them; -1 for none."""


@pytree
class Starts:
    """New rollouts, one per slot that starts."""

    starts: Bool[Array, " b"]
    """Which slots start; the others are left alone."""
    token: Int[Array, " b"]
    """Last token of the prompt."""
    position: Int[Array, " b"]
    """Position of that token."""
    origin: Int[Array, " b"]
    """Position of the first token in the slot's own blocks."""
    limit: Int[Array, " b"]
    """How many tokens may be drawn."""
    draw_key: UInt32[Array, "b 2"]
    """Random key of the rollout."""
    temperature: Float[Array, " b"]
    """Sampling temperature."""


class Draw(NamedTuple):
    """A drawn token and its log-probability under the distribution it was drawn from (nats)."""

    token: Int[Array, " b"]
    logp: Float[Array, " b"]


def fill(arch: Arch, mesh: Mesh, params: Params, slots: Slots, new: Prompts) -> Slots:
    """Compute the prompts' keys and values and store them in their blocks."""
    width = new.tokens.shape[1]
    positions = jnp.broadcast_to(jnp.arange(width), new.tokens.shape)
    segments = (positions < new.lengths[:, None]).astype(jnp.int32)
    _, fresh = merge(arch, params)(new.tokens, positions, segments, dtype=params["embed"].dtype)
    assert not isinstance(fresh, KeyValue), "the sampler's parameters are in the separate layout"
    heads, rows = PartitionSpec(DATA_AXES, "tensor"), PartitionSpec(DATA_AXES)
    # Rows and the blocks they fill lie on the same data shard, so nothing leaves it.
    store = jax.shard_map(store_prompts, mesh=mesh, in_specs=(heads, heads, rows), out_specs=heads)
    cache = tuple(
        LayerCache(store(layer.prompt, prompts, new.blocks), layer.own)
        for layer, prompts in zip(slots.cache, fresh, strict=True)
    )
    return Slots(cache, slots.progress)


def extend(arch: Arch, mesh: Mesh, params: Params, slots: Slots, new: Pieces) -> Slots:
    """Compute the keys and values of tokens that continue what the cache holds, and store them in their blocks."""
    positions = new.first[:, None] + jnp.arange(new.tokens.shape[1])[None]
    attention, dtype = pieces_attention(arch, mesh, new), params["embed"].dtype
    _, cache = merge(arch, params).continued(new.tokens, positions, attention, slots.cache, dtype=dtype)
    return Slots(cache, slots.progress)


def start(progress: Progress, new: Starts) -> Progress:
    """Begin new rollouts whose prompts are stored."""
    fresh = {"token": new.token, "position": new.position, "origin": new.origin, "remaining": new.limit}
    fresh |= {"temperature": new.temperature, "count": jnp.zeros_like(progress.count)}
    changed = {name: jnp.where(new.starts, value, getattr(progress, name)) for name, value in fresh.items()}
    changed["draw_key"] = jnp.where(new.starts[:, None], new.draw_key, progress.draw_key)
    return dataclasses.replace(progress, **changed)


def decode_chunk(
    arch: Arch, mesh: Mesh, steps: int, params: Params, slots: Slots, tables: Tables, stop_ids: Int[Array, " e"]
) -> Slots:
    """Draw up to `steps` tokens in every slot that has any left; stop early when none has."""

    def unfinished(carry: tuple[Array, Slots]) -> Array:
        step, state = carry
        return (step < steps) & jnp.any(state.progress.remaining > 0)

    def advance(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
        step, state = carry
        return step + 1, _decode_step(arch, mesh, params, state, tables, stop_ids)

    return jax.lax.while_loop(unfinished, advance, (jnp.int32(0), slots))[1]


def _decode_step(arch: Arch, mesh: Mesh, params: Params, state: Slots, tables: Tables, stop_ids: Int[Array, " e"]) -> Slots:
    """Feed each slot's token and draw the next one."""
    decoder, dtype, now = merge(arch, params), params["embed"].dtype, state.progress
    active = now.remaining > 0
    attention = paged_attention(arch, mesh, tables, now.position, now.origin, active)
    hidden, cache = decoder.continued(now.token[:, None], now.position[:, None], attention, state.cache, dtype=dtype)
    drawn = draw(logits(decoder, hidden[:, 0]), now.temperature, uniforms(now.draw_key, now.position + 1))
    ended = jnp.any(drawn.token[:, None] == stop_ids[None, :], axis=1)
    written = jnp.arange(now.out_tokens.shape[1])[None, :] == jnp.where(active, now.count, -1)[:, None]
    progress = dataclasses.replace(
        now,
        token=jnp.where(active, drawn.token, now.token),
        position=jnp.where(active, now.position + 1, now.position),
        remaining=jnp.where(active & ~ended, now.remaining - 1, 0),
        out_tokens=jnp.where(written, drawn.token[:, None], now.out_tokens),
        out_logp=jnp.where(written, drawn.logp[:, None], now.out_logp),
        count=jnp.where(active, now.count + 1, now.count),
    )
    return Slots(cache, progress)


def uniforms(draw_key: UInt32[Array, "b 2"], position: Int[Array, " b"]) -> Float[Array, " b"]:
    """Return one number in [0, 1) per slot, a function of its rollout's key and the position of the token to draw."""

    def one(key: Array, at: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), at))

    return jax.vmap(one)(draw_key, position)


def draw(logits: Float[Array, "b v"], temperature: Float[Array, " b"], uniform: Float[Array, " b"]) -> Draw:
    """Draw one token per row from softmax(logits / temperature) by inverting its cumulative distribution.

    One uniform number per row decides, so a row's token depends on nothing but its own logits and number. The
    distribution is summed in blocks; the block that holds the number is found first, then the token inside it: two
    short scans instead of one over the whole vocabulary. At temperature 0 the most likely token is taken, with
    probability 1 (log-probability 0).
    """
    rows, vocab = logits.shape
    greedy = temperature == 0
    scale = jnp.where(greedy, 1.0, temperature)[:, None]
    # Division by a positive number keeps the order, so the maximum may be taken first; scaled logits are never stored.
    top = jnp.max(logits, axis=1, keepdims=True) / scale
    blocks = jnp.pad(logits, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf).reshape(rows, -1, _BLOCK)
    masses = jnp.exp(blocks / scale[:, None] - top[:, None]).sum(axis=2)
    reached = jnp.cumsum(masses, axis=1)
    total = reached[:, -1]
    target = uniform * total
    block = _first_above(reached, target, masses)
    before = jnp.take_along_axis(reached - masses, block[:, None], axis=1)
    inside = jnp.exp(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0] / scale - top)
    within = _first_above(jnp.cumsum(inside, axis=1), target - before[:, 0], inside)
    drawn = (block * _BLOCK + within).astype(jnp.int32)

    def take_likeliest() -> Int[Array, " b"]:
        return jnp.where(greedy, jnp.argmax(logits, axis=1), drawn).astype(jnp.int32)

    # A search of the whole vocabulary, which only a greedy row is worth.
    token = jax.lax.cond(jnp.any(greedy), take_likeliest, lambda: drawn)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1) / scale
    return Draw(token, jnp.where(greedy, 0.0, (chosen - top)[:, 0] - jnp.log(total)))


def _first_above(reached: Float[Array, "b n"], target: Float[Array, " b"], mass: Float[Array, "b n"]) -> Int[Array, " b"]:
    """Return the first entry whose cumulative mass exceeds the target; never one without mass, whatever the rounding."""
    index = jnp.arange(reached.shape[1])
    last = jnp.max(jnp.where(mass > 0, index, 0), axis=1)
    above = (reached > target[:, None]) & (mass > 0)
    return jnp.minimum(jnp.min(jnp.where(above, index, reached.shape[1]), axis=1), last)
