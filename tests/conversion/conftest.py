"""Models that tests of conversion read and never change."""

from pathlib import Path

import pytest

from rljax.convert import convert
from tests.models.oracle import save_llama


@pytest.fixture(scope="package")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("base")
    save_llama(folder)
    return folder


@pytest.fixture(scope="package")
def checkpoint(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the same model as a checkpoint of rljax."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    convert(base, folder, verify="none")
    return folder
