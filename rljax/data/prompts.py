"""Which Task comes next.

Owns the sources of tasks (files, generated), the length filter, and the prompt stream: a pure function from a position to
tasks, so that the position is all that a checkpoint has to remember. Refuses to own environments and token ids.

    source --filter_by_length--> source --PromptStream.take(position, count)--> tasks of this process

There is no iterator, no worker and no read-ahead, so nothing can be ahead of what was used, and nothing needs to be restored.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from grain import MapDataset

from rljax.data.task_rows import LoadedTasks, Row, json_text, read_jsonl, to_tasks
from rljax.records import Task

_EXAMPLES = 5


@runtime_checkable
class TaskSource(Protocol):
    """Tasks by index; a list or tuple of Tasks is one. The same index must always give the same Task."""

    def __len__(self) -> int:
        """Give the number of tasks in an epoch."""
        ...

    def __getitem__(self, index: int, /) -> Task:
        """Give the task at an index, 0 .. len - 1."""
        ...


@dataclass(frozen=True, slots=True)
class GeneratedTasks:
    """Tasks made on demand by a function of their index.

    Example:
        GeneratedTasks(make=lambda index: arithmetic_task("train", index), length=4096)
    """

    make: Callable[[int], Task]
    """Index -> Task; must not depend on anything else."""
    length: int
    """Number of tasks in an epoch."""

    def __len__(self) -> int:
        """Give the number of tasks in an epoch."""
        return self.length

    def __getitem__(self, index: int) -> Task:
        """Make the task at an index."""
        if not 0 <= index < self.length:
            raise IndexError(f"task {index} of {self.length}")
        return self.make(index)


@dataclass(frozen=True, slots=True)
class SelectedTasks:
    """Some tasks of another source, which are fetched when they are asked for.

    Example:
        SelectedTasks(source=tasks, indices=np.array([0, 2, 3]))
    """

    source: TaskSource
    """Where the tasks come from."""
    indices: np.ndarray
    """Indices of the selected tasks, int64 [n], ascending."""

    def __len__(self) -> int:
        """Give the number of selected tasks."""
        return len(self.indices)

    def __getitem__(self, index: int) -> Task:
        """Fetch the selected task at an index."""
        if not 0 <= index < len(self.indices):
            raise IndexError(f"task {index} of {len(self.indices)}")
        return self.source[int(self.indices[index])]


def load_tasks(path: Path) -> LoadedTasks:
    """Read the tasks of a .jsonl or .parquet file.

    Columns: `messages` (list of {role, content}) or `prompt` (text); `answer`, in every row or in none; `id` (text or number;
    made from content and line where it is absent). All other columns become metadata, to which `source` (file:line) is added.
    Null means absent. A repeated id gets `#2`, `#3` ... and a warning: its rows stay separate problems.

    Raises:
        ValueError: For a file that cannot be read and for unusable rows, all reported together.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file; set data.path (or eval.path) to a .jsonl or .parquet file of tasks")
    if path.suffix == ".jsonl":
        return to_tasks(path, read_jsonl(path))
    if path.suffix == ".parquet":
        return to_tasks(path, _read_parquet(path))
    raise ValueError(f"{path}: unknown kind of file {path.suffix!r}; use .jsonl or .parquet")


def _read_parquet(path: Path) -> Iterator[Row]:
    """Read a Parquet file batch by batch; rows count from 1."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path}: reading Parquet needs pyarrow; install it with: pip install 'rljax[parquet]'") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for value in batch.to_pylist():
                    number += 1
                    yield Row(f"{path}:{number}", value)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path}: cannot be read as Parquet after row {number} ({error})") from error


@dataclass(frozen=True, slots=True)
class DropReport:
    """What the length filter did.

    Example:
        DropReport(total=100, kept=98, max_prompt_length=128, longest=311, examples=(("t/7", 311), ("t/9", 140)))
    """

    total: int
    """Tasks before the filter."""
    kept: int
    """Tasks that stay."""
    max_prompt_length: int
    """The limit (tokens)."""
    longest: int
    """Longest prompt before the filter (tokens)."""
    examples: tuple[tuple[str, int], ...]
    """Id and length (tokens) of the first tasks that were dropped."""

    def __str__(self) -> str:
        """Say it in a sentence."""
        if self.kept == self.total:
            return f"all {self.total} tasks fit max_prompt_length = {self.max_prompt_length} (longest: {self.longest} tokens)"
        shown = ", ".join(f"{name!r} ({length} tokens)" for name, length in self.examples)
        return (
            f"{self.total - self.kept} of {self.total} tasks dropped: their prompts are longer than max_prompt_length = "
            f"{self.max_prompt_length} tokens (longest: {self.longest}), such as {shown}"
        )


def filter_by_length(tasks: TaskSource, encode: Callable[[Task], int], max_prompt_length: int) -> tuple[TaskSource, DropReport]:
    """Leave out the tasks whose prompts are too long.

    Every prompt is measured, before the run starts; tasks are fetched one at a time and not kept.

    Args:
        tasks: The tasks.
        encode: Task -> length of its templated prompt (tokens).
        max_prompt_length: Longest prompt that stays (tokens).

    Returns:
        The tasks that stay, in their order, and the report.

    Raises:
        ValueError: When a prompt cannot be templated; names the task.
    """
    lengths = np.zeros(len(tasks), np.int64)
    examples: list[tuple[str, int]] = []
    for index in range(len(tasks)):
        task = tasks[index]
        try:
            lengths[index] = encode(task)
        except ValueError as error:
            source = task.metadata.get("source")
            raise ValueError(f"task {task.id!r}{f' ({source})' if source else ''}: {error}") from error
        if lengths[index] > max_prompt_length and len(examples) < _EXAMPLES:
            examples.append((task.id, int(lengths[index])))
    (indices,) = np.nonzero(lengths <= max_prompt_length)
    report = DropReport(
        total=len(tasks),
        kept=len(indices),
        max_prompt_length=max_prompt_length,
        longest=int(lengths.max(initial=0)),
        examples=tuple(examples),
    )
    return (tasks if report.kept == report.total else SelectedTasks(tasks, indices)), report


def require_batch(report: DropReport, batch_size: int) -> None:
    """Refuse a run whose tasks do not fill one batch.

    Args:
        report: Of the length filter.
        batch_size: Tasks per batch of rollouts, over all processes.

    Raises:
        ValueError: States tasks, batch and what the filter did.
    """
    if report.kept < batch_size:
        raise ValueError(
            f"{report.kept} tasks are left, fewer than the batch of {batch_size} (train.rollout_batch_size). "
            f"The source has {report.total}; {report}. Add tasks, lower train.rollout_batch_size, or raise "
            "sampler.max_prompt_length"
        )


class PromptStream:
    """An endless stream of tasks, addressed by position.

    Position p is index p mod n of epoch p div n, for n tasks. Each epoch holds every task once, in an order that is a pure
    function of (seed, epoch), and a different one each time when shuffled. Nothing is remembered between two calls.

    Example:
        stream = PromptStream(tasks, seed=0, shuffle=True)
        tasks = stream.take(position=160, count=8)
    """

    def __init__(
        self, source: TaskSource, seed: int, shuffle: bool = True, process_index: int = 0, process_count: int = 1
    ) -> None:
        """Open the stream.

        Args:
            source: The tasks, equal on every process.
            seed: Seed of the order.
            shuffle: Whether to shuffle each epoch.
            process_index: This process.
            process_count: Number of processes that share each batch.

        Raises:
            ValueError: When there are no tasks, or there is no such process.
        """
        if len(source) == 0:
            raise ValueError("there are no tasks to train on")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index {process_index} is not one of {process_count} processes")
        self._source = source
        self._process_index = process_index
        self._process_count = process_count
        indices = MapDataset.range(len(source)).seed(seed)
        self._indices: MapDataset[int] = (indices.shuffle() if shuffle else indices).repeat()

    def __len__(self) -> int:
        """Give the number of tasks in an epoch."""
        return len(self._source)

    def take(self, position: int, count: int) -> list[Task]:
        """Give this process its share of the tasks at positions `position` .. `position + count - 1`.

        The positions are split among the processes in order, as evenly as possible: together they get each one exactly once,
        whatever the number of processes. The next batch starts at `position + count`.

        Args:
            position: Tasks consumed before, over all processes and epochs.
            count: Tasks to take, over all processes.

        Raises:
            ValueError: For a negative position or count.
        """
        if position < 0 or count < 0:
            raise ValueError(f"position and count must not be negative; got {position} and {count}")
        first = position + count * self._process_index // self._process_count
        last = position + count * (self._process_index + 1) // self._process_count
        return [self._task_at(index) for index in range(first, last)]

    def _task_at(self, position: int) -> Task:
        index = self._indices[position]
        assert index is not None, "only filtered datasets have holes"
        return self._source[index]

    def epoch_of(self, position: int) -> int:
        """Give the epoch, from 0, in which a position lies."""
        return position // len(self._source)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what is asked and what is right: ids, messages and answers of all tasks, in order, before shuffling.

        The same in every process and on every machine. Raises ValueError for an answer or message that JSON cannot express.
        """
        digest = hashlib.sha256()
        for index in range(len(self._source)):
            task = self._source[index]
            try:
                digest.update(json_text([task.id, task.messages, task.answer]).encode() + b"\n")
            except ValueError as error:
                raise ValueError(f"task {task.id!r}: {error}") from error
        return digest.hexdigest()


def check_fingerprint(saved: str, current: str) -> None:
    """Refuse to continue a run on other tasks: its position means nothing there.

    Args:
        saved: Fingerprint in the checkpoint.
        current: Fingerprint of the tasks at hand.

    Raises:
        ValueError: When they differ; says what to do.
    """
    if saved != current:
        raise ValueError(
            f"the tasks are not those of the checkpoint (fingerprint {current[:12]}, checkpoint {saved[:12]}): a row, the "
            "order, the tokenizer or sampler.max_prompt_length changed. Restore the original data to continue this run, or "
            "start a new run on the new data with another run.dir"
        )
