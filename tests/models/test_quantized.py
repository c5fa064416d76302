"""A quantised base: its codes against numpy, its bytes, and the forward pass against one of plain arrays."""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.mesh import LEARNER_RULES, param_shardings
from rljax.models.arch import Arch
from rljax.models.block import INPUTS
from rljax.models.decoder import abstract_params, logical_axes, merge
from rljax.models.quantized import abstract_base, dequantised, num_bytes, quantised
from rljax.pytree import Params
from tests.models.test_lora import MIXED, WITH_EXPERTS, forward, random_params
from tests.tiny_model import ARCH, SPREAD, mesh_of

NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
        *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ]
)
"""The values of the codes: arXiv:2305.14314, appendix E."""
LOGITS_ATOL = 1e-5
"""The same products in float32; logits are of the order 3."""
SHAPES = {"qkv": (2, 128, 2, 4, 8), "out": (2, 2, 2, 8, 32), "gate_up": (2, 96, 2, 48), "down": (2, 48, 32)}
TILES = {"qkv": 64, "out": 8, "gate_up": 48, "down": 48}
"""Most inputs up to 64 that divide the last dim of the inputs."""


def random_weight(name: str) -> np.ndarray:
    return np.random.default_rng(3).normal(0.0, SPREAD, SHAPES[name]).astype(np.float32)


def quantised_layers(params: Params, kind: str) -> Params:
    weights = {name: part for name, part in params["layers"].items() if name in INPUTS}
    found = jax.jit(lambda weights: {name: quantised(name, part, kind) for name, part in weights.items()})(weights)
    return {**params, "layers": {**params["layers"], **found}}


def by_hand(part: Any) -> np.ndarray:
    """Multiply codes with scales, each repeated over what it is the scale of."""
    codes, scales = np.asarray(part.qvalue).astype(np.int64), np.asarray(part.scale)
    values = NF4.astype(np.float32)[codes] if part.qtype == "nf4" else codes.astype(np.float32)
    for dim, (size, parts) in enumerate(zip(codes.shape, scales.shape, strict=True)):
        scales = np.repeat(scales, size // parts, axis=dim)
    return values * scales


def dequantised_by_hand(params: Params) -> Params:
    layers = {name: by_hand(part) if hasattr(part, "qvalue") else part for name, part in params["layers"].items()}
    return jax.tree.map(jnp.asarray, {**params, "layers": layers})


@pytest.mark.parametrize("name", INPUTS)
def test_int8_is_within_half_a_scale_and_a_scale_is_one_outputs(name: str) -> None:
    weight = random_weight(name)
    found = jax.jit(lambda weight: quantised(name, weight, "int8"))(weight)
    largest = np.abs(weight).max(axis=tuple(range(1, 1 + INPUTS[name])), keepdims=True)
    np.testing.assert_allclose(found.scale, largest / 127.5, rtol=1e-6)
    assert (found.qvalue.dtype, found.scale.dtype) == (jnp.int8, jnp.float32)
    restored = np.asarray(dequantised({name: found}, "float32")[name])
    np.testing.assert_array_equal(restored, by_hand(found))
    assert (np.abs(restored - weight) / found.scale).max() <= 0.5 + 1e-4
    assert (np.abs(restored - weight) / found.scale).max() > 0.45


@pytest.mark.parametrize("name", INPUTS)
def test_nf4_takes_the_nearest_of_the_published_values(name: str) -> None:
    weight, dim, tile = random_weight(name), INPUTS[name], TILES[name]
    weight[0, :8] = 0.0  # whole tiles of `out` and `down` are zero, which no scale may divide
    found = jax.jit(lambda weight: quantised(name, weight, "nf4"))(weight)
    tiled = (*weight.shape[:dim], -1, tile, *weight.shape[dim + 1 :])
    tiles = weight.reshape(tiled)
    largest = np.abs(tiles).max(axis=dim + 1, keepdims=True)
    scales = np.where(largest > 0, largest, 1.0)
    np.testing.assert_array_equal(found.scale, scales.squeeze(dim + 1))
    distances = np.abs(tiles[..., None] / scales[..., None] - NF4)
    taken = np.take_along_axis(distances, np.asarray(found.qvalue).astype(np.int64).reshape(tiles.shape)[..., None], -1)
    np.testing.assert_allclose(taken[..., 0], distances.min(-1), rtol=0, atol=1e-6)
    assert (found.qvalue.dtype, found.scale.dtype) == (jnp.uint4, jnp.float32)
    assert set(np.unique(np.asarray(found.qvalue).astype(int))) == set(range(16))
    restored = np.asarray(dequantised({name: found}, "float32")[name])
    np.testing.assert_array_equal(restored, by_hand(found))


def test_a_dim_without_a_tile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lora\.base_dtype = 'nf4'.* 67 inputs of down; set it to 'int8'"):
        quantised("down", jnp.ones((1, 67, 4)), "nf4")
    assert quantised("down", jnp.ones((1, 80, 4)), "nf4").scale.shape == (1, 2, 4), "tiles of 40"


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_the_bytes_are_those_of_the_codes_and_scales(kind: str) -> None:
    """A compiled program that only takes the weight knows the room it takes: two codes of nf4 share a byte."""
    weight = jax.ShapeDtypeStruct((2, 1024, 2, 128), jnp.float32)
    found = jax.eval_shape(lambda weight: quantised("gate_up", weight, kind), weight)
    scales = weight.size // (1024 if kind == "int8" else 64)
    expected = weight.size // (1 if kind == "int8" else 2) + 4 * scales
    taken = jax.jit(lambda part: dequantised({"gate_up": part}, "float32")).lower(found).compile().memory_analysis()
    assert num_bytes(found) == expected == taken.argument_size_in_bytes
    assert 4 * weight.size / expected == pytest.approx(3.98 if kind == "int8" else 7.11, abs=0.01)


@pytest.mark.parametrize(("arch", "kind"), [(MIXED, "int8"), (dataclasses.replace(WITH_EXPERTS, dense_layers=(0,)), "nf4")])
def test_logits_are_those_of_the_dequantised_weights(arch: Arch, kind: str) -> None:
    params = random_params(arch)
    base = quantised_layers(params, kind)
    assert {name for name, part in base["layers"].items() if hasattr(part, "qvalue")} == set(INPUTS)
    ours, theirs = forward(arch, base), forward(arch, dequantised_by_hand(base))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=LOGITS_ATOL)
    assert np.abs(ours - forward(arch, params)).max() > 1e-3, "the base is not that of before"


def test_the_backward_pass_keeps_no_dequantised_weights() -> None:
    base = quantised_layers(random_params(ARCH), "nf4")
    tokens = jnp.ones((1, 3), jnp.int32)

    def hidden(embed: jax.Array) -> jax.Array:
        model = merge(ARCH, {**base, "embed": embed})
        return model(tokens, tokens, tokens, dtype=jnp.dtype("float32"), remat="dots")[0]

    kept = jax.eval_shape(lambda embed: jax.vjp(hidden, embed)[1], base["embed"])
    floats = {leaf.shape[-4:] for leaf in jax.tree.leaves(kept) if jnp.issubdtype(leaf.dtype, jnp.floating)}
    assert floats
    assert not floats & {base["layers"][name].shape[-4:] for name in INPUTS}


def test_scales_are_split_with_their_tiles_or_not_at_all() -> None:
    arch, mesh = dataclasses.replace(ARCH, embed_dim=256, ffn_dim=128), mesh_of("tensor")
    axes = logical_axes(arch)
    shapes = abstract_params(arch)
    placed = param_shardings(mesh, shapes, axes, LEARNER_RULES)
    model = jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, placed)
    layers = {kind: abstract_base(mesh, model, axes, kind)["layers"] for kind in ("int8", "nf4")}
    specs = {kind: {name: tuple(layers[kind][name].scale.sharding.spec) for name in INPUTS} for kind in layers}
    assert specs["nf4"] == {
        "qkv": (None, "fsdp", "tensor", None, None),
        "out": (None, "tensor", None, None, "fsdp"),
        "gate_up": (None, "fsdp", None, "tensor"),
        "down": (None, "tensor", "fsdp"),
    }
    assert specs["int8"]["qkv"] == (None, None, "tensor", None, None)
    assert specs["int8"]["down"] == (None, None, "fsdp")
    assert all(layers["nf4"][name].qvalue.sharding == model["layers"][name].sharding for name in INPUTS)
    assert abstract_base(mesh, model, axes, "as-is") is model


def test_a_missing_package_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ValueError, match=r"lora\.base_dtype.*pip install 'rljax\[qlora\]'"):
        quantised("down", jnp.ones((1, 64, 4)), "int8")
