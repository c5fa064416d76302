"""Converting models between Hugging Face folders, GGUF files and rljax checkpoints, and opening the latter.

Owns the verb `convert`: recognising the source, the plan, writing so that the target is whole or not there, and reading
back what was written. Also owns `read_checkpoint`, through which training, evaluation and sampling get a model. Refuses
to own formats: those are in `models/hf.py`, `models/gguf.py` and `checkpoint.py`.

    source --open, check--> plan --read--> params --write--> .name.XXXX.partial --read back--> rename --> target
"""

import dataclasses
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rljax.checkpoint import load_files, load_params, save_params
from rljax.config import DType
from rljax.manifest import DamagedError, StorageError, read_manifest, rename, storage_errors, sync_folder
from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params, count
from rljax.models.gguf import open_gguf
from rljax.models.hf import open_hf, write_hf
from rljax.models.layout import Outside, Slot, fill, slots, view
from rljax.pytree import Params

SHARD_SIZE = 5_000_000_000
"""Default limit of one safetensors file (bytes)."""

Kind = Literal["hf", "gguf", "orbax"]
"""A model's format: a Hugging Face folder, a GGUF file, or a checkpoint of rljax."""

ARCH_FILE = "arch.json"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One tensor of the source and what it becomes. Names are unique on both sides.

    Example:
        PlanRow(source="blk.3.attn_k.weight", source_type="Q4_1", target="layers.qkv[3].key", shape=(192, 576))
    """

    source: str
    """Name in the source."""
    source_type: str
    """Its stored type, in the words of the source format."""
    target: str
    """Name in the target; for a checkpoint of rljax the parameter, its layer and the part of it."""
    shape: tuple[int, ...]
    """Shape as a Hugging Face checkpoint has it."""


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did, or with `dry_run` would do.

    Example:
        ConvertReport(source=..., target=..., kind="gguf", to="orbax", arch=arch, dtype="float32", plan=(row,), notices=(),
                      num_params=134515008, num_bytes=538060032, seconds=9.5, verified=True, written=True)
    """

    source: Path
    """What was read."""
    target: Path
    """What was written."""
    kind: Kind
    """Format of the source."""
    to: Kind
    """Format of the target."""
    arch: Arch
    """The model."""
    dtype: str
    """Type of the written parameters."""
    plan: tuple[PlanRow, ...]
    """One row per tensor."""
    notices: tuple[str, ...]
    """What was assumed, left out, or looks wrong."""
    num_params: int
    """Parameters of the model."""
    num_bytes: int
    """Their size in the target (bytes)."""
    seconds: float
    """Duration of reading, writing and verifying (seconds)."""
    verified: bool
    """Whether the target was read back and compared bit by bit."""
    written: bool
    """False after a dry run."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model as training, evaluation and sampling take it.

    Example:
        Checkpoint(arch=arch, params=params, tokenizer_dir=Path("checkpoints/model"))
    """

    arch: Arch
    """The architecture."""
    params: Params
    """The parameters, on the shardings that were asked for."""
    tokenizer_dir: Path
    """Folder with the tokenizer's files."""


def convert(
    source: Path,
    target: Path,
    *,
    to: Literal["orbax", "hf"] | None = None,
    dtype: DType | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: bool = True,
    shard_size: int = SHARD_SIZE,
    console: Console | None = None,
) -> ConvertReport:
    """Convert a model; the target is complete and proved, or not there at all.

    Args:
        source: A Hugging Face folder, a .gguf file, or a checkpoint of rljax.
        target: The folder to create.
        to: Target format; default: `hf` for a checkpoint of rljax, else `orbax`.
        dtype: Type of the written parameters; default: as stored in a checkpoint of rljax, else float32.
        overwrite: Replace a target that is itself a model.
        dry_run: Open and check the source and plan, but read no weights and write nothing.
        verify: Read back what was written and compare it bit by bit.
        shard_size: Largest safetensors file (bytes); only for `hf`.
        console: Where to show the plan and the outcome; default: nowhere.

    Raises:
        ValueError: The source is not a complete supported model, or the target exists or is in the way.
        StorageError: Writing failed, or what was read back is not what was written; the target is as it was before.
    """
    start = time.monotonic()
    source, target = source.expanduser(), target.expanduser().resolve()
    if shard_size < 1:
        raise ValueError(f"shard_size is {shard_size}; it must be a positive number of bytes")
    kind = source_kind(source)
    to = to or ("hf" if kind == "orbax" else "orbax")
    _check_target(source, target, overwrite)
    arch, files, notices, origins, read = _open_source(kind, source)
    dtype = dtype or (_stored_dtype(source) if kind == "orbax" else "float32")
    _check_tokenizer(files, arch, source)
    report = ConvertReport(
        source=source,
        target=target,
        kind=kind,
        to=to,
        arch=arch,
        dtype=dtype,
        plan=tuple(_plan(arch, origins, to)),
        notices=tuple(notices),
        num_params=count(arch),
        num_bytes=count(arch) * np.dtype(dtype).itemsize,
        seconds=0.0,
        verified=False,
        written=False,
    )
    if console is not None:
        show_plan(report, console)
    if not dry_run:
        params, found = read(np.dtype(dtype))
        with _staged(target) as folder:
            _write(folder, to, arch, params, files, dtype, shard_size)
            if verify:
                _verify(folder, to, arch, params, files, dtype)
        report = dataclasses.replace(report, notices=(*notices, *found), verified=verify, written=True)
    report = dataclasses.replace(report, seconds=time.monotonic() - start)
    if console is not None:
        show_outcome(report, console)
    return report


def read_checkpoint(
    directory: Path, shardings: Callable[[Arch, Params], Params] | None = None, dtype: str = "float32"
) -> Checkpoint:
    """Open a checkpoint of rljax and load its parameters onto the devices.

    Args:
        directory: A folder written by `convert` or by training.
        shardings: From the architecture and the abstract parameters to the sharding of each; default: all on the first device.
        dtype: Type of the loaded parameters.

    Raises:
        ValueError: There is no checkpoint, or of another format; says how to make one.
        StorageError: A file of it is missing or damaged.
    """
    arch = read_arch(directory)
    abstract = abstract_params(arch, np.dtype(dtype))
    if shardings is None:
        placed = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), abstract)
    else:
        placed = shardings(arch, abstract)
    abstract = jax.tree.map(lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), abstract, placed)
    return Checkpoint(arch, load_params(directory, abstract), directory)


def read_arch(directory: Path) -> Arch:
    """Read the architecture of a checkpoint of rljax without loading it.

    Raises:
        ValueError: There is no checkpoint, or of another format; says how to make one.
    """
    path = directory / ARCH_FILE
    if not path.exists():
        hint = (
            f"`rljax convert {directory} NEW_FOLDER` makes one of it" if _is_foreign(directory) else "`rljax convert` makes one"
        )
        raise ValueError(f"{directory} is no checkpoint of rljax ({ARCH_FILE} is missing); {hint}")
    return Arch.from_json(path.read_text(encoding="utf-8"))


def source_kind(source: Path) -> Kind:
    """Recognise the format of a model.

    Raises:
        ValueError: It does not exist or is none that can be read.
    """
    if not source.exists():
        raise ValueError(f"{source} does not exist; give a Hugging Face folder, a .gguf file or a checkpoint of rljax")
    if source.is_file():
        if source.suffix.lower() != ".gguf":
            raise ValueError(f"{source} is a file but no .gguf file; give the folder of a Hugging Face model instead")
        return "gguf"
    if (source / ARCH_FILE).exists():
        return "orbax"
    if (source / "config.json").exists():
        return "hf"
    found = sorted(path.name for path in source.glob("*.gguf"))
    hint = f"; did you mean {source / found[0]}?" if found else ""
    raise ValueError(f"{source} holds neither {ARCH_FILE} nor config.json, so it is no model that rljax can read{hint}")


def show_plan(report: ConvertReport, console: Console) -> None:
    """Show the plan, one line for each kind of tensor: the layers of a model are alike."""
    console.print(f"{report.source} ({report.kind}) -> {report.target} ({report.to}, {report.dtype})", markup=False)
    table = Table(box=box.SIMPLE)
    for heading in ("source", "type", "target", "shape", "count"):
        table.add_column(heading, justify="right" if heading == "count" else "left", overflow="fold")
    groups: dict[tuple[str, ...], int] = {}
    for row in report.plan:
        shape = " x ".join(map(str, row.shape))
        line = (_without_layer(row.source), row.source_type, _without_layer(row.target), shape)
        groups[line] = groups.get(line, 0) + 1
    for line, number in groups.items():
        table.add_row(*map(Text, line), str(number))
    console.print(table)


def show_outcome(report: ConvertReport, console: Console) -> None:
    """Show the notices and what was done."""
    for notice in report.notices:
        console.print(f"note: {notice}", style="yellow", markup=False)
    size = f"{report.num_params:,} parameters, {report.num_bytes / 1e6:,.1f} MB of {report.dtype}"
    if not report.written:
        console.print(f"dry run: the source is complete ({size}); nothing was written", markup=False)
        return
    proof = "read back and compared bit by bit" if report.verified else "not verified"
    console.print(f"wrote {report.target}: {size}, {proof}, in {report.seconds:.1f} s", markup=False)


Reader = Callable[[np.dtype], tuple[Params, list[str]]]


def _open_source(
    kind: Kind, source: Path
) -> tuple[Arch, dict[str, bytes], tuple[str, ...], Mapping[str, tuple[str, str]], Reader]:
    """Open a source of any format: architecture, files, notices, slot name -> (name, type), and how to read the weights."""
    if kind == "orbax":
        arch = read_arch(source)
        files = {name: content for name, content in load_files(source).items() if name != ARCH_FILE}
        stored = _stored_dtype(source)
        origins = {slot.name: (_parameter_part(slot), stored) for slot in slots(arch)}
        return arch, files, (), origins, lambda dtype: (_load(source, arch, dtype), [])
    model: Outside = open_hf(source) if kind == "hf" else open_gguf(source)
    origins = {name: (origin.name, origin.dtype) for name, origin in model.origins.items()}
    return model.arch, dict(model.files), model.notices, origins, lambda dtype: fill(model, dtype)


def _stored_dtype(source: Path) -> DType:
    """Return the type of a checkpoint's parameters: bfloat16 if all are, else float32, which holds them all."""
    try:
        stored = {leaf["dtype"] for leaf in read_manifest(source)["leaves"].values()}
    except DamagedError as err:
        raise StorageError(f"the model checkpoint {source} is damaged: {err}. Convert or copy it again") from err
    return "bfloat16" if stored == {"bfloat16"} else "float32"


def _plan(arch: Arch, origins: Mapping[str, tuple[str, str]], to: Kind) -> Iterator[PlanRow]:
    for slot in slots(arch):
        source, stored = origins[slot.name]
        yield PlanRow(source, stored, slot.name if to == "hf" else _parameter_part(slot), slot.shape)


def _parameter_part(slot: Slot) -> str:
    """Name the part of a parameter: `layers.qkv[3].key`."""
    layer = "" if slot.layer is None else f"[{slot.layer}]"
    return f"{slot.target}{layer}" + ("" if slot.part in ("whole", "out", "down") else f".{slot.part}")


def _without_layer(name: str) -> str:
    """Replace the layer number by a star, so that the rows of all layers look alike."""
    return re.sub(r"(?<=[.\[])\d+(?=[.\]])", "*", name, count=1)


def _is_foreign(directory: Path) -> bool:
    return (directory / "config.json").exists() or directory.suffix == ".gguf"


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Refuse a target that would be lost or cannot be made, before the source is read."""
    if target.exists():
        if source.resolve().is_relative_to(target):
            raise ValueError(f"{target} is or holds the source; choose another target")
        empty = target.is_dir() and not any(target.iterdir())
        model = target.is_dir() and any((target / name).exists() for name in (ARCH_FILE, "config.json"))
        if not empty and not model:
            raise ValueError(f"{target} exists and is no model; choose another target")
        if not empty and not overwrite:
            raise ValueError(f"{target} already holds a model; choose another target or allow overwriting it")
    blocking = next((parent for parent in target.parents if parent.exists()), None)
    if blocking is not None and not blocking.is_dir():
        raise ValueError(f"{target} cannot be made: {blocking} is a file; choose another target")


def _check_tokenizer(files: Mapping[str, bytes], arch: Arch, source: Path) -> None:
    """Refuse a model without a tokenizer, or with one that has more ids than the model has rows."""
    if "tokenizer.json" not in files:
        raise ValueError(
            f"{source / 'tokenizer.json'} does not exist; a model needs its tokenizer in this format, so save it as a fast "
            "tokenizer next to the weights first"
        )
    try:
        tokenizer = json.loads(files["tokenizer.json"])
        vocab = tokenizer["model"]["vocab"]
        ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
        largest = max([*ids, *(token["id"] for token in tokenizer.get("added_tokens") or [])])
    except (ValueError, KeyError, TypeError) as err:
        raise ValueError(
            f"{source / 'tokenizer.json'}: not a tokenizer ({type(err).__name__}: {err}); download it again"
        ) from err
    if largest >= arch.vocab_size:
        raise ValueError(
            f"{source / 'tokenizer.json'}: has the id {largest}, but the model has {arch.vocab_size} rows (vocab_size); "
            "the two do not belong together"
        )


@contextmanager
def _staged(target: Path) -> Iterator[Path]:
    """Give a folder beside the target that takes its place when all went well and is removed when not."""
    with storage_errors(f"{target} could not be written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    replaced = stage / "replaced"
    try:
        # One folder deeper, because the folder itself was made with the narrow permissions of temporary files.
        yield stage / "model"
        with storage_errors(f"{target} could not be written"):
            if target.exists():
                rename(target, replaced)
            rename(stage / "model", target)
    finally:
        if replaced.exists() and not target.exists():
            replaced.rename(target)
        shutil.rmtree(stage, ignore_errors=True)


def _write(folder: Path, to: Kind, arch: Arch, params: Params, files: Mapping[str, bytes], dtype: str, shard_size: int) -> None:
    if to == "orbax":
        cpu = jax.local_devices(backend="cpu")[0]  # a model may be larger than the memory of one accelerator
        save_params(folder, jax.device_put(params, cpu), {ARCH_FILE: arch.to_json().encode(), **files})
        return
    with storage_errors(f"{folder} could not be written"):
        folder.mkdir()
        write_hf(folder, arch, params, files, dtype, shard_size)
        for path in folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(folder)


def _verify(folder: Path, to: Kind, arch: Arch, params: Params, files: Mapping[str, bytes], dtype: str) -> None:
    """Read the written model and compare every bit of it."""
    if to == "orbax":
        loaded = _load(folder, arch, np.dtype(dtype))
        tensors = {slot.name: view(loaded, slot) for slot in slots(arch)}
    else:
        model = open_hf(folder)
        if model.arch != arch:
            raise StorageError(f"{folder}: config.json reads back as {model.arch} instead of {arch}")
        tensors = {slot.name: model.read(slot.name) for slot in slots(arch)}
    for slot in slots(arch):
        wrote, got = view(params, slot), tensors[slot.name]
        if _bits(wrote) != _bits(got):
            raise StorageError(f"{folder}: {slot.name} reads back with other values; check the storage and convert again")
    for name, content in files.items():
        if (folder / name).read_bytes() != content:
            raise StorageError(f"{folder}: {name} reads back with other content; check the storage and convert again")


def _bits(array: np.ndarray) -> Any:
    return array.dtype, array.tobytes()


def _load(directory: Path, arch: Arch, dtype: np.dtype) -> Params:
    """Load a checkpoint of rljax into numpy arrays."""
    place = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), abstract_params(arch, dtype)
    )
    return jax.tree.map(np.asarray, load_params(directory, abstract))
