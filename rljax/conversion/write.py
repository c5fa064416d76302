"""Writing a checkpoint of rljax out of any opened model, one slice of one parameter at a time.

Owns which slices are in memory together, and what the folder contains. Refuses to own the layout of arrays (`zarr.py`) and
where the folder is (`stage.py`).
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rljax.conversion.sources import ARCH_FILE, PARAMS
from rljax.leaves import describe, named_leaves
from rljax.manifest import seal, storage_errors, sync_file, sync_folder
from rljax.mesh import LEARNER_RULES
from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params, logical_axes
from rljax.models.hf import write_hf
from rljax.models.layout import Outside, Slice, fill_slice, memory_limit, slices
from rljax.parallel import in_parallel
from rljax.zarr import ArraySpec, create_arrays, write_slice


def write_model(folder: Path, to: str, model: Outside, dtype: str, shard_size: int) -> list[str]:
    """Write a model as `to` (`orbax` or `hf`) into a folder that does not exist, every file durable.

    Returns:
        One notice per tensor that holds NaN or infinity.

    Raises:
        StorageError: Writing failed, or the source was changed while it was read.
    """
    with storage_errors(f"{folder} could not be written"):
        return _write_checkpoint(folder, model, dtype) if to == "orbax" else _export(folder, model, dtype, shard_size)


def array_specs(arch: Arch, dtype: str) -> dict[str, ArraySpec]:
    """Return how every parameter lies on disk: by layers, and cut where the learner's mesh may split it."""
    stacked = {piece.target for piece in slices(arch) if piece.layer is not None}
    axes = logical_axes(arch)
    names = dict(zip(named_leaves(abstract_params(arch)), jax.tree.leaves(axes, is_leaf=_is_axes), strict=True))
    return {
        name: ArraySpec(
            leaf.shape,
            dtype,
            name in stacked,
            tuple(dim for dim, axis in enumerate(names[name]) if LEARNER_RULES.get(axis) is not None),
        )
        for name, leaf in named_leaves(abstract_params(arch, np.dtype(dtype))).items()
    }


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)


def _write_checkpoint(folder: Path, model: Outside, dtype: str) -> list[str]:
    specs = array_specs(model.arch, dtype)
    kind = np.dtype(dtype)
    folder.mkdir()
    create_arrays(folder / PARAMS, specs)

    def write(piece: Slice) -> tuple[str, dict[str, Any], list[str]]:
        values = np.empty(piece.shape, kind)
        notices = fill_slice(values, piece.slots, model)
        return *write_slice(folder / PARAMS, piece.target, specs[piece.target], piece.layer, values), notices

    done = in_parallel(write, slices(model.arch), lambda piece: piece.size * kind.itemsize, memory_limit(model.arch, kind))
    _write_files(folder, {ARCH_FILE: model.arch.to_json().encode(), **model.files})
    leaves = describe(named_leaves(abstract_params(model.arch, kind)))
    seal(folder, {"leaves": leaves}, {f"{PARAMS}/{path}": facts for path, facts, _ in done})
    return [notice for _, _, notices in done for notice in notices]


def _export(folder: Path, model: Outside, dtype: str, shard_size: int) -> list[str]:
    folder.mkdir()
    notices = write_hf(folder, model, dtype, shard_size)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        sync_file(path)
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        sync_folder(inner)
    return notices


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write a JSON file that is whole or not there."""
    draft = path.with_name(f".{path.name}.partial")
    with storage_errors(f"{path} could not be written"):
        with draft.open("w", encoding="utf-8") as file:
            json.dump(report, file, indent=1, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
