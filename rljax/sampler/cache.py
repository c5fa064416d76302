"""The sampler's device state: blocks of keys and values, and where each rollout in progress stands.

Owns the arrays that outlive a compiled program. Refuses to own the model, which block belongs to whom (blocks.py), how they
are read (paged.py, pages.py) and the schedule (engine.py).

Keys and values are stored in blocks of `BLOCK` positions, in two pools. A block of the *prompt* pool belongs to a prompt
and is read by every slot that continues it; a block of the *own* pool belongs to one slot. Each pool is a few arrays
(arenas), each larger than those before it: blocks are handed out lowest first, and a decode step touches only as many
arenas as are in use, so that its memory traffic follows real lengths rather than the longest possible ones.

A kernel reads the blocks that it is told to, wherever they are: where one attends, the blocks of both pools are pages of one
set of arrays (pages.py).

In a cache of 8-bit integers each key and each value has a scale, which is never applied to it but to its score or weight.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Num, UInt, UInt32

from rljax.mesh import DATA_AXES, sharding
from rljax.models.arch import Arch
from rljax.models.attention import Scales
from rljax.models.block import Attention, KeyValue
from rljax.models.int8 import to_int8
from rljax.pytree import pytree, with_fields

BLOCK = 32
"""Positions per block (tokens)."""
_MOST_ARENAS = 4  # of one pool: each is a level of what a decode step reads, for which it is compiled


class Blocks(NamedTuple):
    """One arena of one layer."""

    key: Num[Array, "p k c t"]
    """Keys, positions last: the product with a query then runs along memory."""
    value: Num[Array, "p k t c"]
    """Values."""
    scales: Scales | None = None
    """Of keys and values that are codes, [p, k, t] each."""


class LayerCache(NamedTuple):
    """The blocks of one layer."""

    prompt: tuple[Blocks, ...]
    """Arenas of the pool that holds prompts."""
    own: tuple[Blocks, ...]
    """Arenas of the pool that holds what each slot was fed after its prompt."""


Pages = tuple[Array, ...]
"""All blocks of one layer as a kernel reads them; the kernel says what the arrays are (kernels.py)."""


@runtime_checkable
class Form(Protocol):
    """How keys and values are kept and read."""

    @property
    def spec(self) -> PartitionSpec:
        """How the cache lies on the mesh."""
        ...

    def empty(self, arch: Arch, mesh: Mesh, prompts: Sequence[int], own: Sequence[int], dtype: jnp.dtype) -> Any:
        """Return one layer's room for both pools, with so many blocks per arena and data shard."""
        ...

    def decode(self, arch: Arch, mesh: Mesh, tables: Any, position: Array, origin: Array, active: Array) -> Attention:
        """Return the attention of a decode step: per slot, what is read, which position is fed, and whether it is stored."""
        ...

    def continued(self, arch: Arch, mesh: Mesh, pieces: Any) -> Attention:
        """Return the attention of a continued prefill."""
        ...

    def with_prompts(self, mesh: Mesh, layer: Any, prompts: KeyValue, blocks: Int[Array, "a i"]) -> Any:
        """Store whole prompts, given as rows, in the blocks named for them; -1 drops a part."""
        ...

    def copied(self, mesh: Mesh, layer: Any, source: Int[Array, " n"], target: Int[Array, " n"]) -> Any:
        """Copy blocks of a layer to others of the same pool and data shard; a target of -1 is none.

        Those of the own pool are counted on after the prompt pool's.
        """
        ...


@pytree
class Report:
    """What the model itself thinks of each drawn token: temperature 1, nothing added or left out (nats)."""

    chosen: Float[Array, "b o"]
    """Log-probability of the token."""
    ids: Int[Array, "b o n"]
    """The most likely tokens in its place, most likely first."""
    logp: Float[Array, "b o n"]
    """Their log-probabilities."""


@pytree
class Progress:
    """How far each rollout is, one entry per slot."""

    token: Int[Array, " b"]
    """Token to feed next."""
    position: Int[Array, " b"]
    """Position of that token in its sequence."""
    origin: Int[Array, " b"]
    """Position of the first token in the slot's own blocks: the last token of the prompt it reads."""
    remaining: Int[Array, " b"]
    """Tokens this slot may still draw; 0 when it is idle or done."""
    draw_key: UInt32[Array, "b 2"]
    """Random key of the rollout; each draw folds in the position of the drawn token."""
    temperature: Float[Array, " b"]
    """Sampling temperature; 0 takes the most likely token."""
    out_tokens: Int[Array, "b o"]
    """Tokens drawn so far."""
    out_logp: Float[Array, "b o"]
    """Their log-probabilities under the distribution they were drawn from (nats)."""
    count: Int[Array, " b"]
    """How many tokens have been drawn."""
    out_choices: UInt[Array, "b o l e"] | None
    """Experts of the token that each was drawn from, per layer with experts; None unless they are recorded."""
    report: Report | None
    """More about them, in engines that report it."""


@pytree
class Slots:
    """Everything a decode step reads and writes."""

    cache: tuple[LayerCache, ...] | tuple[Pages, ...]
    """Per layer, keys and values of the tokens fed so far; entries that no table names are stale and never seen."""
    progress: Progress
    """How far each slot is."""


def arena_sizes(blocks: int, first: int) -> tuple[int, ...]:
    """Split a pool of so many blocks into arenas, the first one of `first` blocks, each later one a multiple of all before.

    The multiple is the least with which there are not too many arenas.

    Example:
        arena_sizes(100, 20) == (20, 20, 40, 20)
        arena_sizes(1000, 20) == (20, 60, 240, 680)
    """
    multiple = next(found for found in itertools.count(1) if first * (1 + found) ** (_MOST_ARENAS - 1) >= blocks)
    sizes = [min(first, blocks)]
    while (total := sum(sizes)) < blocks:
        sizes.append(min(multiple * total, blocks - total))
    return tuple(sizes)


def empty_slots(
    arch: Arch,
    form: Form,
    slots: int,
    prompt_arenas: Sequence[int],
    own_arenas: Sequence[int],
    outputs: int,
    dtype: jnp.dtype,
    mesh: Mesh,
    record_routing: bool = False,
    logprobs: int | None = None,
) -> Slots:
    """Allocate idle slots, laid out on the mesh.

    Args:
        arch: Model the cache is for.
        form: How it is kept.
        slots: Number of slots, split over the mesh's data axes; heads are split over `tensor`.
        prompt_arenas: Blocks per arena of the pool of prompts, on each data shard.
        own_arenas: The same for the pool of the slots' own tokens.
        outputs: Longest completion (tokens).
        dtype: Type of the cache; int8 for codes with scales.
        mesh: Devices.
        record_routing: Whether there is room for the experts that tokens go to.
        logprobs: Most likely tokens that are reported at each position; None for no report.
    """

    def no_choices() -> Array | None:
        if not record_routing:
            return None
        assert arch.experts is not None, "routing is that of experts"
        return jnp.zeros((slots, outputs, *(arch.choices_per_token or ())), arch.experts.choice_dtype)

    def build() -> Slots:
        progress = Progress(
            token=jnp.zeros(slots, jnp.int32),
            position=jnp.zeros(slots, jnp.int32),
            origin=jnp.zeros(slots, jnp.int32),
            remaining=jnp.zeros(slots, jnp.int32),
            draw_key=jnp.zeros((slots, 2), jnp.uint32),
            temperature=jnp.zeros(slots, jnp.float32),
            out_tokens=jnp.zeros((slots, outputs), jnp.int32),
            out_logp=jnp.zeros((slots, outputs), jnp.float32),
            count=jnp.zeros(slots, jnp.int32),
            out_choices=no_choices(),
            report=None if logprobs is None else _empty_report(slots, outputs, logprobs),
        )
        return Slots(tuple(form.empty(arch, mesh, prompt_arenas, own_arenas, dtype) for _ in range(arch.num_layers)), progress)

    return jax.jit(build, out_shardings=slots_sharding(mesh, form))()


def empty_blocks(arch: Arch, count: int, dtype: jnp.dtype) -> Blocks:
    """Return so many blocks of one layer, over all data shards."""
    key, value = ((count, arch.num_kv_heads, *dims) for dims in ((arch.head_dim, BLOCK), (BLOCK, arch.head_dim)))
    scales = Scales(*(jnp.zeros((*key[:2], BLOCK), jnp.float32) for _ in range(2))) if dtype == jnp.int8 else None
    return Blocks(jnp.zeros(key, dtype), jnp.zeros(value, dtype), scales)


def stored_form(cache: Sequence[LayerCache | Pages]) -> Callable[[KeyValue], KeyValue] | None:
    """Return how fresh keys and values become what this cache keeps; None where it keeps them as they are."""
    # Codes are the only integers that are kept.
    return in_int8 if jax.tree.leaves(cache)[0].dtype == jnp.int8 else None


def as_kept(layer: LayerCache | Pages, fresh: KeyValue) -> KeyValue:
    """Return fresh keys and values as this layer's cache keeps them."""
    form = stored_form([layer])
    return fresh if form is None else form(fresh)


def in_int8(fresh: KeyValue) -> KeyValue:
    """Return keys and values as the nearest multiples of max |x| / 127, the maximum over the channels of each."""
    key, value = (to_int8(x, (-1,)) for x in (fresh.key, fresh.value))
    return KeyValue(key.codes, value.codes, Scales(key.scale, value.scale))


def _empty_report(slots: int, outputs: int, logprobs: int) -> Report:
    likely = (slots, outputs, logprobs)
    return Report(jnp.zeros((slots, outputs), jnp.float32), jnp.zeros(likely, jnp.int32), jnp.zeros(likely, jnp.float32))


def slots_sharding(mesh: Mesh, form: Form) -> Any:
    """Return the sharding of `Slots`, as a prefix tree: all of the cache alike, all of the progress alike."""
    return with_fields(Slots, cache=sharding(mesh, *form.spec), progress=sharding(mesh, DATA_AXES))
