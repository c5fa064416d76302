"""Which rows of which tensor of a Hugging Face checkpoint fill which part of which parameter.

Owns the one-to-one table between rows of outside tensors and parts of the stacked parameters, numpy views that turn one
into the other without arithmetic, and moving rows through such a view a few at a time, so that a conversion never holds
more than one layer of one parameter. Refuses to own files and number formats: `hf.py` and `gguf.py` open those and hand
over an `Outside`. Adding a family means adding its names here.

    layers.qkv[3]           parts query, key, value   <->  three tensors, or rows of a fused one
    layers.moe.gate_up[3]   parts gate, up, by expert <->  two tensors per expert, or one for all of them
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params
from rljax.pytree import Params

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
_SHOWN = 12  # problems listed in one error

_TILE_BYTES = 4 << 20  # of one outside tensor, held at once
_BLOCK = 256  # rows and columns transposed at once: both sides stay in the cache
_BF16 = np.dtype("bfloat16")


@dataclass(frozen=True, slots=True)
class Slot:
    """Rows of one outside tensor and the part of a parameter they fill.

    Example:
        Slot(tensor="model.layers.3.self_attn.k_proj.weight", target="layers.qkv", layer=3, part="key", shape=(192, 576))
    """

    tensor: str
    """The tensor's name in a Hugging Face checkpoint."""
    target: str
    """Dotted path of the parameter."""
    layer: int | None
    """Index along the parameter's leading dim; None for a parameter that is not stacked."""
    part: str
    """Which part of the parameter: a key of the transforms, or `whole`."""
    shape: tuple[int, ...]
    """Shape of the rows."""
    first: int | None = None
    """First of the rows, where they are not the whole tensor."""
    expert: int | None = None
    """Index along the dim after the leading one, where experts are stored one by one."""

    @property
    def name(self) -> str:
        """The tensor's name, and which of its rows where these are not all of them: `qkv_proj.weight[0:64]`."""
        return self.tensor if self.first is None else f"{self.tensor}[{self.first}:{self.first + self.shape[0]}]"

    @property
    def offset(self) -> int:
        """Row of the tensor at which the slot begins."""
        return self.first or 0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an outside tensor is stored.

    Example:
        Origin(file=Path("model.safetensors"), name="model.norm.weight", shape=(576,), dtype="BF16")
    """

    file: Path
    """The file."""
    name: str
    """Its name there, and which of its rows where these are not all of them."""
    shape: tuple[int, ...]
    """Shape of the rows, outermost dim first."""
    dtype: str
    """Stored type, in the words of the file format."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One layer of one stacked parameter, or the whole of one that is not stacked: what is held in memory at once.

    Example:
        Slice(target="layers.qkv", layer=3, shape=(576, 3, 5, 64), slots=(query, key, value))
    """

    target: str
    """Dotted path of the parameter."""
    layer: int | None
    """Index along its leading dim, or None for a parameter that is not stacked."""
    shape: tuple[int, ...]
    """Shape, without the leading dim of a stacked parameter."""
    slots: tuple[Slot, ...]
    """The rows of outside tensors that fill it."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Outside:
    """A model that is opened and checked against its architecture, its tensors not yet read.

    Example:
        Outside(arch=arch, origins={"model.norm.weight": origin}, rows=read_rows, files={"vocab.json": b"{}"}, notices=())
    """

    arch: Arch
    """The architecture; its slots are exactly the keys of `origins`."""
    origins: Mapping[str, Origin]
    """Slot name -> where its rows are stored."""
    rows: Callable[[str, int, int], np.ndarray]
    """Slot name, first row, row after the last -> these rows of the slot, contiguous, in a floating type.

    Where tensors are views of a parameter, rows begin and end where `tiles` does. May be called by several threads."""
    files: Mapping[str, bytes]
    """Tokenizer and generation files, by relative name."""
    notices: tuple[str, ...]
    """What was assumed or left out, for people."""

    @property
    def types(self) -> set[str]:
        """The stored types of its tensors, in the words of the format."""
        return {origin.dtype for origin in self.origins.values()}

    def read(self, name: str) -> np.ndarray:
        """Return all rows of a slot, in a floating type."""
        return self.rows(name, 0, self.origins[name].shape[0])


def slots(arch: Arch) -> list[Slot]:
    """Return every tensor a Hugging Face checkpoint of this architecture has, in file order.

    Together they fill every element of every parameter exactly once. A tensor that fills several parts is listed part by
    part, its rows from first to last.
    """
    d, v = arch.embed_dim, arch.vocab_size
    table = [Slot(EMBED, "embed", None, "whole", (v, d))]
    mlps = experts = 0  # layers of each sort so far: the index along the leading dim of their parameters
    for layer in arch.layers:
        placed = [(row, layer) for row in _attention(arch)]
        if arch.has_experts(layer):
            placed += [(row, experts) for row in EXPERTS[arch.family](arch)]
            experts += 1
        else:
            placed += [(row, mlps) for row in _mlp(arch)]
            mlps += 1
        table += [
            Slot(f"model.layers.{layer}.{row.name}", row.target, index, row.part, row.shape, row.first, row.expert)
            for row, index in placed
        ]
    table.append(Slot("model.norm.weight", "final_norm", None, "whole", (d,)))
    if not arch.tie_embeddings:
        table.append(Slot(HEAD, "head", None, "whole", (v, d)))
    return table


def tensor_shapes(table: Sequence[Slot]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a table, by name, in file order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for slot in table:
        rows = shapes[slot.tensor][0] if slot.tensor in shapes else 0
        assert slot.offset == rows, f"{slot.name} begins after row {rows}"
        shapes[slot.tensor] = (rows + slot.shape[0], *slot.shape[1:])
    return shapes


class Row(NamedTuple):
    """What a slot says, without the layer."""

    name: str
    target: str
    part: str
    shape: tuple[int, ...]
    first: int | None = None
    expert: int | None = None


def _attention(arch: Arch) -> list[Row]:
    """List the norms of a layer and the tensors of its attention."""
    d, c = arch.embed_dim, arch.head_dim
    query, key = arch.num_heads * c, arch.num_kv_heads * c
    rows: list[Row] = []
    if arch.pre_norm:
        # The second norm is named after what it follows, unless a norm of attention's output has that name.
        second = "pre_feedforward_layernorm" if arch.post_norm else "post_attention_layernorm"
        rows.append(Row("input_layernorm.weight", "layers.attn_norm", "whole", (d,)))
        rows.append(Row(f"{second}.weight", "layers.mlp_norm", "whole", (d,)))
    if arch.post_norm:
        rows.append(Row("post_attention_layernorm.weight", "layers.attn_post_norm", "whole", (d,)))
        rows.append(Row("post_feedforward_layernorm.weight", "layers.mlp_post_norm", "whole", (d,)))
    sizes = {"query": query, "key": key, "value": key}
    if arch.family in FUSED:
        rows += _fused("self_attn.qkv_proj.weight", "layers.qkv", sizes, d)
    else:
        rows += [Row(f"self_attn.{part[0]}_proj.weight", "layers.qkv", part, (size, d)) for part, size in sizes.items()]
    if arch.qkv_bias:
        for part, size in sizes.items():
            rows.append(Row(f"self_attn.{part[0]}_proj.bias", "layers.qkv_bias", f"{part}_bias", (size,)))
    rows.append(Row("self_attn.o_proj.weight", "layers.out", "out", (d, query)))
    if arch.out_bias:
        rows.append(Row("self_attn.o_proj.bias", "layers.out_bias", "whole", (d,)))
    if arch.qk_norm is not None:
        heads = (c, c) if arch.qk_norm == "head" else (query, key)
        rows.append(Row("self_attn.q_norm.weight", "layers.query_norm", "whole", heads[:1]))
        rows.append(Row("self_attn.k_norm.weight", "layers.key_norm", "whole", heads[1:]))
    if arch.sinks:
        rows.append(Row("self_attn.sinks", "layers.sinks", "whole", (arch.num_heads,)))
    return rows


def _mlp(arch: Arch) -> list[Row]:
    """List the tensors of a layer's MLP."""
    d, sizes = arch.embed_dim, {"gate": arch.ffn_dim, "up": arch.ffn_dim}
    if arch.family in FUSED:
        rows = _fused("mlp.gate_up_proj.weight", "layers.gate_up", sizes, d)
    else:
        rows = [Row(f"mlp.{part}_proj.weight", "layers.gate_up", part, (size, d)) for part, size in sizes.items()]
    return [*rows, Row("mlp.down_proj.weight", "layers.down", "down", (d, arch.ffn_dim))]


def _fused(name: str, target: str, sizes: Mapping[str, int], columns: int) -> list[Row]:
    """List the parts of a tensor that holds them below each other."""
    firsts = [sum(list(sizes.values())[:index]) for index in range(len(sizes))]
    return [Row(name, target, part, (sizes[part], columns), first) for part, first in zip(sizes, firsts, strict=True)]


def _separate_experts(router: str, experts: str, names: tuple[str, str, str]) -> Callable[[Arch], list[Row]]:
    """Name the tensors of experts that are stored one by one."""

    def rows(arch: Arch) -> list[Row]:
        assert arch.experts is not None, "a layer with experts has them"
        d, f = arch.embed_dim, arch.experts.ffn_dim
        parts = ("gate_up", "gate", (f, d)), ("gate_up", "up", (f, d)), ("down", "down", (d, f))
        return [Row(f"{router}.weight", "layers.moe.router", "router", (arch.experts.count, d))] + [
            Row(f"{experts}.{expert}.{name}.weight", f"layers.moe.{target}", part, shape, None, expert)
            for expert in range(arch.experts.count)
            for name, (target, part, shape) in zip(names, parts, strict=True)
        ]

    return rows


def _stacked_experts(arch: Arch) -> list[Row]:
    """Name the tensors of experts that are stored together, inputs first, gate and up taking turns."""
    assert arch.experts is not None, "a layer with experts has them"
    d, f, x = arch.embed_dim, arch.experts.ffn_dim, arch.experts.count
    return [
        Row("mlp.router.weight", "layers.moe.router", "router", (x, d)),
        Row("mlp.router.bias", "layers.moe.router_bias", "whole", (x,)),
        Row("mlp.experts.gate_up_proj", "layers.moe.gate_up", "alternating", (x, d, 2 * f)),
        Row("mlp.experts.gate_up_proj_bias", "layers.moe.gate_up_bias", "alternating_bias", (x, 2 * f)),
        Row("mlp.experts.down_proj", "layers.moe.down", "whole", (x, f, d)),
        Row("mlp.experts.down_proj_bias", "layers.moe.down_bias", "whole", (x, d)),
    ]


# Families whose checkpoints hold queries, keys and values in one tensor, and gate and up in another.
FUSED = ("phi3",)

# How the families with experts name and lay out their tensors.
EXPERTS: dict[str, Callable[[Arch], list[Row]]] = {
    "mixtral": _separate_experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": _separate_experts("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "gpt_oss": _stacked_experts,
}


def view(params: Params, slot: Slot) -> np.ndarray:
    """Return the slot's part of the parameters as a numpy view in the outside order of dims.

    Its elements in row-major order are those of the outside rows, so `view(...)[...] = tensor.reshape(view.shape)` reads and
    `view(...).reshape(slot.shape)` writes, both without arithmetic.
    """
    array: Any = params
    for name in slot.target.split("."):
        array = array[name]
    return part_of(array if slot.layer is None else array[slot.layer], slot)


def part_of(array: np.ndarray, slot: Slot) -> np.ndarray:
    """Return the slot's part of the slice that holds it, as `view` does."""
    return TRANSFORMS[slot.part](array if slot.expert is None else array[slot.expert])


def slices(arch: Arch) -> list[Slice]:
    """Return every slice of every parameter, in the order of the slots that fill them."""
    members: dict[tuple[str, int | None], list[Slot]] = {}
    for slot in slots(arch):
        members.setdefault((slot.target, slot.layer), []).append(slot)
    shapes = abstract_params(arch)

    def shape(target: str, layer: int | None) -> tuple[int, ...]:
        leaf: Any = shapes
        for name in target.split("."):
            leaf = leaf[name]
        return leaf.shape if layer is None else leaf.shape[1:]

    return [Slice(target, layer, shape(target, layer), tuple(found)) for (target, layer), found in members.items()]


def layer_bytes(arch: Arch, dtype: np.dtype) -> int:
    """Return the size of one layer or of the largest single slice, whichever is larger (bytes)."""
    pieces = slices(arch)
    layer = sum(piece.size for piece in pieces if piece.layer == 0)
    return max(layer, *(piece.size for piece in pieces)) * dtype.itemsize


def memory_limit(arch: Arch, dtype: np.dtype) -> int:
    """Return how much a conversion holds at once (bytes): less than two layers, and enough to keep several threads at work."""
    return layer_bytes(arch, dtype) * 3 // 2


def tiles(array: np.ndarray, slot: Slot) -> Iterator[tuple[int, int, np.ndarray]]:
    """Divide a slot into a few rows at a time.

    Args:
        array: The slice that holds the slot.
        slot: One of its slots.

    Yields:
        First row of the slot, row after the last, and the part of the slice that holds them: its elements in row-major
        order are those of the rows.
    """
    part = part_of(array, slot)
    # A view only splits dims, so an index of its first dim is a whole number of outside rows.
    rows, rest = divmod(slot.shape[0], part.shape[0])
    assert not rest, f"{slot} is no view of whole rows of {part.shape}"
    step = max(1, _TILE_BYTES // (rows * math.prod(slot.shape[1:]) * array.itemsize))
    for first in range(0, part.shape[0], step):
        last = min(first + step, part.shape[0])
        yield first * rows, last * rows, part[first:last]


def fill_slice(array: np.ndarray, members: Sequence[Slot], model: Outside) -> list[str]:
    """Read the slots of a slice into `array`, converted to its type.

    Returns:
        One notice per slot that holds NaN or infinity.
    """
    notices = []
    for slot in members:
        finite = True
        for first, last, part in tiles(array, slot):
            values = cast(model.rows(slot.name, first, last), array.dtype)
            finite = finite and all_finite(values)
            move(part, values.reshape(part.shape))
        notices += [] if finite else [not_finite(model.origins[slot.name])]
    return notices


def fill(model: Outside, dtype: np.dtype) -> tuple[Params, list[str]]:
    """Read every tensor into newly allocated parameters of `dtype`, one at a time.

    Returns:
        The parameters, and one notice per tensor that holds NaN or infinity.
    """
    params, notices = empty_params(model.arch, dtype), []
    for piece in slices(model.arch):
        array: Any = params
        for name in piece.target.split("."):
            array = array[name]
        notices += fill_slice(array if piece.layer is None else array[piece.layer], piece.slots, model)
    return params, notices


def empty_params(arch: Arch, dtype: np.dtype) -> Params:
    """Return parameters to be filled: numpy arrays with undefined content."""

    def allocate(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: allocate(child) for name, child in tree.items()}
        return np.empty(tree.shape, dtype)

    return allocate(abstract_params(arch))


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Convert to another floating type, to the nearest, ties to even; the array itself when it has the type."""
    if values.dtype == dtype:
        return values
    if values.dtype == _BF16 and dtype == np.float32:  # the upper half of the bits; twice as fast as astype
        wide = values.view(np.uint16).astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    with np.errstate(over="ignore"):  # becomes infinity, of which there is a notice
        return values.astype(dtype)


def all_finite(values: np.ndarray) -> bool:
    """Say whether no element is NaN or infinite."""
    flat = values.reshape(-1)
    parts = (flat[first : first + _BLOCK**2] for first in range(0, flat.size, _BLOCK**2))  # each stays in the cache
    if values.dtype == _BF16:  # numpy would go through float32, one element at a time
        return all(int((part.view(np.uint16) & 0x7FFF).max()) < 0x7F80 for part in parts)
    return all(bool(np.isfinite(part).all()) for part in parts)


def not_finite(origin: Origin) -> str:
    """Return the notice about a tensor that holds NaN or infinity."""
    return f"{origin.name} in {origin.file} holds NaN or infinity; the model will not work as it should"


def move(into: np.ndarray, values: np.ndarray) -> None:
    """Copy bit by bit between arrays of one shape and type, of which one may be a transposed view.

    Plain assignment is slow there (a cache line per element) and slower for bfloat16, so dims are merged and what is
    left to transpose goes through small blocks.
    """
    assert (into.shape, into.dtype) == (values.shape, values.dtype)
    bits = np.dtype(f"u{into.itemsize}")
    _move(*_merged(into.view(bits), values.view(bits)))


def _merged(*arrays: np.ndarray) -> list[np.ndarray]:
    """View arrays of one shape with as few dims as all of them allow."""
    sizes, strides = list(arrays[0].shape), [list(array.strides) for array in arrays]
    for dim in range(len(sizes) - 2, -1, -1):
        if all(stride[dim] == stride[dim + 1] * sizes[dim + 1] for stride in strides):
            sizes[dim] *= sizes.pop(dim + 1)
            for stride in strides:
                del stride[dim]
    pairs = zip(arrays, strides, strict=True)
    return [np.lib.stride_tricks.as_strided(array, sizes, stride) for array, stride in pairs]


def _move(into: np.ndarray, values: np.ndarray) -> None:
    if into.ndim < 2 or into.strides[-1] == values.strides[-1] == into.itemsize:
        into[...] = values
    elif into.ndim > 2:
        for index in range(len(into)):
            _move(into[index], values[index])
    else:
        # Some columns more than used: rows at a power-of-two distance would fall on the same cache lines.
        block = np.empty((_BLOCK, _BLOCK + 8), into.dtype)
        for row in range(0, into.shape[0], _BLOCK):
            for column in range(0, into.shape[1], _BLOCK):
                place = slice(row, row + _BLOCK), slice(column, column + _BLOCK)
                held = block[: into[place].shape[0], : into[place].shape[1]]
                held[...] = values[place]
                into[place] = held


def mismatches(table: Sequence[Slot], found: Mapping[str, Origin], floating: tuple[str, ...]) -> list[str]:
    """Say, one sentence each, which tensors are missing, unexpected, of a wrong shape or not floating."""
    expected = tensor_shapes(table)
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [
        f"{o.name} in {o.file.name} has no place in this architecture" for name, o in found.items() if name not in expected
    ]
    for name, shape in expected.items():
        if (origin := found.get(name)) is None:
            continue
        if origin.shape != shape:
            problems.append(f"{origin.name} in {origin.file.name} has shape {origin.shape}; the configuration asks for {shape}")
        if origin.dtype not in floating:
            problems.append(
                f"{origin.name} in {origin.file.name} is of type {origin.dtype}; convertible: {', '.join(floating)}"
            )
    return problems


def refuse(where: Path, problems: list[str], remedy: str) -> None:
    """Raise a ValueError that lists the first problems, if there are any."""
    if problems:
        shown = "".join(f"\n  {problem}" for problem in problems[:_SHOWN])
        more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(f"{where}: the tensors are not those of the configured model; {remedy}{shown}{more}")


def interleaved_to_half(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder the output rows of a query or key projection from interleaved to half rotary layout.

    Interleaved stores the two channels of a rotated pair next to each other, half stores them c/2 apart; of four
    channels 0 1 2 3 the half layout is 0 2 1 3.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


# Parameter (one layer of it, or one expert) -> view with the dims in the outside order, all of which are split, none merged.
TRANSFORMS = {
    "whole": lambda x: x,
    "query": lambda qkv: qkv[:, :, :-2].transpose(1, 2, 3, 0),  # [d,k,m,c] -> [k,m,c,d]
    "key": lambda qkv: qkv[:, :, -2].transpose(1, 2, 0),  # [d,k,c] -> [k,c,d]
    "value": lambda qkv: qkv[:, :, -1].transpose(1, 2, 0),
    "out": lambda out: out.transpose(3, 0, 1, 2),  # [k,m,c,d] -> [d,k,m,c]
    "gate": lambda gate_up: gate_up[:, 0].T,  # [d,f] -> [f,d]
    "up": lambda gate_up: gate_up[:, 1].T,
    "down": lambda down: down.T,  # [f,d] -> [d,f]
    "query_bias": lambda bias: bias[:, :-2],  # [k,m+2,c] -> [k,m,c]
    "key_bias": lambda bias: bias[:, -2],
    "value_bias": lambda bias: bias[:, -1],
    "router": lambda router: router.T,  # [d,x] -> [x,d]
    "alternating": lambda gate_up: gate_up.swapaxes(-1, -2),  # [x,d,2,f] -> [x,d,f,2]
    "alternating_bias": lambda bias: bias.swapaxes(-1, -2),
}
