"""A target folder that is whole or not there.

Owns the hidden folder in which a target is prepared, the renames that put it in its place, and what killed conversions
left. Refuses to own what is written.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rljax.manifest import StorageError, lock_directory, rename, storage_errors

_SPARE_BYTES = 64 << 20  # for the tokenizer, metadata and the file system's own


def check_target(source: Path, target: Path, overwrite: bool, marks: tuple[str, ...]) -> None:
    """Refuse a target that would be lost or cannot be made, before the source is read.

    Args:
        source: What is to be converted.
        target: The folder to create.
        overwrite: Whether a model there may be replaced.
        marks: Files of which one makes a folder a model.

    Raises:
        ValueError: It exists or is in the way; says what to do.
    """
    if target.exists():
        if source.resolve().is_relative_to(target):
            raise ValueError(f"{target} is or holds the source; choose another target")
        empty = target.is_dir() and not any(target.iterdir())
        model = target.is_dir() and any((target / name).exists() for name in marks)
        if not empty and not model:
            raise ValueError(f"{target} exists and is no model; choose another target")
        if not empty and not overwrite:
            raise ValueError(f"{target} already holds a model; choose another target or allow overwriting it")
    blocking = next((parent for parent in target.parents if parent.exists()), None)
    if blocking is not None and not blocking.is_dir():
        raise ValueError(f"{target} cannot be made: {blocking} is a file; choose another target")


@contextmanager
def staged(target: Path, num_bytes: int) -> Iterator[Path]:
    """Give a folder beside the target that takes its place when all went well and is removed when not.

    What killed conversions to this target left is removed first; one that is still at work is an error.

    Args:
        target: The folder to create or replace.
        num_bytes: Room it will need.

    Raises:
        StorageError: It cannot be written, there is no room, or another conversion to it is at work.
    """
    with storage_errors(f"{target} could not be written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        free = shutil.disk_usage(target.parent).free
        if free < num_bytes + _SPARE_BYTES:
            raise StorageError(f"{target} needs {num_bytes:,} bytes, and {free:,} are free; make room or choose another disk")
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        lock = lock_directory(stage)
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
        os.close(lock)
        shutil.rmtree(stage, ignore_errors=True)


def _sweep(target: Path) -> None:
    """Remove what killed conversions to a target left, and put back what one of them was about to replace."""
    left = [path for path in target.parent.iterdir() if path.name.startswith(f".{target.name}.") and path.suffix == ".partial"]
    for stage in (path for path in left if path.is_dir()):
        try:
            lock = lock_directory(stage)
        except StorageError as error:
            raise StorageError(f"another conversion writes {target} (its folder is {stage}); wait for it or stop it") from error
        try:
            if (stage / "replaced").exists() and not target.exists():
                rename(stage / "replaced", target)
            shutil.rmtree(stage)
        finally:
            os.close(lock)
