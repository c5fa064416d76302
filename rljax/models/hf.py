"""Hugging Face model folders: configuration and safetensors, in both directions.

Owns the translation of config.json into an `Arch` and back, reading single and sharded safetensors, and writing them.
Everything is strict: whatever would make the converted model another model than the source is an error that names the
file, the key or the tensor, before anything is written. Refuses to own the safetensors format (`shards.py`), 8-bit weights
(`fp8.py`), the checkpoint format of rljax and atomic writing.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rljax.models import shards
from rljax.models.arch import Arch, Rope
from rljax.models.fp8 import split_scales
from rljax.models.layout import (
    EMBED,
    HEAD,
    Origin,
    Outside,
    Slice,
    all_finite,
    cast,
    mismatches,
    not_finite,
    refuse,
    slices,
    slots,
    tiles,
)
from rljax.parallel import in_parallel

DEFAULT_ROPE_THETA = 10_000.0
"""What the Llama family means by a configuration without `rope_theta` (arXiv:2104.09864, section 3.3)."""

FLOATING = ("F32", "F16", "BF16")
"""Types of stored tensors that convert without loss to float32."""

CARRIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""Files that travel with a model unchanged, byte for byte; further chat templates do too."""

# Buffers that old versions stored next to the weights; they follow from the configuration.
_HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TEMPLATES = "additional_chat_templates"

# Keys that would change the computation with any value but these; an empty tuple allows only null.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (),
    "quantization_config": (),
    "partial_rotary_factor": (1.0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}


def arch_from_config(config: Mapping[str, Any], where: str = "config.json") -> tuple[Arch, list[str]]:
    """Translate a config.json into an architecture.

    Null means absent everywhere. Returns the architecture and notices of defaults that were assumed.

    Raises:
        ValueError: a key is missing, of the wrong type, in conflict with another one, or asks for what rljax lacks.
    """
    given = {key: value for key, value in config.items() if value is not None}
    names = given.get("architectures") or [_CLASS_OF_TYPE.get(given.get("model_type", ""), given.get("model_type"))]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        raise ValueError(f"{where}: architectures is {names}; rljax loads {', '.join(sorted(FAMILIES))}")
    model_type = given.get("model_type")
    if model_type is not None and _CLASS_OF_TYPE.get(model_type) != names[0]:
        raise ValueError(f"{where}: model_type {model_type!r} is not the one of {names[0]}; correct whichever is wrong")
    return FAMILIES[names[0]](given, where)


def config_from_arch(arch: Arch, dtype: str, token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json that means `arch`, under the old and the new names of moved keys."""
    rope = arch.rope
    stretch: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        stretch["factor"] = rope.factor
    if rope.kind == "llama3":
        stretch["low_freq_factor"] = rope.low_freq_factor
        stretch["high_freq_factor"] = rope.high_freq_factor
        stretch["original_max_position_embeddings"] = rope.original_max_position
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.embed_dim,
        "intermediate_size": arch.ffn_dim,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": arch.max_position,
        "tie_word_embeddings": arch.tie_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else stretch,
        "rope_parameters": {**stretch, "rope_theta": rope.theta},
        "dtype": dtype,
        "torch_dtype": dtype,
        **{key: token_ids[key] for key in _TOKEN_IDS if token_ids.get(key) is not None},
    }


def open_hf(directory: Path) -> Outside:
    """Open a Hugging Face model folder and check it against its configuration; tensors are read later.

    Raises:
        ValueError: a file is missing or broken, or a tensor is missing, unexpected, mis-shaped or not floating.
    """
    where = directory / "config.json"
    if not where.exists():
        raise ValueError(f"{where} does not exist; give the folder of a Hugging Face model")
    config = read_json(where)
    found = _entries(directory)
    plain, found, scales, scaled = split_scales(config, found, str(where))
    arch, notices = arch_from_config(plain, str(where))
    notices += scaled
    if dropped := [name for name in found if _HARMLESS.fullmatch(name)]:
        notices.append(f"left out {len(dropped)} stored rotary tables ({dropped[0]}, ...): they follow from config.json")
    found = {name: entry for name, entry in found.items() if name not in dropped}
    origins = {name: Origin(entry.file, name, entry.shape, entry.dtype) for name, entry in found.items()}

    def rows(name: str, first: int, last: int) -> np.ndarray:
        values = shards.read_rows(found[name], first, last)
        return scales[name].apply(values, first) if name in scales else values

    # Shapes and types first, with the head that is stored: comparing it with the embedding would fail obscurely.
    stored = arch if HEAD not in found else dataclasses.replace(arch, tie_embeddings=False)
    readable = (*FLOATING, *({found[name].dtype for name in scales}))
    refuse(directory, mismatches(slots(stored), origins, readable), "download the checkpoint again, or correct config.json")
    if arch.tie_embeddings and HEAD in found:
        if _same_rows(rows, found[HEAD].shape):
            del origins[HEAD]
        else:
            arch = stored
            notices.append(f"{HEAD} differs from {EMBED} although tie_word_embeddings is true; converted as an untied model")
    return Outside(arch, origins, rows, _carried(directory, config), tuple(notices))


def write_hf(directory: Path, model: Outside, dtype: str, shard_size: int) -> list[str]:
    """Write a Hugging Face model folder into `directory`, which exists and is empty; a few rows are held at a time.

    One model.safetensors if it has at most `shard_size` bytes, else shards of at most that (a larger tensor gets its own)
    and their index.

    Returns:
        One notice per tensor that holds NaN or infinity.
    """
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled, total, item = 0, 0, np.dtype(dtype).itemsize
    for slot in slots(model.arch):
        size = math.prod(slot.shape) * item
        if parts[-1] and filled + size > shard_size:
            parts.append([])
            filled = 0
        parts[-1].append((slot.name, slot.shape))
        filled, total = filled + size, total + size
    places: dict[str, shards.Entry] = {}
    for number, members in enumerate(parts, 1):
        name = _SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        places |= shards.create(directory / name, members, dtype)

    def write(piece: Slice) -> list[str]:
        return _write_slice(piece, model, places, np.dtype(dtype))

    pieces = slices(model.arch)
    # A source that is a checkpoint of rljax holds the slice, and its reader a copy for a moment.
    notices = in_parallel(write, pieces, lambda piece: piece.size, max(piece.size for piece in pieces))
    if len(parts) > 1:
        weight_map = {name: entry.file.name for name, entry in places.items()}
        _write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    token_ids = json.loads(model.files.get("generation_config.json", b"{}"))
    _write_json(directory / "config.json", config_from_arch(model.arch, dtype, token_ids))
    for name, content in model.files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    return [notice for found in notices for notice in found]


def _write_slice(piece: Slice, model: Outside, places: Mapping[str, shards.Entry], dtype: np.dtype) -> list[str]:
    """Write the tensors of one slice; they lie next to each other where the source is a checkpoint of rljax."""
    shape = np.broadcast_to(np.empty((), dtype), piece.shape)  # takes no memory: only its views' shapes are used
    notices = []
    for slot in piece.slots:
        finite = True
        for first, last, _ in tiles(shape, slot):
            values = cast(model.rows(slot.name, first, last), dtype)
            finite = finite and all_finite(values)
            shards.write_rows(places[slot.name], first, values)
        notices += [] if finite else [not_finite(model.origins[slot.name])]
    return notices


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: it is not JSON, not an object, or names a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is listed twice")
        return entries

    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except ValueError as err:
        raise ValueError(f"{path}: not valid JSON ({err}); download it again") from err
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}; download it again")
    return value


def _llama(config: Mapping[str, Any], where: str) -> tuple[Arch, list[str]]:
    for key, allowed in _NEUTRAL.items():
        if key in config and config[key] not in allowed:
            supported = " or ".join(map(repr, allowed)) or "null"
            raise ValueError(f"{where}: {key} is {config[key]!r}; rljax supports only {supported}")

    def number(key: str, kind: type = int, default: Any = None) -> Any:
        value = config.get(key, default)
        if value is None:
            raise ValueError(f"{where}: {key} is missing; it is needed to build the model")
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0:
            raise ValueError(f"{where}: {key} must be a positive {kind.__name__}, got {value!r}")
        return value

    width, heads, max_position = number("hidden_size"), number("num_attention_heads"), number("max_position_embeddings")
    if "head_dim" not in config and width % heads:
        raise ValueError(f"{where}: hidden_size ({width}) is no multiple of num_attention_heads ({heads}); head_dim is needed")
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ValueError(f"{where}: tie_word_embeddings must be true or false, got {tied!r}")
    rope, notices = _rope(config, max_position, where)
    arch = Arch(
        vocab_size=number("vocab_size"),
        num_layers=number("num_hidden_layers"),
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=width // heads),
        ffn_dim=number("intermediate_size"),
        rope=rope,
        norm_eps=float(number("rms_norm_eps", float)),
        tie_embeddings=tied,
        max_position=max_position,
    )
    return arch, notices


# Rotary keys that mean something for each kind, and must be there.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(config: Mapping[str, Any], max_position: int, where: str) -> tuple[Rope, list[str]]:
    """Read the rotary embedding from the old keys (rope_theta, rope_scaling), the new one (rope_parameters), or both."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for place in ("rope_parameters", "rope_scaling", "rope_theta"):
        entry = config.get(place, {})
        entry = {"rope_theta": entry} if place == "rope_theta" and entry != {} else entry
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where}: {place} must be a table or null, got {entry!r}")
        for old, value in entry.items():
            key = "rope_type" if old == "type" else old
            if value is None:
                continue
            if key in merged and merged[key] != value:
                raise ValueError(
                    f"{where}: {place} says {key} = {value!r}, but {origin[key]} says {merged[key]!r}; remove the wrong one"
                )
            merged[key], origin[key] = value, place
    kind = merged.pop("rope_type", "default")
    if kind not in _ROPE_KEYS:
        raise ValueError(f"{where}: rope_type {kind!r} is not supported; rljax knows {', '.join(_ROPE_KEYS)}")
    notices = [] if "rope_theta" in merged else [f"{where} names no rope_theta; took the family's {DEFAULT_ROPE_THETA:g}"]
    theta = merged.pop("rope_theta", DEFAULT_ROPE_THETA)
    if merged.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor other than 1 is not supported")
    if kind == "llama3":
        merged.setdefault("original_max_position_embeddings", max_position)
    for key in merged:
        if key not in _ROPE_KEYS[kind]:
            raise ValueError(f"{where}: {origin[key]}.{key} has no meaning for rope_type {kind!r}; remove it")
    values = {"theta": theta, **{key: merged.get(key) for key in _ROPE_KEYS[kind]}}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{where}: rotary embedding of type {kind!r} needs a positive {key}, got {value!r}")
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ValueError(f"{where}: low_freq_factor must be below high_freq_factor in rope_scaling")
    original = values.pop("original_max_position_embeddings", None)
    numbers = {key: float(value) for key, value in values.items()}
    return Rope(kind=kind, **numbers, **({} if original is None else {"original_max_position": int(original)})), notices


def _entries(directory: Path) -> dict[str, shards.Entry]:
    """Return every stored tensor, after checking that the index and the files agree."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists() and index.exists():
        raise ValueError(f"{directory}: has both {_SINGLE} and {_INDEX}; remove the one that does not belong")
    if single.exists():
        return shards.read_header(single)
    if not index.exists():
        raise ValueError(
            f"{directory}: has neither {_SINGLE} nor {_INDEX}; other weight formats must be saved as safetensors first"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: has no weight_map; download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: {name} is said to be in {file!r}, which is no file name; download the index again")
        if not (directory / file).exists():
            raise ValueError(f"{index}: {name} is said to be in {file}, which does not exist; download that file")
    found: dict[str, shards.Entry] = {}
    for file in sorted(set(weight_map.values())):
        stored = shards.read_header(directory / file)
        if twice := sorted(set(stored) & set(found)):
            other = found[twice[0]].file.name
            raise ValueError(f"{index}: {twice[0]} is stored twice, in {other} and in {file}; download both again")
        listed = {name for name, place in weight_map.items() if place == file}
        if set(stored) != listed:
            name = min(set(stored) ^ listed)
            told = "holds it, but the index does not say so" if name in stored else "does not hold it, though the index says so"
            raise ValueError(f"{index}: {name}: {file} {told}; download both again")
        found |= {name: stored[name] for name in sorted(stored)}
    return found


def _same_rows(rows: Callable[[str, int, int], np.ndarray], shape: tuple[int, ...]) -> bool:
    """Say whether the stored head is the embedding, a few rows at a time."""
    step = max(1, (4 << 20) // (4 * shape[1]))
    wide = np.dtype(np.float32)

    def part(name: str, first: int) -> np.ndarray:
        return cast(rows(name, first, min(first + step, shape[0])), wide)

    return all(np.array_equal(part(HEAD, first), part(EMBED, first)) for first in range(0, shape[0], step))


def _carried(directory: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Read the files that travel with the model; the end tokens of config.json get a generation_config.json if it lacks one."""
    files = {name: (directory / name).read_bytes() for name in CARRIED_FILES if (directory / name).exists()}
    files |= {f"{_TEMPLATES}/{path.name}": path.read_bytes() for path in sorted((directory / _TEMPLATES).glob("*.jinja"))}
    ids = {key: config[key] for key in _TOKEN_IDS if config.get(key) is not None}
    if "generation_config.json" not in files and ids:
        files["generation_config.json"] = json.dumps(ids, indent=2).encode()
    return files


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


FAMILIES: dict[str, Callable[[Mapping[str, Any], str], tuple[Arch, list[str]]]] = {"LlamaForCausalLM": _llama}
_CLASS_OF_TYPE = {"llama": "LlamaForCausalLM"}
