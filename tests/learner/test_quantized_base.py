"""An adapter beside a quantised base: gradients, what changes, meshes, and the merged model."""

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from rljax.learner.state import TrainState
from rljax.learner.step import Learner
from rljax.leaves import like, named_leaves
from rljax.mesh import data_shards
from rljax.models.lora import merged
from rljax.models.quantized import num_bytes
from rljax.pytree import Params
from tests.learner.test_lora import GRADIENT_ATOL, LORA
from tests.models.test_lora import random_adapter, random_params
from tests.models.test_quantized import dequantised_by_hand
from tests.tiny_model import ARCH, batch_of, config_of, first_state, gradient, mesh_of, placed, some_groups

WIDE = dataclasses.replace(ARCH, embed_dim=256, ffn_dim=128)
"""Several tiles along the dims that meshes split."""
MESH_ATOL = 1e-4
"""Float32 sums of eight times as many terms as in the tiny model, split over devices: by CPU they differ by 1.6e-5 to 3.6e-5,
in gradients of the order 1."""


@cache
def learner_with(kind: str, mesh: str = "one") -> Learner:
    devices = mesh_of(mesh)
    return Learner(WIDE, devices, config_of(data_shards(devices), lora={**LORA, "base_dtype": kind}))


def kept(learner: Learner, params: Params) -> Params:
    """Return a model as a run keeps the base it loads."""
    model = placed(learner, params)
    return like(model, {name: learner.kept(name, leaf) for name, leaf in named_leaves(model).items()})


@cache
def step_on(kind: str, mesh: str = "one") -> tuple[Learner, Params, TrainState, Any]:
    """Return a learner, the base it has used, and state and output after one step; as-is, of what nf4 dequantises to."""
    learner = learner_with(kind, mesh)
    assert learner.lora is not None
    params = random_params(WIDE)
    base = kept(learner, dequantised_by_hand(kept(learner_with("nf4"), params)) if kind == "as-is" else params)
    state = first_state(learner, random_adapter(WIDE, learner.lora))
    return learner, base, *learner.step(state, learner.put(batch_of(learner, some_groups())), base=base)


def test_the_gradient_is_that_against_the_dequantised_base() -> None:
    (_, _, ours, output), (_, _, theirs, other) = step_on("nf4"), step_on("as-is")
    assert float(output.metrics["loss"]) == pytest.approx(float(other.metrics["loss"]), abs=GRADIENT_ATOL)
    for left, right in zip(*map(jax.tree.leaves, (gradient(ours), gradient(theirs))), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=GRADIENT_ATOL)
        assert np.abs(right).max() > 1e-3


def test_only_the_adapter_changes_and_only_it_is_kept() -> None:
    learner, base, state, _ = step_on("nf4")
    assert learner.lora is not None
    again = kept(learner, random_params(WIDE))
    assert all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (base, again)), strict=True))
    adapter = random_adapter(WIDE, learner.lora)
    assert all(not np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (state.params, adapter)), strict=True))
    assert jax.tree.structure(base) == jax.tree.structure(learner.abstract_base)
    assert num_bytes(base) == num_bytes(learner.abstract_base) < num_bytes(learner.abstract_model) / 2


def test_a_step_on_many_devices_is_the_step_on_one() -> None:
    (_, _, single, output), (learner, base, sharded, other) = step_on("nf4"), step_on("nf4", "tensor")
    assert float(other.metrics["loss"]) == pytest.approx(float(output.metrics["loss"]), abs=MESH_ATOL)
    for one, many in zip(*map(jax.tree.leaves, (gradient(single), gradient(sharded))), strict=True):
        np.testing.assert_allclose(many, one, rtol=0, atol=MESH_ATOL)
    for leaf, shape in zip(*map(jax.tree.leaves, (base, learner.abstract_base)), strict=True):
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_merged_model_is_the_dequantised_base_with_the_adapter(kind: str) -> None:
    learner = learner_with(kind)
    assert learner.lora is not None
    base, adapter = kept(learner, random_params(WIDE)), random_adapter(WIDE, learner.lora)
    expected = merged(WIDE, dequantised_by_hand(base), adapter, learner.lora)
    found = learner.merged(placed(learner, adapter), base)
    for left, right, shape in zip(*map(jax.tree.leaves, (found, expected, learner.abstract_model)), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-6)
        assert left.dtype == shape.dtype


def test_tiles_that_do_not_divide_over_the_mesh_are_refused() -> None:
    arch, mesh = dataclasses.replace(ARCH, embed_dim=192), mesh_of("fsdp")
    with pytest.raises(ValueError, match=r"lora\.base_dtype = 'nf4': mesh\.fsdp \(8\) must divide the embed dim \(3\)"):
        Learner(arch, mesh, config_of(8, lora={**LORA, "base_dtype": "nf4"}))
    Learner(arch, mesh, config_of(8, lora={**LORA, "base_dtype": "int8"}))
