"""Where metrics and rollouts are written.

Owns `metrics.jsonl`, the rollout log and TensorBoard event files. Refuses to own the meaning of metrics
(`metrics.py`) and what is shown in the terminal (`live.py`). In a run of several processes, one writes the metrics
and each writes its own rollouts.
"""

import importlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rljax.records import Group, Rollout, Task
from rljax.telemetry.metrics import as_numbers


@runtime_checkable
class Sink(Protocol):
    """Takes the metrics of each step."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the metrics of one step; names must be declared, values must be numbers."""
        ...

    def close(self) -> None:
        """Finish writing; may be called twice."""
        ...


class Sinks:
    """Several sinks as one; all are closed, even when one fails to.

    Example:
        with Sinks(MetricsFile(run_dir / "metrics.jsonl"), LiveView(total_steps=100)) as sinks:
            sinks.write(1, {"reward/mean": 0.25})
    """

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the metrics of one step to every sink."""
        numbers = as_numbers(values)
        for sink in self._sinks:
            sink.write(step, numbers)

    def close(self) -> None:
        """Close every sink."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)

    def __enter__(self) -> "Sinks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsFile:
    """Metrics as strict JSON, one line per `write`, readable at any moment.

    Each line reaches the file in one append, so that a killed process leaves whole lines. A value that is not finite is
    written as null and its name is listed under `nonfinite`. A line that a full disk cut short is removed again.
    """

    def __init__(self, path: Path) -> None:
        """Open the file for appending, after removing a torn last line."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._fd, path.read_bytes().rfind(b"\n") + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append the metrics of one step.

        Raises:
            ValueError: a metric is not declared or not a number.
            OSError: the line could not be written.
        """
        numbers = as_numbers(values)
        bad = [name for name, number in numbers.items() if not math.isfinite(number)]
        row: dict[str, Any] = {"step": step} | {name: None if name in bad else number for name, number in numbers.items()}
        if bad:
            row["nonfinite"] = bad
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        size = os.fstat(self._open_fd()).st_size
        if os.write(self._open_fd(), line) != len(line):
            os.ftruncate(self._open_fd(), size)
            raise OSError(f"{self._path}: the disk is full; step {step} was not logged")

    def truncate_after(self, step: int) -> None:
        """Drop the rows of steps after `step`, atomically, so that a resumed run has each step once."""
        kept = b"".join(line for line, row in _json_lines(self._path) if row["step"] <= step)
        self.close()
        _replace(self._path, kept)
        self._fd = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the file; may be called twice."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ValueError(f"{self._path} is closed")
        return self._fd


def read_metrics(path: Path) -> dict[int, dict[str, int | float]]:
    """Read a metrics file: all values of each step, in the order of steps; non-finite values are NaN.

    Lines of one step are merged, so that values that came late (an evaluation of an earlier step) join their step.
    A torn last line is left out.
    """
    steps: dict[int, dict[str, int | float]] = {}
    for _, row in _json_lines(path):
        names = row.keys() - {"step", "nonfinite"}
        steps.setdefault(row["step"], {}).update({name: math.nan if row[name] is None else row[name] for name in names})
    return dict(sorted(steps.items()))


class RolloutLog:
    """Every rollout as one JSON line, in one file per step that appears whole or not at all.

    Token ids are exact. Text is for people: a lone surrogate becomes U+FFFD, since it has no UTF-8 form.
    """

    def __init__(self, directory: Path, process: int = 0, processes: int = 1) -> None:
        """Log into a directory; with several processes, each has its own file per step.

        Args:
            directory: Folder of the files `step_00000012.jsonl`, or `step_00000012_p0003.jsonl` of process 3.
            process: Index of this process.
            processes: Number of processes.
        """
        self._directory = directory
        self._suffix = f"_p{process:04d}.jsonl" if processes > 1 else ".jsonl"
        directory.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, groups: Sequence[Group]) -> Path:
        """Write the rollouts of one step and return their file; an earlier file of the step is replaced."""
        path = self._directory / f"step_{step:08d}{self._suffix}"
        _replace(
            path, b"".join(_utf8_line(_rollout_row(group.task, rollout)) for group in groups for rollout in group.rollouts)
        )
        return path

    def truncate_after(self, step: int) -> None:
        """Delete the files of steps after `step`, and unfinished ones, when a run resumes from `step`."""
        for path in self._directory.iterdir():
            match = re.fullmatch(rf"step_(\d+){re.escape(self._suffix)}(\.tmp)?", path.name)
            if match and (match[2] or int(match[1]) > step):
                path.unlink()


def read_rollouts(path: Path) -> Iterator[dict[str, Any]]:
    """Read the rollouts of one step, one dictionary per line of its file."""
    for _, row in _json_lines(path):
        yield row


class TensorBoardSink:
    """Metrics as TensorBoard event files."""

    def __init__(self, directory: Path, first_step: int = 1) -> None:
        """Write into a directory.

        Args:
            directory: Folder of the event files.
            first_step: TensorBoard hides what an earlier, killed run logged from this step on.

        Raises:
            ValueError: tensorboardX is not installed.
        """
        try:
            tensorboard = importlib.import_module("tensorboardX")  # optional, so not imported at the top
        except ImportError as error:
            raise ValueError(
                "telemetry.tensorboard = true needs tensorboardX: pip install 'rljax[tensorboard]', or set it to false"
            ) from error
        self._writer = tensorboard.SummaryWriter(str(directory), purge_step=first_step, flush_secs=1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the metrics of one step; they are on disk about a second later."""
        for name, number in as_numbers(values).items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        """Finish the event file; may be called twice."""
        self._writer.close()


def _json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the whole lines of a file, as bytes and parsed."""
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return  # torn by a crash
        try:
            yield line, json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not a JSON line ({error}); repair or remove it") from error


def _rollout_row(task: Task, rollout: Rollout) -> dict[str, Any]:
    return {
        "task_id": rollout.task_id,
        "attempt": rollout.attempt,
        "text": rollout.text,
        "reward": rollout.score.value,
        "status": rollout.score.status,
        "components": rollout.score.components,
        "detail": rollout.score.detail,
        "finish_reason": rollout.finish_reason,
        "turns": rollout.turns,
        "turn_rewards": rollout.turn_rewards,
        "messages": task.messages,
        "answer": task.answer,
        "tokens": rollout.tokens,
        "provenance": rollout.provenance,
        "logp_behavior": rollout.logp_behavior,
        "versions": rollout.versions,
    }


def _utf8_line(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)
    # Through UTF-16, where a pair of surrogates is one character and a lone one is an error that can be replaced.
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode() + b"\n"


def _plain(value: Any) -> Any:
    """Turn a value into what strict JSON can say: non-finite numbers become null, unknown objects their text."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return _plain(value.tolist())
    return str(value)


def _replace(path: Path, content: bytes) -> None:
    """Write a file so that it is seen whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
