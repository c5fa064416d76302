"""Attention of rows in order next to one written out in numpy, and what its program leaves out."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.models.attention import AttentionOptions, Scales, attend, attend_in_order, segment_mask

HEADS, QUERIES, CHANNELS = 2, 2, 8  # key-value heads, query heads of each, channels


def packed(length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return positions, segments and parents [1, s] of a row: a prompt, three rollouts of it, one on its own, padding."""
    sizes = [int(share * length) for share in (0.3, 0.15, 0.2, 0.1, 0.15)]
    sizes.append(length - sum(sizes))
    starts = (0, sizes[0], sizes[0], sizes[0], 0, 0)
    positions = np.concatenate([np.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
    names, parents = (np.repeat(values, sizes) for values in ((1, 2, 3, 4, 5, 0), (0, 1, 1, 1, 0, 0)))
    return positions[None], names[None], parents[None]


def inputs(length: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(length)
    shapes = (1, length, HEADS, QUERIES, CHANNELS), (1, HEADS, length, CHANNELS), (1, HEADS, length, CHANNELS)
    query, key, value = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    return query, key, value


def by_hand(length: int, options: AttentionOptions, sinks: np.ndarray | None) -> np.ndarray:
    """Go through the tokens one after another, in float64."""
    query, key, value = (np.asarray(x, np.float64)[0] for x in inputs(length))
    positions, segments, parents = (x[0] for x in packed(length))
    out = np.zeros(query.shape)
    for at in np.flatnonzero(segments):
        seen = np.flatnonzero((segments == segments[at]) | ((segments == parents[at]) & (parents[at] > 0)))
        seen = seen[(positions[seen] <= positions[at]) & (seen <= at)]
        if options.window is not None:
            seen = seen[positions[at] - positions[seen] < options.window]
        for k in range(HEADS):
            for m in range(QUERIES):
                scores = options.scale * key[k, seen] @ query[at, k, m]
                if options.soft_cap is not None:
                    scores = options.soft_cap * np.tanh(scores / options.soft_cap)
                total = np.exp(scores).sum() + (0 if sinks is None else np.exp(sinks[k, m]))
                out[at, k, m] = np.exp(scores) / total @ value[k, seen]
    return out


@pytest.mark.parametrize(
    ("length", "kind"),
    [*itertools.product((7, 129, 300), ("plain", "window", "capped", "sinks")), (128, "plain"), (2100, "plain")],
)
def test_a_row_in_order_is_attended_as_by_hand(length: int, kind: str) -> None:
    options = AttentionOptions(0.4, window=50 if kind == "window" else None, soft_cap=1.5 if kind == "capped" else None)
    sinks = np.random.default_rng(0).normal(size=(HEADS, QUERIES)).astype(np.float32) if kind == "sinks" else None
    mask = segment_mask(*map(jnp.asarray, packed(length)), options.window)
    out = attend_in_order(*inputs(length), mask, options, None if sinks is None else jnp.asarray(sinks))
    real = packed(length)[1][0] > 0
    np.testing.assert_allclose(np.asarray(out)[0, real], by_hand(length, options, sinks)[real], rtol=0, atol=2e-6)
    assert np.isfinite(out).all()


def test_gradients_are_those_of_the_whole_square() -> None:
    options, mask = AttentionOptions(0.4), segment_mask(*map(jnp.asarray, packed(300)))
    weights = (
        np.random.default_rng(1).normal(size=(1, 300, HEADS, QUERIES, CHANNELS))
        * np.asarray(mask).any(2)[..., None, None, None]
    )

    def gradient(form) -> tuple[jax.Array, ...]:
        return jax.grad(lambda *qkv: jnp.sum(form(*qkv, mask, options) * weights), argnums=(0, 1, 2))(*inputs(300))

    for one, other in zip(gradient(attend_in_order), gradient(attend), strict=True):
        assert np.abs(other).max() > 0.5
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_codes_with_scales_are_what_they_stand_for() -> None:
    query, key, value = inputs(300)
    options, mask = AttentionOptions(0.4), segment_mask(*map(jnp.asarray, packed(300)))
    (keys, of_keys), (values, of_values) = (codes(np.asarray(x)) for x in (key, value))
    found = attend_in_order(query, jnp.asarray(keys), jnp.asarray(values), mask, options, scales=Scales(of_keys, of_values))
    meant = (jnp.asarray(x * np.asarray(scale)[..., None]) for x, scale in ((keys, of_keys), (values, of_values)))
    np.testing.assert_allclose(found, attend(query, *meant, mask, options), rtol=0, atol=2e-6)


def codes(x: np.ndarray) -> tuple[np.ndarray, jax.Array]:
    scale = np.abs(x).max(-1) / np.float32(127)
    return np.round(x / scale[..., None]).astype(np.int8), jnp.asarray(scale)


@pytest.mark.parametrize("length", [640, 8192])
def test_keys_after_a_block_of_queries_are_left_out(length: int) -> None:
    mask = jax.ShapeDtypeStruct((1, length, length), jnp.bool)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(length)]
    text = jax.jit(lambda *given: attend_in_order(*given, AttentionOptions(0.4))).lower(*shapes, mask).as_text()
    pattern = rf"dot_general.*tensor<1x{HEADS}x(\d+)x{CHANNELS}xf32>, tensor<1x{HEADS}x(\d+)x{CHANNELS}xf32>"
    pairs = [(int(rows) // QUERIES, int(keys)) for rows, keys in re.findall(pattern, text)]
    assert 2 <= len(pairs) <= 16
    assert sum(rows for rows, _ in pairs) == length
    assert sum(rows * keys for rows, keys in pairs) <= 0.61 * length**2
