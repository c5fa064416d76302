"""Attention of one new token per slot to the blocks its slot reads, and the write of that token into its block.

Owns the part of a decode step that follows the tables. Refuses to own which block belongs to whom (blocks.py).

The work is done block by block, each block against all queries that read it, and the parts are joined per slot:

    query of each slot --gathered per block--> [block x its readers] --softmax within the block--> parts --joined--> slot

So no key or value is ever gathered or copied, a prompt's block is read once for all rollouts of its group, and the
arithmetic grows with the blocks in use. A slot's parts are always joined in the order of its tokens: which blocks it was
given changes no bit of the result.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from rljax.mesh import DATA_AXES
from rljax.models.arch import Arch
from rljax.models.attention import AttentionOptions, Part, attend_part, join_parts, position_mask
from rljax.models.block import Attention, KeyValue, layer_kinds
from rljax.pytree import pytree
from rljax.sampler.cache import BLOCK, Blocks, LayerCache

_ROWS, _HEADS = PartitionSpec(DATA_AXES), PartitionSpec(DATA_AXES, "tensor")


@pytree
class Tables:
    """Who reads which block during one chunk; slots and blocks are counted within their data shard, -1 is nobody."""

    prompt_slot: Int[Array, "p g"]
    """Per block of the prompt pool, the slots that read it."""
    prompt_start: Int[Array, " p"]
    """Position of its first token."""
    prompt_filled: Int[Array, " p"]
    """How many of its positions hold tokens."""
    own_slot: Int[Array, " n"]
    """Per block of the own pool, the slot it belongs to."""
    own_start: Int[Array, " n"]
    """Position of its first token."""
    prompt_parts: Int[Array, "b i"]
    """Per slot, its places in the prompt pool in the order of tokens: block x g + reader."""
    own_parts: Int[Array, "b j"]
    """Per slot, its own blocks in the order of tokens."""


class _Visible(NamedTuple):
    """Which positions of a block its readers see."""

    own: Bool[Array, "n 1 t"]
    prompt: Bool[Array, "p g t"]


class _Plan(NamedTuple):
    """What the layers of one step share."""

    own_slot: Int[Array, " n"]
    prompt_slot: Int[Array, "p g"]
    visible: dict[str, _Visible]
    """By the window, as text: jax sorts keys, and there may be None among them."""
    parts: Int[Array, "b q"]
    block: Int[Array, " b"]
    offset: Int[Array, " b"]


def paged_attention(arch: Arch, mesh: Mesh, tables: Tables, position: Int[Array, " b"], origin: Int[Array, " b"]) -> Attention:
    """Return the attention of a decode step in which each slot feeds one token, at `position`.

    Args:
        arch: Model, whose layers may have windows.
        mesh: Devices; slots and blocks are split over the data axes, heads over `tensor`.
        tables: Who reads what.
        position: Per slot, the position of the token that is fed.
        origin: Per slot, the position of the first token in its own blocks.
    """
    windows = {kind.attention.window for kind in layer_kinds(arch)}
    plan_of = partial(_plan, sorted(windows, key=str))
    plan = jax.shard_map(plan_of, mesh=mesh, in_specs=_ROWS, out_specs=_ROWS)(tables, position, origin)

    def attention(
        query: Array, fresh: KeyValue, cache: LayerCache, options: AttentionOptions, sinks: Array | None
    ) -> tuple[Array, LayerCache]:
        queries = PartitionSpec(DATA_AXES, None, "tensor")
        specs = (queries, _HEADS, _HEADS, _ROWS, PartitionSpec("tensor"))
        attend = jax.shard_map(partial(_attend, options), mesh=mesh, in_specs=specs, out_specs=(queries, _HEADS))
        return attend(query, fresh, cache, plan, sinks)

    return attention


def _plan(windows: Sequence[int | None], tables: Tables, position: Int[Array, " b"], origin: Int[Array, " b"]) -> _Plan:
    """Derive from the tables what every layer needs, on one data shard."""
    entries = jnp.arange(BLOCK)[None]
    own_slot, prompt_slot = jnp.maximum(tables.own_slot, 0), jnp.maximum(tables.prompt_slot, 0)
    own_at, prompt_at = (start[:, None] + entries for start in (tables.own_start, tables.prompt_start))
    used = (tables.own_slot >= 0)[:, None, None]
    read = (tables.prompt_slot >= 0)[:, :, None] & (entries < tables.prompt_filled[:, None])[:, None]
    visible = {
        str(window): _Visible(
            position_mask(position[own_slot][:, None], own_at, window) & used,
            position_mask(position[prompt_slot], prompt_at, window) & read,
        )
        for window in windows
    }
    first, nothing = len(own_slot), len(own_slot) + prompt_slot.size
    parts = jnp.concatenate(
        [
            jnp.where(tables.prompt_parts >= 0, first + tables.prompt_parts, nothing),
            jnp.where(tables.own_parts >= 0, tables.own_parts, nothing),
        ],
        axis=1,
    )
    fed = position - origin
    block = jnp.take_along_axis(tables.own_parts, jnp.minimum(fed // BLOCK, tables.own_parts.shape[1] - 1)[:, None], axis=1)
    return _Plan(own_slot, prompt_slot, visible, parts, block[:, 0], fed % BLOCK)


def _attend(
    options: AttentionOptions,
    query: Float[Array, "b 1 k m c"],
    fresh: KeyValue,
    cache: LayerCache,
    plan: _Plan,
    sinks: Float[Array, "k m"] | None,
) -> tuple[Float[Array, "b 1 k m c"], LayerCache]:
    """Write the fresh keys and values into the slots' own blocks and attend, on one data shard."""
    now, visible = query[:, 0], plan.visible[str(options.window)]
    # A slot that has no block for its token stores nothing.
    own = _store(cache.own, plan.block, fresh.key[:, :, 0], fresh.value[:, :, 0], plan.offset)
    parts: list[Part] = []
    for arena, blocks in _used(own, len(plan.own_slot)):
        parts.append(attend_part(now[plan.own_slot[blocks]], arena.key, arena.value, visible.own[blocks], options))
    for arena, blocks in _used(cache.prompt, len(plan.prompt_slot)):
        readers = jnp.swapaxes(now[plan.prompt_slot[blocks]], 1, 2)  # [p, k, g, m, c]
        parts.append(_apart(attend_part(readers, arena.key, arena.value, visible.prompt[blocks], options)))
    return join_parts(parts, plan.parts, sinks).astype(query.dtype)[:, None], LayerCache(cache.prompt, own)


def _apart(part: Part) -> Part:
    """Give each reader of each block a row of its own."""
    return Part(*(jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], *x.shape[3:]) for x in part))


def _used(arenas: tuple[Blocks, ...], blocks: int) -> list[tuple[Blocks, slice]]:
    """Return the arenas that the tables cover, each with its range of blocks."""
    ends, used = 0, []
    for arena in arenas:
        if ends < blocks:
            used.append((arena, slice(ends, ends + len(arena.key))))
        ends += len(arena.key)
    assert used[-1][1].stop == blocks, "tables cover whole arenas"
    return used


def store_prompts(arenas: tuple[Blocks, ...], prompts: KeyValue, blocks: Int[Array, "a i"]) -> tuple[Blocks, ...]:
    """Store whole prompts, given as rows, in the blocks named for them; -1 drops a part. On one data shard."""
    key, value = prompts.key, prompts.value
    a, k, s, c = key.shape
    missing = blocks.shape[1] * BLOCK - s
    key, value = (jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))).reshape(a, k, -1, BLOCK, c) for x in (key, value))
    keys = key.transpose(0, 2, 1, 4, 3).reshape(-1, k, c, BLOCK)
    values = value.transpose(0, 2, 1, 3, 4).reshape(-1, k, BLOCK, c)
    return _store(arenas, blocks.reshape(-1), keys, values)


def _store(
    arenas: tuple[Blocks, ...], block: Int[Array, " n"], key: Array, value: Array, offset: Int[Array, " n"] | None = None
) -> tuple[Blocks, ...]:
    """Store keys and values in the blocks named for them, whole blocks or, with offsets, one position each; -1 drops one."""
    stored, first = [], 0
    for arena in arenas:
        at = _within(block, first, len(arena.key))
        keys, values = arena.key.at[at], arena.value.at[at]
        if offset is not None:
            keys, values = arena.key.at[at, :, :, offset], arena.value.at[at, :, offset]
        both = ((keys, key, arena.key.dtype), (values, value, arena.value.dtype))
        stored.append(Blocks(*(place.set(new.astype(dtype), mode="drop") for place, new, dtype in both)))
        first += len(arena.key)
    return tuple(stored)


def _within(block: Int[Array, "*n"], first: int, size: int) -> Int[Array, "*n"]:
    """Count blocks from the first one of an arena; one of another arena, or none, gets a number out of range."""
    at = block - first
    return jnp.where((at >= 0) & (at < size), at, size)
