"""Attention of new tokens to the blocks of the cache that they read, and the write of those tokens into their blocks.

Owns the part of a decode step, and of a continued prefill, that follows the tables. Refuses to own which block belongs to
whom (blocks.py).

A decode step has one new token per slot. Its work is done block by block, each block against all queries that read it, and
the parts are joined per slot:

    query of each slot --gathered per block--> [block x its readers] --softmax within the block--> parts --joined--> slot

So no key or value is ever gathered or copied, a prompt's block is read once for all rollouts of its group, and the
arithmetic grows with the blocks in use. A slot's parts are always joined in the order of its tokens: in tables of one size,
which blocks it was given changes no bit of the result.

A continued prefill has many new tokens in few rows. It first stores them and then gathers all keys and values of its rows:
a copy that is small against the products with the weights.

Both attend to what is stored, so that it makes no difference to later tokens when a key or value was computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from rljax.mesh import DATA_AXES, data_shards
from rljax.models.arch import Arch
from rljax.models.attention import AttentionOptions, Part, Scales, attend, attend_part, join_parts, position_mask
from rljax.models.block import Attention, KeyValue, windows
from rljax.pytree import pytree
from rljax.sampler.cache import BLOCK, Blocks, LayerCache, as_kept, empty_blocks

_ROWS, _HEADS = PartitionSpec(DATA_AXES), PartitionSpec(DATA_AXES, "tensor")


@dataclass(frozen=True, slots=True)
class InBlocks:
    """The form of a cache to which XLA attends block by block; see `pages.InPages` for the other one."""

    @property
    def spec(self) -> PartitionSpec:
        """How the cache lies on the mesh."""
        return _HEADS

    def empty(self, arch: Arch, mesh: Mesh, prompts: Sequence[int], own: Sequence[int], dtype: jnp.dtype) -> LayerCache:
        """Return the arenas of one layer, with so many blocks on each data shard."""
        shards = data_shards(mesh)
        pools = (tuple(empty_blocks(arch, shards * size, dtype) for size in arenas) for arenas in (prompts, own))
        return LayerCache(*pools)

    def decode(
        self,
        arch: Arch,
        mesh: Mesh,
        tables: "Tables",
        position: Int[Array, " b"],
        origin: Int[Array, " b"],
        active: Bool[Array, " b"],
    ) -> Attention:
        """Return the attention of a decode step; see `paged_attention`."""
        return paged_attention(arch, mesh, tables, position, origin, active)

    def continued(self, arch: Arch, mesh: Mesh, pieces: "Pieces") -> Attention:
        """Return the attention of a continued prefill; see `pieces_attention`."""
        return pieces_attention(arch, mesh, pieces)

    def with_prompts(self, mesh: Mesh, layer: LayerCache, prompts: KeyValue, blocks: Int[Array, "a i"]) -> LayerCache:
        """Store whole prompts, given as rows, in the blocks named for them; -1 drops a part."""
        # Rows and the blocks they fill lie on the same data shard, so nothing leaves it.
        store = jax.shard_map(store_prompts, mesh=mesh, in_specs=(_HEADS, _HEADS, _ROWS), out_specs=_HEADS)
        return LayerCache(store(layer.prompt, prompts, blocks), layer.own)

    def copied(self, mesh: Mesh, layer: LayerCache, source: Int[Array, " n"], target: Int[Array, " n"]) -> LayerCache:
        """Copy blocks of a layer to others of the same pool and data shard; a target of -1 is none."""
        copy = jax.shard_map(_copied, mesh=mesh, in_specs=(_HEADS, _ROWS, _ROWS), out_specs=_HEADS)
        return copy(layer, source, target)


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


@pytree
class Pieces:
    """Tokens that continue sequences of which earlier tokens are in the cache, as rows."""

    tokens: Int[Array, "a s"]
    """The tokens, padded at the end."""
    lengths: Int[Array, " a"]
    """How many of them are real."""
    first: Int[Array, " a"]
    """Position of the first one."""
    origin: Int[Array, " a"]
    """Position of the first token of the blocks they are stored in: 0 in a prompt's blocks."""
    base: Int[Array, " a"]
    """How many blocks the row reads before those."""
    blocks: Int[Array, "a q"]
    """The row's blocks in the order of tokens, -1 for none; those of the own pool are counted on after the prompt pool's."""


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


class PiecesPlan(NamedTuple):
    """What the layers of one continued prefill share."""

    visible: dict[str, Bool[Array, "a s t"]]
    """Which positions of its blocks each token sees; by the window, as text."""
    blocks: Int[Array, "a q"]
    """Those of each row."""
    block: Int[Array, " n"]
    """Where each token is stored; -1 for nowhere."""
    offset: Int[Array, " n"]
    """At which position there."""


def paged_attention(
    arch: Arch,
    mesh: Mesh,
    tables: Tables,
    position: Int[Array, " b"],
    origin: Int[Array, " b"],
    active: Bool[Array, " b"],
) -> Attention:
    """Return the attention of a decode step in which each slot feeds one token, at `position`.

    Args:
        arch: Model, whose layers may have windows.
        mesh: Devices; slots and blocks are split over the data axes, heads over `tensor`.
        tables: Who reads what.
        position: Per slot, the position of the token that is fed.
        origin: Per slot, the position of the first token in its own blocks.
        active: Which slots store their token; what others hold is left alone.
    """
    plan = jax.shard_map(partial(_plan, windows(arch)), mesh=mesh, in_specs=_ROWS, out_specs=_ROWS)
    return over_mesh(mesh, _attend, plan(tables, position, origin, active))


def pieces_attention(arch: Arch, mesh: Mesh, pieces: Pieces) -> Attention:
    """Return the attention of a continued prefill: each token sees what its row's blocks hold up to its own position."""
    return over_mesh(mesh, _attend_gathered, plan_of_pieces(arch, mesh, pieces))


def plan_of_pieces(arch: Arch, mesh: Mesh, pieces: Pieces) -> PiecesPlan:
    """Derive from the pieces what every layer needs, on every data shard."""
    return jax.shard_map(partial(_plan_pieces, windows(arch)), mesh=mesh, in_specs=_ROWS, out_specs=_ROWS)(pieces)


def over_mesh(
    mesh: Mesh,
    attend_shard: Callable[..., tuple[Array, Any]],
    plan: Any,
    cache_spec: PartitionSpec = _HEADS,
    check_vma: bool = True,
) -> Attention:
    """Return the attention that runs `attend_shard` on every shard with its part of the plan.

    Args:
        mesh: Devices.
        attend_shard: From options, queries, fresh keys and values, a layer's cache, the plan and sinks to results and cache.
        plan: What the layers share, its leaves split over the data axes.
        cache_spec: How a layer's cache lies on the mesh.
        check_vma: Whether it is derived and checked over which mesh axes the results vary.
    """

    def attention(
        query: Array, fresh: KeyValue, cache: Any, options: AttentionOptions, sinks: Array | None
    ) -> tuple[Array, Any]:
        queries = PartitionSpec(DATA_AXES, None, "tensor")
        specs, found = (queries, _HEADS, cache_spec, _ROWS, PartitionSpec("tensor")), (queries, cache_spec)
        attend_all = partial(attend_shard, options)
        run = jax.shard_map(attend_all, mesh=mesh, in_specs=specs, out_specs=found, check_vma=check_vma)
        return run(query, fresh, cache, plan, sinks)

    return attention


def _plan(
    windows: Sequence[int | None],
    tables: Tables,
    position: Int[Array, " b"],
    origin: Int[Array, " b"],
    active: Bool[Array, " b"],
) -> _Plan:
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
    block = jnp.take_along_axis(tables.own_parts, (fed // BLOCK)[:, None], axis=1, mode="fill", fill_value=-1)[:, 0]
    return _Plan(own_slot, prompt_slot, visible, parts, jnp.where(active, block, -1), fed % BLOCK)


def _plan_pieces(windows: Sequence[int | None], pieces: Pieces) -> PiecesPlan:
    """Derive from the pieces what every layer needs, on one data shard."""
    columns, rows = jnp.arange(pieces.blocks.shape[1])[None], pieces.tokens.shape
    origin, base = pieces.origin[:, None], pieces.base[:, None]
    target = columns >= base
    begin = jnp.where(target, origin + (columns - base) * BLOCK, columns * BLOCK)
    at = begin[:, :, None] + jnp.arange(BLOCK)[None, None]
    # The prompt's last block is not full: the position after its last token is the first one of the own blocks.
    there = (pieces.blocks >= 0)[:, :, None] & (target[:, :, None] | (at < origin[:, :, None]))
    at, there = at.reshape(rows[0], -1), there.reshape(rows[0], 1, -1)
    positions = pieces.first[:, None] + jnp.arange(rows[1])[None]
    visible = {str(window): position_mask(positions, at, window) & there for window in windows}
    fed = positions - origin
    block = jnp.take_along_axis(pieces.blocks, base + fed // BLOCK, axis=1, mode="fill", fill_value=-1)
    real = jnp.arange(rows[1])[None] < pieces.lengths[:, None]
    return PiecesPlan(visible, pieces.blocks, jnp.where(real, block, -1).reshape(-1), (fed % BLOCK).reshape(-1))


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
    own = _store(cache.own, plan.block, jax.tree.map(lambda x: x[:, :, 0], as_kept(cache, fresh)), plan.offset)
    parts: list[Part] = []
    for arena, blocks in _used(own, len(plan.own_slot)):
        reader = now[plan.own_slot[blocks]]
        parts.append(attend_part(reader, arena.key, arena.value, visible.own[blocks], options, arena.scales))
    for arena, blocks in _used(cache.prompt, len(plan.prompt_slot)):
        readers = jnp.swapaxes(now[plan.prompt_slot[blocks]], 1, 2)  # [p, k, g, m, c]
        part = attend_part(readers, arena.key, arena.value, visible.prompt[blocks], options, arena.scales)
        parts.append(_apart(part))
    return join_parts(parts, plan.parts, sinks).astype(query.dtype)[:, None], LayerCache(cache.prompt, own)


def _attend_gathered(
    options: AttentionOptions,
    query: Float[Array, "a s k m c"],
    fresh: KeyValue,
    cache: LayerCache,
    plan: PiecesPlan,
    sinks: Float[Array, "k m"] | None,
) -> tuple[Float[Array, "a s k m c"], LayerCache]:
    """Write the fresh keys and values into their blocks and attend to all of the row's blocks, on one data shard."""
    first_own = sum(len(arena.key) for arena in cache.prompt)
    new = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], *x.shape[3:]), as_kept(cache, fresh))
    prompt = _store(cache.prompt, plan.block, new, plan.offset)
    own = _store(cache.own, plan.block - first_own, new, plan.offset)
    seen, visible = _gathered((*prompt, *own), plan.blocks), plan.visible[str(options.window)]
    return attend(query, seen.key, seen.value, visible, options, sinks, seen.scales), LayerCache(prompt, own)


def _gathered(arenas: Sequence[Blocks], blocks: Int[Array, "a q"]) -> KeyValue:
    """Return the keys and values of each row's blocks, in their order; zeros for those that are none."""
    (a, q), found = blocks.shape, _taken(arenas, blocks)
    k, c, t = found.key.shape[2:]
    return KeyValue(
        found.key.transpose(0, 2, 1, 4, 3).reshape(a, k, q * t, c),
        found.value.transpose(0, 2, 1, 3, 4).reshape(a, k, q * t, c),
        jax.tree.map(lambda scale: scale.transpose(0, 2, 1, 3).reshape(a, k, q * t), found.scales),
    )


def _taken(arenas: Sequence[Blocks], blocks: Int[Array, "*n"]) -> Blocks:
    """Return copies of these blocks; zeros for those that are none."""
    first, found = 0, None
    for arena in arenas:
        at = _within(blocks, first, len(arena.key))
        part = jax.tree.map(lambda x, at=at: x.at[at].get(mode="fill", fill_value=0), arena)
        # Every block lies in one arena and is zero in the others, so the sum is exact.
        found = part if found is None else jax.tree.map(jnp.add, found, part)
        first += len(arena.key)
    assert found is not None, "there is an arena"
    return found


def _copied(layer: LayerCache, source: Int[Array, " n"], target: Int[Array, " n"]) -> LayerCache:
    """Copy blocks of one data shard, those of the own pool counted on after the prompt pool's."""
    # Else XLA may read a block after it was written to, for which it would copy all of the cache.
    found = KeyValue(*jax.lax.optimization_barrier(_taken((*layer.prompt, *layer.own), source)))
    first_own = sum(len(arena.key) for arena in layer.prompt)
    return LayerCache(_store(layer.prompt, target, found), _store(layer.own, target - first_own, found))


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
    _, k, _, c = prompts.key.shape
    key, value, scales = split_in_blocks(prompts, blocks.shape[1])
    keys = key.transpose(0, 2, 1, 4, 3).reshape(-1, k, c, BLOCK)
    values = value.transpose(0, 2, 1, 3, 4).reshape(-1, k, BLOCK, c)
    scales = jax.tree.map(lambda scale: scale.transpose(0, 2, 1, 3).reshape(-1, k, BLOCK), scales)
    return _store(arenas, blocks.reshape(-1), KeyValue(keys, values, scales))


def split_in_blocks(prompts: KeyValue, count: int) -> KeyValue:
    """Return keys and values of rows [a, k, s, c] as so many blocks of each, padded at the end: [a, k, count, BLOCK, c]."""
    a, k, s, _ = prompts.key.shape

    def split(x: Array) -> Array:
        rest = [(0, 0)] * (x.ndim - 3)
        return jnp.pad(x, ((0, 0), (0, 0), (0, count * BLOCK - s), *rest)).reshape(a, k, -1, BLOCK, *x.shape[3:])

    return jax.tree.map(split, prompts)


def _store(
    arenas: tuple[Blocks, ...], block: Int[Array, " n"], new: KeyValue, offset: Int[Array, " n"] | None = None
) -> tuple[Blocks, ...]:
    """Store keys and values in the blocks named for them, whole blocks or, with offsets, one position each; -1 drops one."""
    stored, first = [], 0
    for arena in arenas:
        at = _within(block, first, len(arena.key))

        def put(held: Array, fresh: Array, between: int, at: Array = at) -> Array:
            # So many dims lie between that of blocks and that of positions.
            place = held.at[at] if offset is None else held.at[(at, *[slice(None)] * between, offset)]
            return place.set(fresh.astype(held.dtype), mode="drop")

        scales = None
        if arena.scales is not None:
            assert new.scales is not None, "codes come with scales"
            scales = Scales(put(arena.scales.key, new.scales.key, 1), put(arena.scales.value, new.scales.value, 1))
        stored.append(Blocks(put(arena.key, new.key, 2), put(arena.value, new.value, 1), scales))
        first += len(arena.key)
    return tuple(stored)


def _within(block: Int[Array, "*n"], first: int, size: int) -> Int[Array, "*n"]:
    """Count blocks from the first one of an arena; one of another arena, or none, gets a number out of range."""
    at = block - first
    return jnp.where((at >= 0) & (at < size), at, size)
