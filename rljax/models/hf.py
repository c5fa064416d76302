"""Hugging Face model folders: safetensors and their configuration, in both directions.

Owns reading single and sharded safetensors, and writing them; what config.json means is in `hf_config.py`.
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

from rljax.manifest import sync_file
from rljax.models import shards
from rljax.models.fp8 import split_scales
from rljax.models.hf_config import TOKEN_IDS, arch_from_config, config_from_arch
from rljax.models.layout import (
    EMBED,
    HEAD,
    Origin,
    Outside,
    Slice,
    all_finite,
    cast,
    memory_limit,
    mismatches,
    not_finite,
    refuse,
    slices,
    slots,
    tensor_shapes,
    tiles,
)
from rljax.parallel import in_parallel

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
_TEMPLATES = "additional_chat_templates"


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

    # Shapes and types first, with the head that is stored: comparing it with the embedding would fail obscurely.
    stored = arch if HEAD not in found else dataclasses.replace(arch, tie_embeddings=False)
    table = {slot.name: slot for slot in slots(stored)}
    origins = {name: Origin(entry.file, name, entry.shape, entry.dtype) for name, entry in found.items()}
    readable = (*FLOATING, *({found[name].dtype for name in scales}))
    remedy = "download the checkpoint again, or correct config.json"
    refuse(directory, mismatches(list(table.values()), origins, readable), remedy)
    origins = {
        name: Origin(found[slot.tensor].file, name, slot.shape, found[slot.tensor].dtype) for name, slot in table.items()
    }

    def rows(name: str, first: int, last: int) -> np.ndarray:
        tensor, offset = table[name].tensor, table[name].offset
        values = shards.read_rows(found[tensor], offset + first, offset + last)
        return scales[tensor].apply(values, offset + first) if tensor in scales else values

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
        One notice per slot that holds NaN or infinity.
    """
    parts: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled, total, item = 0, 0, np.dtype(dtype).itemsize
    for tensor, shape in tensor_shapes(slots(model.arch)).items():
        size = math.prod(shape) * item
        if parts[-1] and filled + size > shard_size:
            parts.append([])
            filled = 0
        parts[-1].append((tensor, shape))
        filled, total = filled + size, total + size
    places: dict[str, shards.Entry] = {}
    for number, members in enumerate(parts, 1):
        name = _SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        places |= shards.create(directory / name, members, dtype)

    def write(piece: Slice) -> list[str]:
        return _write_slice(piece, model, places, np.dtype(dtype))

    # A source that is a checkpoint of rljax holds the slice.
    limit = memory_limit(model.arch, np.dtype(dtype))
    notices = in_parallel(write, slices(model.arch), lambda piece: piece.size * item, limit)
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
    """Write the slots of one slice; they lie next to each other where the source is a checkpoint of rljax."""
    shape = np.broadcast_to(np.empty((), dtype), piece.shape)  # takes no memory: only its views' shapes are used
    notices = []
    for slot in piece.slots:
        finite = True
        for first, last, _ in tiles(shape, slot):
            values = cast(model.rows(slot.name, first, last), dtype)
            finite = finite and all_finite(values)
            shards.write_rows(places[slot.tensor], slot.offset + first, values)
        notices += [] if finite else [not_finite(model.origins[slot.name])]
    for file in {places[slot.tensor].file for slot in piece.slots}:
        sync_file(file)  # while other slices are being read, rather than all at the end
    return notices


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: it is not JSON, not an object, or names a key twice.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=shards.unique_keys)
    except ValueError as err:
        raise ValueError(f"{path}: not valid JSON ({err}); download it again") from err
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}; download it again")
    return value


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
    ids = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
    if "generation_config.json" not in files and ids:
        files["generation_config.json"] = json.dumps(ids, indent=2).encode()
    return files


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
