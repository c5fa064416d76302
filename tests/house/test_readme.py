"""The layout that the README shows is the layout of the repository.

The fenced block under the heading `## Layout` has one entry per line: a path, two or more spaces, what it holds. What
lies in a folder follows it, indented by two spaces:

    configs/       recipes
    rljax/         the package
      cli.py       the commands
"""

import re
from pathlib import Path

import pytest

from tests.house.repository import ROOT, files

BLOCK = re.compile(r"^## Layout\n.*?^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r"( *)(\S+) {2,}(\S.*)")


def parse_layout(readme: str) -> set[str]:
    """Read the entries of the layout block: paths from the root, folders with a closing slash.

    Raises:
        ValueError: there is no such block, or a line is no entry, with the line.
    """
    block = BLOCK.search(readme)
    if block is None:
        raise ValueError("README.md needs a fenced block under the heading '## Layout'")
    entries: set[str] = set()
    folders: list[str] = []
    for line in block[1].splitlines():
        if not line.strip():
            continue
        entry = ENTRY.fullmatch(line)
        depth = len(entry[1]) // 2 if entry else 0
        if entry is None or len(entry[1]) % 2 or depth > len(folders):
            raise ValueError(f"not 'path', two spaces, 'what it holds', indented by two under its folder: {line!r}")
        del folders[depth:]
        path = "".join(folders) + entry[2]
        entries.add(path)
        if path.endswith("/"):
            folders.append(entry[2])
    return entries


def expected_entries(paths: tuple[Path, ...]) -> set[str]:
    """List what the layout must show: everything at the top and in rljax/, except hidden files and package markers."""
    entries = set()
    for path in paths:
        for depth, part in enumerate(path.parts[: 2 if path.parts[0] == "rljax" else 1], start=1):
            folder = depth < len(path.parts)
            entries.add("/".join((*path.parts[: depth - 1], part)) + ("/" if folder else ""))
    return {entry for entry in entries if not re.search(r"(^\.|/__\w+__\.py$|/py\.typed$)", entry)}


def missing(entries: set[str]) -> list[str]:
    """List the entries that are not in the repository as what they are shown."""
    return sorted(e for e in entries if not ((ROOT / e).is_dir() if e.endswith("/") else (ROOT / e).is_file()))


def test_layout_shows_all_there_is() -> None:
    shown = parse_layout((ROOT / "README.md").read_text(encoding="utf-8"))
    assert sorted(expected_entries(files()) - shown) == []


def test_layout_shows_only_what_there_is() -> None:
    shown = parse_layout((ROOT / "README.md").read_text(encoding="utf-8"))
    assert missing(shown) == []


def test_what_is_not_there_is_found() -> None:
    assert missing({"rljax/", "rljax", "LICENSE", "LICENSE/", "nowhere.py"}) == ["LICENSE/", "nowhere.py", "rljax"]


def test_hidden_files_and_package_markers_need_no_entry() -> None:
    paths = tuple(map(Path, [".ci/run", "Makefile", "docs/a/b.md", "rljax/__init__.py", "rljax/cli.py", "rljax/envs/base.py"]))
    assert expected_entries(paths) == {"Makefile", "docs/", "rljax/", "rljax/cli.py", "rljax/envs/"}


def test_layout_is_read_with_its_folders() -> None:
    readme = "# x\n\n## Layout\n\n```\na/        one\n  b/      two\n    c.py  three\n  d.py    four\ne.md      five\n```\n"
    assert parse_layout(readme) == {"a/", "a/b/", "a/b/c.py", "a/d.py", "e.md"}


@pytest.mark.parametrize("line", ["a.py", "a.py one space", "   b.py  odd indent", "  c.py  under nothing"])
def test_a_line_that_is_no_entry_is_an_error(line: str) -> None:
    with pytest.raises(ValueError, match="not 'path'"):
        parse_layout(f"## Layout\n```\n{line}\n```\n")
