"""Folders that prove what they hold: durable files, a manifest with their digests, and a lock.

Owns the part of a checkpoint that knows nothing of arrays: making files durable, writing and checking the manifest,
renaming, and refusing a second writer. Refuses to own what the files mean and which folder is used. Nothing here imports
jax, so a command line can know a `StorageError` without it.
"""

import fcntl
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rljax.faults import fault_point

FORMAT = 1
"""Version of the layout of a checkpoint; part of every manifest."""
MANIFEST = "manifest.json"
"""Name of the file that makes a folder a checkpoint."""

_HASH_THREADS = 4

T = TypeVar("T")


class StorageError(RuntimeError):
    """The storage failed or holds nothing usable: a write that did not commit, or checkpoints of which none is good."""


class DamagedError(Exception):
    """A folder does not hold what its manifest says; the message names the file."""


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn any failure inside into a `StorageError` that says what could not be done, and why."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        raise StorageError(f"{what}: {error}") from error


def local_path(directory: Path) -> Path:
    """Return the absolute path with symbolic links resolved.

    Raises:
        ValueError: It is the address of an object store, such as gs://bucket.
    """
    if re.match(r"\w+:/", str(directory)):
        raise ValueError(f"{directory} is an object-store address; give a directory of a mounted file system instead")
    return directory.resolve()


def lock_directory(directory: Path) -> int:
    """Take the lock of a directory for as long as this process lives.

    Returns:
        The descriptor that holds the lock; closing it gives the directory back, and the system does so on any exit.

    Raises:
        StorageError: Another process holds it; the message names that process.
    """
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except BlockingIOError as error:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
        os.close(descriptor)
        raise StorageError(f"{directory} is in use by another run ({owner}); stop it or choose another run.dir") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sync_file(path: Path) -> None:
    """Make what has been written to a file durable."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a folder and make the new name durable.

    Raises:
        OSError: The target exists and is not an empty folder, or the file system refused.
    """
    source.rename(target)
    sync_folder(target.parent)
    if source.parent != target.parent:
        sync_folder(source.parent)


def seal(folder: Path, body: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, int]:
    """Make all files of a folder durable and write the manifest that proves them.

    Args:
        folder: What is to be proved, complete and no longer written to.
        body: What the manifest says beside the files; plain JSON values.
        known: `size` and `sha256` of files whose writer made them durable and took both from what it wrote, by their path
            inside the folder; they are not read again.

    Returns:
        Size of every file (bytes), by its path inside the folder.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def measure(name: str) -> Mapping[str, Any]:
        if known is not None and name in known:
            return known[name]
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"size": os.fstat(file.fileno()).st_size, "sha256": digest}

    facts = dict(zip(names, _each(measure, names), strict=True))
    for inner in (path for path in folder.rglob("*") if path.is_dir()):
        sync_folder(inner)
    fault_point("checkpoint.pre_manifest")
    draft = folder / f"{MANIFEST}.partial"
    with open(draft, "wb") as file:
        file.write(_render({**body, "format": FORMAT, "files": facts}))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(folder / MANIFEST)
    sync_folder(folder)
    fault_point("checkpoint.post_manifest")
    return {name: fact["size"] for name, fact in facts.items()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder: what `seal` was given, and `files` with `size` and `sha256` of each.

    Raises:
        DamagedError: It is missing or any byte of it has changed.
        ValueError: It has a format that this version does not know.
    """
    try:
        raw = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise DamagedError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    try:
        body = json.loads(raw)["body"]
        intact = raw == _render(body)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedError(f"{MANIFEST} is not readable ({error})") from error
    if not intact:
        raise DamagedError(f"{MANIFEST} does not match its own digest")
    if body["format"] != FORMAT:
        newer = isinstance(body["format"], int) and body["format"] > FORMAT
        remedy = "a newer rljax wrote it, so update rljax" if newer else "convert the model again"
        raise ValueError(f"{folder} has checkpoint format {body['format']}, and this rljax reads format {FORMAT}; {remedy}")
    return body


def check_files(folder: Path, facts: Mapping[str, Mapping[str, Any]], *, share: int = 0, shares: int = 1) -> None:
    """Compare the files of a folder with its manifest.

    Args:
        folder: The sealed folder.
        facts: `files` of its manifest, or some of them.
        share: Which part of the files to read, 0 .. shares - 1, where several processes divide the work.
        shares: Number of parts.

    Raises:
        DamagedError: A file is missing or unreadable, or its size or content differs.
    """

    def examine(name: str) -> None:
        try:
            with open(folder / name, "rb") as file:
                _compare_size(name, os.fstat(file.fileno()).st_size, facts[name])
                if hashlib.file_digest(file, "sha256").hexdigest() != facts[name]["sha256"]:
                    raise DamagedError(f"{name} has other content than was saved (SHA-256 differs)")
        except OSError as error:
            raise DamagedError(f"{name} cannot be read ({error.strerror})") from error

    _each(examine, sorted(facts)[share::shares])


def check_sizes(folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the sizes of files alone, where their content is compared later.

    Raises:
        DamagedError: A file is missing or its size differs.
    """
    for name in sorted(facts):
        try:
            _compare_size(name, (folder / name).stat().st_size, facts[name])
        except OSError as error:
            raise DamagedError(f"{name} cannot be read ({error.strerror})") from error


def _compare_size(name: str, size: int, facts: Mapping[str, Any]) -> None:
    if size != facts["size"]:
        raise DamagedError(f"{name} is {size} bytes long instead of {facts['size']}")


def _each(work: Callable[[str], T], names: list[str]) -> list[T]:
    """Apply `work` to every name, several at a time; reading and hashing both leave the interpreter free."""
    with ThreadPoolExecutor(_HASH_THREADS) as pool:
        return list(pool.map(work, names))


def _render(body: Mapping[str, Any]) -> bytes:
    """Write a manifest in its one canonical form, with a digest of itself, so that any changed byte shows."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({"body": body, "sha256": digest}, sort_keys=True, indent=1) + "\n").encode()
