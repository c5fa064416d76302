"""What the documents show can be used: recipes load, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from rljax.recipe import load
from tests.house.repository import ROOT, files

RECIPE = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
DOCUMENTS = sorted(path for path in files() if path.suffix == ".md")


def dead_links(document: Path) -> list[str]:
    """List the links of a document, relative to the root, that lead to no file or folder."""
    text = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [link for link in LINK.findall(text) if not (ROOT / document.parent / link).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_somewhere(document: Path) -> None:
    assert dead_links(document) == []


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[a](page.md#part) [b](nowhere.md) [c](https://example.org/x) [d](#here)\n```\n[e](code)\n```\n")
    assert dead_links(page) == ["nowhere.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_recipes_in_documents_load(document: Path, tmp_path: Path) -> None:
    for text in RECIPE.findall((ROOT / document).read_text(encoding="utf-8")):
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(text, encoding="utf-8")
        load(recipe)


def test_the_readme_shows_a_recipe() -> None:
    assert RECIPE.search((ROOT / "README.md").read_text(encoding="utf-8"))
