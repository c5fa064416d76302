"""Tokenizer folders, made once per test run."""

from pathlib import Path

import pytest

from rljax.data.tokenizer import Tokenizer
from tests.data.tokenizer_folders import FOLDERS


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> folder of a checkpoint's tokenizer."""
    return {kind: make(tmp_path_factory.mktemp(kind)) for kind, make in FOLDERS.items()}


@pytest.fixture(scope="session")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    """Kind -> tokenizer."""
    return {kind: Tokenizer.load(folder) for kind, folder in folders.items()}
