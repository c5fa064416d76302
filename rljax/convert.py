"""Converting models between Hugging Face folders, GGUF files and rljax checkpoints, and opening the latter.

Owns the verb `convert`: the plan, the order of writing and proving, and what is told. Also owns `read_checkpoint`, through
which training, evaluation and sampling get a model. Refuses to own formats (`models/hf.py`, `models/gguf.py`, `zarr.py`,
`checkpoint.py`) and the single stages (`conversion/`).

    source --open, check--> plan --a layer at a time--> .name.XXXX.partial --open both, compare--> rename --> target
"""

import dataclasses
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
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
from rljax.conversion.proof import LogitComparison, compare_bits, compare_logits, logits_fit
from rljax.conversion.sources import (
    ARCH_FILE,
    Kind,
    check_content,
    open_source,
    parameter_part,
    read_arch,
    source_kind,
    stored_dtype,
)
from rljax.conversion.stage import check_target, staged
from rljax.conversion.write import write_model, write_report
from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params, count
from rljax.models.layout import Outside, slots
from rljax.pytree import Params

SHARD_SIZE = 5_000_000_000
"""Default limit of one safetensors file (bytes)."""

Verify = Literal["auto", "none", "bits", "logits"]
"""How a conversion is proved: `bits` compares every tensor, `logits` also what both models compute."""

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
    """How its dims are arranged in a parameter: a key of `models.layout.TRANSFORMS`."""


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
    """The model."""
    dtype: str
    """Type of the written parameters."""
    plan: tuple[PlanRow, ...]
    """One row per tensor; for each part of a fused one."""
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
    to: Literal["orbax", "hf"] | None = None,
    dtype: DType | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    verify: Verify = "auto",
    shard_size: int = SHARD_SIZE,
    console: Console | None = None,
) -> ConvertReport:
    """Convert a model; the target is complete and proved, or not there at all.

    Beside a written target lies `NAME.conversion.json`, the report as JSON.

    Args:
        source: A Hugging Face folder, a .gguf file, or a checkpoint of rljax.
        target: The folder to create.
        to: Target format; default: `hf` for a checkpoint of rljax, else `orbax`.
        dtype: Type of the written parameters; default: as stored in a checkpoint of rljax, else float32.
        overwrite: Replace a target that is itself a model.
        dry_run: Open and check the source and plan, but read no weights and write nothing.
        verify: Whether to read back what was written and compare it, bit by bit or by logits too; `auto` does both for
            models below `LOGITS_BELOW` parameters that fit in memory, and bits alone for others.
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
    check_target(source, target, overwrite, (ARCH_FILE, "config.json"))
    model = open_source(kind, source)
    dtype = dtype or (stored_dtype(source) if kind == "orbax" else "float32")
    notices = (*model.notices, *_check_tokenizer(model.files, model.arch, source))
    report = ConvertReport(
        source=source,
        target=target,
        kind=kind,
        to=to,
        arch=model.arch,
        dtype=dtype,
        plan=tuple(_plan(model, to, dtype)),
        notices=notices,
        num_params=count(model.arch),
        num_bytes=count(model.arch) * np.dtype(dtype).itemsize,
        seconds=0.0,
        verified=False,
        logits=None,
        written=False,
    )
    if console is not None:
        show_plan(report, console)
    if not dry_run:
        report = _carry_out(report, model, verify, shard_size)
    report = dataclasses.replace(report, seconds=time.monotonic() - start)
    if report.written:
        write_report(target.with_name(f"{target.name}.conversion.json"), _as_json(report))
    if console is not None:
        show_outcome(report, console)
    return report


def _carry_out(report: ConvertReport, model: Outside, verify: Verify, shard_size: int) -> ConvertReport:
    """Write the target, prove it and put it in its place."""
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
            reopened = open_source(report.kind, report.source)
            compare_bits(reopened, open_source(report.to, folder), np.dtype(report.dtype))
        if verify == "logits":
            logits = compare_logits(report.kind, report.source, report.to, folder, report.dtype)
    return dataclasses.replace(report, notices=tuple(notices), verified=verify != "none", logits=logits, written=True)


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


def _without_numbers(name: str) -> str:
    """Replace the numbers of layers and experts by stars, so that the rows of all of them look alike."""
    return re.sub(r"(?<=[.\[,])\d+(?=[.\],])", "*", name)


def _check_tokenizer(files: Mapping[str, bytes], arch: Arch, source: Path) -> list[str]:
    """Refuse a model without a tokenizer, or with one that has more ids than the model has rows; note unused rows."""
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
    unused = arch.vocab_size - 1 - largest
    return [f"the last {unused} rows of the embedding belong to no token"] if unused else []
