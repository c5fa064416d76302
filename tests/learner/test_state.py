"""The training state lies where its description says, and weight decay spares vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rljax.config import OptimizerConfig
from rljax.learner.optimizer import Optimizer
from rljax.learner.state import abstract_state, learner_params
from rljax.models.decoder import decaying, logical_axes
from rljax.pytree import leaf_names
from tests.tiny_model import ARCH, config_of, first_state, host_params, learner_of, mesh_of

VECTORS = {"final_norm", "layers.attn_norm", "layers.mlp_norm"}


@pytest.mark.parametrize("mesh", ["one", "fsdp", "tensor"])
def test_the_described_state_is_the_real_one(mesh: str) -> None:
    learner = learner_of(mesh)
    real, described = first_state(learner), learner.abstract_state
    assert leaf_names(real) == leaf_names(described)
    for name, leaf, like in zip(leaf_names(real), *map(jax.tree.leaves, (real, described)), strict=True):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype), name
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim), name


def test_each_moment_lies_like_its_parameter() -> None:
    state = learner_of("tensor").abstract_state
    for moment in (state.optimizer.moments[0].mu, state.optimizer.moments[0].nu):
        places = jax.tree.map(lambda leaf, like: leaf.sharding == like.sharding, moment, state.params)
        assert all(jax.tree.leaves(places))
    assert state.params["layers"]["down"].sharding.spec == PartitionSpec(None, "tensor", "fsdp")
    assert state.optimizer.updates.sharding.is_fully_replicated


def test_moments_are_float32_whatever_the_parameters_are() -> None:
    optimizer = Optimizer(OptimizerConfig(), lambda _: decaying(ARCH), logical_axes(ARCH))
    state = abstract_state(ARCH, mesh_of("one"), config_of(model={"param_dtype": "bfloat16"}), optimizer)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.optimizer.moments[0].mu)} == {"float32"}
    assert jax.tree.leaves(learner_params(ARCH, mesh_of("one"), "float32"))[0].dtype == jnp.float32


def test_weight_decay_shrinks_matrices_and_leaves_vectors() -> None:
    params = jax.tree.map(jnp.array, host_params())
    optimizer = Optimizer(OptimizerConfig(learning_rate=0.5, weight_decay=0.1), lambda _: decaying(ARCH), logical_axes(ARCH))
    still = jax.tree.map(jnp.zeros_like, params)
    after = jax.jit(optimizer.update)(still, optimizer.init(params), params).params
    for name, old, new in zip(leaf_names(params), *map(jax.tree.leaves, (params, after)), strict=True):
        np.testing.assert_allclose(new, old * (1.0 if name in VECTORS else 0.95), rtol=1e-6)
    assert set(leaf_names(params)) > VECTORS
