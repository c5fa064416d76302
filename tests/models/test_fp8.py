"""8-bit weights are read as the numbers they stand for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rljax.convert import convert, read_checkpoint
from rljax.models import layout
from rljax.models.hf import open_hf
from rljax.models.layout import fill, slots, view
from tests.models.families import save
from tests.models.oracle import save_llama

BLOCK = (16, 24)  # divides neither every row nor every column count of the tiny model
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_llama(folder)
    return folder


def quantise(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the 8-bit tensor, its scales, and what both stand for, block by block."""
    rows, columns = weight.shape
    stored, held = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[place].abs().max() / 448
            stored[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
            held[place] = stored[place].to(torch.float32) * scales[i, j]
    return stored, scales, held


def save_quantised(plain: Path, folder: Path, form: str) -> dict[str, torch.Tensor]:
    """Write a copy whose projections are 8-bit; return the weights it stands for."""
    shutil.copytree(plain, folder)
    tensors = load_file(folder / "model.safetensors")
    held = dict(tensors)
    for name in [name for name in tensors if "proj" in name]:
        rows, columns = tensors[name].shape
        block = {"blocks": BLOCK, "rows": (1, columns)}.get(form, (rows, columns))
        tensors[name], scales, held[name] = quantise(tensors[name], block)
        scales = scales.reshape(()) if form == "scalar" else scales.reshape(-1) if form == "tensor" else scales
        suffix = "_scale" if form == "rows" else "_scale_inv"
        tensors[name + suffix] = scales
        if form == "scalar":
            tensors[name.replace(".weight", ".activation_scale")] = torch.ones(())
    save_file(tensors, folder / "model.safetensors")
    settings: dict[str, Any] = {"quant_method": "compressed-tensors" if form == "rows" else "fp8"}
    settings["weight_block_size"] = list(BLOCK) if form == "blocks" else None
    rewrite_config(folder, quantization_config=settings)
    return held


def rewrite_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("form", ["blocks", "rows", "tensor", "scalar"])
def test_every_weight_is_multiplied_by_its_scale(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    held = save_quantised(plain, tmp_path / "model", form)
    monkeypatch.setattr(layout, "_TILE_BYTES", 3000)  # some rows at a time, blocks cut through
    model = open_hf(tmp_path / "model")
    for name, weight in held.items():
        assert np.array_equal(model.read(name), weight.numpy()), name
    assert any("multiplied by their scales" in notice for notice in model.notices)
    assert any("scales of activations" in notice for notice in model.notices) == (form == "scalar")
    convert(tmp_path / "model", tmp_path / "out")
    down = read_checkpoint(tmp_path / "out").params["layers"]["down"]
    assert np.array_equal(down[1], held["model.layers.1.mlp.down_proj.weight"].numpy().T)
    convert(tmp_path / "out", tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())


@pytest.mark.parametrize("name", ["phi3", "qwen3-moe"])
@pytest.mark.parametrize("form", ["blocks", "rows", "tensor"])
def test_scales_reach_the_rows_of_fused_tensors_and_every_expert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, form: str
) -> None:
    save(name, tmp_path / "plain")
    held = save_quantised(tmp_path / "plain", tmp_path / "model", form)
    monkeypatch.setattr(layout, "_TILE_BYTES", 1000)
    model = open_hf(tmp_path / "model")
    params, _ = fill(model, np.dtype("float32"))
    for slot in slots(model.arch):
        wanted = held[slot.tensor].numpy()[slot.offset : slot.offset + slot.shape[0]]
        assert np.array_equal(view(params, slot).reshape(slot.shape), wanted), slot.name
        assert np.array_equal(model.rows(slot.name, 1, slot.shape[0]), wanted[1:]), slot.name  # may begin inside a block


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors: tensors.pop(f"{QUERY}_scale_inv"), f"{QUERY} is of type F8_E4M3 and has no"),
        (lambda tensors: tensors.pop(QUERY), "scales no tensor"),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY].to(torch.float32)}), "scales no tensor"),
        (lambda tensors: tensors.update({f"{QUERY}_scale_inv": torch.ones(2, 3)}), r"shape \(2, 3\), which is neither"),
        (lambda tensors: tensors.update({f"{QUERY}_scale_inv": torch.ones(4, 3).to(torch.int8)}), "no scale"),
    ],
)
def test_a_scale_that_does_not_fit_is_refused(plain: Path, tmp_path: Path, change: Callable[[Any], Any], told: str) -> None:
    save_quantised(plain, tmp_path / "model", "blocks")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(ValueError, match=told):
        open_hf(tmp_path / "model")


def test_other_quantisations_are_refused_by_name(plain: Path, tmp_path: Path) -> None:
    save_quantised(plain, tmp_path / "model", "blocks")
    rewrite_config(tmp_path / "model", quantization_config={"quant_method": "awq"})
    with pytest.raises(ValueError, match="quantization_config"):
        open_hf(tmp_path / "model")
    rewrite_config(tmp_path / "model", quantization_config=None)
    with pytest.raises(ValueError, match=f"{QUERY}.*F8_E4M3|scale_inv"):
        open_hf(tmp_path / "model")
