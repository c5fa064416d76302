"""The value loss is that of a page of plain Python, pulls values towards returns, and does not see what is masked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.value import VALUE_METRICS, explained_variance, value_loss
from tests.reference import critic as reference

FLOAT32 = 2e-6
"""Relative rounding of a few float32 operations."""


def loss_of(value, old, target, mask=None, clip=None, weight=1.0):
    arrays = [jnp.asarray(known, jnp.float32) for known in (value, old, target)]
    kept = jnp.ones(arrays[0].shape, bool) if mask is None else jnp.asarray(mask)
    return value_loss(*arrays, jnp.float32(weight), kept, clip)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss", "slope"),
    [
        (1.0, 0.0, 3.0, None, 2.0, -2.0),
        (1.0, 0.0, 3.0, 0.2, 3.92, 0.0),  # went the right way, but further than it may: 2.8^2 / 2
        (1.0, 0.0, -1.0, 0.2, 2.0, 2.0),  # went the wrong way: the larger error counts, and pulls it back
        (0.1, 0.0, 3.0, 0.2, 4.205, -2.9),  # inside
        (0.2, 0.0, 3.0, 0.2, 3.92, -2.8),  # at the bound the slope is the whole one
    ],
)
def test_a_value_by_hand(value, old, target, clip, loss, slope):
    got, grad = jax.value_and_grad(lambda v: loss_of(v, [old], [target], clip=clip)[0])(jnp.array([value]))
    assert float(got) == pytest.approx(loss, rel=FLOAT32)
    assert float(grad[0]) == pytest.approx(slope, rel=FLOAT32)
    assert reference.loss(value, old, target, clip) == (pytest.approx(loss), pytest.approx(slope))


@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_it_is_the_sum_over_tokens(clip):
    rng = np.random.default_rng(0)
    value, old, target = (np.float32(rng.normal(size=(3, 5))) for _ in range(3))
    mask = rng.random((3, 5)) < 0.7
    weight = 1 / mask.sum()
    grad_of = jax.value_and_grad(lambda v: loss_of(v, old, target, mask, clip, weight), has_aux=True)
    (got, metrics), grad = grad_of(jnp.asarray(value))
    pairs = [reference.loss(*map(float, known), clip) for known in zip(value[mask], old[mask], target[mask], strict=True)]
    assert float(got) == pytest.approx(weight * sum(loss for loss, _ in pairs), rel=1e-5)
    np.testing.assert_allclose(np.asarray(grad)[mask], [weight * slope for _, slope in pairs], rtol=1e-5, atol=1e-7)
    assert (np.asarray(grad)[~mask] == 0).all()
    assert set(metrics) == set(VALUE_METRICS)
    cut = [slope == 0.0 for _, slope in pairs]
    assert float(metrics["value_clipped"]) == sum(cut)
    assert (clip == 0.5) == any(cut)
    assert float(metrics["value_loss"]) == float(got)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_descent_moves_a_value_towards_its_return(clip):
    for target in (2.0, -2.0):
        grad = jax.grad(lambda v, target=target: loss_of(v, [0.0], [target], clip=clip)[0])(jnp.array([0.0]))
        assert np.sign(-float(grad[0])) == np.sign(target)


@pytest.mark.parametrize("filler", [0.0, np.inf, np.nan])
def test_masked_filler_changes_no_bit(filler):
    mask = np.array([True, False, True])
    known = [np.where(mask, row, np.float32(filler)) for row in ([1.0, 9.0, -1.0], [0.5, 9.0, 0.0], [2.0, 9.0, 2.0])]
    plain = [np.where(mask, row, np.float32(0)) for row in known]

    def outcome(rows):
        grad_of = jax.value_and_grad(lambda v: loss_of(v, *rows[1:], mask=mask, clip=0.2), has_aux=True)
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(grad_of(jnp.asarray(rows[0], jnp.float32)))]

    assert outcome(known) == outcome(plain)


def test_explained_variance_is_one_for_a_perfect_critic_and_zero_for_a_constant():
    returns = np.array([1.0, 2.0, 4.0, 1.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(returns + 3, returns) == 1.0, "a shift is no lack of explanation"
    assert explained_variance(np.full(4, 7.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.ones(4)) is None
    assert explained_variance(np.zeros(0), np.zeros(0)) is None
