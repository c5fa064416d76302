"""Recognising and opening a model of any format.

Owns which format a path has, and reading a checkpoint of rljax tensor by tensor. Refuses to own the other formats
(`models/hf.py`, `models/gguf.py`) and to load parameters onto devices.
"""

import dataclasses
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rljax.checkpoint import load_files
from rljax.conversion.vocabulary import valid_rows
from rljax.leaves import check_leaves, named_leaves
from rljax.manifest import MANIFEST, DamagedError, StorageError, check_files, check_sizes, read_manifest
from rljax.models import peft
from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params
from rljax.models.gguf import open_gguf
from rljax.models.hf import open_hf
from rljax.models.layout import Origin, Outside, Slice, Slot, move, part_of, slices
from rljax.zarr import StoredArrays

Kind = Literal["hf", "gguf", "orbax", "adapter", "peft"]
"""A format: of models, a Hugging Face folder, a GGUF file, a checkpoint of rljax; of adapters, rljax's own and PEFT's."""

ARCH_FILE = "arch.json"
"""The file that holds a checkpoint's architecture."""

ADAPTER_FILE = "lora.json"
"""The file that makes a folder an adapter of rljax."""

MARKS: dict[str, Kind] = {ADAPTER_FILE: "adapter", peft.CONFIG: "peft", ARCH_FILE: "orbax", "config.json": "hf"}
"""The file by which each format of folders is recognised; the first that is there, as an adapter may carry PEFT's file."""

PARAMS = "params"
"""The folder of its arrays."""


def source_kind(source: Path) -> Kind:
    """Recognise the format of a model or an adapter.

    Raises:
        ValueError: It does not exist or is none that can be read.
    """
    if not source.exists():
        raise ValueError(f"{source} does not exist; give a Hugging Face folder, a .gguf file or a checkpoint of rljax")
    if source.is_file():
        if source.suffix.lower() != ".gguf":
            raise ValueError(f"{source} is a file but no .gguf file; give the folder of a Hugging Face model instead")
        return "gguf"
    for name, kind in MARKS.items():
        if (source / name).exists():
            return kind
    if any((source / name).is_dir() for name in ("arrays", PARAMS)):
        if not (source / MANIFEST).exists():
            raise ValueError(
                f"{source} holds arrays that were never committed ({MANIFEST} is missing); take another checkpoint"
            )
        raise ValueError(f"{source} is a step of a run; convert the run's model/ folder, which the end of the run writes")
    found = sorted(path.name for path in source.glob("*.gguf"))
    hint = f"; did you mean {source / found[0]}?" if found else ""
    raise ValueError(f"{source} holds neither {ARCH_FILE} nor config.json, so it is no model that rljax can read{hint}")


def open_source(kind: Kind, source: Path) -> Outside:
    """Open a model of any format and check that it is complete, without reading its weights.

    Which rows of the embedding are tokens is told by the tokenizer, whatever the format.

    Raises:
        ValueError: It is not a complete supported model; names the file, the key or the tensor.
        StorageError: A file of a checkpoint of rljax is missing or damaged.
    """
    opened = {"hf": open_hf, "gguf": open_gguf, "orbax": _open_checkpoint}[kind](source)
    valid, notices = valid_rows(opened.files, opened.arch.vocab_size, source)
    arch = dataclasses.replace(opened.arch, valid_vocab=valid)
    return dataclasses.replace(opened, arch=arch, notices=(*opened.notices, *notices))


def check_content(source: Path) -> None:
    """Compare the files of a checkpoint of rljax with its manifest, but for those that are compared when they are read.

    Raises:
        StorageError: One is missing or damaged.
    """
    files = model_manifest(source)["files"]
    arrays = _arrays(source, files)
    late = {f"{PARAMS}/{path}" for path in _array_files(files) if arrays.proves(path)}
    try:
        check_files(source, {name: facts for name, facts in files.items() if name not in late})
        check_sizes(source, {name: files[name] for name in late})
    except DamagedError as err:
        raise _damaged(source, err) from err


def _arrays(source: Path, files: Mapping[str, Mapping[str, Any]]) -> StoredArrays:
    return StoredArrays(source / PARAMS, _array_files(files))


def _array_files(files: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return those of a manifest's files that hold arrays, by their path inside that folder."""
    inside = f"{PARAMS}/"
    return {name.removeprefix(inside): facts for name, facts in files.items() if name.startswith(inside)}


def model_manifest(source: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint of rljax.

    Raises:
        StorageError: It is missing or damaged.
    """
    try:
        return read_manifest(source)
    except DamagedError as err:
        raise _damaged(source, err) from err


def read_arch(directory: Path) -> Arch:
    """Read the architecture of a checkpoint of rljax without loading it.

    Raises:
        ValueError: There is no checkpoint, or of another format; says how to make one.
    """
    path = directory / ARCH_FILE
    if not path.exists():
        foreign = (directory / "config.json").exists() or directory.suffix == ".gguf"
        hint = f"`rljax convert {directory} NEW_FOLDER` makes one of it" if foreign else "`rljax convert` makes one"
        raise ValueError(f"{directory} is no checkpoint of rljax ({ARCH_FILE} is missing); {hint}")
    return Arch.from_json(path.read_text(encoding="utf-8"))


def parameter_part(slot: Slot) -> str:
    """Name the part of a parameter: `layers.qkv[3].key`, or `layers.moe.gate_up[3,7].up` of an expert."""
    index = ",".join(str(number) for number in (slot.layer, slot.expert) if number is not None)
    return f"{slot.target}{f'[{index}]' if index else ''}" + ("" if slot.part in ("whole", "out", "down") else f".{slot.part}")


def _open_checkpoint(source: Path) -> Outside:
    arch = read_arch(source)
    files = {name: content for name, content in load_files(source).items() if name != ARCH_FILE}
    manifest = model_manifest(source)
    leaves = manifest["leaves"]
    check_leaves(leaves, named_leaves(abstract_params(arch)), f"the model checkpoint {source}", convert=True)
    home: dict[str, tuple[Slice, Slot]] = {slot.name: (piece, slot) for piece in slices(arch) for slot in piece.slots}
    origins = {
        name: Origin(source / PARAMS, parameter_part(slot), slot.shape, leaves[slot.target]["dtype"])
        for name, (_, slot) in home.items()
    }
    arrays = _arrays(source, manifest["files"])
    held = threading.local()  # the slice each thread is reading from: its tensors are asked for one after the other

    def rows(name: str, first: int, last: int) -> np.ndarray:
        piece, slot = home[name]
        if getattr(held, "place", None) != (piece.target, piece.layer):
            held.array = held.place = None  # let go of the one before it first
            try:
                held.array, held.place = arrays.read(piece.target, piece.layer), (piece.target, piece.layer)
            except DamagedError as err:
                raise _damaged(source, DamagedError(f"{PARAMS}/{err}")) from err
        part = part_of(held.array, slot)
        if slot is piece.slots[-1] and last == slot.shape[0]:
            held.array = held.place = None  # nothing more will be asked of it
        scale = slot.shape[0] // part.shape[0]
        assert (first % scale, last % scale) == (0, 0)
        part = part[first // scale : last // scale]
        values = np.empty(part.shape, part.dtype)
        move(values, part)
        return values.reshape(last - first, *slot.shape[1:])

    return Outside(arch, origins, rows, files, ())


def _damaged(source: Path, error: DamagedError) -> StorageError:
    return StorageError(f"the model checkpoint {source} is damaged: {error}. Convert or copy it again")
