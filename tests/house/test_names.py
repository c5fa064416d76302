"""Modules are named after what they own, and annotations stay objects."""

import re

import pytest

from tests.house.repository import ROOT, files, python_files

EMPTY_NAME = re.compile(r"(utils?|common|core|helpers?|misc|base_.*|.*_utils?|.*_helpers?|.*_v\d+)")
FUTURE_ANNOTATIONS = re.compile(r"^from __future__ import .*\bannotations\b", re.MULTILINE)

# Folders and addresses of one person's machine, and hosts that only some networks reach.
FOREIGN = re.compile(r"(?<![\w.])/(work|tmp|root|home|Users)/|\bpypi\.org\b|\bpythonhosted\.org\b|\bnpmjs\.(org|com)\b")
PUBLISHED = ("rljax", "docs", "configs", "tools", ".ci")


@pytest.mark.parametrize("name", ["utils", "helpers", "base_env", "sampler_v2", "core", "loss_utils"])
def test_an_empty_name_is_recognised(name: str) -> None:
    assert EMPTY_NAME.fullmatch(name)


def test_modules_and_folders_have_telling_names() -> None:
    parts = {part.removesuffix(".py") for path in python_files() for part in path.parts}
    assert sorted(part for part in parts if EMPTY_NAME.fullmatch(part)) == []


def test_annotations_are_not_postponed() -> None:
    assert FUTURE_ANNOTATIONS.search("import os\nfrom __future__ import annotations\n")
    found = [path for path in python_files() if FUTURE_ANNOTATIONS.search((ROOT / path).read_text(encoding="utf-8"))]
    assert found == [], "annotations are checked at run time, so they must not become strings"


@pytest.mark.parametrize("text", ["/work/main", "see '/tmp/x'", "https://pypi.org/simple"])
def test_a_foreign_place_is_recognised(text: str) -> None:
    assert FOREIGN.search(text)


@pytest.mark.parametrize("text", ["docs/work/x.md", "../tmp/y", "a/home/b"])
def test_a_path_of_the_project_is_not_a_foreign_place(text: str) -> None:
    assert not FOREIGN.search(text)


def test_published_text_names_no_foreign_place() -> None:
    found = []
    for path in files():
        if path.parts[0] in PUBLISHED or len(path.parts) == 1:
            for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), start=1):
                if FOREIGN.search(line):
                    found.append(f"{path}:{number}: {line.strip()[:100]}")
    assert found == []
