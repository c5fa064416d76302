"""Arrays in files that Orbax restores, written and read one slice at a time.

Owns that layout (Zarr version 3, read by TensorStore underneath Orbax) and reading it, or what Orbax itself wrote, without
Orbax. Refuses to own what the arrays are, the manifest (it is given digests), and restoring onto devices (`checkpoint.py`).

    params/
        _METADATA                   the list of arrays, for Orbax
        layers.qkv/zarr.json        shape, type and chunks of one array
        layers.qkv/3.0.0.0.0        layer 3 of it: an index, then its chunks, uncompressed

A slice is one file, so that it can be written as soon as it is known. Inside, it is cut into chunks along the dims that a
mesh may split, and a device that needs a part of the slice reads only the chunks that hold it.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from rljax.manifest import DamagedError

_LIST = "_METADATA"
_CHUNK_BYTES = 1 << 20  # cut further only above this: smaller reads cost more than they save
_MOST_CUTS = 32  # along one dim


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array as it is to lie on disk.

    Example:
        ArraySpec(shape=(30, 576, 3, 5, 64), dtype="float32", stacked=True, cuts=(1, 2))
    """

    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its type, as numpy calls it."""
    stacked: bool
    """Whether it is written one index of its first dim at a time, or whole."""
    cuts: tuple[int, ...]
    """Dims along which a slice is cut into chunks."""

    @property
    def shard(self) -> tuple[int, ...]:
        """Shape of what one file holds."""
        return (1, *self.shape[1:]) if self.stacked else self.shape

    @property
    def chunk(self) -> tuple[int, ...]:
        """Shape of one chunk: the shard, its cut dims halved in turn until it is small or no dim divides evenly."""
        chunk, changed = list(self.shard), True
        item = np.dtype(self.dtype).itemsize
        while changed:
            changed = False
            for dim in self.cuts:
                cuts = self.shard[dim] // chunk[dim]
                if math.prod(chunk) * item > _CHUNK_BYTES and chunk[dim] % 2 == 0 and cuts < _MOST_CUTS:
                    chunk[dim] //= 2
                    changed = True
        return tuple(chunk)


def create_arrays(folder: Path, arrays: Mapping[str, ArraySpec]) -> None:
    """Create a folder of arrays whose slices come later, in any order, through `write_slice`."""
    folder.mkdir(parents=True)
    tree: dict[str, Any] = {}
    for name, spec in arrays.items():
        (folder / name).mkdir()
        (folder / name / "zarr.json").write_text(json.dumps(_description(spec)), encoding="utf-8")
        tree[f"({name!r},)"] = {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(spec.shape)},
        }
    listed = {"tree_metadata": tree, "use_ocdbt": False, "use_zarr3": True, "store_array_data_equal_to_fill_value": True}
    (folder / _LIST).write_text(json.dumps({**listed, "custom_metadata": None}), encoding="utf-8")


def write_slice(folder: Path, name: str, spec: ArraySpec, layer: int | None, values: np.ndarray) -> tuple[str, dict[str, Any]]:
    """Write one slice and make it durable.

    Args:
        folder: The folder given to `create_arrays`.
        name: The array.
        spec: As given to `create_arrays`.
        layer: Index along the first dim of a stacked array, else None.
        values: The slice, without the first dim of a stacked array.

    Returns:
        The file's path inside `folder`, and its `size` (bytes) and `sha256`, taken from what was to be written.

    Raises:
        OSError: the disk is full or failed.
    """
    assert (layer is not None) == spec.stacked
    block = values[None] if spec.stacked else values
    assert (block.shape, block.dtype) == (spec.shard, np.dtype(spec.dtype))
    block = block.view(f"u{block.itemsize}")  # numpy copies integers faster than bfloat16
    path = _slice_path(name, layer, len(spec.shape))
    index = _index(spec.shard, spec.chunk, block.itemsize)
    digest = hashlib.sha256(index.data)
    chunk = np.empty(spec.chunk, block.dtype)  # one for all: memory that is new for each would be cleared for each
    descriptor = os.open(folder / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write_all(descriptor, index)
        for place in _chunks(spec.shard, spec.chunk):
            chunk[...] = block[place]
            digest.update(_raw(chunk))
            _write_all(descriptor, chunk)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path, {"size": index.nbytes + block.nbytes, "sha256": digest.hexdigest()}


class StoredArrays:
    """The arrays of a folder written through `write_slice` or by Orbax, read slice by slice.

    Example:
        StoredArrays(checkpoint / "params").read("layers.qkv", 3)
    """

    def __init__(self, folder: Path, files: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Open the folder.

        Args:
            folder: What `create_arrays` or Orbax made.
            files: `size` and `sha256` of its files, by their path inside it: those that `proves` tells are compared when
                they are read.

        Raises:
            ValueError: it holds no arrays of either kind.
        """
        try:
            listed = json.loads((folder / _LIST).read_text(encoding="utf-8"))
            driver = "zarr3" if listed["use_zarr3"] else "zarr"
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{folder} holds no arrays that Orbax wrote ({error})") from error
        self._folder, self._files = folder, files or {}
        self._spec: dict[str, Any] = {"driver": driver, "kvstore": {"driver": "file", "path": f"{folder}/"}}
        if listed["use_ocdbt"]:
            self._spec["kvstore"] = {"driver": "ocdbt", "base": self._spec["kvstore"]}
        self._open: dict[str, Any] = {}
        self._layouts: dict[str, _Layout | None] = {}

    def proves(self, path: str) -> bool:
        """Tell whether reading compares this file with its digest; its path is relative to the folder."""
        return path in self._files and _SLICE_FILE.fullmatch(path) is not None and self._own(path.split("/")[0]) is not None

    def read(self, name: str, layer: int | None) -> np.ndarray:
        """Read one index along the first dim of an array, or all of it. May be called by several threads.

        Raises:
            ValueError: there is no such array, or reading failed.
            DamagedError: a file is missing, too short, or has another digest than it should.
        """
        own = self._own(name)
        # A file holds an index along the first dim, or everything.
        if own is not None and (own.shard == own.shape if layer is None else own.shard[0] == 1):
            values = _read_slice(self._folder, name, own, layer, self._files)
            return values if layer is None else values[0]
        if name not in self._open:
            store = {**self._spec["kvstore"], "path": f"{self._spec['kvstore'].get('path', '')}{name}/"}
            self._open[name] = tensorstore.open({**self._spec, "kvstore": store}, open=True, read=True).result()
        array = self._open[name]
        return (array if layer is None else array[layer]).read().result()

    def _own(self, name: str) -> "_Layout | None":
        """Return the layout of an array that `write_slice` wrote; None for other arrays."""
        if name not in self._layouts:
            try:
                description = json.loads((self._folder / name / "zarr.json").read_text(encoding="utf-8"))
                inner = description["codecs"][0]["configuration"]["chunk_shape"]
                outer = description["chunk_grid"]["configuration"]["chunk_shape"]
                layout = _Layout(tuple(description["shape"]), description["data_type"], tuple(outer), tuple(inner))
                self._layouts[name] = layout if _description(layout) == description else None
            except (OSError, ValueError, KeyError, IndexError, TypeError):
                self._layouts[name] = None
        return self._layouts[name]


_SLICE_FILE = re.compile(r"[^/]+/\d+(\.\d+)*")


@dataclass(frozen=True, slots=True)
class _Layout:
    """What zarr.json says of an array."""

    shape: tuple[int, ...]
    dtype: str
    shard: tuple[int, ...]
    chunk: tuple[int, ...]


def _description(array: ArraySpec | _Layout) -> dict[str, Any]:
    """Return the content of zarr.json (Zarr version 3 with the codec `sharding_indexed`)."""
    raw = [{"name": "bytes", "configuration": {"endian": "little"}}]
    shards = {"chunk_shape": list(array.chunk), "codecs": raw, "index_codecs": raw, "index_location": "start"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": array.dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.shard)}},
        "chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}},
        "fill_value": 0.0,
        "codecs": [{"name": "sharding_indexed", "configuration": shards}],
    }


def _slice_path(name: str, layer: int | None, dims: int) -> str:
    return f"{name}/" + ".".join(map(str, (layer or 0, *[0] * (dims - 1))))


def _index(shard: tuple[int, ...], chunk: tuple[int, ...], item: int) -> np.ndarray:
    """Return what a file begins with: offset and length of each chunk (bytes)."""
    count, length = math.prod(shard) // math.prod(chunk), math.prod(chunk) * item
    index = np.empty((count, 2), "<u8")
    index[:, 0], index[:, 1] = index.nbytes + np.arange(count) * length, length
    return index


def _chunks(shard: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield the places of the chunks in the order they lie in the file."""
    for index in np.ndindex(*(whole // part for whole, part in zip(shard, chunk, strict=True))):
        yield tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, chunk, strict=True))


def _read_slice(
    folder: Path, name: str, layout: _Layout, layer: int | None, files: Mapping[str, Mapping[str, Any]]
) -> np.ndarray:
    """Read one file chunk by chunk, each hashed and put in its place while it is in the processor's cache."""
    path = _slice_path(name, layer, len(layout.shape))
    values = np.empty(layout.shard, np.dtype(layout.dtype))
    bits = values.view(f"u{values.itemsize}")
    expected = _index(layout.shard, layout.chunk, values.itemsize)
    known = files.get(path)
    digest = hashlib.sha256() if known else None
    index, chunk = np.empty_like(expected), np.empty(layout.chunk, bits.dtype)
    try:
        with open(folder / path, "rb", buffering=0) as file:
            _fill(file, index, digest)
            if not np.array_equal(index, expected):
                raise DamagedError(f"{path} does not begin with the places of its chunks")
            for place in _chunks(layout.shard, layout.chunk):
                _fill(file, chunk, digest)
                bits[place] = chunk
    except (OSError, EOFError) as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror if isinstance(error, OSError) else error})") from error
    if known and digest and digest.hexdigest() != known["sha256"]:
        raise DamagedError(f"{path} has other content than was saved (SHA-256 differs)")
    return values


def _raw(values: np.ndarray) -> memoryview:
    """Return the bytes of a contiguous array."""
    return values.reshape(-1).view(np.uint8).data


def _fill(file: Any, values: np.ndarray, digest: Any) -> None:
    left = whole = _raw(values)
    while left:
        got = file.readinto(left)
        if not got:
            raise EOFError("it is too short")
        left = left[got:]
    if digest is not None:
        digest.update(whole)


def _write_all(descriptor: int, values: np.ndarray) -> None:
    left = _raw(values)
    while left:
        left = left[os.write(descriptor, left) :]
