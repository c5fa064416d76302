"""Safetensors files: what is in them, rows of one tensor at a time, and writing them in any order.

Owns the file format: eight bytes of header length, a JSON header, then the tensors without gaps. A header that does not
account for every byte of its file is an error. Reads with `pread` rather than a memory map, so that what has been read
does not count as memory of the process. Refuses to own what tensors mean.
"""

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""Floating types a stored tensor may have and numpy can hold, by the names of the format."""

_OTHER_SIZES = {"F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E5M2": 1}
_HEADER_LIMIT = 100_000_000  # bytes; the format's own
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies.

    Example:
        Entry(file=Path("model.safetensors"), dtype="BF16", shape=(576,), offset=4096)
    """

    file: Path
    """The file."""
    dtype: str
    """Its type, in the words of the format."""
    shape: tuple[int, ...]
    """Its shape."""
    offset: int
    """Its first byte, from the beginning of the file."""


def read_header(path: Path) -> dict[str, Entry]:
    """Read which tensors a file holds, after checking that they are all of it.

    Raises:
        ValueError: the file is cut short, has bytes that belong to no tensor, a tensor twice or one of another length than
            its type and shape ask for; names the tensor.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))[0]
            if length > min(_HEADER_LIMIT, size - 8):
                raise ValueError(f"{size} bytes are too few for its header")
            header = json.loads(file.read(length), object_pairs_hook=unique_keys)
        entries = {name: _entry(path, name, facts, 8 + length) for name, facts in header.items() if name != "__metadata__"}
        end = 8 + length
        for name, (entry, stop) in sorted(entries.items(), key=lambda item: (item[1][0].offset, item[1][1])):
            if entry.offset != end:
                raise ValueError(f"{name} begins at byte {entry.offset}, and what is before it ends at byte {end}")
            end = stop
        if end != size:
            raise ValueError(f"its tensors end at byte {end}, and it has {size} bytes")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise ValueError(f"{path}: not a complete safetensors file ({err}); download it again") from err
    return {name: entry for name, (entry, _) in entries.items()}


def read_rows(entry: Entry, first: int, last: int) -> np.ndarray:
    """Read rows `first` to `last - 1` of a tensor; a scalar has one row.

    Raises:
        ValueError: the file ended early, because it was changed after its header was read.
    """
    dtype = DTYPES[entry.dtype]
    shape = (last - first, *entry.shape[1:])
    row = math.prod(entry.shape[1:]) * dtype.itemsize
    values = np.empty(shape if entry.shape else (), dtype)
    descriptor = os.open(entry.file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        left, offset = values.reshape(-1).view(np.uint8).data, entry.offset + first * row
        while left:
            got = os.preadv(descriptor, [left], offset)
            if not got:
                raise ValueError(f"{entry.file}: ended while it was being read; was it changed?")
            left, offset = left[got:], offset + got
    finally:
        os.close(descriptor)
    return values


def create(path: Path, tensors: Sequence[tuple[str, tuple[int, ...]]], dtype: str) -> dict[str, Entry]:
    """Create a file of tensors whose contents come later, in any order, through `write_rows`.

    Args:
        path: The file.
        tensors: Name and shape of each, in the order they shall lie.
        dtype: Their type, as numpy calls it.
    """
    kind = next(name for name, known in DTYPES.items() if known == np.dtype(dtype))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in tensors:
        size = math.prod(shape) * DTYPES[kind].itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    start = 8 + len(text)
    return {name: Entry(path, kind, shape, start + header[name]["data_offsets"][0]) for name, shape in tensors}


def write_rows(entry: Entry, first: int, values: np.ndarray) -> None:
    """Write rows of a tensor from `first` on; `values` are contiguous and have its type.

    Raises:
        OSError: the disk is full or failed.
    """
    assert values.dtype == DTYPES[entry.dtype]
    assert values.flags.c_contiguous
    left = values.reshape(-1).view(np.uint8).data
    offset = entry.offset + first * math.prod(entry.shape[1:]) * values.itemsize
    descriptor = os.open(entry.file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        while left:
            wrote = os.pwrite(descriptor, left, offset)
            left, offset = left[wrote:], offset + wrote
    finally:
        os.close(descriptor)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object from its pairs; raise ValueError where a key is named twice."""
    entries = dict(pairs)
    if len(entries) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is listed twice")
    return entries


def _entry(path: Path, name: str, facts: Mapping[str, Any], start: int) -> tuple[Entry, int]:
    """Return a tensor's entry and the byte after it."""
    kind, shape, (first, last) = facts["dtype"], tuple(facts["shape"]), facts["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, first, last)):
        raise ValueError(f"{name} has the shape {list(shape)} and the offsets {first}, {last}")
    size = DTYPES[kind].itemsize if kind in DTYPES else _OTHER_SIZES.get(kind)
    if size is not None and last - first != math.prod(shape) * size:
        raise ValueError(f"{name} has {last - first} bytes, and {kind}{list(shape)} needs {math.prod(shape) * size}")
    return Entry(path, kind, shape, start + first), start + last
