"""Converting models and adapters between the formats of others and rljax's own, and opening a checkpoint of rljax.

Owns the verb `convert`: the plan, the order of writing and proving, and what is told. Also owns `read_checkpoint`, through
which training, evaluation and sampling get a model. Refuses to own formats (`models/hf.py`, `models/gguf.py`, `zarr.py`,
`checkpoint.py`) and the single stages (`conversion/`).

    source --open, check--> plan --a layer at a time--> .name.XXXX.partial --open both, compare--> rename --> target
"""

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rljax.checkpoint import load_params
from rljax.config import DType
from rljax.conversion.merge import ADAPTERS, Adapter, identity_of, merged, open_adapter, write_adapter
from rljax.conversion.proof import LogitComparison, compare_adapters, compare_bits, compare_logits, logits_fit
from rljax.conversion.sources import MARKS, Kind, check_content, open_source, parameter_part, read_arch, source_kind
from rljax.conversion.stage import check_target, staged
from rljax.conversion.write import write_model, write_report
from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params, count
from rljax.models.layout import Outside, slots
from rljax.models.peft import refuse_fused
from rljax.pytree import Params

SHARD_SIZE = 5_000_000_000
"""Default limit of one safetensors file (bytes)."""

Verify = Literal["auto", "none", "bits", "logits"]
"""How a conversion is proved: `bits` compares every tensor, `logits` also what both models compute."""

_USUAL: dict[Kind, Kind] = {"hf": "orbax", "gguf": "orbax", "orbax": "hf", "peft": "adapter", "adapter": "peft"}

LOGITS_BELOW = 8_000_000_000
"""Models of fewer parameters are proved by logits too, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One tensor of the source, or rows of a fused one, and what they become. Names are unique on both sides.

    Example:
        PlanRow(source="blk.3.attn_k.weight", source_type="Q4_1", target="layers.qkv[3].key", shape=(192, 576),
                dtype="float32", transform="key")
    """

    source: str
    """Name in the source."""
    source_type: str
    """Its stored type, in the words of the source format."""
    target: str
    """Name in the target; for a checkpoint of rljax the parameter, its layer and the part of it."""
    shape: tuple[int, ...]
    """Shape as a Hugging Face checkpoint has it."""
    dtype: str
    """Type in the target."""
    transform: str
    """How its dims are arranged in a parameter: a key of `models.layout.TRANSFORMS`, or `factor` of an adapter."""


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """What a conversion did, or with `dry_run` would do.

    Example:
        ConvertReport(source=..., target=..., kind="gguf", to="orbax", arch=arch, dtype="float32", plan=(row,), notices=(),
                      num_params=134515008, num_bytes=538060032, seconds=9.5, verified=True, logits=None, written=True)
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
    """The model, or an adapter's base."""
    dtype: str
    """Type of the written parameters."""
    plan: tuple[PlanRow, ...]
    """One row per tensor; for each part of a fused one."""
    notices: tuple[str, ...]
    """What was assumed, left out, or looks wrong."""
    num_params: int
    """Parameters of what was written."""
    num_bytes: int
    """Their size in the target (bytes)."""
    seconds: float
    """Duration of reading, writing and verifying (seconds)."""
    verified: bool
    """Whether the target was read back and compared bit by bit."""
    logits: LogitComparison | None
    """How the logits of source and target differ, if they were compared."""
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
    to: Kind | None = None,
    base: Path | None = None,
    dtype: DType | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: Verify = "auto",
    shard_size: int = SHARD_SIZE,
    console: Console | None = None,
) -> ConvertReport:
    """Convert a model or an adapter; the target is complete and proved, or not there at all.

    Beside a written target lies `NAME.conversion.json`, the report as JSON. An adapter that is converted to the format of a
    model is merged into its base.

    Args:
        source: A Hugging Face folder, a .gguf file, a checkpoint of rljax, or an adapter of PEFT or of rljax.
        target: The folder to create.
        to: Target format, any but `gguf`; default: `hf` for a checkpoint of rljax and `orbax` for other models, `peft` for
            an adapter of rljax and `adapter` for one of PEFT.
        base: The model an adapter belongs to; default: the one it names, if that is a folder here.
        dtype: Type of the written parameters; default: as stored in a checkpoint of rljax or an adapter, else float32.
        overwrite: Replace a target that is itself a model or an adapter.
        dry_run: Open and check the source and plan, but read no weights of a model and write nothing.
        verify: Whether to read back what was written and compare it, bit by bit or by logits too; `auto` does both for
            models below `LOGITS_BELOW` parameters that fit in memory, and bits alone for others and for adapters.
        shard_size: Largest safetensors file (bytes); only for `hf`.
        console: Where to show the plan and the outcome; default: nowhere.

    Raises:
        ValueError: The source is not a complete supported model or adapter, the adapter is for another base, or the target
            exists or is in the way.
        StorageError: Writing failed, or what was read back is not what was written; the target is as it was before.
    """
    start = time.monotonic()
    source, target = source.expanduser(), target.expanduser().resolve()
    if shard_size < 1:
        raise ValueError(f"shard_size is {shard_size}; it must be a positive number of bytes")
    kind = source_kind(source)
    to = to or _USUAL[kind]
    check_target(source, target, overwrite, tuple(MARKS))
    opened = _open(kind, source, to, base)
    report = _planned(source, target, kind, to, opened, dtype)
    if console is not None:
        show_plan(report, console)
    if not dry_run:
        report = (
            _write_adapter(report, opened, verify)
            if isinstance(opened, Adapter)
            else _write_model(report, opened, base, verify, shard_size)
        )
    report = dataclasses.replace(report, seconds=time.monotonic() - start)
    if report.written:
        write_report(target.with_name(f"{target.name}.conversion.json"), _as_json(report))
    if console is not None:
        show_outcome(report, console)
    return report


def _planned(source: Path, target: Path, kind: Kind, to: Kind, opened: Outside | Adapter, dtype: DType | None) -> ConvertReport:
    """Return the report of a conversion that is still to be done."""
    dtype = dtype or ("bfloat16" if opened.types == {"bfloat16"} else "float32")
    plan = tuple(_adapter_plan(opened, kind, dtype) if isinstance(opened, Adapter) else _plan(opened, to, dtype))
    num_params = sum(math.prod(row.shape) for row in plan)
    return ConvertReport(
        source=source,
        target=target,
        kind=kind,
        to=to,
        arch=opened.arch,
        dtype=dtype,
        plan=plan,
        notices=opened.notices,
        num_params=num_params,
        num_bytes=num_params * np.dtype(dtype).itemsize,
        seconds=0.0,
        verified=False,
        logits=None,
        written=False,
    )


def _open(kind: Kind, source: Path, to: Kind, base: Path | None) -> Outside | Adapter:
    """Open what is to be converted: a model, an adapter, or the two merged."""
    if kind in ADAPTERS:
        adapter = open_adapter(kind, source, base)
        if to == "peft":
            refuse_fused(adapter.arch, str(adapter.base))
        if to == "adapter":
            identity_of(adapter.base)
        return adapter if to in ADAPTERS else merged(adapter)
    if base is not None:
        raise ValueError(f"{source} is a whole model, and --base is for adapters; leave it out")
    if to in ADAPTERS:
        raise ValueError(f"{source} is a whole model, of which no adapter can be made; choose --to hf or --to orbax")
    return open_source(kind, source)


def _write_model(report: ConvertReport, model: Outside, base: Path | None, verify: Verify, shard_size: int) -> ConvertReport:
    """Write a model, prove it and put it in its place."""
    notices, logits = list(report.notices), None
    if report.kind == "orbax":
        check_content(report.source)
    if verify == "auto":
        fits = report.num_params < LOGITS_BELOW and logits_fit(report.arch)
        if not fits:
            notices.append("logits were not compared: the model is too large to be run here (verify=logits insists)")
        verify = "logits" if fits else "bits"
    with staged(report.target, report.num_bytes) as folder:
        notices += write_model(folder, report.to, model, report.dtype, shard_size)
        if verify != "none":
            reopened = _open(report.kind, report.source, report.to, base)
            assert isinstance(reopened, Outside)
            compare_bits(reopened, open_source(report.to, folder), np.dtype(report.dtype))
            if verify == "logits":
                checkpoint = report.source if report.kind == "orbax" else None
                logits = compare_logits(reopened, checkpoint, report.to, folder, report.dtype)
    return dataclasses.replace(report, notices=tuple(notices), verified=verify != "none", logits=logits, written=True)


def _write_adapter(report: ConvertReport, adapter: Adapter, verify: Verify) -> ConvertReport:
    """Write an adapter, prove it and put it in its place."""
    if verify == "logits":
        raise ValueError("an adapter alone computes no logits; choose --verify bits, or merge it with --to hf or --to orbax")
    with staged(report.target, report.num_bytes) as folder:
        write_adapter(folder, report.to, adapter, report.dtype)
        if verify != "none":
            compare_adapters(adapter, open_adapter(report.to, folder, adapter.base), report.dtype)
    return dataclasses.replace(report, verified=verify != "none", written=True)


def read_checkpoint(
    directory: Path,
    shardings: Callable[[Arch, Params], Params] | None = None,
    dtype: str = "float32",
    change: Callable[[str, jax.Array], Any] | None = None,
) -> Checkpoint:
    """Open a checkpoint of rljax and load its parameters onto the devices.

    Args:
        directory: A folder written by `convert` or by training.
        shardings: From the architecture and the abstract parameters to the sharding of each; default: all on the first device.
        dtype: Type of the loaded parameters.
        change: What is made of each parameter, one at a time, by name; default: nothing.

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
    return Checkpoint(arch, load_params(directory, abstract, change), directory)


def show_plan(report: ConvertReport, console: Console) -> None:
    """Show the plan, one line for each kind of tensor: the layers of a model are alike."""
    console.print(f"{report.source} ({report.kind}) -> {report.target} ({report.to}, {report.dtype})", markup=False)
    table = Table(box=box.SIMPLE)
    for heading in ("source", "type", "target", "transform", "shape", "count"):
        table.add_column(heading, justify="right" if heading == "count" else "left", overflow="fold")
    groups: dict[tuple[str, ...], int] = {}
    for row in report.plan:
        shape = " x ".join(map(str, row.shape))
        line = (_without_numbers(row.source), row.source_type, _without_numbers(row.target), row.transform, shape)
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
    if report.logits is not None:
        proof += f", logits of {report.logits.rows} prompts differ by at most {report.logits.max_abs_difference:.2g}"
    console.print(f"wrote {report.target}: {size}, {proof}, in {report.seconds:.1f} s", markup=False)


def _as_json(report: ConvertReport) -> dict[str, Any]:
    """Return the report as plain JSON values."""
    return {**dataclasses.asdict(report), "source": str(report.source), "target": str(report.target)}


def _plan(model: Outside, to: Kind, dtype: str) -> Iterator[PlanRow]:
    """Yield one row per slot, after checking that together they are every parameter, once."""
    table = slots(model.arch)
    filled = sum(math.prod(slot.shape) for slot in table)
    assert filled == count(model.arch), f"the tensors fill {filled} of {count(model.arch)} elements"
    for slot in table:
        origin = model.origins[slot.name]
        target = slot.name if to == "hf" else parameter_part(slot)
        yield PlanRow(origin.name, origin.dtype, target, slot.shape, dtype, slot.part)


def _adapter_plan(adapter: Adapter, kind: Kind, dtype: str) -> Iterator[PlanRow]:
    """Yield one row per layer of a factor."""
    stored = "bfloat16" if adapter.types == {"bfloat16"} else "float32"
    for theirs, ours, values in adapter.tensors(stored):
        source, target = (theirs, ours) if kind == "peft" else (ours, theirs)
        yield PlanRow(source, values.dtype.name, target, values.shape, dtype, "factor")


def _without_numbers(name: str) -> str:
    """Replace the numbers of layers and experts by stars, so that the rows of all of them look alike."""
    return re.sub(r"(?<=[.\[,])\d+(?=[.\],])", "*", name)
