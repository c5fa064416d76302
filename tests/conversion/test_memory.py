"""A conversion holds one layer, not the model."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rljax.models.arch import Experts
from rljax.models.layout import layer_bytes
from tools.bench.convert import CHILD, synthetic_arch, write_source

ROOT = Path(__file__).resolve().parents[2]
CONSTANT = 200e6  # bytes: what the libraries allocate at their first use


def peak(source: Path, target: Path, to: str) -> Any:
    command = [sys.executable, "-c", CHILD, source, target, to, "bits"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout.splitlines()[-1])


EXPERTS = Experts(count=8, per_token=2, ffn_dim=448, normalize=True)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {"family": "phi3"},
    "qwen3_moe": {"family": "qwen3_moe", "qk_norm": "head", "experts": EXPERTS},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_peak_memory_does_not_grow_with_the_model(tmp_path: Path, family: str) -> None:
    arch = dataclasses.replace(synthetic_arch(0.8, 1024), **FAMILIES[family])
    num_bytes = write_source(tmp_path / "hf", arch)
    layer = layer_bytes(arch, np.dtype("bfloat16"))
    assert num_bytes > 25 * layer
    for source, target, to in (("hf", "rljax", "orbax"), ("rljax", "exported", "hf")):
        used = peak(tmp_path / source, tmp_path / target, to)
        assert used["peak_bytes"] - used["peak_bytes_before"] < 2 * layer + CONSTANT < num_bytes / 3, used
