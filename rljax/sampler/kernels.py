"""The attention kernels of TPUs and GPUs: which one a sampler uses, how it wants keys and values to lie, how it is called.

Owns what each kernel cannot do, the layout of its pages on the mesh and in memory, and its sizes. Refuses to own which page
belongs to whom (blocks.py) and what is written when (pages.py).

Both come with JAX. A query attends to the pages that its row of a table names, in the order of tokens; what stands after the
row's length is not seen. Nothing is gathered, and pages that no row names are not read.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from rljax.mesh import DATA_AXES
from rljax.models.arch import Arch
from rljax.models.attention import AttentionOptions, Scales, attend, position_mask
from rljax.models.block import KeyValue, layer_kinds
from rljax.sampler.cache import BLOCK, Pages, in_int8

_LANES = 128  # channels of a register of a TPU
_ROWS = 8  # its other dim, for numbers of 32 bits
_TPU_BUFFER = 2**20  # pages that are fetched together (bytes), of which there are two sets in 16 MB
_TPU_QUERIES = 8  # that share a program of the kernel
_GPU_BUFFER = 2**15  # keys that are multiplied together (bytes)
_GPU_SPLITS = 16  # parts of one sequence, at most, that are worked on at the same time
_GPU_CHANNELS = 256  # more do not fit together
_TRIAL_PAGES, _TRIAL_LENGTHS = 11, (1, 32, 33, 100)
_MOST_ERROR = {
    "float32": 1e-2,
    "bfloat16": 5e-2,
    "int8": 1e-2,
}  # of results of the order 1; devices may round products of float32


@runtime_checkable
class Kernel(Protocol):
    """What the sampler asks of an attention kernel."""

    name: ClassVar[str]
    """How it is called in reports."""
    page_dim: ClassVar[int]
    """Which dim of its arrays counts pages; the next one counts positions."""
    spec: ClassVar[PartitionSpec]
    """How its arrays lie on the mesh."""
    skips_stale: ClassVar[bool]
    """Whether what stands after a row's length is left out even where it is not finite."""

    def refusal(self, arch: Arch, tensor: int, dtype: jnp.dtype) -> str | None:
        """Return why it cannot attend for this model with heads over so many devices and a cache of this type, if it cannot."""
        ...

    def empty(self, arch: Arch, tensor: int, pages: int, dtype: jnp.dtype) -> Pages:
        """Return so many pages of zeros, of one layer, over the whole mesh."""
        ...

    def columns(self, longest: int, page: Pages) -> int:
        """Return how many columns a table needs for rows of so many pages."""
        ...

    def pack(self, new: KeyValue, like: Pages) -> Pages:
        """Arrange keys and values [n, k, t, c] as those of the pages, which are `like` these."""
        ...

    def unpack(self, found: Pages, heads: int, channels: int) -> KeyValue:
        """Return the keys and values [n, k, t, c] in n pages."""
        ...

    def attend(
        self,
        query: Float[Array, "b k m c"],
        pages: Pages,
        table: Int[Array, "b q"],
        lengths: Int[Array, " b"],
        options: AttentionOptions,
    ) -> Float[Array, "b k m c"]:
        """Attend from one query per row to the first `lengths` positions in its pages, at least one, on one shard."""
        ...


@dataclass(frozen=True, slots=True)
class TpuKernel:
    """Ragged paged attention: one array, [p, t, 2 k, c], the key and the value of each head in turn.

    Channels are padded to 128. The number of heads of a shard, too, is padded to one that fills registers: 1, 2, or a multiple
    of 4 in float32; 1, 2, 4 or a multiple of 8 in bfloat16.
    """

    name: ClassVar[str] = "ragged paged attention, a Pallas kernel for TPUs"
    page_dim: ClassVar[int] = 0
    spec: ClassVar[PartitionSpec] = PartitionSpec(DATA_AXES, None, "tensor")
    skips_stale: ClassVar[bool] = True

    def refusal(self, arch: Arch, tensor: int, dtype: jnp.dtype) -> str | None:
        """Return what of this model or cache it has no place for."""
        if dtype == jnp.int8:
            return "the kernel for TPUs has one scale for all codes, not one per token; set sampler.cache_dtype = 'as-is'"
        if arch.sinks:
            return "the kernel for TPUs knows no attention sinks, which this model has"
        if arch.head_dim > _LANES:
            return f"the kernel for TPUs works on heads of at most {_LANES} channels, and this model's have {arch.head_dim}"
        if arch.queries_per_kv == 1 and dtype == jnp.float32 and self._heads(arch, tensor, dtype) > 4:
            return "the kernel for TPUs needs several query heads for each key head in float32; set sampler.dtype = 'bfloat16'"
        return None

    def empty(self, arch: Arch, tensor: int, pages: int, dtype: jnp.dtype) -> Pages:
        """Return pages of zeros."""
        return (jnp.zeros((pages, BLOCK, 2 * tensor * self._heads(arch, tensor, dtype), _LANES), dtype),)

    def columns(self, longest: int, page: Pages) -> int:
        """Return `longest`: the kernel takes any number."""
        return longest

    def pack(self, new: KeyValue, like: Pages) -> Pages:
        """Put the value of each head after its key, and zeros where there is neither."""
        heads, channels = like[0].shape[2] // 2, like[0].shape[3]
        n, k, t, c = new.key.shape
        pairs = jnp.stack([new.key, new.value], 2).transpose(0, 3, 1, 2, 4)  # [n, t, k, 2, c]
        pairs = jnp.pad(pairs, ((0, 0), (0, 0), (0, heads - k), (0, 0), (0, channels - c)))
        return (pairs.reshape(n, t, 2 * heads, channels),)

    def unpack(self, found: Pages, heads: int, channels: int) -> KeyValue:
        """Take keys and values apart again, without the zeros."""
        n, t, x, c = found[0].shape
        pairs = found[0].reshape(n, t, x // 2, 2, c)[:, :, :heads, :, :channels].transpose(3, 0, 2, 1, 4)
        return KeyValue(pairs[0], pairs[1])

    def attend(
        self,
        query: Float[Array, "b k m c"],
        pages: Pages,
        table: Int[Array, "b q"],
        lengths: Int[Array, " b"],
        options: AttentionOptions,
    ) -> Float[Array, "b k m c"]:
        """Call the kernel, for which a decode step is a batch of sequences with one new token each."""
        (pairs,), (b, k, m, c) = pages, query.shape
        heads, channels = pairs.shape[2] // 2, pairs.shape[3]
        rows = jnp.pad(query.astype(pairs.dtype), ((0, 0), (0, heads - k), (0, 0), (0, channels - c)))
        # Heads that fill a tile are worked on together, if they divide all of them.
        tile = _ROWS * 4 // pairs.dtype.itemsize
        together = tile if pairs.shape[2] % tile == 0 else pairs.shape[2]
        fetched = _TPU_BUFFER // (BLOCK * together * channels * pairs.dtype.itemsize)
        out = ragged_paged_attention(
            rows.reshape(b, heads * m, channels),
            pairs,
            lengths,
            table,
            jnp.arange(b + 1, dtype=jnp.int32),
            jnp.full(1, b, jnp.int32),
            sm_scale=options.scale,
            sliding_window=options.window,
            soft_cap=options.soft_cap,
            num_kv_pages_per_block=max(1, min(fetched, table.shape[1])),
            num_queries_per_block=min(_TPU_QUERIES, b),
        )
        return out.reshape(b, heads, m, channels)[:, :k, :, :c]

    def _heads(self, arch: Arch, tensor: int, dtype: jnp.dtype) -> int:
        """Return how many key heads each device has room for."""
        heads, filled = arch.num_kv_heads // tensor, 16 // jnp.dtype(dtype).itemsize
        return min((size for size in (1, 2, 4) if size >= heads), default=-(-heads // filled) * filled)


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """Paged attention in Triton: keys and values, [k, p, t, c] each, and the scales of those that are codes, [k, p, t] each.

    Channels are padded to a power of two, at least 16.
    """

    name: ClassVar[str] = "paged attention, a Pallas kernel for GPUs"
    page_dim: ClassVar[int] = 1
    spec: ClassVar[PartitionSpec] = PartitionSpec("tensor", DATA_AXES)
    skips_stale: ClassVar[bool] = False

    def refusal(self, arch: Arch, tensor: int, dtype: jnp.dtype) -> str | None:
        """Return what of this model it has no place for."""
        if arch.sinks:
            return "the kernel for GPUs knows no attention sinks, which this model has"
        if any(kind.attention.window is not None for kind in layer_kinds(arch)):
            return "the kernel for GPUs knows no windows, which layers of this model have"
        if arch.head_dim > _GPU_CHANNELS:
            return (
                f"the kernel for GPUs works on heads of at most {_GPU_CHANNELS} channels, and this model's have {arch.head_dim}"
            )
        return None

    def empty(self, arch: Arch, tensor: int, pages: int, dtype: jnp.dtype) -> Pages:
        """Return pages of zeros."""
        shape = arch.num_kv_heads, pages, BLOCK, max(16, _power_of_two(arch.head_dim))
        scales = [jnp.zeros(shape[:-1], jnp.float32) for _ in range(2)] if dtype == jnp.int8 else []
        return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), *scales

    def columns(self, longest: int, page: Pages) -> int:
        """Return the next multiple of what its programs work on together."""
        splits, together = self._sizes(longest, page)
        return -(-longest // (splits * together)) * splits * together

    def pack(self, new: KeyValue, like: Pages) -> Pages:
        """Put heads first, and zeros after the channels."""
        scales = () if new.scales is None else new.scales
        missing = like[0].shape[-1] - new.key.shape[-1]
        key, value = (jnp.pad(jnp.swapaxes(x, 0, 1), ((0, 0),) * 3 + ((0, missing),)) for x in (new.key, new.value))
        return key, value, *(jnp.swapaxes(scale, 0, 1) for scale in scales)

    def unpack(self, found: Pages, heads: int, channels: int) -> KeyValue:
        """Put pages first again, without the zeros."""
        key, value, *scales = (jnp.swapaxes(x, 0, 1) for x in found)
        return KeyValue(key[..., :channels], value[..., :channels], Scales(*scales) if scales else None)

    def attend(
        self,
        query: Float[Array, "b k m c"],
        pages: Pages,
        table: Int[Array, "b q"],
        lengths: Int[Array, " b"],
        options: AttentionOptions,
    ) -> Float[Array, "b k m c"]:
        """Call the kernel; the factor of the scores, which it has no place for, goes to the queries."""
        assert options.window is None, "such a model is refused"
        b, k, m, c = query.shape
        key, value, *scales = pages
        kind = query.dtype if scales else key.dtype
        rows = jnp.pad((query.astype(jnp.float32) * options.scale).astype(kind), ((0, 0),) * 3 + ((0, key.shape[-1] - c),))
        splits, together = self._sizes(table.shape[1], pages)
        out = paged_attention(
            rows.reshape(b, k * m, -1),
            key,
            value,
            table,
            lengths,
            *scales,
            pages_per_compute_block=together,
            k_splits=splits,
            attn_logits_soft_cap=options.soft_cap,
        )
        return out.reshape(b, k, m, -1)[..., :c]

    def _sizes(self, columns: int, pages: Pages) -> tuple[int, int]:
        """Return in how many parts the table is worked on at the same time, and pages of which are multiplied together."""
        size = 4 if pages[0].dtype == jnp.int8 else pages[0].dtype.itemsize  # codes become numbers before their product
        page = BLOCK * pages[0].shape[-1] * size
        together = min(max(1, _GPU_BUFFER // page), _power_of_two(columns))
        return min(_GPU_SPLITS, _power_of_two(-(-columns // together))), together


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """What attends in decode steps, and why."""

    kernel: Kernel | None
    """A kernel; None for XLA's products, block by block (paged.py)."""
    why: str
    """The reason, for reports."""

    def __str__(self) -> str:
        """Return what is used, and why."""
        return f"{'XLA' if self.kernel is None else self.kernel.name}: {self.why}"


def choose_attention(
    asked: Literal["auto", "xla", "kernel"], arch: Arch, platform: str, tensor: int, dtype: str, cache_dtype: str
) -> AttentionChoice:
    """Return what attends in decode steps.

    Args:
        asked: `sampler.attention`.
        arch: Model.
        platform: Kind of the devices, as JAX names it.
        tensor: Over how many of them the heads are split.
        dtype: `sampler.dtype`.
        cache_dtype: `sampler.cache_dtype`.

    Raises:
        ValueError: the kernel is asked for where it cannot be used.
    """
    if asked == "xla":
        return AttentionChoice(None, "sampler.attention asks for it")
    kernel = KERNELS.get(platform)
    if kernel is None:
        refusal = f"there is no kernel for devices of the kind {platform}"
    else:
        refusal = kernel.refusal(arch, tensor, jnp.dtype("int8" if cache_dtype == "int8" else dtype))
    if refusal is None:
        return AttentionChoice(kernel, f"the devices are of the kind {platform}, and it can do all layers of the model")
    if asked == "kernel":
        raise ValueError(f"sampler.attention = 'kernel' cannot be: {refusal}; or set it to 'xla', or to 'auto'")
    return AttentionChoice(None, refusal)


def tried(
    choice: AttentionChoice, asked: Literal["auto", "xla", "kernel"], arch: Arch, tensor: int, dtype: str
) -> AttentionChoice:
    """Return the choice if its kernel, tried on a few pages on this device, finds what XLA's attention finds; else XLA.

    Args:
        choice: From `choose_attention`.
        asked: `sampler.attention`.
        arch: Model.
        tensor: Over how many devices the heads are split.
        dtype: Type of the cache: `sampler.dtype`, or int8.

    Raises:
        ValueError: the kernel is asked for and does not.
    """
    if choice.kernel is None:
        return choice
    heads = arch.num_kv_heads // tensor
    part = replace(arch, num_kv_heads=heads, num_heads=heads * arch.queries_per_kv)
    try:
        kinds = {kind.attention for kind in layer_kinds(arch)}
        error = float(np.max([_error(choice.kernel, part, options, dtype) for options in kinds]))  # NaN if one is
    except Exception as err:  # whatever a compiler raises
        found = f"failed ({str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__})"
    else:
        if error <= _MOST_ERROR[dtype]:
            return choice
        found = f"was wrong by up to {error:.2g}"
    if asked == "kernel":
        raise ValueError(
            f"sampler.attention = 'kernel': {choice.kernel.name}, {found} when it was tried; set it to 'xla' or 'auto'"
        )
    return AttentionChoice(None, f"{choice.kernel.name}, {found} when it was tried on this device")


def _error(kernel: Kernel, arch: Arch, options: AttentionOptions, dtype: str) -> float:
    """Return how far the kernel's attention is from XLA's, at most, for normal numbers in pages that are read in any order."""
    rng, kind = np.random.default_rng(0), "float32" if dtype == "int8" else dtype
    shape = _TRIAL_PAGES, arch.num_kv_heads, BLOCK, arch.head_dim
    key, value = (jnp.asarray(rng.normal(size=shape), kind) for _ in range(2))
    kept = KeyValue(key, value)
    kept = in_int8(kept) if dtype == "int8" else kept
    query = jnp.asarray(rng.normal(size=(len(_TRIAL_LENGTHS), shape[1], arch.queries_per_kv, arch.head_dim)), kind)
    pages = kernel.pack(kept, kernel.empty(arch, 1, _TRIAL_PAGES, jnp.dtype(dtype)))
    lengths = jnp.asarray(_TRIAL_LENGTHS, jnp.int32)
    columns = kernel.columns(-(-max(_TRIAL_LENGTHS) // BLOCK), pages)
    table = jnp.asarray(rng.integers(0, _TRIAL_PAGES, (len(lengths), columns)), jnp.int32)
    found = jax.jit(partial(kernel.attend, options=options))(query, pages, table, lengths)

    def in_rows(x: Any) -> Any:
        return jnp.swapaxes(x[table], 1, 2).reshape(len(lengths), arch.num_kv_heads, -1, *x.shape[3:])

    rows = jax.tree.map(in_rows, kept)
    places = jnp.broadcast_to(jnp.arange(columns * BLOCK), (len(lengths), columns * BLOCK))
    seen = position_mask(lengths[:, None] - 1, places, options.window)
    expected = attend(query[:, None], rows.key, rows.value, seen, options, scales=rows.scales)[:, 0]
    return float(jnp.max(jnp.abs(found.astype(jnp.float32) - expected.astype(jnp.float32))))


def _power_of_two(number: int) -> int:
    """Return the first power of two that is at least so large."""
    return 1 << (number - 1).bit_length()


KERNELS: dict[str, Kernel] = {"tpu": TpuKernel(), "gpu": GpuKernel(), "cuda": GpuKernel(), "rocm": GpuKernel()}
"""By the platform of the devices, as JAX names it."""
