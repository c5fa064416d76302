"""The mesh is the configured one, and parameters lie on it as the rules say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rljax.config import MeshConfig
from rljax.mesh import AXES, LEARNER_RULES, SAMPLER_RULES, build_mesh, constrain, data_shards, param_shardings, sharding
from rljax.models.arch import Experts
from rljax.models.decoder import abstract_params, logical_axes
from tests.tiny_model import ARCH, mesh_of

SHAPES = {"w": jax.ShapeDtypeStruct((2, 32, 3, 8), jnp.float32), "scale": jax.ShapeDtypeStruct((32,), jnp.float32)}
NAMES = {"w": ("layers", "embed", "kv_heads", "head_dim"), "scale": ("embed",)}


@pytest.fixture
def eight() -> list:
    if len(jax.devices()) < 8:
        pytest.skip("needs 8 devices")
    return jax.devices()[:8]


def test_fsdp_takes_the_devices_that_are_left(eight: list) -> None:
    assert dict(build_mesh(MeshConfig(), eight).shape) == dict(zip(AXES, (1, 8, 1, 1, 1), strict=True))
    mesh = build_mesh(MeshConfig(replica=2, tensor=2), eight)
    assert dict(mesh.shape) == {"replica": 2, "fsdp": 2, "context": 1, "expert": 1, "tensor": 2}
    assert data_shards(mesh) == 4
    assert mesh.devices.flatten().tolist() == eight


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MeshConfig(fsdp=4), "mesh.fsdp 4 needs 4 devices, and there are 8"),
        (MeshConfig(fsdp=2, tensor=3), "mesh.fsdp 2 x mesh.tensor 3 needs 6 devices, and there are 8"),
        (MeshConfig(tensor=3), "mesh.fsdp 2 x mesh.tensor 3 needs 6 devices"),
        (MeshConfig(tensor=16), "mesh.tensor 16 needs 16 devices"),
        (MeshConfig(fsdp=1), "a mesh of 1 needs 1 devices, and there are 8"),
    ],
)
def test_a_mesh_of_another_size_is_refused(eight: list, config: MeshConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_mesh(config, eight)


def test_parameters_are_split_by_the_rules() -> None:
    mesh = mesh_of("tensor")
    placed = param_shardings(mesh, SHAPES, NAMES, {"embed": "fsdp", "kv_heads": None})
    assert placed["w"].spec == PartitionSpec(None, "fsdp", None, None)
    assert placed["scale"].spec == PartitionSpec("fsdp")


def test_a_dim_that_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match=r"mesh\.tensor \(2\) must divide the kv_heads dim \(3\) of w; choose another"):
        param_shardings(mesh_of("tensor"), SHAPES, NAMES, LEARNER_RULES)


def test_every_rule_is_about_a_dim_of_the_model() -> None:
    arch = dataclasses.replace(ARCH, experts=Experts(count=2, per_token=1, ffn_dim=8, normalize=True), dense_layers=(0,))
    names = set(jax.tree.leaves(logical_axes(arch)))
    assert set(LEARNER_RULES) <= names
    assert set(SAMPLER_RULES) <= names


def test_the_learner_splits_every_matrix_and_the_sampler_none_over_data() -> None:
    mesh, shapes, axes = mesh_of("fsdp"), abstract_params(ARCH), logical_axes(ARCH)
    for rules, share in ((LEARNER_RULES, 8), (SAMPLER_RULES, 1)):
        placed = param_shardings(mesh, shapes, axes, rules)
        sizes = [
            (shape.size, at.shard_shape(shape.shape)) for shape, at in zip(*map(jax.tree.leaves, (shapes, placed)), strict=True)
        ]
        assert all(size == share * np.prod(part) for size, part in sizes)


def test_constraints_hold_under_a_mesh_and_are_nothing_without() -> None:
    x = jnp.zeros((8, 4))
    assert constrain(x, "fsdp") is x
    mesh = mesh_of("fsdp")
    with jax.set_mesh(mesh):
        out = jax.jit(lambda x: constrain(x, "fsdp"))(x)
    assert out.sharding.is_equivalent_to(sharding(mesh, "fsdp"), 2)
