"""Published parameters are the learner's, cast, split by block with output dims first, and laid out for the sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rljax.learner.state import learner_params
from rljax.models.block import INPUTS
from rljax.models.quantized import num_bytes
from rljax.rollouts.weights import published_params, publisher
from tests.models.test_int8 import OUTPUTS_FIRST, by_hand
from tests.tiny_model import ARCH, host_params, mesh_of, published, warm_engine


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_int8_projections_are_the_codes_of_the_master_weights_and_the_rest_is_as_it_was(dtype: str) -> None:
    engine = warm_engine()
    plain, small = (published(engine, host_params(), dtype, kind) for kind in ("as-is", "int8"))
    projections = outputs = 0
    for index, block in small["layers"].items():
        for name, value in block.items():
            if name not in INPUTS:
                assert np.array_equal(value, plain["layers"][index][name])
                assert value.dtype == dtype
                continue
            codes, scale = by_hand(name, host_params()["layers"][name][index])
            np.testing.assert_array_equal(value.codes, codes)
            np.testing.assert_allclose(value.scale, scale, rtol=2e-7)
            projections, outputs = projections + codes.size, outputs + scale.size
    for name in ("embed", "head", "final_norm"):
        assert np.array_equal(small[name], plain[name])
    assert num_bytes(small) == num_bytes(plain) - projections * (jnp.dtype(dtype).itemsize - 1) + 4 * outputs
    assert num_bytes(small["layers"]) < (0.33 if dtype == "float32" else 0.66) * num_bytes(plain["layers"])


@pytest.mark.parametrize("mesh", ["fsdp", "tensor"])
def test_codes_and_scales_are_the_same_bits_on_any_mesh(mesh: str) -> None:
    single, sharded = (published(warm_engine(name), host_params(), "float32", "int8") for name in ("one", mesh))
    for one, two in zip(*map(jax.tree.leaves, (single, sharded)), strict=True):
        assert np.array_equal(one, two)
    told = published_params(ARCH, mesh_of(mesh), "float32", "int8")
    assert [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(told)] == [
        (leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(sharded)
    ]
    if mesh == "tensor":
        qkv, down = sharded["layers"][0]["qkv"], sharded["layers"][0]["down"]
        assert (qkv.codes.sharding.spec, qkv.scale.sharding.spec) == (
            PartitionSpec("tensor", None, None, None),
            PartitionSpec("tensor", None, None),
        )
        # The inputs of `down` are split, and its scales are those of all of them.
        assert (down.codes.sharding.spec, down.scale.sharding.spec) == (PartitionSpec(None, "tensor"), PartitionSpec(None))
