"""Every recipe that is shipped can be loaded and says what it is for."""

from pathlib import Path

import pytest

from rljax.config import Config
from rljax.recipe import load
from tests.house.repository import ROOT, files

RECIPES = [path for path in files() if path.parts[0] == "configs" and path.suffix == ".toml"]


def test_there_are_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("path", RECIPES, ids=str)
def test_recipe_loads(path: Path) -> None:
    assert isinstance(load(ROOT / path), Config)


@pytest.mark.parametrize("path", RECIPES, ids=str)
def test_recipe_opens_with_its_command(path: Path) -> None:
    header = (ROOT / path).read_text(encoding="utf-8").split("\n\n")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"{path}" in header, "the header comment gives the command, the hardware, and the expected time and result"
