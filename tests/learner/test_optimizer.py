import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.config import OptimizerConfig
from rljax.learner.optimizer import Optimizer, clip_by_global_norm, learning_rate

FLOAT32 = 1e-5
"""Relative rounding of a few dozen float32 updates."""
AXES = {"w": ("embed", "ffn"), "scale": ("embed",)}


def matrices_decay(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def adamw(config, params, gradients, decays):
    """AdamW in float64, one update per gradient."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    first, second = ({name: np.zeros_like(value) for name, value in params.items()} for _ in range(2))
    for n, grads in enumerate(gradients, start=1):
        norm = math.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in grads.values()))
        scale = min(1.0, config.max_grad_norm / norm) if config.max_grad_norm else 1.0
        rate = learning_rate(config, n)
        for name in params:
            g = np.asarray(grads[name], np.float64) * scale
            first[name] = config.b1 * first[name] + (1 - config.b1) * g
            second[name] = config.b2 * second[name] + (1 - config.b2) * g**2
            direction = first[name] / (1 - config.b1**n) / (np.sqrt(second[name] / (1 - config.b2**n)) + config.eps)
            params[name] = params[name] - rate * (direction + config.weight_decay * decays[name] * params[name])
    return params


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_updates_are_those_of_adamw(schedule, max_grad_norm):
    decay = {} if schedule == "constant" else {"decay_steps": 6, "min_learning_rate": 0.001}
    config = OptimizerConfig(
        learning_rate=0.01, schedule=schedule, warmup_steps=2, weight_decay=0.1, max_grad_norm=max_grad_norm, **decay
    )
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 4)), "scale": rng.normal(size=4)}
    gradients = [{"w": rng.normal(size=(3, 4)), "scale": rng.normal(size=4)} for _ in range(8)]
    optimizer = Optimizer(config, matrices_decay, AXES)
    update = jax.jit(optimizer.update)
    now = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)
    state = optimizer.init(now)
    for n, grads in enumerate(gradients, start=1):
        grads = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), grads)
        now, state, norm, rate = update(grads, state, now)
        assert float(rate) == pytest.approx(learning_rate(config, n), rel=FLOAT32)
        assert float(norm) == pytest.approx(math.sqrt(sum(float((g**2).sum()) for g in grads.values())), rel=FLOAT32)
        assert int(state.updates) == n
    want = adamw(config, params, gradients, {"w": 1, "scale": 0})
    for name, value in want.items():
        np.testing.assert_allclose(now[name], value, rtol=FLOAT32, atol=FLOAT32)


def test_weight_decay_spares_what_the_mask_spares():
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5)
    optimizer = Optimizer(config, matrices_decay, AXES)
    params = {"w": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    after = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params).params
    np.testing.assert_allclose(after["w"], 0.95, rtol=FLOAT32)
    np.testing.assert_array_equal(after["scale"], 1.0)


@pytest.mark.parametrize(("step", "rate"), [(1, 0.25), (2, 0.5), (4, 1.0), (5, 1.0), (1000, 1.0)])
def test_warm_up_counts_updates_from_one(step, rate):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert learning_rate(config, step) == pytest.approx(rate)


def test_without_warm_up_the_first_update_has_the_peak_rate():
    assert learning_rate(OptimizerConfig(learning_rate=1.0), 1) == 1.0


@pytest.mark.parametrize(
    ("schedule", "rates"), [("linear", [0.5, 1.0, 0.55, 0.1, 0.1]), ("cosine", [0.5, 1.0, 0.55, 0.1, 0.1])]
)
def test_decay_ends_at_the_minimum(schedule, rates):
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=2, decay_steps=10, min_learning_rate=0.1)
    np.testing.assert_allclose([learning_rate(config, step) for step in (1, 2, 6, 10, 50)], rates, rtol=FLOAT32)


def test_cosine_is_above_linear_in_the_first_half():
    linear, cosine = (
        learning_rate(OptimizerConfig(learning_rate=1.0, schedule=s, decay_steps=8), 2) for s in ("linear", "cosine")
    )
    assert (linear, cosine) == pytest.approx((0.75, 0.5 * (1 + math.sqrt(0.5))))


def test_every_schedule_of_the_configuration_runs():
    for name in get_args(OptimizerConfig.model_fields["schedule"].annotation):
        decay = {} if name == "constant" else {"decay_steps": 4}
        assert learning_rate(OptimizerConfig(schedule=name, **decay), 1) > 0


def test_the_norm_is_reported_before_the_clip():
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    clipped, norm = clip_by_global_norm(grads, 1.0)
    assert float(norm) == 5.0
    np.testing.assert_allclose(clipped["a"], [0.6, 0.0], rtol=FLOAT32)
    for limit in (None, 5.0, 6.0):
        same, norm = clip_by_global_norm(grads, limit)
        np.testing.assert_array_equal(same["b"], grads["b"])
        assert float(norm) == 5.0


def test_a_zero_gradient_changes_nothing():
    optimizer = Optimizer(OptimizerConfig(learning_rate=0.1), matrices_decay, AXES)
    params = {"w": jnp.array([[0.3, -0.7]])}
    update = optimizer.update({"w": jnp.zeros((1, 2))}, optimizer.init(params), params)
    assert np.asarray(update.params["w"]).tobytes() == np.asarray(params["w"]).tobytes()
    assert float(update.grad_norm) == 0.0


def test_small_updates_add_up_in_float32():
    optimizer = Optimizer(OptimizerConfig(learning_rate=6e-4, max_grad_norm=None), matrices_decay, AXES)
    params, state = {"w": jnp.ones(())}, None
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for _ in range(100):
        params, state, _, _ = update({"w": jnp.ones((), jnp.bfloat16)}, state, params)
    assert float(params["w"]) == pytest.approx(0.94, abs=1e-4)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating))


def test_bfloat16_parameters_keep_their_dtype_and_float32_moments():
    optimizer = Optimizer(OptimizerConfig(learning_rate=0.1), matrices_decay, AXES)
    params = {"w": jnp.ones((2, 2), jnp.bfloat16)}
    update = optimizer.update({"w": jnp.ones((2, 2), jnp.bfloat16)}, optimizer.init(params), params)
    assert update.params["w"].dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(update.state.moments)} == {jnp.dtype("float32"), jnp.dtype("int32")}
