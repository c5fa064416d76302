"""A cache of pages, to which a kernel attends: what is written when, and the attention of new tokens.

Owns the counterparts of paged.py for a cache that a kernel reads. Refuses to own the kernels and how their pages lie
(kernels.py), and which page belongs to whom (blocks.py).

A kernel reads pages one after the other as one sequence, without a gap. So all blocks of a layer are pages of one set of
arrays, those of the own pool counted on after the prompt pool's, and the slot's own blocks begin where a block of its
prompt does: when the slot starts, the first one receives a copy of what the prompt's last block holds, which need not be full.

    prompt's blocks    [0..31] [32..63] [64..70        ]   read by its group, the last one only to be copied
    a slot's own                        [64..70 71 72 ..] [..]
    its table          [0..31] [32..63] [64..          ] [..]

What an earlier holder left in a page must not even be multiplied by zero, since it need not be finite. Where a kernel does so,
a page is cleared when its first position is written.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from rljax.mesh import DATA_AXES, data_shards
from rljax.models.arch import Arch
from rljax.models.attention import AttentionOptions, Scales, attend
from rljax.models.block import Attention, KeyValue
from rljax.pytree import pytree
from rljax.sampler.cache import BLOCK, Pages, as_kept
from rljax.sampler.kernels import Kernel
from rljax.sampler.paged import Pieces, PiecesPlan, over_mesh, plan_of_pieces, split_in_blocks

_ROWS, _HEADS = PartitionSpec(DATA_AXES), PartitionSpec(DATA_AXES, "tensor")


@pytree
class PageTable:
    """Who reads which page during one chunk."""

    pages: Int[Array, "b q"]
    """Per slot, its pages in the order of tokens, counted within its data shard; 0 where there is none."""


class _Plan(NamedTuple):
    """What the layers of one step share."""

    table: Int[Array, "b q"]
    """Pages with something to see; after the last one of a slot, that one again."""
    lengths: Int[Array, " b"]
    active: Bool[Array, " b"]
    page: Int[Array, " b"]
    """Where each slot's token is stored; -1 for nowhere."""
    offset: Int[Array, " b"]


@dataclass(frozen=True, slots=True)
class InPages:
    """The form of a cache that a kernel reads; see `paged.InBlocks` for the other one."""

    kernel: Kernel
    """What attends in decode steps."""

    @property
    def spec(self) -> PartitionSpec:
        """How the cache lies on the mesh."""
        return self.kernel.spec

    def empty(self, arch: Arch, mesh: Mesh, prompts: Sequence[int], own: Sequence[int], dtype: jnp.dtype) -> Pages:
        """Return the pages of one layer: on each data shard, the blocks of the pool of prompts and those of the own pool."""
        return self.kernel.empty(arch, mesh.shape["tensor"], data_shards(mesh) * (sum(prompts) + sum(own)), dtype)

    def decode(
        self,
        arch: Arch,
        mesh: Mesh,
        tables: PageTable,
        position: Int[Array, " b"],
        origin: Int[Array, " b"],
        active: Bool[Array, " b"],
    ) -> Attention:
        """Return the attention of a decode step in which each slot feeds one token, at `position`."""
        plan = jax.shard_map(_plan, mesh=mesh, in_specs=_ROWS, out_specs=_ROWS)(tables.pages, position, active)
        # What a Pallas kernel returns does not say over which axes it varies.
        return over_mesh(mesh, partial(_attend, self.kernel), plan, self.spec, check_vma=False)

    def continued(self, arch: Arch, mesh: Mesh, pieces: Pieces) -> Attention:
        """Return the attention of a continued prefill: each token sees what its row's pages hold up to its own position."""
        return over_mesh(mesh, partial(_attend_gathered, self.kernel), plan_of_pieces(arch, mesh, pieces), self.spec)

    def with_prompts(self, mesh: Mesh, layer: Pages, prompts: KeyValue, blocks: Int[Array, "a i"]) -> Pages:
        """Store whole prompts, given as rows, in the blocks named for them; -1 drops a part."""
        specs = self.spec, _HEADS, _ROWS
        return jax.shard_map(partial(_with_prompts, self.kernel), mesh=mesh, in_specs=specs, out_specs=self.spec)(
            layer, prompts, blocks
        )

    def copied(self, mesh: Mesh, layer: Pages, source: Int[Array, " b"], target: Int[Array, " b"]) -> Pages:
        """Copy pages of a layer to others of the same data shard; a target of -1 is none."""
        copy = jax.shard_map(
            partial(_copied, self.kernel.page_dim), mesh=mesh, in_specs=(self.spec, _ROWS, _ROWS), out_specs=self.spec
        )
        return copy(layer, source, target)


def _plan(pages: Int[Array, "b q"], position: Int[Array, " b"], active: Bool[Array, " b"]) -> _Plan:
    """Derive from the table what every layer needs, on one data shard."""
    columns = jnp.arange(pages.shape[1])[None]
    last = jnp.where(active, position // BLOCK, 0)[:, None]
    # A kernel may fetch pages after the last one together with it. What is in them has no weight, but must be finite.
    table = jnp.take_along_axis(pages, jnp.minimum(columns, last), axis=1)
    lengths = jnp.where(active, position + 1, 1).astype(jnp.int32)  # no kernel takes an empty row
    return _Plan(table, lengths, active, jnp.where(active, table[:, -1], -1), position % BLOCK)


def _attend(
    kernel: Kernel,
    options: AttentionOptions,
    query: Float[Array, "b 1 k m c"],
    fresh: KeyValue,
    pages: Pages,
    plan: _Plan,
    sinks: Float[Array, "k m"] | None,
) -> tuple[Float[Array, "b 1 k m c"], Pages]:
    """Write the fresh keys and values into the slots' pages and attend, on one data shard."""
    assert sinks is None, "such a model is refused"
    pages = _with_tokens(kernel, pages, as_kept(pages, fresh), plan.page, plan.offset)
    out = kernel.attend(query[:, 0], pages, plan.table, plan.lengths, options).astype(query.dtype)
    # An idle slot has seen some page of others.
    return jnp.where(plan.active[:, None, None, None], out, 0)[:, None], pages


def _attend_gathered(
    kernel: Kernel,
    options: AttentionOptions,
    query: Float[Array, "a s k m c"],
    fresh: KeyValue,
    pages: Pages,
    plan: PiecesPlan,
    sinks: Float[Array, "k m"] | None,
) -> tuple[Float[Array, "a s k m c"], Pages]:
    """Write the fresh keys and values into their pages and attend to all of the row's pages, on one data shard."""
    assert sinks is None, "such a model is refused"
    a, s, k, _, c = query.shape
    rows = jax.tree.map(lambda x: jnp.swapaxes(x, 1, 2).reshape(a * s, k, 1, *x.shape[3:]), as_kept(pages, fresh))
    pages = _with_tokens(kernel, pages, rows, plan.block, plan.offset)
    found = tuple(_taken(held, kernel.page_dim, plan.blocks.reshape(-1)) for held in pages)

    def in_rows(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(a, -1, *x.shape[1:]), 1, 2).reshape(a, k, -1, *x.shape[3:])

    seen = jax.tree.map(in_rows, kernel.unpack(found, k, c))
    visible = plan.visible[str(options.window)]
    real = plan.block.reshape(a, s, 1) >= 0
    seen = _without_stale(seen, jnp.any(visible & real, axis=1)[:, None])
    return attend(query, seen.key, seen.value, visible, options, None, seen.scales), pages


def _without_stale(seen: KeyValue, read: Bool[Array, "a 1 t"]) -> KeyValue:
    """Return zeros in the place of values that nobody reads: what they hold has no weight, but need not be finite."""
    value, scales = jnp.where(read[..., None], seen.value, 0), seen.scales
    return KeyValue(seen.key, value, scales and Scales(scales.key, jnp.where(read, scales.value, 0)))


def _with_prompts(kernel: Kernel, pages: Pages, prompts: KeyValue, blocks: Int[Array, "a i"]) -> Pages:
    """Store whole prompts, on one data shard."""
    new = jax.tree.map(
        lambda x: jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], *x.shape[3:]), split_in_blocks(prompts, blocks.shape[1])
    )

    def store(held: Array, fresh: Array) -> Array:
        return _stored(held, kernel.page_dim, fresh.astype(held.dtype), blocks.reshape(-1))

    return jax.tree.map(store, pages, kernel.pack(new, pages))


def _with_tokens(kernel: Kernel, pages: Pages, new: KeyValue, page: Int[Array, " n"], offset: Int[Array, " n"]) -> Pages:
    """Store one position each in the pages named for them; -1 drops it."""
    dim = kernel.page_dim

    def store(held: Array, fresh: Array) -> Array:
        if not kernel.skips_stale:
            clear = jnp.zeros((*held.shape[:dim], len(page), *held.shape[dim + 1 :]), held.dtype)
            held = _stored(held, dim, clear, jnp.where(offset == 0, page, -1))
        return _stored(held, dim, fresh.astype(held.dtype), page, offset)

    return jax.tree.map(store, pages, kernel.pack(new, pages))


def _copied(dim: int, layer: Pages, source: Int[Array, " b"], target: Int[Array, " b"]) -> Pages:
    """Copy pages of one data shard."""

    def copy(held: Array) -> Array:
        # Else XLA makes one loop of reading and writing, for which it copies all of what is written to.
        found = jax.lax.optimization_barrier(_taken(held, dim, source))
        return _stored(held, dim, found, target)

    return jax.tree.map(copy, layer)


def _stored(held: Array, dim: int, new: Array, page: Int[Array, " n"], offset: Int[Array, " n"] | None = None) -> Array:
    """Store whole pages, or with offsets one position of each."""
    places, size, channels = _places(held, dim, page), math.prod(held.shape[dim + 1 : 3]), held.shape[3:]
    if offset is None:
        flat = held.reshape(-1, size, *channels).at[places].set(new.reshape(-1, size, *channels), mode="drop")
        return flat.reshape(held.shape)
    # As rows of channels: where a kernel wants few heads together, XLA would write them in another order than the kernel
    # reads, and turn all pages round before and after.
    heads = size // BLOCK
    first = places * size + jnp.tile(offset, len(places) // len(offset)) * heads
    rows = (first[:, None] + jnp.arange(heads)[None]).reshape(-1)
    return held.reshape(-1, *channels).at[rows].set(new.reshape(-1, *channels), mode="drop").reshape(held.shape)


def _taken(held: Array, dim: int, page: Int[Array, " n"]) -> Array:
    """Return whole pages, zeros for those that are none."""
    flat = held.reshape(-1, math.prod(held.shape[dim + 1 : 3]), *held.shape[3:])
    found = flat.at[_places(held, dim, page)].get(mode="fill", fill_value=0)
    return found.reshape(*held.shape[:dim], len(page), *held.shape[dim + 1 :])


def _places(held: Array, dim: int, page: Int[Array, " n"]) -> Int[Array, " i"]:
    """Return where pages are when the dims before theirs are put into it; those that are none are out of range."""
    before, count = math.prod(held.shape[:dim]), held.shape[dim]
    every = jnp.arange(before)[:, None] * count + page[None]
    return jnp.where((page >= 0) & (page < count), every, before * count).reshape(-1)
