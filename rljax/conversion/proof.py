"""Proving that a written model is the model that was read.

Owns both comparisons, made between the source opened again and the target read back: every bit of every tensor, a few rows
at a time; and the logits of both models for fixed prompts, each loaded in the way a user would load it. Refuses to own what
happens when they differ.
"""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.checkpoint import load_params
from rljax.conversion.merge import Adapter
from rljax.conversion.sources import Kind, open_source
from rljax.data.tokenizer import Tokenizer
from rljax.manifest import StorageError
from rljax.models import decoder
from rljax.models.arch import Arch
from rljax.models.layout import Outside, Slice, cast, fill, memory_limit, slices, tiles
from rljax.parallel import in_parallel
from rljax.pytree import Params

PROMPTS = (
    "The capital of France is",
    "What is 12 * 7? Answer with just the number.",
    "def add(a, b):\n    return a +",
    "Größe, naïve, 東京, Привет 🙂",
)
"""Texts whose logits are compared; in addition to ids spread evenly over the vocabulary."""

_LONGEST = 32  # tokens of a prompt that are used
_HEADROOM = 1.25  # activations, logits and a copy of the largest parameter


@dataclass(frozen=True, slots=True)
class LogitComparison:
    """How the logits of two models differ on the fixed prompts.

    Example:
        LogitComparison(rows=5, tokens=94, max_abs_difference=0.0, top1_agreement=1.0, source_dtype="float32")
    """

    rows: int
    """Prompts."""
    tokens: int
    """Their tokens."""
    max_abs_difference: float
    """Largest difference between two logits, float32."""
    top1_agreement: float
    """Share of the positions whose most likely next token is the same."""
    source_dtype: str
    """Type in which the source was loaded: the target's, or float32 where that would have lost precision."""


def compare_adapters(source: Adapter, target: Adapter, dtype: str) -> None:
    """Compare what two adapters are, and every bit of their factors.

    Args:
        source: The source.
        target: What was written, opened.
        dtype: Type of its factors.

    Raises:
        StorageError: Something differs; names it.
    """
    if (source.spec, {dtype}) != (target.spec, target.types):
        raise StorageError(f"the adapter reads back as {target.spec} of {target.types} instead of {source.spec} of {dtype}")
    for (name, _, wanted), (_, _, found) in zip(source.tensors(dtype), target.tensors(dtype), strict=True):
        if (found.shape, found.tobytes()) != (wanted.shape, wanted.tobytes()):
            raise StorageError(f"{name} reads back with other values; check the storage and convert again")


def compare_bits(source: Outside, target: Outside, dtype: np.dtype) -> None:
    """Compare every bit of every tensor, and every file, a few rows at a time.

    Args:
        source: The source.
        target: What was written, opened.
        dtype: Type the source's tensors were converted to.

    Raises:
        StorageError: Something differs; names it.
    """
    if target.arch != source.arch:
        raise StorageError(f"the architecture reads back as {target.arch} instead of {source.arch}")
    for name, content in source.files.items():
        if target.files.get(name) != content:
            raise StorageError(f"{name} reads back with other content; check the storage and convert again")

    def compare(piece: Slice) -> None:
        shape = np.broadcast_to(np.empty((), dtype), piece.shape)  # takes no memory
        for slot in piece.slots:
            for first, last, _ in tiles(shape, slot):
                wanted, found = cast(source.rows(slot.name, first, last), dtype), target.rows(slot.name, first, last)
                bits = np.dtype(f"u{dtype.itemsize}")
                if found.dtype != dtype or not np.array_equal(wanted.view(bits), found.view(bits)):
                    raise StorageError(f"{slot.name} reads back with other values; check the storage and convert again")

    # Twice the slice: it may be held on both sides.
    in_parallel(compare, slices(source.arch), lambda piece: piece.size * dtype.itemsize * 2, memory_limit(source.arch, dtype))


def compare_logits(source: Outside, checkpoint: Path | None, to: Kind, target: Path, dtype: str) -> LogitComparison:
    """Compare the logits of two models that should be the same, one in memory at a time.

    Args:
        source: The source, opened again.
        checkpoint: Where it is, if it is a checkpoint of rljax: that is loaded as training does.
        to: Format of the target.
        target: What was written.
        dtype: Type of its tensors.

    Raises:
        StorageError: They differ although no precision was lost; or the target's are not finite while the source's are.
    """
    lossless = all(_fits(origin.dtype, dtype) for origin in source.origins.values())
    loaded_as = dtype if lossless else "float32"
    ids, real = _prompt_ids(target, source.arch)
    before = _run(source.arch, _load(source, checkpoint, loaded_as), ids, real)
    written = open_source(to, target)
    after = _run(written.arch, _load(written, target if to == "orbax" else None, dtype), ids, real)
    same = np.array_equal(before, after, equal_nan=True)
    difference = 0.0 if same else float(np.abs(before - after).max(where=np.isfinite(before - after), initial=0.0))
    agreement = float((before.argmax(-1) == after.argmax(-1)).mean())
    found = LogitComparison(len(ids), len(before), difference, agreement, loaded_as)
    if (lossless and not same) or (np.isfinite(before).all() and not np.isfinite(after).all()):
        raise StorageError(f"{target} computes other logits than the source: {dataclasses.asdict(found)}")
    return found


def logits_fit(arch: Arch) -> bool:
    """Say whether this machine has the memory to run one of the two models, in float32."""
    available = available_memory()
    return available is None or decoder.count(arch) * 4 * _HEADROOM < available


def available_memory() -> int | None:
    """Return the memory that a process could still take (bytes), or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _fits(stored: str, dtype: str) -> bool:
    return dtype == "float32" or stored in ("BF16", "bfloat16")


def _prompt_ids(folder: Path, arch: Arch) -> tuple[np.ndarray, np.ndarray]:
    """Return token ids [b, s] and which of them are real."""
    longest = min(_LONGEST, arch.max_position)
    rows = [np.linspace(0, arch.vocab_size - 1, longest).astype(int).tolist()]
    tokenizer = Tokenizer.load(folder)
    rows += [ids for text in PROMPTS if (ids := tokenizer.encode(text)[:longest])]
    ids = np.zeros((len(rows), longest), np.int32)
    for row, found in zip(ids, rows, strict=True):
        row[: len(found)] = found
    return ids, np.arange(longest)[None] < np.array([len(row) for row in rows])[:, None]


def _load(opened: Outside, checkpoint: Path | None, dtype: str) -> Params:
    """Load a model onto the host: a checkpoint of rljax through Orbax, as training does."""
    if checkpoint is None:
        return fill(opened, np.dtype(dtype))[0]
    place = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    shapes = decoder.abstract_params(opened.arch, np.dtype(dtype))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)
    return load_params(checkpoint, shapes)


def _run(arch: Arch, params: Params, ids: np.ndarray, real: np.ndarray) -> np.ndarray:
    """Return the float32 logits [n, v] of the real tokens, those of padding rows of the vocabulary too."""
    arch = dataclasses.replace(arch, valid_vocab=None)
    positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        found: Any = _logits(arch, params, *(jnp.asarray(part) for part in (ids, positions, real.astype(np.int32))))
    return np.asarray(found)[real]


@partial(jax.jit, static_argnums=0)
def _logits(arch: Arch, params: Params, ids: Any, positions: Any, segments: Any) -> Any:
    model = decoder.merge(arch, params)
    return decoder.logits(model, model(ids, positions, segments, dtype=jnp.dtype("float32"))[0])
