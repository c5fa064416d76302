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
    layer: int | None
    """Index along its leading dim, or None for a parameter that is not stacked."""
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


def slots(arch: Arch) -> list[Slot]:
    """Return every tensor a Hugging Face checkpoint of this architecture has, in file order.

    Together they fill every element of every parameter exactly once.
    """
    d, c, f, v = arch.embed_dim, arch.head_dim, arch.ffn_dim, arch.vocab_size
    query, key = arch.num_heads * c, arch.num_kv_heads * c
    per_layer = (
        ("input_layernorm", "layers.attn_norm", "whole", (d,)),
        ("self_attn.q_proj", "layers.qkv", "query", (query, d)),
        ("self_attn.k_proj", "layers.qkv", "key", (key, d)),
        ("self_attn.v_proj", "layers.qkv", "value", (key, d)),
        ("self_attn.o_proj", "layers.out", "out", (d, query)),
        ("post_attention_layernorm", "layers.mlp_norm", "whole", (d,)),
        ("mlp.gate_proj", "layers.gate_up", "gate", (f, d)),
        ("mlp.up_proj", "layers.gate_up", "up", (f, d)),
        ("mlp.down_proj", "layers.down", "down", (d, f)),
    )
    table = [Slot(EMBED, "embed", None, "whole", (v, d))]
    for layer in range(arch.num_layers):
        table += [
            Slot(f"model.layers.{layer}.{name}.weight", target, layer, part, shape) for name, target, part, shape in per_layer
        ]
    table.append(Slot("model.norm.weight", "final_norm", None, "whole", (d,)))
    if not arch.tie_embeddings:
        table.append(Slot(HEAD, "head", None, "whole", (v, d)))
    return table


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
}
