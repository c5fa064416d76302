"""Checkpoints that are either whole or not there, and that say so before anything is read from them.

Owns what is on disk of a run (`CheckpointStore`) and of a converted model (`save_params`, `load_params`): how it is
written, proved, kept, found again and deleted. Orbax moves the arrays; the proof is ours, because Orbax returns wrong
values for a file with a flipped bit and does not fall back to an older checkpoint. Refuses to own when to save, what the
arrays mean, and where a run continues.

    run/checkpoints/
        .lock                    held by the one run that may write here; the system releases it when that run dies
        saving-00000030.1/       being written; swept at the next start or save when its writer died
        step-00000020/           committed: the rename from saving-* is the commit
            arrays/              Orbax (OCDBT), one array per leaf of the tree
            manifest.json        RunMeta, every leaf, size and SHA-256 of every file, and a digest of itself
        deleting-00000010/       an old checkpoint on its way out; swept like saving-*
        quarantine/              damaged checkpoints, moved here once an older good one was restored; never deleted

    save()      copy to the host; then, in the background, Orbax commits -> files hashed and made durable -> manifest
                -> rename -> old ones deleted
    restore()   newest first: manifest and every file checked -> leaves compared -> arrays read onto their shardings

The directory must be a POSIX file system that all processes share (local disk, NFS, Lustre, a mounted bucket with atomic
rename). All processes call save, wait, restore and close in the same order; process 0 alone locks, writes manifests, renames
and deletes, so a failure there surfaces on process 0 and ends the others through the runtime. Files are verified by all
processes, each its share, and all agree on the checkpoint before one array is read.
"""

import dataclasses
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from rljax.faults import fault_point
from rljax.leaves import check_leaves, describe, is_key, like, live_leaves, wanted_leaves
from rljax.manifest import (
    MANIFEST,
    DamagedError,
    StorageError,
    check_files,
    local_path,
    lock_directory,
    read_manifest,
    rename,
    seal,
    storage_errors,
)
from rljax.records import RunMeta

_ARRAYS = "arrays"
_PARAMS = "params"
_STEP = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"([^/.][^/]*/)?[^/.][^/]*")  # at most one folder deep
_UNFINISHED = re.compile(r"saving-\d{8,}\.\d+|deleting-\d{8,}")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint that could not be used.

    Example:
        Skipped(step=20, reason="arrays/_METADATA is 118 bytes long instead of 2320", moved_to=Path("quarantine/step-00000020"))
    """

    step: int
    """Its step, from its name."""
    reason: str
    """What is wrong with it, naming the file."""
    moved_to: Path | None = None
    """Where it was moved; None as long as it is still in its place."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What `CheckpointStore.restore` found.

    Example:
        Restored(arrays=state, meta=RunMeta(step=10, ...), step=10, skipped=())
    """

    arrays: PyTree
    """The tree that was saved, in the structure and on the shardings asked for."""
    meta: RunMeta
    """The host-side half saved with it."""
    step: int
    """Optimizer updates done when it was saved."""
    skipped: tuple[Skipped, ...]
    """Newer checkpoints that were damaged, newest first."""


class CheckpointStore:
    """The checkpoints of one run: asynchronous saves, verified restores, a lock and retention.

    Use it as a context manager, or call `close` in every case: a save that is still being written when the interpreter
    ends is lost. At most one save is in flight. A failed background save is raised by the next call of `check`, `save`,
    `wait` or `close`; the checkpoints before it are untouched, and the store can be used again.

    Example:
        with CheckpointStore(run_dir / "checkpoints", keep=2) as store:
            restored = store.restore(abstract_state)
            ...
            store.check()
            store.save(step, state, meta)
    """

    def __init__(self, directory: Path, keep: int) -> None:
        """Open the directory for one run: create and lock it, and sweep what killed saves left behind.

        Args:
            directory: Where the checkpoints live; on a file system all processes share.
            keep: Newest checkpoints kept, at least 1.

        Raises:
            ValueError: `keep` is below 1, or `directory` is an object-store address.
            StorageError: Another run holds the directory, or it cannot be created or written.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must be kept")
        self.directory = local_path(directory)
        self._keep = keep
        self._lock: int | None = None
        self._pending: Future[None] | None = None
        self._tries = 0
        if _is_primary():
            with storage_errors(f"the checkpoint directory {self.directory} cannot be used"):
                self.directory.mkdir(parents=True, exist_ok=True)
                self._lock = lock_directory(self.directory)
                try:
                    self._sweep()
                except BaseException:
                    os.close(self._lock)
                    raise
        self._newest = self.latest()
        self._background = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")

    def __enter__(self) -> "CheckpointStore":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except StorageError as failure:  # must not hide the error that ended the run
            error.add_note(f"While closing the checkpoints: {failure}")

    def latest(self) -> int | None:
        """Return the step of the newest committed checkpoint, or None; whether it is good is found out by `restore`."""
        return max(self._steps(), default=None)

    def save(self, step: int, arrays: PyTree, meta: RunMeta, *, blocking: bool = False) -> None:
        """Save a tree of arrays and its host-side half, in the background.

        Returns when every array has been copied to the host, so the caller may donate or overwrite them at once. Waits
        first for the save before it. Afterwards the newest `keep` checkpoints are kept: an older one is deleted only
        when this one is committed and its files have been seen at their full sizes.

        Args:
            step: Optimizer updates done; larger than that of every earlier checkpoint.
            arrays: Any pytree whose leaves are jax arrays; typed random keys included.
            meta: The host-side half, of the same step.
            blocking: Return only when the checkpoint is committed.

        Raises:
            ValueError: The step is not new, differs from `meta.step`, or a leaf is not a live, non-empty jax array.
            StorageError: This save, or the one before it, failed.
        """
        self.wait()
        if meta.step != step:
            raise ValueError(f"the checkpoint of step {step} was given the RunMeta of step {meta.step}")
        if self._newest is not None and step <= self._newest:
            raise ValueError(f"step {step} is not newer than the checkpoint of step {self._newest} in {self.directory}")
        leaves = live_leaves(arrays)
        body = {"meta": dataclasses.asdict(meta), "leaves": describe(leaves)}
        # A name of its own for every try: writers of a failed one may still be at work when the step is saved again.
        self._tries += 1
        folder = self.directory / f"saving-{step:08d}.{self._tries}"
        with storage_errors(_save_failure(step)):
            fault_point("checkpoint.begin")
            if _is_primary():
                self._sweep()
                folder.mkdir()
            writing = _start_writing(folder / _ARRAYS, leaves)
        self._pending = self._background.submit(self._commit, step, folder, body, writing)
        if blocking:
            self.wait()

    def check(self) -> None:
        """Raise the failure of a finished background save, if there is one; costs next to nothing otherwise.

        Raises:
            StorageError: The save of the step it names did not commit, and why.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the save in flight, if any, is committed.

        Raises:
            StorageError: It failed; names the step and the cause.
        """
        if self._pending is not None:
            try:
                self._pending.result()
            finally:
                if self._pending.done():  # not so when the wait itself was interrupted
                    self._pending = None

    def close(self) -> None:
        """Wait for the save in flight and give the directory back. Closing twice is allowed.

        Raises:
            StorageError: That save failed.
        """
        try:
            self.wait()
        finally:
            self._background.shutdown()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def restore(self, abstract: PyTree) -> Restored | None:
        """Restore the newest good checkpoint onto the given shardings.

        Every file is compared with the manifest first. A damaged checkpoint is skipped with a warning; once an older
        one has been restored it is moved to `quarantine/`. Until then nothing on disk changes.

        Args:
            abstract: Tree of `jax.ShapeDtypeStruct` with shardings: exactly the leaves that were saved. The mesh may differ.

        Returns:
            The checkpoint, or None when none was ever committed here.

        Raises:
            ValueError: The checkpoint and `abstract` differ in a leaf, its shape or its type; or a leaf has no sharding.
            StorageError: There are checkpoints and none of them is good, or reading failed.
        """
        self.wait()
        wanted = wanted_leaves(abstract)
        skipped: list[Skipped] = []
        for step in _agreed_steps(self._steps()):
            folder = self._folder(step)
            body, damage = _verify(folder, step)
            if damage is not None:
                skipped.append(Skipped(step, damage))
                _log.warning("checkpoint %s is damaged and skipped: %s", folder, damage)
                continue
            fault_point("checkpoint.verified")
            check_leaves(body["leaves"], wanted, f"the checkpoint {folder}")
            leaves = _read_arrays(folder / _ARRAYS, body["leaves"], wanted)
            fault_point("checkpoint.restored")
            self._newest = step
            return Restored(like(abstract, leaves), _run_meta(body, folder), step, self._quarantine(skipped))
        if skipped:
            reasons = "; ".join(f"step {skip.step}: {skip.reason}" for skip in skipped)
            raise StorageError(
                f"none of the {len(skipped)} checkpoints in {self.directory} is good ({reasons}). Nothing was changed. Repair "
                "or copy back one of them, or start again in another run directory"
            )
        return None

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _steps(self) -> list[int]:
        """List the steps of all committed checkpoints, good or damaged, newest first."""
        if not self.directory.is_dir():
            return []
        names = (_STEP.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted((int(name[1]) for name in names if name), reverse=True)

    def _commit(self, step: int, folder: Path, body: dict[str, Any], writing: ocp.AsyncCheckpointer) -> None:
        """Finish one save; runs in the background thread."""
        try:
            with storage_errors(_save_failure(step)):
                try:
                    fault_point("checkpoint.writing")
                finally:
                    writing.close()
                fault_point("checkpoint.data_written")
                if _is_primary():
                    sizes = seal(folder, body)
                    rename(folder, self._folder(step))
                    fault_point("checkpoint.committed")
                    for name, size in sizes.items():
                        found = (self._folder(step) / name).stat().st_size
                        if found != size:
                            raise StorageError(f"{_save_failure(step)}: {name} is {found} bytes long instead of {size}")
            self._newest = step
            with storage_errors(f"checkpoints older than step {step} could not be deleted"):
                self._delete_old()
        except StorageError as error:
            _log.error("%s", error)  # at once, in case the run never comes to its next call
            # Makes room again on a full disk; what a writer still holds is swept before the next save.
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _delete_old(self) -> None:
        """Delete all but the newest `keep` checkpoints."""
        if not _is_primary():
            return
        fault_point("checkpoint.pre_gc")
        for step in self._steps()[self._keep :]:
            doomed = self.directory / f"deleting-{step:08d}"
            rename(self._folder(step), doomed)
            fault_point("checkpoint.mid_gc")
            shutil.rmtree(doomed)

    def _sweep(self) -> None:
        """Delete what killed saves and killed deletions left."""
        for entry in self.directory.iterdir():
            if _UNFINISHED.fullmatch(entry.name):
                shutil.rmtree(entry)

    def _quarantine(self, skipped: list[Skipped]) -> tuple[Skipped, ...]:
        """Move damaged checkpoints aside, so that their steps can be saved again and their files looked at."""
        shelf = self.directory / "quarantine"
        moved = []
        for skip in skipped if _is_primary() else []:
            target, copies = shelf / f"step-{skip.step:08d}", 0
            while target.exists():
                copies += 1
                target = shelf / f"step-{skip.step:08d}.{copies}"
            with storage_errors(f"the damaged checkpoint of step {skip.step} cannot be moved to {target}"):
                shelf.mkdir(exist_ok=True)
                rename(self._folder(skip.step), target)
            moved.append(dataclasses.replace(skip, moved_to=target))
        return tuple(moved or skipped)


def save_params(directory: Path, params: PyTree, files: Mapping[str, bytes], *, overwrite: bool = False) -> None:
    """Write a model checkpoint: a folder with `params/`, the given files and a manifest, complete or not there at all.

    It is written under the hidden name `.<name>.partial` beside the target and renamed at the end. When it replaces an
    older one, that one is renamed to `.<name>.replaced` just before and deleted just after.

    Args:
        directory: The folder to create.
        params: Any pytree whose leaves are jax arrays.
        files: What else belongs to the model (`arch.json`, tokenizer files), by file name.
        overwrite: Replace the model checkpoint that is already there.

    Raises:
        ValueError: The folder exists and `overwrite` is off, it holds something other than a model checkpoint, or a
            file name or a leaf cannot be stored.
        StorageError: Writing failed; nothing is left at `directory` that was not there before.
    """
    target = local_path(directory)
    for name in files:
        if not _FILE.fullmatch(name) or name.split("/")[0] in (MANIFEST, _PARAMS):
            raise ValueError(f"{name!r} cannot be the name of a file in a model checkpoint")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        if not (target / MANIFEST).is_file():
            raise ValueError(f"{target} exists and is not a model checkpoint; choose another directory")
        if not overwrite:
            raise ValueError(f"{target} already holds a model checkpoint; choose another directory or allow overwriting it")
    leaves = live_leaves(params)
    partial, replaced = (target.with_name(f".{target.name}.{suffix}") for suffix in ("partial", "replaced"))
    with storage_errors(f"the model checkpoint {target} could not be written"):
        if _is_primary():
            if replaced.exists() and not target.exists():  # killed between the two renames below
                rename(replaced, target)
            for leftover in (partial, replaced):
                if leftover.exists():
                    shutil.rmtree(leftover)
            partial.mkdir(parents=True)
            for name, content in files.items():
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).write_bytes(content)
        _start_writing(partial / _PARAMS, leaves, by_layer=True).close()
        if _is_primary():
            seal(partial, {"leaves": describe(leaves)})
            if target.exists():
                rename(target, replaced)
            rename(partial, target)
            if replaced.exists():
                shutil.rmtree(replaced)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices(f"model checkpoint {target}")


def load_params(directory: Path, abstract: PyTree, change: Callable[[str, jax.Array], Any] | None = None) -> PyTree:
    """Load the parameters of a model checkpoint onto the given shardings, after checking every file of it.

    Floating-point leaves are converted to the type asked for, so that a model stored in bfloat16 can be trained in
    float32; everything else must match exactly.

    Args:
        directory: A folder written by `save_params`.
        abstract: Tree of `jax.ShapeDtypeStruct` with shardings.
        change: From the name of a leaf and the leaf to what takes its place; then one leaf is read and changed at a time.

    Returns:
        The parameters, in the structure of `abstract`.

    Raises:
        ValueError: There is no model checkpoint, or it differs from `abstract` in a leaf, its shape or its type.
        StorageError: A file is missing or damaged, or reading failed.
    """
    source, wanted = _model_folder(directory), wanted_leaves(abstract)
    body, damage = _verify(source)
    if damage is not None:
        raise StorageError(f"the model checkpoint {source} is damaged: {damage}. Convert or copy it again")
    check_leaves(body["leaves"], wanted, f"the model checkpoint {source}", convert=True)
    read = partial(_read_arrays, source / _PARAMS, body["leaves"])
    if change is None:
        return like(abstract, read(wanted))
    return like(abstract, {name: jax.block_until_ready(change(name, read({name: wanted[name]})[name])) for name in wanted})


def load_files(directory: Path) -> dict[str, bytes]:
    """Read the files a model checkpoint holds beside its parameters, each checked against the manifest.

    Args:
        directory: A folder written by `save_params`.

    Returns:
        Content by file name, as given to `save_params`.

    Raises:
        ValueError: There is no model checkpoint.
        StorageError: A file is missing or damaged.
    """
    source = _model_folder(directory)
    try:
        facts = {name: fact for name, fact in read_manifest(source)["files"].items() if not name.startswith(f"{_PARAMS}/")}
        check_files(source, facts)
    except DamagedError as error:
        raise StorageError(f"the model checkpoint {source} is damaged: {error}. Convert or copy it again") from error
    return {name: (source / name).read_bytes() for name in facts}


def _is_primary() -> bool:
    return jax.process_index() == 0


def _model_folder(directory: Path) -> Path:
    source = local_path(directory)
    if not source.is_dir():
        raise ValueError(f"there is no model checkpoint at {source}; write one with `rljax convert`")
    if not (source / MANIFEST).exists() and not (source / _PARAMS).exists():
        raise ValueError(f"{source} is not a model checkpoint; write one with `rljax convert`")
    return source


def _save_failure(step: int) -> str:
    return f"the checkpoint of step {step} could not be saved"


def _verify(folder: Path, step: int | None = None) -> tuple[dict[str, Any], str | None]:
    """Check a checkpoint against its manifest; all processes read a share of the files and come to the same verdict.

    Returns:
        The manifest and None when it is good; otherwise also what is wrong with it.
    """
    body, damage = {}, None
    try:
        body = read_manifest(folder)
        if step is not None and body["meta"]["step"] != step:
            raise DamagedError(f"it is the checkpoint of step {body['meta']['step']}")
        check_files(folder, body["files"], share=jax.process_index(), shares=jax.process_count())
    except DamagedError as error:
        damage = str(error)
    if jax.process_count() > 1:
        verdicts = multihost_utils.process_allgather(np.array(damage is not None))
        if damage is None and verdicts.any():
            damage = f"process {int(np.argmax(verdicts))} found damage; its log says where"
    return body, damage


def _agreed_steps(steps: list[int]) -> list[int]:
    """Give all processes the list that process 0 sees; a shared file system may show them different moments."""
    if jax.process_count() == 1:
        return steps
    count = int(multihost_utils.broadcast_one_to_all(np.array(len(steps))))
    own = np.array([*steps, *[0] * count][:count], np.int32)
    return [int(step) for step in multihost_utils.broadcast_one_to_all(own)]


def _run_meta(body: Mapping[str, Any], folder: Path) -> RunMeta:
    names = {field.name for field in dataclasses.fields(RunMeta)}
    if set(body["meta"]) != names:
        raise ValueError(
            f"{folder} was written by another version of rljax: its RunMeta has the fields {sorted(body['meta'])}, "
            f"this version has {sorted(names)}"
        )
    return RunMeta(**body["meta"])


def _start_writing(target: Path, leaves: Mapping[str, jax.Array], *, by_layer: bool = False) -> ocp.AsyncCheckpointer:
    """Copy the leaves to the host and begin to write them; keys are written as the integers they consist of.

    With `by_layer`, every layer of a model is a chunk of its own, so that a conversion reads one without the others.

    Returns:
        What is to be closed, which waits for Orbax's commit. It serves one save: after a failure Orbax keeps further
        errors of that save and would raise them in the next one.
    """
    # Creating the folders at once makes a failure of that kind a failure of the call, not of a background thread.
    options = ocp.AsyncOptions(create_directories_asynchronously=False)
    writing = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), async_options=options)
    stored = {name: jax.random.key_data(leaf) if is_key(leaf) else leaf for name, leaf in leaves.items()}
    chunks = {name: ocp.SaveArgs(shard_axes=(0,) if by_layer and name.startswith("layers.") else ()) for name in stored}
    writing.save(target, args=ocp.args.PyTreeSave(stored, save_args=chunks))
    return writing


def _read_arrays(
    source: Path, saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Read verified arrays onto their shardings."""
    data = {name: jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf for name, leaf in wanted.items()}
    stored = {name: jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=wanted[name].sharding) for name, part in data.items()}
    try:
        asked = ocp.checkpoint_utils.construct_restore_args(stored)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reading:
            found = reading.restore(source, args=ocp.args.PyTreeRestore(item=stored, restore_args=asked, partial_restore=True))
    except (OSError, ValueError) as error:  # the files are what was saved and the leaves agree, so reading them failed
        raise StorageError(f"{source} could not be read: {error}") from error
    for name, leaf in wanted.items():
        if is_key(leaf):
            found[name] = jax.device_put(jax.random.wrap_key_data(found[name], impl=saved[name]["generator"]), leaf.sharding)
    return found


class _OrbaxIsQuiet(logging.Filter):
    """Drops Orbax's own log lines: what matters in them reaches the caller as an exception."""

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname


logging.getLogger("absl").addFilter(_OrbaxIsQuiet())
