"""Imports point down only, and each heavy third party lives in one place (contracts in pyproject.toml)."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.house.repository import ROOT


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True)


def test_imports_keep_the_contracts() -> None:
    result = lint_imports(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_import_that_points_up_is_found(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "rljax", tmp_path / "rljax", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "rljax" / "pytree.py").open("a") as source:
        source.write("\nimport rljax.loop\n")
    with (tmp_path / "rljax" / "records.py").open("a") as source:
        source.write("\nimport jax\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "rljax.pytree -> rljax.loop" in result.stdout
    assert "rljax.records -> jax" in result.stdout
