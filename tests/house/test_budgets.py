"""Files and functions stay small enough to be read in one go."""

import ast
from pathlib import Path

import pytest

from tests.house.repository import ROOT, python_files

FILE_LINES = 550
FUNCTION_LINES = 70


def long_functions(source: str, limit: int) -> list[str]:
    """Name the functions of a source text that have more than `limit` lines, decorators not counted."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > limit:
                found.append(f"{node.name} (line {node.lineno}) has {lines} lines, {lines - limit} too many")
    return found


@pytest.mark.parametrize("path", python_files(), ids=str)
def test_file_and_functions_are_within_budget(path: Path) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    lines = len(source.splitlines())
    assert lines <= FILE_LINES, f"{path} has {lines} lines; split it, {FILE_LINES} is the budget"
    assert long_functions(source, FUNCTION_LINES) == []


def test_a_function_over_budget_is_named() -> None:
    source = "class A:\n    def f(self):\n        a = 1\n        return a\n\ndef g():\n    return 1\n"
    assert long_functions(source, 2) == ["f (line 2) has 3 lines, 1 too many"]
