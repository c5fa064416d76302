"""Weights in 8 bits: codes and scales against numpy, the product against one in float64, and how far logits move."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.models.block import CONTRACTED, INPUTS, project_outputs_first
from rljax.models.decoder import logits, merge, unstack
from rljax.models.int8 import LARGEST, Int8Weight, grouped_int8_product, to_int8
from rljax.pytree import Params
from tests.tiny_model import ARCH, host_params

OUTPUTS_FIRST = {"qkv": (1, 2, 3, 0), "out": (3, 0, 1, 2), "gate_up": (1, 2, 0), "down": (1, 0)}
"""Dims of the sampler's layout, of those of one layer of the learner's."""
ROUNDING = {"float32": 2e-6, "bfloat16": 2**-8}
"""Relative to the largest result: float32 sums, and one rounding of the result."""
LOGITS_ATOL = 2e-5
"""Float32 products that are scaled before or after the sum; logits are of the order 3."""


def by_hand(name: str, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of one layer's weight in the sampler's layout."""
    turned = weight.transpose(OUTPUTS_FIRST[name])
    outputs = turned.shape[: turned.ndim - INPUTS[name]]
    rows = turned.reshape(-1, int(np.prod(turned.shape[len(outputs) :])))
    codes, scales = np.zeros(rows.shape, np.int8), np.ones(len(rows), np.float32)
    for index, row in enumerate(rows):
        if row.any():
            scales[index] = np.abs(row).max() / np.float32(127)
            codes[index] = np.rint(row / scales[index])
    return codes.reshape(turned.shape), scales.reshape(outputs)


def restored(weight: Int8Weight, contracted: tuple[int, ...]) -> np.ndarray:
    """Return codes times scales in float64."""
    return np.asarray(weight.codes, np.float64) * np.expand_dims(np.asarray(weight.scale, np.float64), contracted)


def some_weight(name: str) -> np.ndarray:
    return host_params()["layers"][name][1].copy()


def turned(name: str, weight: np.ndarray) -> jax.Array:
    return jnp.asarray(weight.transpose(OUTPUTS_FIRST[name]))


@pytest.mark.parametrize("name", INPUTS)
def test_codes_are_the_nearest_multiples_of_the_largest_weights_127th(name: str) -> None:
    weight = some_weight(name)
    weight[..., 3] = 0.0  # an output that is zero
    found = jax.jit(lambda weight: to_int8(weight, CONTRACTED[name]))(turned(name, weight))
    codes, scale = by_hand(name, weight)
    assert (found.codes.dtype, found.scale.dtype) == (jnp.int8, jnp.float32)
    np.testing.assert_allclose(found.scale, scale, rtol=2e-7)
    np.testing.assert_array_equal(found.codes, codes)
    assert np.abs(codes).reshape(*scale.shape, -1).max(-1).min() == 0  # the zero one
    assert np.abs(codes).max() == LARGEST
    assert np.abs(codes.astype(int)).max() == -codes.astype(int).min(), "symmetric: -128 is not used"
    step = np.asarray(found.scale).reshape(*scale.shape, *(1,) * INPUTS[name])
    error = np.abs(restored(found, CONTRACTED[name]) - turned(name, weight)) / step
    assert 0.45 < error.max() <= 0.5 + 1e-5


def test_a_weight_that_is_not_finite_shows_in_the_product() -> None:
    weight = np.ones((2, 3), np.float32)
    weight[0, 1], weight[1, 2] = np.nan, np.inf
    out = project_outputs_first(jnp.ones((1, 1, 3)), to_int8(jnp.asarray(weight), (-1,)), 1)
    assert not np.isfinite(out).any()


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", INPUTS)
def test_the_product_is_that_of_codes_times_scales(name: str, dtype: str) -> None:
    weight = turned(name, some_weight(name))
    small, inputs = to_int8(weight, CONTRACTED[name]), weight.shape[-INPUTS[name] :]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 2, *inputs)), dtype)
    out = jax.jit(project_outputs_first, static_argnums=2)(x, small, INPUTS[name])
    dims = tuple(range(-INPUTS[name], 0))
    exact = np.tensordot(np.asarray(x, np.float64), restored(small, dims), (dims, dims))
    assert (out.dtype, out.shape) == (dtype, exact.shape)
    assert np.abs(np.asarray(out, np.float64) - exact).max() <= ROUNDING[dtype] * np.abs(exact).max()
    # What is lost to the unquantised product is at most half a step per term.
    plain = np.tensordot(np.asarray(x, np.float64), np.asarray(weight, np.float64), (dims, dims))
    bound = (
        np.abs(np.asarray(x, np.float64)).sum(dims)[..., *(None,) * small.scale.ndim] * np.asarray(small.scale)[None, None] / 2
    )
    assert (np.abs(exact - plain) <= bound * (1 + 1e-4)).all()
    assert np.abs(exact - plain).max() > 0


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("sizes", [[3, 0, 5, 4], [0, 0, 7, 0], [2, 1, 0, 3]])
def test_each_run_of_rows_meets_its_own_codes_and_scales(sizes: list[int], dtype: str) -> None:
    rng = np.random.default_rng(2)
    x, weight = jnp.asarray(rng.normal(size=(12, 6)), dtype), rng.normal(size=(4, 6, 5)).astype(np.float32)
    small = to_int8(jnp.asarray(weight), (-2,))
    np.testing.assert_allclose(small.scale, np.abs(weight).max(1) / 127, rtol=2e-7)
    owner = np.repeat(np.arange(5), [*sizes, 12 - sum(sizes)])
    dense = np.asarray(small.codes, np.float64) * np.asarray(small.scale, np.float64)[:, None]
    expected = [
        np.asarray(x, np.float64)[row] @ dense[expert] if expert < 4 else np.zeros(5) for row, expert in enumerate(owner)
    ]
    out = grouped_int8_product(x, small.codes, small.scale, jnp.asarray(sizes), jnp.asarray(np.minimum(owner, 3)))
    np.testing.assert_allclose(out, expected, rtol=0, atol=ROUNDING["float32"] * 10)


def separate(change: Callable[[Int8Weight, jax.Array, tuple[int, ...]], Any]) -> Params:
    params = jax.tree.map(jnp.asarray, unstack(ARCH, jax.tree.map(jnp.asarray, host_params())))
    layers = {
        number: {
            name: change(to_int8(part, CONTRACTED[name]), part, CONTRACTED[name]) if name in INPUTS else part
            for name, part in layer.items()
        }
        for number, layer in params["layers"].items()
    }
    return {**params, "layers": layers}


@jax.jit
def scores(params: Params) -> jax.Array:
    tokens = jnp.arange(8, 8 + 48).reshape(2, 24)
    positions = jnp.broadcast_to(jnp.arange(24), tokens.shape)
    model = merge(ARCH, params)
    return logits(model, model(tokens, positions, positions * 0 + 1, dtype=jnp.dtype("float32"))[0])


def test_logits_are_those_of_the_dequantised_weights_and_close_to_the_originals() -> None:
    small = np.asarray(scores(separate(lambda small, part, dims: small)))
    dequantised = np.asarray(scores(separate(lambda small, part, dims: jnp.asarray(restored(small, dims), part.dtype))))
    plain = np.asarray(scores(separate(lambda small, part, dims: part)))
    np.testing.assert_allclose(small, dequantised, rtol=0, atol=LOGITS_ATOL)
    # Rounding to steps of max / 127 adds an error of step / sqrt(12) to each weight. The largest of 32 to 48 normal weights
    # is 2 to 3.5 standard deviations, so a product has a relative error of at most 3.5 / 127 / sqrt(12); eight add up.
    relative = np.sqrt(np.mean((small - plain) ** 2) / np.mean(plain**2))
    assert 1e-3 < relative < np.sqrt(8) * 3.5 / LARGEST / np.sqrt(12)
