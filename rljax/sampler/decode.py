"""The compiled programs of the sampler: fill slots from prompts, and decode a chunk of tokens in all of them.

Owns what runs on the device. Refuses to own the queue and the choice of what runs next (engine.py).

A prompt's last token is not prefilled: it is the first token the decode loop feeds, so that every draw, the first one
included, is made by the same code.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, UInt32

from rljax.mesh import DATA_AXES
from rljax.models.arch import Arch
from rljax.models.decoder import KeyValue, logits, merge
from rljax.pytree import Params, pytree
from rljax.sampler.cache import Slots

_BLOCK = 256  # vocabulary entries per block of the two-level draw


@pytree
class Admission:
    """New rollouts for the slots: prompts as rows, and which slot starts from which row."""

    tokens: Int[Array, "a s"]
    """Prompt tokens but the last, padded at the end."""
    lengths: Int[Array, " a"]
    """How many of them are real."""
    row: Int[Array, " b"]
    """Per slot, the row (counted within its data shard) it starts from; -1 leaves the slot alone."""
    token: Int[Array, " b"]
    """Per slot, the last token of its prompt."""
    position: Int[Array, " b"]
    """Per slot, the position of that token."""
    limit: Int[Array, " b"]
    """Per slot, how many tokens it may draw."""
    draw_key: UInt32[Array, "b 2"]
    """Per slot, the random key of its rollout."""
    temperature: Float[Array, " b"]
    """Per slot, the sampling temperature."""


class Draw(NamedTuple):
    """A drawn token and its log-probability under the distribution it was drawn from (nats)."""

    token: Int[Array, " b"]
    logp: Float[Array, " b"]


def fill(arch: Arch, mesh: Mesh, params: Params, slots: Slots, new: Admission) -> Slots:
    """Compute the prompts' keys and values once per row and hand them to every slot that starts from the row."""
    rows, width = new.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    segments = (positions < new.lengths[:, None]).astype(jnp.int32)
    dtype = params["embed"].dtype
    _, fresh = merge(arch, params)(new.tokens, positions, segments, dtype=dtype)
    heads, row = PartitionSpec(DATA_AXES, "tensor"), PartitionSpec(DATA_AXES)

    def copy(old: Array, prompts: Array, source: Array) -> Array:
        taken = jnp.take(prompts.astype(old.dtype), jnp.maximum(source, 0), axis=0)
        kept = jnp.where((source >= 0)[:, None, None, None], taken, old[:, :, :width])
        return old.at[:, :, :width].set(kept)

    # Rows and the slots that start from them lie on the same data shard, so the copy never leaves it.
    local = jax.shard_map(copy, mesh=mesh, in_specs=(heads, heads, row), out_specs=heads)
    starts = new.row >= 0
    return Slots(
        cache=jax.tree.map(lambda old, prompts: local(old, prompts, new.row), slots.cache, fresh),
        token=jnp.where(starts, new.token, slots.token),
        position=jnp.where(starts, new.position, slots.position),
        remaining=jnp.where(starts, new.limit, slots.remaining),
        draw_key=jnp.where(starts[:, None], new.draw_key, slots.draw_key),
        temperature=jnp.where(starts, new.temperature, slots.temperature),
        out_tokens=slots.out_tokens,
        out_logp=slots.out_logp,
        count=jnp.where(starts, 0, slots.count),
    )


def decode_chunk(arch: Arch, steps: int, params: Params, slots: Slots, stop_ids: Int[Array, " e"]) -> Slots:
    """Draw up to `steps` tokens in every slot that has any left; stop early when none has."""

    def unfinished(carry: tuple[Array, Slots]) -> Array:
        step, state = carry
        return (step < steps) & jnp.any(state.remaining > 0)

    def advance(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
        step, state = carry
        return step + 1, _decode_step(arch, params, state, stop_ids)

    return jax.lax.while_loop(unfinished, advance, (jnp.int32(0), slots))[1]


def _decode_step(arch: Arch, params: Params, slots: Slots, stop_ids: Int[Array, " e"]) -> Slots:
    """Feed each slot's token and draw the next one."""
    decoder, dtype = merge(arch, params), params["embed"].dtype
    position = slots.position[:, None]
    hidden, cache = decoder(slots.token[:, None], position, jnp.ones_like(position), slots.cache, dtype=dtype)
    assert not isinstance(cache, KeyValue), "the sampler's parameters are in the separate layout"
    drawn = draw(logits(decoder, hidden[:, 0]), slots.temperature, uniforms(slots.draw_key, slots.position + 1))
    active = slots.remaining > 0
    ended = jnp.any(drawn.token[:, None] == stop_ids[None, :], axis=1)
    written = jnp.arange(slots.out_tokens.shape[1])[None, :] == jnp.where(active, slots.count, -1)[:, None]
    return Slots(
        cache=cache,
        token=jnp.where(active, drawn.token, slots.token),
        position=jnp.where(active, slots.position + 1, slots.position),
        remaining=jnp.where(active & ~ended, slots.remaining - 1, 0),
        draw_key=slots.draw_key,
        temperature=slots.temperature,
        out_tokens=jnp.where(written, drawn.token[:, None], slots.out_tokens),
        out_logp=jnp.where(written, drawn.logp[:, None], slots.out_logp),
        count=jnp.where(active, slots.count + 1, slots.count),
    )


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
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    padded = jnp.pad(scaled, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(rows, -1, _BLOCK)
    top = jnp.max(scaled, axis=1)
    masses = jnp.exp(blocks - top[:, None, None]).sum(axis=2)
    reached = jnp.cumsum(masses, axis=1)
    total = reached[:, -1]
    target = uniform * total
    block = _first_above(reached, target, masses)
    before = jnp.take_along_axis(reached - masses, block[:, None], axis=1)
    inside = jnp.exp(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0] - top[:, None])
    within = _first_above(jnp.cumsum(inside, axis=1), target - before[:, 0], inside)
    drawn = (block * _BLOCK + within).astype(jnp.int32)

    def take_likeliest() -> Int[Array, " b"]:
        return jnp.where(greedy, jnp.argmax(logits, axis=1), drawn).astype(jnp.int32)

    # A search of the whole vocabulary, which only a greedy row is worth.
    token = jax.lax.cond(jnp.any(greedy), take_likeliest, lambda: drawn)
    chosen = jnp.take_along_axis(scaled, token[:, None], axis=1)[:, 0]
    return Draw(token, jnp.where(greedy, 0.0, chosen - top - jnp.log(total)))


def _first_above(reached: Float[Array, "b n"], target: Float[Array, " b"], mass: Float[Array, "b n"]) -> Int[Array, " b"]:
    """Return the first entry whose cumulative mass exceeds the target; never one without mass, whatever the rounding."""
    index = jnp.arange(reached.shape[1])
    last = jnp.max(jnp.where(mass > 0, index, 0), axis=1)
    above = (reached > target[:, None]) & (mass > 0)
    return jnp.minimum(jnp.min(jnp.where(above, index, reached.shape[1]), axis=1), last)
