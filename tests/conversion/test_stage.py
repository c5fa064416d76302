"""A conversion that fails, is interrupted or killed leaves nothing, or what the next one clears away."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljax.conversion.stage import staged
from rljax.convert import convert, read_checkpoint
from rljax.data.tokenizer import Tokenizer
from rljax.manifest import StorageError
from tests.models.oracle import save_llama

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_llama(folder)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any) -> None:
    name, real = ("write", os.write) if to == "orbax" else ("pwrite", os.pwrite)
    written = 0

    def fills_up(descriptor: int, content: Any, *offset: int) -> int:
        nonlocal written
        written += len(content)
        if written > 100_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, content, *offset)

    monkeypatch.setattr(os, name, fills_up)
    with pytest.raises(StorageError, match="No space left on device"):
        convert(source, tmp_path / "out", to=to)
    assert written > 100_000
    assert not list(tmp_path.iterdir())


def test_too_little_room_is_told_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(StorageError, match="1,000 are free"):
        convert(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
import rljax.conversion.write as write
from rljax.convert import convert
original, calls = write.write_slice, []
def dies(*args):
    calls.append(args)
    return os.kill(os.getpid(), int(sys.argv[3])) if len(calls) == 4 else original(*args)
write.write_slice = dies
convert(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def run_killed(source: Path, target: Path, number: int) -> int:
    command = [sys.executable, "-c", KILLED, source, target, str(number)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300).returncode


def test_the_next_conversion_removes_what_a_killed_one_left(source: Path, tmp_path: Path) -> None:
    assert run_killed(source, tmp_path / "out", signal.SIGKILL) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.")
    assert left.name.endswith(".partial")
    convert(source, tmp_path / "out")
    assert names(tmp_path) == ["out", "out.conversion.json"]
    assert Tokenizer.load(read_checkpoint(tmp_path / "out").tokenizer_dir).stop_ids == {0, 2}


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path) -> None:
    assert run_killed(source, tmp_path / "out", signal.SIGINT) != 0
    assert not list(tmp_path.iterdir())


def test_what_a_killed_conversion_was_replacing_is_put_back(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    stage = tmp_path / ".out.abc.partial"
    stage.mkdir()
    (tmp_path / "out").rename(stage / "replaced")  # as after the first of its two renames
    with pytest.raises(KeyboardInterrupt), staged(tmp_path / "out", 0):
        raise KeyboardInterrupt
    assert contents(tmp_path / "out") == before
    assert not stage.exists()


def test_two_conversions_to_one_target_are_refused(source: Path, tmp_path: Path) -> None:
    with staged(tmp_path / "out", 0) as folder:
        folder.mkdir()
        with pytest.raises(StorageError, match="another conversion writes"):
            convert(source, tmp_path / "out")
        assert folder.exists()
    assert (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_folder_is_a_storage_error(source: Path, tmp_path: Path) -> None:
    (tmp_path / "shelf").mkdir(mode=0o500)
    with pytest.raises(StorageError, match="could not be written"):
        convert(source, tmp_path / "shelf" / "out")
