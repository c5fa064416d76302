"""Estimators of the KL divergence: value, direction and expectation of the gradient, and the controller of their weight."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithm_config import AlgorithmConfig
from rljax.algorithms.kl import KL_ESTIMATORS, next_beta
from rljax.algorithms.losses import ScoredTokens, policy_loss


def scalar(value):
    return jnp.asarray(value, jnp.float32)


@pytest.mark.parametrize(
    ("name", "logp", "ref", "value", "derivative"),
    [
        ("k1", -1.0, -2.0, 1.0, 1.0),
        ("k2", -1.0, -2.0, 0.5, 1.0),
        ("k3", -1.0, -2.0, 0.367879, 0.632121),
        ("k3+", -1.0, -2.0, 0.367879, 1.0),
        ("k3-ratio", -1.0, -2.0, 0.367879, 1.0),
        ("k1", -2.0, -1.0, -1.0, -1.0),
        ("k2", -2.0, -1.0, 0.5, -1.0),
        ("k3", -2.0, -1.0, 0.718282, -1.718282),
        ("k3+", -2.0, -1.0, 0.718282, -1.0),
        ("k3-ratio", -2.0, -1.0, 0.718282, -1.0),
    ],
)
def test_values_and_derivatives_on_policy(name, logp, ref, value, derivative):
    got, slope = jax.value_and_grad(lambda x: KL_ESTIMATORS[name](x, scalar(ref), scalar(logp)))(scalar(logp))
    assert float(got) == pytest.approx(value, abs=1e-6)
    assert float(slope) == pytest.approx(derivative, abs=1e-6)


def test_with_the_ratio_off_policy():
    got, slope = jax.value_and_grad(lambda x: KL_ESTIMATORS["k3-ratio"](x, scalar(-2.0), scalar(-1.5)))(scalar(-1.0))
    assert float(got) == pytest.approx(np.exp(0.5) * 0.367879, abs=1e-5)
    assert float(slope) == pytest.approx(np.exp(0.5) * 1.0, abs=1e-5)  # (exp(-1) + 1 - 1) + (1 - exp(-1))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("logp", [-1.0, -3.0])
def test_one_descent_step_on_the_loss_moves_towards_the_reference(name, logp):
    config = AlgorithmConfig.model_validate({"beta": 0.1, "kl_estimator": name})
    start = jnp.full(1, logp, jnp.float32)
    known = (jnp.ones(1, bool), jnp.zeros(1), jnp.ones(1), start, start, jnp.zeros(1, jnp.int32), jnp.full(1, -2.0))

    def loss(x, beta=None):
        return policy_loss(x, jnp.zeros(1), ScoredTokens(*known), config, beta)[0]

    moved = start - 0.1 * jax.grad(loss)(start)
    assert abs(float(moved[0]) + 2.0) < abs(logp + 2.0)
    doubled = jax.grad(loss)(start, scalar(0.2))
    np.testing.assert_allclose(doubled, 2 * jax.grad(loss)(start), rtol=1e-6)


REF = jnp.array([0.2, 0.3, 0.5])
LOGITS = jnp.array([0.3, -0.4, 0.1])


def exact_kl(z):
    p = jax.nn.softmax(z)
    return jnp.sum(p * (jnp.log(p) - jnp.log(REF)))


def expected(name, sampled, z):
    """Return the expectation of an estimator over tokens drawn from `sampled`, which are not differentiated."""
    return jnp.sum(sampled * KL_ESTIMATORS[name](jax.nn.log_softmax(z), jnp.log(REF), jnp.log(sampled)))


@pytest.mark.parametrize("name", ["k1", "k2", "k3+", "k3-ratio"])
def test_the_expected_gradient_is_the_gradient_of_the_kl(name):
    own = jax.lax.stop_gradient(jax.nn.softmax(LOGITS))
    np.testing.assert_allclose(jax.grad(lambda z: expected(name, own, z))(LOGITS), jax.grad(exact_kl)(LOGITS), atol=1e-6)


def test_the_expected_gradient_of_plain_k3_is_that_of_the_reverse_divergence():
    own = jax.lax.stop_gradient(jax.nn.softmax(LOGITS))
    reverse = jax.grad(lambda z: jnp.sum(REF * (jnp.log(REF) - jax.nn.log_softmax(z))))(LOGITS)
    np.testing.assert_allclose(jax.grad(lambda z: expected("k3", own, z))(LOGITS), reverse, atol=1e-6)


def test_with_the_ratio_it_is_so_for_tokens_of_another_policy_too():
    other = jnp.array([0.6, 0.3, 0.1])
    value, gradient = jax.value_and_grad(lambda z: expected("k3-ratio", other, z))(LOGITS)
    assert float(value) == pytest.approx(float(exact_kl(LOGITS)), abs=1e-6)
    np.testing.assert_allclose(gradient, jax.grad(exact_kl)(LOGITS), atol=1e-6)
    biased = jax.grad(lambda z: expected("k3", other, z))(LOGITS)
    assert np.abs(biased - jax.grad(exact_kl)(LOGITS)).max() > 0.05


@pytest.mark.parametrize("name", ["k1", "k3", "k3+", "k3-ratio"])
def test_the_expected_value_is_the_kl(name):
    assert float(expected(name, jax.nn.softmax(LOGITS), LOGITS)) == pytest.approx(float(exact_kl(LOGITS)), abs=1e-6)


def test_in_the_reward_the_divergence_is_measured_and_not_differentiated():
    config = AlgorithmConfig(beta=0.5, kl_in_reward=True)
    known = (jnp.ones(1, bool), jnp.zeros(1), jnp.ones(1), *[jnp.full(1, -1.0)] * 2, jnp.zeros(1, jnp.int32), jnp.full(1, -2.0))

    def loss(x):
        return policy_loss(x, jnp.zeros(1), ScoredTokens(*known), config)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.full(1, -1.0))
    assert (float(value), float(gradient[0])) == (0.0, 0.0)
    assert float(metrics["kl_ref"]) == pytest.approx(0.367879, abs=1e-6)


@pytest.mark.parametrize(("kl", "factor"), [(0.1, 1.0), (0.11, 1.01), (0.2, 1.02), (9.0, 1.02), (0.09, 0.99), (-3.0, 0.98)])
def test_the_weight_follows_the_error_within_its_bounds(kl, factor):
    assert float(next_beta(scalar(0.5), scalar(kl), 0.1, 0.1)) == pytest.approx(0.5 * factor, rel=1e-5)


def test_every_name_of_the_configuration_is_in_the_table():
    assert set(get_args(AlgorithmConfig.model_fields["kl_estimator"].annotation)) == set(KL_ESTIMATORS)
