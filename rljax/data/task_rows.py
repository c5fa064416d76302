"""From the rows of a file to Tasks.

Owns what a row must look like, the ids of rows that have none, and one report of everything that is wrong with a file.
Refuses to own file formats and the order in which tasks are used.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rljax.records import Message, Task

SHOWN = 20
"""Errors and warnings written out in full; the rest is counted."""

_OWN_COLUMNS = ("id", "messages", "prompt", "answer")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file, parsed or not.

    Example:
        Row(where="train.jsonl:3", value={"prompt": "What is 3 + 4?", "answer": "7"})
    """

    where: str
    """File and physical line or row, counted from 1."""
    value: Any = None
    """The parsed row."""
    problem: str | None = None
    """Why it could not be parsed, with the remedy."""


@dataclass(frozen=True, slots=True)
class LoadedTasks:
    """The tasks of a file.

    Example:
        LoadedTasks(tasks=(task,), warnings=("train.jsonl:5: id 'a' was used before; this row became 'a#2'",))
    """

    tasks: tuple[Task, ...]
    """The tasks, in the order of the file."""
    warnings: tuple[str, ...]
    """What deserves a look but stops nothing."""


class _Unusable(Exception):
    """What is wrong with one row, and the remedy."""


def json_text(value: Any) -> str:
    """Write a value as JSON that is the same in every process.

    Raises:
        ValueError: When JSON cannot express the value.
    """

    def as_plain(item: Any) -> Any:
        if isinstance(item, Mapping):
            return dict(item)
        raise ValueError(f"{type(item).__name__} {item!r} cannot be written as JSON; use text, numbers, lists and objects")

    return json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"), default=as_plain)


def read_jsonl(path: Path) -> Iterator[Row]:
    """Parse a JSONL file line by line.

    Lines end at `\\n` only: characters such as U+2028 may stand inside text. A byte order mark, `\\r` before the end of a line
    and blank lines are harmless. Line numbers are those of an editor.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                yield Row(f"{path}:1", problem="the file is UTF-16; save it as UTF-8")
                return
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield _parse(f"{path}:{number}", line.rstrip(b"\r\n"))


def _parse(where: str, line: bytes) -> Row:
    try:
        return Row(where, json.loads(line.decode("utf-8"), parse_constant=_refuse_constant))
    except UnicodeDecodeError as error:
        return Row(where, problem=f"not valid UTF-8 at byte {error.start} of the line; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return Row(where, problem=f"broken JSON at column {error.colno} ({error.msg}); each line must hold one whole object")
    except (ValueError, RecursionError) as error:
        return Row(where, problem=f"broken JSON ({error}); each line must hold one whole object")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def to_tasks(path: Path, rows: Iterable[Row]) -> LoadedTasks:
    """Turn rows into tasks, or report everything that is wrong with them at once.

    Raises:
        ValueError: For a file without rows and for unusable rows; shows the first with file, line, columns and remedy, and
            counts the rest.
    """
    tasks: list[Task] = []
    problems: list[tuple[int, str]] = []  # (row index, text): shown in the order of the file
    unanswered: list[tuple[int, str]] = []
    warnings: list[str] = []
    taken: set[str] = set()
    total, answered, repeated = 0, 0, 0
    for index, row in enumerate(rows):
        total += 1
        columns = f"columns: {', '.join(map(str, row.value))}" if isinstance(row.value, dict) else "no columns"
        try:
            task = _to_task(row)
        except _Unusable as error:
            problems.append((index, f"{row.where}: {error} ({columns})"))
            continue
        if task.answer is None:
            unanswered.append(
                (index, f"{row.where}: no 'answer' ({columns}), but other rows have one; add it, or remove the row")
            )
        else:
            answered += 1
        name = _unused(task.id, taken)
        taken.add(name)
        if name != task.id:
            repeated += 1
            if repeated <= SHOWN:
                warnings.append(f"{row.where}: id {task.id!r} was used before; this row became {name!r}, a group of its own")
            task = Task(id=name, messages=task.messages, answer=task.answer, metadata=task.metadata)
        tasks.append(task)
    if answered:
        problems = sorted(problems + unanswered)
    if problems:
        raise ValueError(
            f"{path}: {len(problems)} of {total} rows cannot be used:\n  " + _listed([text for _, text in problems])
        )
    if not tasks:
        raise ValueError(f"{path}: holds no tasks; each row needs 'messages' or 'prompt'")
    if repeated > SHOWN:
        warnings.append(f"{path}: {repeated - SHOWN} more rows repeat an id")
    return LoadedTasks(tuple(tasks), tuple(warnings))


def _listed(texts: list[str]) -> str:
    more = [f"... and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return "\n  ".join(texts[:SHOWN] + more)


def _unused(name: str, taken: set[str]) -> str:
    """Give the name itself, or the first of `name#2`, `name#3` ... that no task has."""
    count, candidate = 1, name
    while candidate in taken:
        count += 1
        candidate = f"{name}#{count}"
    return candidate


def _to_task(row: Row) -> Task:
    if row.problem is not None:
        raise _Unusable(row.problem)
    if not isinstance(row.value, dict):
        raise _Unusable(f"a row must be a JSON object, not {type(row.value).__name__}")
    value = {key: item for key, item in row.value.items() if item is not None}  # null means absent
    messages = _messages(value)
    answer = value.get("answer")
    try:
        text = json_text([messages, answer])
    except ValueError as error:
        raise _Unusable(f"'messages' or 'answer': {error}") from error
    for name, part in (("id", value.get("id")), ("messages", messages), ("answer", answer)):
        if _has_lone_surrogate(part):
            raise _Unusable(f"{name!r} holds half of a surrogate pair, which is no character; fix its \\u escapes")
    metadata = {"source": row.where} | {key: item for key, item in value.items() if key not in _OWN_COLUMNS}
    return Task(id=_id(value, text, row.where), messages=messages, answer=answer, metadata=metadata)


def _id(value: Mapping[str, Any], text: str, where: str) -> str:
    given = value.get("id")
    if given is None:
        return f"{hashlib.sha256(text.encode()).hexdigest()[:12]}:{where.rpartition(':')[2]}"
    if not isinstance(given, str | int) or isinstance(given, bool) or given == "":
        raise _Unusable(f"'id' must be text or a whole number, not {given!r}")
    return str(given)


def _messages(value: Mapping[str, Any]) -> tuple[Message, ...]:
    if ("messages" in value) == ("prompt" in value):
        both = (
            "both 'messages' and 'prompt'; remove one"
            if "messages" in value
            else "neither 'messages' nor 'prompt'; rename or add one"
        )
        raise _Unusable(f"has {both}")
    if "prompt" in value:
        prompt = value["prompt"]
        if not isinstance(prompt, str):
            raise _Unusable(f"'prompt' must be text, not {type(prompt).__name__}; a list of messages belongs in 'messages'")
        messages = [{"role": "user", "content": prompt}]
    else:
        messages = value["messages"]
        if not isinstance(messages, list):
            raise _Unusable(f"'messages' must be a list of {{role, content}}, not {type(messages).__name__}")
    return _checked(messages, "prompt" if "prompt" in value else "messages")


def _checked(messages: list[Any], column: str) -> tuple[Message, ...]:
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _Unusable(f"'messages'[{index}] must be an object with 'role' and 'content', not {message!r:.80}")
        message = {key: item for key, item in message.items() if item is not None}
        if not isinstance(message.get("content", "" if "tool_calls" in message else None), str | list):
            raise _Unusable(f"'messages'[{index}].content must be text, not {message.get('content')!r:.80}")
        checked.append(message)
    if not any(_says_something(message) for message in checked if message["role"] != "system"):
        raise _Unusable(f"'{column}' is empty or white space only; fill it or remove the row")
    return tuple(checked)


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content", "")
    return bool(content.strip()) if isinstance(content, str) else bool(content)


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
