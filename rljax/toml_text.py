"""The text of recipes: TOML keys and where they stand, values written as TOML, and what is wrong with a text that is none.

Owns what `tomllib` does not tell: lines of keys, and the way back from values to text. Refuses to know any option.
"""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any

Key = tuple[str, ...]
"""Names of tables and at last of an option."""


_NAME = r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')"""
_KEY = re.compile(rf"{_NAME}(?:[ \t]*\.[ \t]*{_NAME})*")
_STATEMENT = re.compile(  # possessive, since a run of comments could be split in exponentially many ways
    rf"(?:\s|#[^\n]*+)*+(?:\[\[?[ \t]*(?P<table>{_KEY.pattern})[ \t]*\]|(?P<key>{_KEY.pattern}))"
)
_PIECE = re.compile(
    r'''"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?'{3,5}'''  # strings over several lines; up to two quotes may precede the end
    r"""|"(?:\\.|[^"\\\n])*"|'[^'\n]*\'|\#[^\n]*|.""",
    re.DOTALL,
)


def key_lines(text: str) -> Iterator[tuple[Key, int]]:
    """Yield the full key and the line of every table header and assignment, since tomllib keeps no lines.

    Stops without an error where the text is not TOML: reporting that is the parser's part.
    """
    table: Key = ()
    position = 0
    while statement := _STATEMENT.match(text, position):
        kind = statement.lastgroup or ""
        key = parse_key(statement[kind])
        if key is None:
            return
        table = key if kind == "table" else table
        yield (key if kind == "table" else table + key), text.count("\n", 0, statement.start(kind)) + 1
        position = statement.end(kind)
        depth = 0
        while piece := _PIECE.match(text, position):
            position = piece.end()
            depth += (piece[0] in ("[", "{")) - (piece[0] in ("]", "}"))
            if piece[0] == "\n" and depth <= 0:  # below 0 after the bracket that closes a header
                break


def parse_key(text: str) -> Key | None:
    """Split a dotted TOML key, such as `env.options."a b"`; None when it is none."""
    if not _KEY.fullmatch(text):
        return None
    try:
        tree: Any = tomllib.loads(f"{text} = 0")
    except tomllib.TOMLDecodeError:
        return None
    parts: list[str] = []
    while isinstance(tree, dict):
        part, tree = next(iter(tree.items()))
        parts.append(part)
    return tuple(parts)


def syntax_problem(path: Path, text: str, message: str) -> str:
    """Say where a text is no TOML and why, from the message of `tomllib`."""
    what, _, where = message.rstrip(")").rpartition(" (at ")
    found = re.fullmatch(r"line (\d+), column (\d+)", where)
    seen: dict[Key, int] = {}
    hint = ""
    last = int(found[1]) if found else text.count("\n") + 1
    for key, line in key_lines(text):
        if line > last:
            break
        if key in seen and what.startswith("Cannot"):
            hint = f"; {dotted(key)} is set twice, first on line {seen[key]}"
        seen.setdefault(key, line)
    if found:
        return f"{path}:{found[1]}:{found[2]}: {what}{hint}"
    if seen and not hint:
        key, line = list(seen.items())[-1]
        hint = f"; the last key is {dotted(key)} on line {line}"
    return f"{path}:{last}: {what}, at the end of the file{hint}"


def dotted(key: Key) -> str:
    """Write a key with dots, its parts quoted where they have to be."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else to_toml(part) for part in key)


def to_toml(value: Any) -> str:
    """Write a value as TOML; None as the text "none"."""
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{dotted((str(name),))} = {to_toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(to_toml(inner) for inner in value) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
