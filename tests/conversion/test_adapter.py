"""Adapter folders hold what was trained, and are taken with the model they were trained beside and no other."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.checkpoint import load_params, save_params
from rljax.conversion.adapter import ADAPTER_FILE, AdapterCard, base_identity, check_adapter, read_card, write_adapter
from rljax.convert import convert
from rljax.models.lora import TARGETS, LoraSpec
from tests.tiny_model import host_adapter
from tests.tiny_run import tiny_checkpoint

SPEC = LoraSpec(rank=4, alpha=8.0, rslora=True, targets=TARGETS[:3])


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    card = AdapterCard(SPEC, base_identity(tiny_checkpoint()))
    write_adapter(tmp_path / "adapter", jax.tree.map(jnp.asarray, host_adapter(SPEC)), card)
    return tmp_path / "adapter"


def test_what_was_written_is_read(adapter: Path) -> None:
    assert read_card(adapter) == AdapterCard(SPEC, base_identity(tiny_checkpoint()))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), host_adapter(SPEC))
    for left, right in zip(*map(jax.tree.leaves, (load_params(adapter, like), host_adapter(SPEC))), strict=True):
        assert np.array_equal(left, right)
    check_adapter(adapter, SPEC, tiny_checkpoint())


def test_an_adapter_of_another_kind_is_refused(adapter: Path) -> None:
    asked = dataclasses.replace(SPEC, rank=8, targets=TARGETS)
    with pytest.raises(ValueError, match=r"has rank 4, not 8, targets \('q_proj', 'k_proj', 'v_proj'\), not .*set these in"):
        check_adapter(adapter, asked, tiny_checkpoint())


def test_a_base_keeps_its_identity_when_it_is_converted_again_and_loses_it_with_another_type(tmp_path: Path) -> None:
    for name, dtype in (("a", "float32"), ("b", "float32"), ("c", "bfloat16")):
        convert(tiny_checkpoint(), tmp_path / name, to="orbax", dtype=dtype, verify="none")
    a, b, c = (base_identity(tmp_path / name) for name in "abc")
    assert a == b != c


def test_no_adapter_and_a_broken_description_are_told(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no adapter \(lora.json is missing\); give the adapter/ folder"):
        read_card(tiny_checkpoint())
    text = json.dumps({"spec": {"rank": 4}, "base": ""}).encode()
    save_params(tmp_path / "broken", {"a": jnp.ones(2)}, {ADAPTER_FILE: text})
    with pytest.raises(ValueError, match=r"not the description of an adapter"):
        read_card(tmp_path / "broken")
