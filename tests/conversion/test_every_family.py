"""Models of every family go into a checkpoint and come back, a few rows at a time, bit by bit."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from rljax import zarr
from rljax.convert import convert, read_checkpoint
from rljax.models import layout
from rljax.models.hf import open_hf
from rljax.models.layout import slots
from rljax.models.shards import read_header
from tests.models.families import CASES, save, stored
from tests.models.oracle import load_hf, tokenizer_files

QKV = "model.layers.1.self_attn.qkv_proj.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
STACKED = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def one(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            save(name, made[name])
            for file, content in tokenizer_files().items():
                (made[name] / file).write_bytes(content)
        return made[name]

    return one


def altered(folder: Path, target: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_returns_the_same_bits(
    source: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(layout, "_TILE_BYTES", 700)  # a few rows, and half an expert where they are stacked
    monkeypatch.setattr(zarr, "_CHUNK_BYTES", 500)
    there = convert(source(name), tmp_path / "there", verify="bits")
    back = convert(tmp_path / "there", tmp_path / "back", verify="bits", shard_size=30_000)
    assert stored(tmp_path / "back") == stored(source(name))
    assert there.num_params == sum(value.size for value in load_file(source(name) / "model.safetensors").values())
    for report in (there, back):
        assert len({row.source for row in report.plan}) == len({row.target for row in report.plan}) == len(report.plan)
    ours, theirs = read_checkpoint(tmp_path / "there").params, load_hf(source(name))[1]
    assert jax.tree.all(jax.tree.map(lambda one, other: np.array_equal(one, other), ours, theirs))


@pytest.mark.parametrize("name", ["phi3", "gemma3", "qwen3-moe", "gpt-oss"])
def test_logits_prove_a_conversion(source: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    report = convert(source(name), tmp_path / "there", verify="logits")
    assert report.logits is not None
    assert (report.logits.max_abs_difference, report.logits.top1_agreement) == (0.0, 1.0)
    narrow = convert(source(name), tmp_path / "narrow", dtype="bfloat16", verify="logits").logits
    assert narrow is not None
    assert narrow.max_abs_difference > 0


def test_layers_and_experts_are_shown_once(source: Callable[[str], Path], tmp_path: Path) -> None:
    screen = io.StringIO()
    convert(source("qwen3-moe"), tmp_path / "out", dry_run=True, console=Console(file=screen, width=160))
    lines = [line.split() for line in screen.getvalue().splitlines() if ".experts." in line]
    assert [(line[0], line[2], line[-1]) for line in lines] == [
        ("model.layers.*.mlp.experts.*.gate_proj.weight", "layers.moe.gate_up[*,*].gate", "15"),
        ("model.layers.*.mlp.experts.*.up_proj.weight", "layers.moe.gate_up[*,*].up", "15"),
        ("model.layers.*.mlp.experts.*.down_proj.weight", "layers.moe.down[*,*]", "15"),
    ]


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("phi3", lambda t: t.update({QKV: t[QKV][:-1]}), r"qkv_proj\.weight in .* has shape \(95, 32\); .* \(96, 32\)"),
        ("phi3", lambda t: t.update({QKV: np.concatenate([t[QKV], t[QKV][:1]])}), r"has shape \(97, 32\)"),
        ("phi3", lambda t: t.update({QKV: t[QKV].T}), r"qkv_proj\.weight in .* has shape \(32, 96\)"),
        ("phi3", lambda t: t.pop(QKV), r"qkv_proj\.weight is missing"),
        ("phi3", lambda t: t.update({QKV: t[QKV].astype(np.int8)}), r"qkv_proj\.weight in .* is of type I8"),
        ("phi3", lambda t: t.update({QKV.replace("qkv", "q"): t[QKV][:32]}), r"\.q_proj\.weight in .* has no place"),
        ("mixtral", lambda t: t.pop(EXPERT), r"experts\.3\.w2\.weight is missing"),
        ("mixtral", lambda t: t.update({EXPERT.replace("3", "4"): t[EXPERT]}), r"experts\.4\.w2\.weight in .* has no place"),
        ("mixtral", lambda t: t.update({EXPERT: t[EXPERT].T}), r"experts\.3\.w2\.weight in .* has shape \(48, 32\)"),
        ("gpt-oss", lambda t: t.update({STACKED: t[STACKED][:3]}), r"gate_up_proj in .* has shape \(3, 32, 96\)"),
        ("gpt-oss", lambda t: t.update({STACKED: t[STACKED].swapaxes(1, 2)}), r"gate_up_proj in .* has shape \(4, 96, 32\)"),
        ("qwen2", lambda t: t.pop("model.layers.1.self_attn.k_proj.bias"), r"k_proj\.bias is missing"),
        ("qwen3", lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"), r"q_norm\.weight is missing"),
        ("gemma2", lambda t: t.pop("model.layers.1.post_feedforward_layernorm.weight"), "post_feedforward.* is missing"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(
    source: Callable[[str], Path], tmp_path: Path, name: str, change: Callable[[Any], Any], told: str
) -> None:
    model = altered(source(name), tmp_path / "model", change)
    with pytest.raises(ValueError, match=told):
        convert(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["phi3", "mixtral", "gpt-oss"])
def test_a_cut_file_is_refused(source: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    shutil.copytree(source(name), tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors: not a complete"):
        open_hf(tmp_path / "model")


def test_nan_in_a_fused_tensor_is_told_with_its_rows(source: Callable[[str], Path], tmp_path: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors[QKV] = tensors[QKV].copy()
        tensors[QKV][40, 3] = np.nan

    report = convert(altered(source("phi3"), tmp_path / "model", spoil), tmp_path / "out", verify="bits")
    assert [notice.split(" in ")[0] for notice in report.notices] == [f"{QKV}[32:64]"]


def test_rows_of_fused_tensors_of_several_shards_are_found(source: Callable[[str], Path], tmp_path: Path) -> None:
    convert(source("phi3"), tmp_path / "cut", to="hf", shard_size=1, verify="none")
    files = list((tmp_path / "cut").glob("*.safetensors"))
    assert [len(read_header(file)) for file in files] == [1] * len(files)  # a tensor is never divided
    assert len(json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())["weight_map"]) == len(files)
    one, many = open_hf(source("phi3")), open_hf(tmp_path / "cut")
    for slot in slots(one.arch):
        assert np.array_equal(many.rows(slot.name, 1, slot.shape[0]), one.read(slot.name)[1:]), slot.name
