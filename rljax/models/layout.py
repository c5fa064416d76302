"""Which part of which parameter each tensor of a Hugging Face checkpoint fills.

Owns the one-to-one table between outside tensors and slices of the stacked parameters, and numpy views that turn one into
the other without arithmetic. Refuses to own files and number formats: `hf.py` and `gguf.py` open those and hand over an
`Outside`. Adding a family means adding its names here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params
from rljax.pytree import Params

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
_SHOWN = 12  # problems listed in one error


@dataclass(frozen=True, slots=True)
class Slot:
    """One outside tensor and the part of a parameter it fills.

    Example:
        Slot(name="model.layers.3.self_attn.k_proj.weight", target="layers.qkv", layer=3, part="key", shape=(192, 576))
    """

    name: str
    """Name in a Hugging Face checkpoint."""
    target: str
    """Dotted path of the parameter."""
    layer: int | tuple[int, ...] | None
    """Index along its leading dim, or dims; None for a parameter that is not stacked."""
    part: str
    """Which part of the parameter: a key of the transforms, or `whole`."""
    shape: tuple[int, ...]
    """Shape of the outside tensor."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an outside tensor is stored.

    Example:
        Origin(file=Path("model.safetensors"), name="model.norm.weight", shape=(576,), dtype="BF16")
    """

    file: Path
    """The file."""
    name: str
    """Its name there."""
    shape: tuple[int, ...]
    """Shape, outermost dim first."""
    dtype: str
    """Stored type, in the words of the file format."""


@dataclass(frozen=True, slots=True)
class Outside:
    """A model in a foreign format: opened and checked against the architecture, its tensors not yet read.

    Example:
        Outside(arch=arch, origins={"model.norm.weight": origin}, read=file.get_tensor, files={"vocab.json": b"{}"}, notices=())
    """

    arch: Arch
    """The architecture; its slots are exactly the keys of `origins`."""
    origins: Mapping[str, Origin]
    """Slot name -> where the tensor is stored."""
    read: Callable[[str], np.ndarray]
    """Slot name -> the tensor with the slot's shape, in a floating type."""
    files: Mapping[str, bytes]
    """Tokenizer and generation files, by relative name."""
    notices: tuple[str, ...]
    """What was assumed or left out, for people."""


def stored_rows(name: str) -> tuple[str, slice | None]:
    """Return the tensor of a checkpoint that a slot's name means, and which of its rows; None for all of them.

    A tensor that fills several parameters has one slot for each, named with the rows as in `qkv_proj.weight[0:64]`.
    """
    if not name.endswith("]"):
        return name, None
    stored, _, rows = name[:-1].rpartition("[")
    first, _, last = rows.partition(":")
    return stored, slice(int(first), int(last))


def slots(arch: Arch) -> list[Slot]:
    """Return every tensor a Hugging Face checkpoint of this architecture has, in file order.

    Together they fill every element of every parameter exactly once. A tensor that fills several parameters is listed
    part by part; see `stored_rows`.
    """
    d, v = arch.embed_dim, arch.vocab_size
    table = [Slot(EMBED, "embed", None, "whole", (v, d))]
    mlps = experts = 0  # layers of each sort so far: the index along the leading dim of their parameters
    for layer in arch.layers:
        mixed: list[Any]
        if arch.has_experts(layer):
            mixed = EXPERTS[arch.family](arch, experts)
        else:
            mixed = [(name, target, mlps, part, shape) for name, target, part, shape in _mlp(arch)]
        attention: list[Any] = [(name, target, layer, part, shape) for name, target, part, shape in _attention(arch)]
        table += [Slot(f"model.layers.{layer}.{name}", *rest) for name, *rest in (*attention, *mixed)]
        mlps, experts = mlps + (not arch.has_experts(layer)), experts + arch.has_experts(layer)
    table.append(Slot("model.norm.weight", "final_norm", None, "whole", (d,)))
    if not arch.tie_embeddings:
        table.append(Slot(HEAD, "head", None, "whole", (v, d)))
    return table


Row = tuple[str, str, str, tuple[int, ...]]  # name, target, part and shape of a tensor of one layer


def _attention(arch: Arch) -> list[Row]:
    """List the norms of a layer and the tensors of its attention."""
    d, c = arch.embed_dim, arch.head_dim
    query, key = arch.num_heads * c, arch.num_kv_heads * c
    rows: list[Row] = []
    if arch.pre_norm:
        # The second norm is named after what it follows, unless a norm of attention's output has that name.
        second = "pre_feedforward_layernorm" if arch.post_norm else "post_attention_layernorm"
        rows += [
            ("input_layernorm.weight", "layers.attn_norm", "whole", (d,)),
            (f"{second}.weight", "layers.mlp_norm", "whole", (d,)),
        ]
    if arch.post_norm:
        rows.append(("post_attention_layernorm.weight", "layers.attn_post_norm", "whole", (d,)))
        rows.append(("post_feedforward_layernorm.weight", "layers.mlp_post_norm", "whole", (d,)))
    sizes = {"query": query, "key": key, "value": key}
    names = {part: f"self_attn.{part[0]}_proj.weight" for part in sizes}
    if arch.family in FUSED:
        bounds = {"query": (0, query), "key": (query, query + key), "value": (query + key, query + 2 * key)}
        names = {part: f"self_attn.qkv_proj.weight[{first}:{last}]" for part, (first, last) in bounds.items()}
    rows += [(names[part], "layers.qkv", part, (size, d)) for part, size in sizes.items()]
    if arch.qkv_bias:
        rows += [(f"self_attn.{part[0]}_proj.bias", "layers.qkv_bias", f"{part}_bias", (size,)) for part, size in sizes.items()]
    rows.append(("self_attn.o_proj.weight", "layers.out", "out", (d, query)))
    if arch.out_bias:
        rows.append(("self_attn.o_proj.bias", "layers.out_bias", "whole", (d,)))
    if arch.qk_norm is not None:
        heads = (c, c) if arch.qk_norm == "head" else (query, key)
        rows.append(("self_attn.q_norm.weight", "layers.query_norm", "whole", heads[:1]))
        rows.append(("self_attn.k_norm.weight", "layers.key_norm", "whole", heads[1:]))
    if arch.sinks:
        rows.append(("self_attn.sinks", "layers.sinks", "whole", (arch.num_heads,)))
    return rows


def _mlp(arch: Arch) -> list[Row]:
    d, f = arch.embed_dim, arch.ffn_dim
    down: Row = ("mlp.down_proj.weight", "layers.down", "down", (d, f))
    if arch.family in FUSED:
        return [("mlp.gate_up_proj.weight", "layers.gate_up", "gate_up", (2 * f, d)), down]
    halves: list[Row] = [(f"mlp.{part}_proj.weight", "layers.gate_up", part, (f, d)) for part in ("gate", "up")]
    return [*halves, down]


def _separate_experts(router: str, experts: str, names: tuple[str, str, str]) -> Callable[[Arch, int], list[Any]]:
    """Name the tensors of experts that are stored one by one."""

    def rows(arch: Arch, index: int) -> list[Any]:
        assert arch.experts is not None, "a layer with experts has them"
        d, f = arch.embed_dim, arch.experts.ffn_dim
        parts = ("gate_up", "gate", (f, d)), ("gate_up", "up", (f, d)), ("down", "down", (d, f))
        return [(f"{router}.weight", "layers.moe.router", index, "router", (arch.experts.count, d))] + [
            (f"{experts}.{expert}.{name}.weight", f"layers.moe.{target}", (index, expert), part, shape)
            for expert in range(arch.experts.count)
            for name, (target, part, shape) in zip(names, parts, strict=True)
        ]

    return rows


def _stacked_experts(arch: Arch, index: int) -> list[Any]:
    """Name the tensors of experts that are stored together, inputs first, gate and up taking turns."""
    assert arch.experts is not None, "a layer with experts has them"
    d, f, x = arch.embed_dim, arch.experts.ffn_dim, arch.experts.count
    return [
        ("mlp.router.weight", "layers.moe.router", index, "router", (x, d)),
        ("mlp.router.bias", "layers.moe.router_bias", index, "whole", (x,)),
        ("mlp.experts.gate_up_proj", "layers.moe.gate_up", index, "alternating", (x, d, 2 * f)),
        ("mlp.experts.gate_up_proj_bias", "layers.moe.gate_up_bias", index, "alternating_bias", (x, 2 * f)),
        ("mlp.experts.down_proj", "layers.moe.down", index, "whole", (x, f, d)),
        ("mlp.experts.down_proj_bias", "layers.moe.down_bias", index, "whole", (x, d)),
    ]


# Families whose checkpoints hold queries, keys and values in one tensor, and gate and up in another.
FUSED = ("phi3",)

# How the families with experts name and lay out their tensors.
EXPERTS: dict[str, Callable[[Arch, int], list[Any]]] = {
    "mixtral": _separate_experts("block_sparse_moe.gate", "block_sparse_moe.experts", ("w1", "w3", "w2")),
    "qwen3_moe": _separate_experts("mlp.gate", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
    "gpt_oss": _stacked_experts,
}


def view(params: Params, slot: Slot) -> np.ndarray:
    """Return the slot's part of the parameters as a numpy view in the outside order of dims.

    Its elements in row-major order are the outside tensor's, so `view(...)[...] = tensor.reshape(view.shape)` reads and
    `view(...).reshape(slot.shape)` writes, both without arithmetic.
    """
    array: Any = params
    for name in slot.target.split("."):
        array = array[name]
    return TRANSFORMS[slot.part](array if slot.layer is None else array[slot.layer])


def empty_params(arch: Arch, dtype: np.dtype) -> Params:
    """Return parameters to be filled: numpy arrays with undefined content."""

    def allocate(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {name: allocate(child) for name, child in tree.items()}
        return np.empty(tree.shape, dtype)

    return allocate(abstract_params(arch))


def fill(model: Outside, dtype: np.dtype) -> tuple[Params, list[str]]:
    """Read every tensor into newly allocated parameters of `dtype`, one at a time.

    Returns:
        The parameters, and one notice per tensor that holds NaN or infinity.
    """
    params, notices = empty_params(model.arch, dtype), []
    for slot in slots(model.arch):
        part = view(params, slot)
        part[...] = model.read(slot.name).reshape(part.shape)
        if not np.isfinite(part).all():
            origin = model.origins[slot.name]
            notices.append(f"{origin.name} in {origin.file} holds NaN or infinity; the model will not work as it should")
    return params, notices


def mismatches(expected: list[Slot], found: Mapping[str, Origin], floating: tuple[str, ...]) -> list[str]:
    """Say, one sentence each, which tensors are missing, unexpected, of a wrong shape or not floating."""
    names = {slot.name for slot in expected}
    problems = [f"{slot.name} is missing" for slot in expected if slot.name not in found]
    problems += [
        f"{o.name} in {o.file.name} has no place in this architecture" for name, o in found.items() if name not in names
    ]
    for slot in expected:
        if (origin := found.get(slot.name)) is None:
            continue
        if origin.shape != slot.shape:
            problems.append(
                f"{origin.name} in {origin.file.name} has shape {origin.shape}; the configuration asks for {slot.shape}"
            )
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


# Parameter (one layer of it) -> view with the dims in the outside order, all of which are split, none merged.
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
    "gate_up": lambda gate_up: gate_up.transpose(1, 2, 0),  # [d,2,f] -> [2,f,d]
    "router": lambda router: router.T,  # [d,x] -> [x,d]
    "alternating": lambda gate_up: gate_up.swapaxes(-1, -2),  # [x,d,2,f] -> [x,d,f,2]
    "alternating_bias": lambda bias: bias.swapaxes(-1, -2),
}
