"""Files and functions stay small enough to be read in one go."""

import ast

from tests.house.repository import ROOT, python_files

FILE_LINES = 550
FUNCTION_LINES = 70


def over_budget(source: str, file_lines: int, function_lines: int) -> list[str]:
    """Say what in a source text is too long: the file, or functions (decorators not counted)."""
    lines = len(source.splitlines())
    found = [f"has {lines} lines, {lines - file_lines} too many"] if lines > file_lines else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > function_lines:
                found.append(f"line {node.lineno}: {node.name} has {lines} lines, {lines - function_lines} too many")
    return found


def test_files_and_functions_are_within_budget() -> None:
    found = []
    for path in python_files():
        source = (ROOT / path).read_text(encoding="utf-8")
        found += [f"{path} {what}" for what in over_budget(source, FILE_LINES, FUNCTION_LINES)]
    assert found == []


def test_what_is_over_budget_is_named() -> None:
    source = "class A:\n    @property\n    def f(self):\n        a = 1\n        return a\n\ndef g():\n    return 1\n"
    assert over_budget(source, file_lines=8, function_lines=2) == ["line 3: f has 3 lines, 1 too many"]
    assert over_budget(source, file_lines=7, function_lines=3) == ["has 8 lines, 1 too many"]
