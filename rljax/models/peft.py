"""Adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors, in both directions.

Owns what their keys and tensor names mean. Strict as `hf_config.py` is: an option that would make the adapter another
function than rljax computes is an error that names it. Refuses to own what an adapter is (`lora.py`) and its base.

PEFT's lora_A.weight [r, in] and lora_B.weight [out, r] are one layer of a factor with its input and output dims merged,
transposed.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rljax.models import shards
from rljax.models.arch import Arch
from rljax.models.hf import FLOATING, read_json
from rljax.models.layout import FUSED
from rljax.models.lora import TARGETS, LoraSpec, abstract_adapter

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_NAME = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(?:self_attn|mlp)\.(\w+)\.lora_([AB])\.weight")

# Options that change the function, and the values with which they do not.
_OFF: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    # The other first values change the base too, so that the adapter belongs to a base that is stored nowhere.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    **dict.fromkeys(("fan_in_fan_out", "use_dora", "lora_bias", "use_qalora", "ensure_weight_tying"), (False,)),
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "loftq_config", "modules_to_save", "layers_to_transform"), ({}, [])),
    **dict.fromkeys(("layer_replication", "trainable_token_indices", "target_parameters", "megatron_config"), ({}, [])),
    **dict.fromkeys(("corda_config", "lora_ga_config", "alora_invocation_tokens", "arrow_config", "kasa_config"), ({}, [])),
    **dict.fromkeys(("velora_config", "monteclora_config", "use_bdlora"), ({}, [], False)),
}  # fmt: skip

_READ = ("r", "lora_alpha", "use_rslora", "target_modules", "base_model_name_or_path")
_HARMLESS = {
    *("auto_mapping", "peft_version", "revision", "inference_mode", "exclude_modules", "lora_dropout", "layers_pattern"),
    *("megatron_core", "qalora_group_size", "eva_config", "runtime_config"),
}

Factors = dict[str, dict[str, np.ndarray]]
"""Target -> `a` and `b`, stacked over the layers, as `lora.abstract_adapter` has them."""


class PeftConfig(NamedTuple):
    """What an adapter_config.json says."""

    rank: int
    """Inner dim of the factors."""
    alpha: float
    """Numerator of the scale."""
    rslora: bool
    """Whether the scale is rank-stabilised."""
    modules: frozenset[str] | None
    """Names of the adapted projections; None where a pattern selects them."""
    base: str | None
    """Name or path of the base model."""
    notices: tuple[str, ...]
    """Keys that rljax does not know."""


def read_config(folder: Path) -> PeftConfig:
    """Read and check adapter_config.json; null means absent.

    Raises:
        ValueError: it is missing or broken, or an option is set that rljax cannot represent.
    """
    where = folder / CONFIG
    given = {key: value for key, value in read_json(where).items() if value is not None}
    for key, allowed in _OFF.items():
        if key in given and given[key] not in allowed:
            raise ValueError(
                f"{where}: {key} is {given[key]!r}, and adapters of rljax have no such thing; merge the adapter into its base "
                "with PEFT and convert the merged model"
            )
    rank, alpha, rslora = given.get("r"), given.get("lora_alpha"), given.get("use_rslora", False)
    if type(rank) is not int or not isinstance(alpha, (int, float)) or type(alpha) is bool or type(rslora) is not bool:
        raise ValueError(f"{where}: needs r, lora_alpha and perhaps use_rslora, got {rank!r}, {alpha!r} and {rslora!r}")
    listed = given.get("target_modules")
    modules = frozenset(str(name).split(".")[-1] for name in listed) if isinstance(listed, list) else None
    unknown = sorted(set(given) - {*_OFF, *_READ, *_HARMLESS})
    notices = tuple(f"{where}: {key} is unknown and was ignored; make sure that it changes no computation" for key in unknown)
    return PeftConfig(rank, float(alpha), rslora, modules, given.get("base_model_name_or_path"), notices)


def read_peft(folder: Path, arch: Arch, base: str) -> tuple[LoraSpec, Factors, PeftConfig]:
    """Read an adapter for a base model, in the types it is stored in.

    Args:
        folder: The folder PEFT wrote.
        arch: Architecture of the base.
        base: The base, for messages.

    Raises:
        ValueError: a file or tensor is missing, unexpected, broken or of another shape than the base asks for, or the
            adapter is of a kind that rljax lacks.
    """
    config, where = read_config(folder), folder / WEIGHTS
    refuse_fused(arch, base)
    if not where.exists():
        raise ValueError(f"{where} does not exist; save the adapter as safetensors, or download that file")
    found = shards.read_header(where)
    places: dict[tuple[str, int, str], shards.Entry] = {}
    for name, entry in found.items():
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in TARGETS or name != tensor_name(int(match[1]), match[2], match[3]):
            raise ValueError(f"{where}: {name} has no place in an adapter of rljax, which are for {', '.join(TARGETS)}")
        places[match[2], int(match[1]), match[3]] = entry
    targets = tuple(target for target in TARGETS if any(target == place[0] for place in places))
    if not targets or config.modules not in (None, frozenset(targets)):
        named = "a pattern" if config.modules is None else ", ".join(sorted(config.modules))
        held = ", ".join(targets) or "nothing"
        raise ValueError(
            f"{folder}: target_modules of {CONFIG} is {named}, but {WEIGHTS} has factors for {held}; download the adapter again"
        )
    spec = LoraSpec(config.rank, config.alpha, config.rslora, targets)
    shapes = abstract_adapter(arch, spec)["layers"]
    expected = {
        (target, layer, side): (factor.shape[1:], tensor_shape(side, factor.shape[1:]))
        for target in targets
        for side, factor in (("A", shapes[target]["a"]), ("B", shapes[target]["b"]))
        for layer in arch.layers
    }
    for (target, layer, side), (_, shape) in expected.items():
        entry, name = places.pop((target, layer, side), None), tensor_name(layer, target, side)
        if entry is None:
            raise ValueError(f"{where}: {name} is missing, and the base {base} has such a layer; is it the adapter's base?")
        if entry.shape != shape:
            raise ValueError(
                f"{where}: {name} has shape {entry.shape}, and rank {spec.rank} with the base {base} asks for {shape}; "
                f"the adapter is for {config.base}"
            )
        if entry.dtype not in FLOATING:
            raise ValueError(f"{where}: {name} is of type {entry.dtype}; convertible: {', '.join(FLOATING)}")
    if places:
        name = tensor_name(*_order(next(iter(places))))
        raise ValueError(f"{where}: {name} has no place in the base {base}; the adapter is for {config.base}")

    def stacked(target: str, side: str) -> np.ndarray:
        shape = expected[target, 0, side][0]
        layers = [found[tensor_name(layer, target, side)] for layer in arch.layers]
        return np.stack([shards.read_rows(entry, 0, entry.shape[0]).T.reshape(shape) for entry in layers])

    return spec, {target: {"a": stacked(target, "A"), "b": stacked(target, "B")} for target in targets}, config


def write_peft(folder: Path, spec: LoraSpec, tensors: Mapping[str, np.ndarray], dtype: str, base: str) -> None:
    """Write an adapter as PEFT does, into a folder that exists and is empty.

    Args:
        folder: The folder.
        spec: What the adapter is.
        tensors: Its tensors by PEFT's names, of type `dtype`.
        dtype: That type, as numpy calls it.
        base: Name or path of its base.
    """
    places = shards.create(folder / WEIGHTS, [(name, tensors[name].shape) for name in sorted(tensors)], dtype)
    for name, values in tensors.items():
        shards.write_rows(places[name], 0, values)
    content = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": spec.rank,
        "target_modules": list(spec.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": spec.rslora,
    }
    (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def refuse_fused(arch: Arch, base: str) -> None:
    """Raise a ValueError where PEFT's projections are not those of rljax, because checkpoints join several in one matrix."""
    if arch.family in FUSED:
        raise ValueError(
            f"{base}: checkpoints of this family hold several projections in one matrix, for which PEFT has one adapter and "
            "rljax several; merge the adapter and convert the merged model instead"
        )


def tensor_name(layer: int, target: str, side: str) -> str:
    """Name one factor of one layer in adapter_model.safetensors."""
    part = "self_attn" if target in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"base_model.model.model.layers.{layer}.{part}.{target}.lora_{side}.weight"


def tensor_shape(side: str, factor: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of a tensor whose factor, of one layer, has the shape `factor`."""
    merged = (factor[0], int(np.prod(factor[1:]))) if side == "B" else (int(np.prod(factor[:-1])), factor[-1])
    return merged[1], merged[0]


def tensor(factor: np.ndarray, side: str) -> np.ndarray:
    """Return one layer of a factor as PEFT stores it: lora_A [r, in] or lora_B [out, r]."""
    return factor.reshape(tensor_shape(side, factor.shape)[::-1]).T


def _order(place: tuple[str, int, str]) -> tuple[int, str, str]:
    return place[1], place[0], place[2]
