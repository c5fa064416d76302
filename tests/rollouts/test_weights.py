"""Published parameters are the learner's, cast, split by block with output dims first, and laid out for the sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rljax.learner.state import learner_params
from rljax.rollouts.weights import publisher
from tests.tiny_model import ARCH, host_params, mesh_of

OUTPUTS_FIRST = {"qkv": (1, 2, 3, 0), "out": (3, 0, 1, 2), "gate_up": (1, 2, 0), "down": (1, 0)}


@pytest.mark.parametrize("mesh", ["one", "tensor"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_the_learners_in_the_samplers_type(mesh: str, dtype: str) -> None:
    layout = learner_params(ARCH, mesh_of(mesh), "float32")
    source = jax.tree.map(lambda leaf, like: jax.device_put(jnp.array(leaf), like.sharding), host_params(), layout)
    out = publisher(ARCH, mesh_of(mesh), dtype)(source)
    assert sorted(out["layers"]) == [0, 1]
    for name in ("embed", "head", "final_norm"):
        assert np.array_equal(out[name], jnp.asarray(host_params()[name], dtype))
    for index, block in out["layers"].items():
        for name, value in block.items():
            expected = jnp.asarray(host_params()["layers"][name][index], dtype)
            assert np.array_equal(value, expected.transpose(OUTPUTS_FIRST.get(name, range(expected.ndim))))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(source))  # the learner trains on


def test_the_samplers_layout_is_whole_on_every_data_shard_and_split_over_tensor() -> None:
    mesh = mesh_of("tensor")
    layout = learner_params(ARCH, mesh, "float32")
    source = jax.tree.map(lambda leaf, like: jax.device_put(jnp.array(leaf), like.sharding), host_params(), layout)
    out = publisher(ARCH, mesh, "float32")(source)
    assert source["layers"]["qkv"].sharding.spec == PartitionSpec(None, "fsdp", "tensor", None, None)
    assert out["layers"][0]["qkv"].sharding.spec == PartitionSpec("tensor", None, None, None)
    assert out["layers"][1]["down"].sharding.spec == PartitionSpec(None, "tensor")
    assert out["head"].sharding.spec == PartitionSpec("tensor", None)
    assert all("fsdp" not in leaf.sharding.spec for leaf in jax.tree.leaves(out))


def test_a_model_that_does_not_divide_is_refused() -> None:
    odd = type(ARCH)(**{**{name: getattr(ARCH, name) for name in ARCH.__slots__}, "ffn_dim": 47})
    with pytest.raises(ValueError, match=r"mesh.tensor \(2\) must divide the ffn dim \(47\) of layers"):
        publisher(odd, mesh_of("tensor"), "float32")
