"""Hugging Face model folders: safetensors and their configuration, in both directions.

Owns reading single and sharded safetensors, and writing them; what config.json means is in `hf_config.py`.
Everything is strict: whatever would make the converted model another model than the source is an error that names the
file, the key or the tensor, before anything is written. Refuses to own the checkpoint format of rljax and atomic writing.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rljax.models.arch import Arch
from rljax.models.hf_config import TOKEN_IDS, arch_from_config, config_from_arch
from rljax.models.layout import EMBED, HEAD, Origin, Outside, Slot, mismatches, refuse, slots, stored_rows, view
from rljax.pytree import Params

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
"""Files that travel with a model unchanged, byte for byte."""

# Buffers that old versions stored next to the weights; they follow from the configuration.
_HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def open_hf(directory: Path) -> Outside:
    """Open a Hugging Face model folder and check it against its configuration; tensors are read later.

    Raises:
        ValueError: a file is missing or broken, or a tensor is missing, unexpected, mis-shaped or not floating.
    """
    where = directory / "config.json"
    if not where.exists():
        raise ValueError(f"{where} does not exist; give the folder of a Hugging Face model")
    config = read_json(where)
    arch, notices = arch_from_config(config, str(where))
    handles: dict[Path, Any] = {path: _open_file(path) for path in _weight_files(directory)}
    found = {
        name: Origin(path, name, tuple(handle.get_slice(name).get_shape()), handle.get_slice(name).get_dtype())
        for path, handle in handles.items()
        for name in sorted(handle.keys())
    }
    if dropped := [name for name in found if _HARMLESS.fullmatch(name)]:
        notices.append(f"left out {len(dropped)} stored rotary tables ({dropped[0]}, ...): they follow from config.json")
    found = {name: origin for name, origin in found.items() if name not in dropped}

    def read(name: str) -> np.ndarray:
        rows = stored_rows(name)[1]
        whole = handles[found[name].file].get_slice(found[name].name)
        return whole[:] if rows is None else whole[rows]

    # Shapes and types first, with the head that is stored: comparing it with the embedding would fail obscurely.
    stored = arch if HEAD not in found else dataclasses.replace(arch, tie_embeddings=False)
    found = _in_parts(found, slots(stored))
    refuse(directory, mismatches(slots(stored), found, FLOATING), "download the checkpoint again, or correct config.json")
    if arch.tie_embeddings and HEAD in found:
        if _same_values(read(HEAD), read(EMBED)):
            del found[HEAD]
        else:
            arch = stored
            notices.append(f"{HEAD} differs from {EMBED} although tie_word_embeddings is true; converted as an untied model")
    if (directory / "additional_chat_templates").exists():
        notices.append("left out additional_chat_templates: only the default chat template travels with a checkpoint")
    return Outside(arch, found, read, _carried(directory, config), tuple(notices))


def write_hf(directory: Path, arch: Arch, params: Params, files: Mapping[str, bytes], dtype: str, shard_size: int) -> None:
    """Write a Hugging Face model folder into `directory`, which exists and is empty.

    One model.safetensors if it has at most `shard_size` bytes, else shards of at most that (a larger tensor gets its own)
    and their index. `files` are written as they are.
    """
    parts: dict[str, list[Slot]] = {}
    for slot in slots(arch):
        parts.setdefault(stored_rows(slot.name)[0], []).append(slot)
    shards: list[list[str]] = [[]]
    filled, total, item = 0, 0, np.dtype(dtype).itemsize
    for name, members in parts.items():
        size = sum(int(np.prod(slot.shape)) for slot in members) * item
        if shards[-1] and filled + size > shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + size, total + size
    weight_map = {}
    for number, members in enumerate(shards, 1):
        name = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            stored: np.ascontiguousarray(
                np.concatenate([view(params, slot).reshape(slot.shape) for slot in parts[stored]]), dtype
            )
            for stored in members
        }
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
        (directory / name).chmod(directory.stat().st_mode & 0o666)  # it is made readable to its owner alone
    if len(shards) > 1:
        _write_json(directory / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    token_ids = json.loads(files.get("generation_config.json", b"{}"))
    _write_json(directory / "config.json", config_from_arch(arch, dtype, token_ids))
    for name, content in files.items():
        (directory / name).write_bytes(content)


def _in_parts(found: Mapping[str, Origin], expected: Sequence[Slot]) -> dict[str, Origin]:
    """Replace each tensor that has a slot for every part of its rows by those parts."""
    parts: dict[str, dict[str, slice]] = {}
    for slot in expected:
        stored, rows = stored_rows(slot.name)
        if rows is not None and stored in found:
            parts.setdefault(stored, {})[slot.name] = rows
    # A tensor with another number of rows stays whole, and is refused as one without a place.
    cut = {name: rows for name, rows in parts.items() if max(r.stop for r in rows.values()) == found[name].shape[0]}
    out = {name: origin for name, origin in found.items() if name not in cut}
    for stored, rows in cut.items():
        origin = found[stored]
        shapes = {name: (part.stop - part.start, *origin.shape[1:]) for name, part in rows.items()}
        out |= {name: dataclasses.replace(origin, shape=shape) for name, shape in shapes.items()}
    return out


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


def _weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files, after checking that the index and the files agree."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists() and index.exists():
        raise ValueError(f"{directory}: has both {_SINGLE} and {_INDEX}; remove the one that does not belong")
    if single.exists():
        return [single]
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
    for file in sorted(set(weight_map.values())):
        stored = set(_open_file(directory / file).keys())
        listed = {name for name, place in weight_map.items() if place == file}
        if stored != listed:
            name = min(stored ^ listed)
            told = "holds it, but the index does not say so" if name in stored else "does not hold it, though the index says so"
            raise ValueError(f"{index}: {name}: {file} {told}; download both again")
    return [directory / file for file in sorted(set(weight_map.values()))]


def _open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except SafetensorError as err:
        raise ValueError(f"{path}: not a complete safetensors file ({err}); download it again") from err


def _same_values(first: np.ndarray, second: np.ndarray) -> bool:
    return first.shape == second.shape and np.array_equal(first.astype(np.float32), second.astype(np.float32))


def _carried(directory: Path, config: Mapping[str, Any]) -> dict[str, bytes]:
    """Read the files that travel with the model; the end tokens of config.json get a generation_config.json if it lacks one."""
    files = {name: (directory / name).read_bytes() for name in CARRIED_FILES if (directory / name).exists()}
    ids = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
    if "generation_config.json" not in files and ids:
        files["generation_config.json"] = json.dumps(ids, indent=2).encode()
    return files


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
