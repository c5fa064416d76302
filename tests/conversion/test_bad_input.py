"""Bad input ends `rljax convert` with the right exit code and a message that helps, and leaves nothing behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rljax.cli import EXIT_DONE, EXIT_STORAGE, EXIT_USAGE, main
from rljax.convert import convert
from tests.models.gguf_files import metadata, write_gguf
from tests.models.oracle import make_llama, tokenizer_files

SHARD = "model-00002-of-00004.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded") / "model"
    convert(base, folder, to="hf", shard_size=80_000, verify="none")
    assert (folder / SHARD).exists()
    return folder


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def swap_shapes(folder: Path) -> None:
    """Store two tensors of the same number of elements under each other's names."""
    tensors = load_file(folder / "model.safetensors")
    down = UP.replace("up", "down")
    tensors[UP], tensors[down] = tensors[down], tensors[UP]
    save_file(tensors, folder / "model.safetensors")


def no_marker(folder: Path) -> None:
    """Leave what a run leaves that was killed while it saved: arrays without their manifest."""
    (folder / "params").rename(folder / "arrays")
    for name in ("arch.json", "manifest.json"):
        (folder / name).unlink()


def flip(path: Path, place: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[place] ^= 1
    path.write_bytes(raw)


BAD: dict[str, tuple[str, Callable[[Path], Any], int, tuple[str, ...]]] = {
    "truncated shard": (
        "sharded", lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-4]), EXIT_USAGE, (SHARD, "download it again"),
    ),
    "index names a missing file": ("sharded", lambda f: (f / SHARD).unlink(), EXIT_USAGE, (INDEX, SHARD, "download that file")),
    "swapped shapes": ("base", swap_shapes, EXIT_USAGE, (UP, "(64, 96)", "(96, 64)", "download the checkpoint again")),
    "wrong architecture": (
        "base", lambda f: edit(f / "config.json", architectures=["GPT5ForCausalLM"]), EXIT_USAGE,
        ("config.json", "GPT5ForCausalLM", "LlamaForCausalLM"),
    ),
    "tokenizer larger than the embedding": (
        "base", lambda f: (f / "tokenizer.json").write_bytes(tokenizer_files(99)["tokenizer.json"]), EXIT_USAGE,
        ("tokenizer.json", "the id 98", "97 rows", "published with"),
    ),
    "no commit marker": ("checkpoint", no_marker, EXIT_USAGE, ("manifest.json", "never committed", "another checkpoint")),
    "no manifest": ("checkpoint", lambda f: (f / "manifest.json").unlink(), EXIT_STORAGE, ("manifest.json", "copy it again")),
    "a flipped bit": (
        "checkpoint", lambda f: flip(f / "params" / "layers.down" / "1.0.0"), EXIT_STORAGE,
        ("params/layers.down/1.0.0", "copy it again"),
    ),
    "a missing array": (
        "checkpoint", lambda f: (f / "params" / "layers.down" / "1.0.0").unlink(), EXIT_STORAGE,
        ("params/layers.down/1.0.0", "copy it again"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_leaves_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    kind, spoil, code, told = BAD[name]
    shutil.copytree(request.getfixturevalue(kind), tmp_path / "bad")
    spoil(tmp_path / "bad")
    assert main(["convert", str(tmp_path / "bad"), str(tmp_path / "out")]) == code
    message = capsys.readouterr().err
    assert [part for part in (str(tmp_path / "bad"), *told) if part not in message] == [], message
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_a_gguf_file_that_is_cut_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "model.gguf", make_llama().state_dict(), metadata())
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "model.gguf").read_bytes()[:-500])
    (tmp_path / "model.gguf").unlink()
    assert main(["convert", str(tmp_path / "cut.gguf"), str(tmp_path / "out")]) == EXIT_USAGE
    assert "cut.gguf: not a complete GGUF file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["cut.gguf"]


def test_nan_is_told_by_name_and_converted(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(base, tmp_path / "bad")
    tensors = {name: value.copy() for name, value in load_file(base / "model.safetensors").items()}
    tensors[UP][3, 5] = np.nan
    save_file(tensors, tmp_path / "bad" / "model.safetensors")
    assert main(["convert", str(tmp_path / "bad"), str(tmp_path / "out")]) == EXIT_DONE
    assert f"{UP} in {tmp_path / 'bad' / 'model.safetensors'} holds NaN" in capsys.readouterr().out.replace("\n", "")


def test_a_read_only_target_is_a_storage_error(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(base), "/proc/rljax/model"]) == EXIT_STORAGE  # read-only to root, too
    assert "/proc/rljax/model could not be written" in capsys.readouterr().err


def test_paths_with_spaces_and_unicode_work_in_every_format(base: Path, tmp_path: Path) -> None:
    home = tmp_path / "für  alle 模型 🙂"
    shutil.copytree(base, home / "mon modèle")
    write_gguf(home / "mon modèle.gguf", make_llama().state_dict(), metadata())
    for source, target in (("mon modèle", "nach rljax"), ("nach rljax", "zurück"), ("mon modèle.gguf", "aus gguf")):
        assert main(["convert", str(home / source), str(home / target)]) == EXIT_DONE
    weights = [load_file(home / name / "model.safetensors") for name in ("mon modèle", "zurück")]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
