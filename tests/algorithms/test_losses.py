import itertools
import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithms.losses import (
    AGGREGATIONS,
    KL_ESTIMATORS,
    MAXIMA,
    METRICS,
    ScoredTokens,
    aggregate,
    clip_loss,
    combine_metrics,
    empty_metrics,
    gap_quantile,
    importance_weights,
    policy_loss,
    token_weights,
)
from rljax.config import AlgorithmConfig
from tests.reference import policy_loss as reference

FLOAT32 = 2e-6
"""Relative rounding of a few float32 operations."""


def scalar(value):
    return jnp.asarray(value, jnp.float32)


# Clipped surrogate


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "low", "high"),
    [
        (1.0, 2.0, -2.0, -2.0, False, False),
        (1.5, 2.0, -2.56, 0.0, False, True),  # above 1.28, and more would be rewarded: cut
        (1.5, -2.0, 3.0, 3.0, False, False),  # above, but the step goes back: kept
        (0.5, 2.0, -1.0, -1.0, False, False),
        (0.5, -2.0, 1.6, 0.0, True, False),
        (1.5, 0.0, 0.0, 0.0, False, False),
    ],
)
def test_the_clip_cuts_only_steps_away_from_the_proximal_policy(ratio, advantage, loss, gradient, low, high):
    def loss_of(logp):
        return clip_loss(logp, scalar(-1.0), scalar(advantage), 0.2, 0.28).loss

    logp = scalar(-1.0 + math.log(ratio))
    got = clip_loss(logp, scalar(-1.0), scalar(advantage), 0.2, 0.28)
    assert float(got.loss) == pytest.approx(loss, rel=FLOAT32)
    assert float(jax.grad(loss_of)(logp)) == pytest.approx(gradient, rel=FLOAT32)
    assert (bool(got.clipped_low), bool(got.clipped_high)) == (low, high)


@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_the_policy_gradient(epsilon):
    def loss_and_ratio(logp):
        got = clip_loss(logp, scalar(-3.7), scalar(0.5), epsilon, epsilon)
        return got.loss, got.ratio

    gradient, ratio = jax.grad(loss_and_ratio, has_aux=True)(scalar(-3.7))
    assert float(ratio) == 1.0
    assert float(gradient) == -0.5


def test_a_positive_advantage_raises_the_logprob():
    gradient = jax.grad(lambda logp: clip_loss(logp, scalar(-1.0), scalar(1.0), 0.2, 0.28).loss)(scalar(-1.0))
    assert float(gradient) < 0  # descent moves against it, upwards


@pytest.mark.parametrize("difference", [-200.0, 200.0])
def test_extreme_ratios_stay_finite(difference):
    for advantage in (-1.0, 1.0):
        value, gradient = jax.value_and_grad(lambda logp, a=advantage: clip_loss(logp, scalar(0.0), scalar(a), 0.2, 0.28).loss)(
            scalar(difference)
        )
        assert np.isfinite([value, gradient]).all()


# KL


@pytest.mark.parametrize(
    ("name", "logp", "ref", "value", "derivative"),
    [
        ("k1", -1.0, -2.0, 1.0, 1.0),
        ("k2", -1.0, -2.0, 0.5, 1.0),
        ("k3", -1.0, -2.0, 0.367879, 0.632121),
        ("k1", -2.0, -1.0, -1.0, -1.0),
        ("k2", -2.0, -1.0, 0.5, -1.0),
        ("k3", -2.0, -1.0, 0.718282, -1.718282),
    ],
)
def test_kl_values_and_derivatives(name, logp, ref, value, derivative):
    got, slope = jax.value_and_grad(lambda x: KL_ESTIMATORS[name](x, scalar(ref)))(scalar(logp))
    assert float(got) == pytest.approx(value, abs=1e-6)
    assert float(slope) == pytest.approx(derivative, abs=1e-6)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("logp", [-1.0, -3.0])
def test_one_descent_step_on_the_loss_moves_towards_the_reference(name, logp):
    config = AlgorithmConfig(beta=0.1, kl_estimator=name)

    def loss(x):
        tokens = one_token(logp, advantage=0.0, ref=-2.0)
        return policy_loss(x, jnp.zeros(1), tokens, config)[0]

    start = jnp.full(1, logp, jnp.float32)
    moved = start - 0.1 * jax.grad(loss)(start)
    assert abs(float(moved[0]) + 2.0) < abs(logp + 2.0)


def test_expected_kl_gradients_of_k1_and_k2_are_the_gradient_of_the_kl():
    ref = jnp.array([0.2, 0.3, 0.5])
    logits = jnp.array([0.3, -0.4, 0.1])

    def exact(z):
        p = jax.nn.softmax(z)
        return jnp.sum(p * (jnp.log(p) - jnp.log(ref)))

    want = jax.grad(exact)(logits)
    for name in ("k1", "k2"):

        def estimated(z, name=name):
            p = jax.lax.stop_gradient(jax.nn.softmax(z))  # tokens are drawn, not differentiated
            return jnp.sum(p * KL_ESTIMATORS[name](jax.nn.log_softmax(z), jnp.log(ref)))

        np.testing.assert_allclose(jax.grad(estimated)(logits), want, atol=1e-6)


def test_every_name_of_the_configuration_is_in_a_table():
    fields = AlgorithmConfig.model_fields
    assert set(get_args(fields["kl_estimator"].annotation)) == set(KL_ESTIMATORS)
    assert set(get_args(fields["loss_agg_mode"].annotation)) == set(AGGREGATIONS)


# Importance weights


def test_the_correction_is_proximal_over_behavior_without_gradient():
    weight, cut = importance_weights(scalar(-1.2), scalar(-1.0), 2.0)
    assert float(weight) == pytest.approx(0.818731, abs=1e-6)
    assert not bool(cut)
    assert float(jax.grad(lambda x: importance_weights(x, scalar(-1.0), 2.0)[0])(scalar(-1.2))) == 0.0
    weight, cut = importance_weights(scalar(-1.0), scalar(-3.0), 2.0)
    assert float(weight) == 2.0
    assert bool(cut)


def test_the_loss_multiplies_correction_and_ratio():
    tokens = one_token(prox=-1.2, behavior=-1.0, advantage=1.0)
    loose = AlgorithmConfig(epsilon=0.9, epsilon_high=9.0)
    loss, metrics = policy_loss(jnp.array([-0.9]), jnp.zeros(1), tokens, loose)
    assert float(metrics["ratio"]) == pytest.approx(1.349859, abs=1e-6)
    assert float(metrics["is_weight"]) == pytest.approx(0.818731, abs=1e-6)
    assert float(loss) == pytest.approx(-0.818731 * 1.349859, rel=FLOAT32)
    off, metrics = policy_loss(jnp.array([-0.9]), jnp.zeros(1), tokens, loose.model_copy(update={"rollout_is": "none"}))
    assert float(off) == pytest.approx(-1.349859, rel=FLOAT32)
    assert (float(metrics["is_weight"]), float(metrics["is_truncated"])) == (1.0, 0.0)


# Aggregation


@pytest.mark.parametrize(
    ("mode", "want"),
    [("seq-mean-token-mean", 2.5), ("token-mean", 1.75), ("seq-mean-token-sum-norm", 0.875), ("seq-mean-token-sum", 3.5)],
)
def test_aggregation_modes_have_their_numbers(mode, want):
    lengths = np.array([1, 3])
    weights = token_weights(lengths, mode, tokens=4, rollouts=2, max_completion_length=4)
    per_token = jnp.array([4.0, 1.0, 1.0, 1.0])
    got = aggregate(per_token, jnp.asarray(np.repeat(weights, lengths)), jnp.ones(4, bool))
    assert float(got) == pytest.approx(want, rel=FLOAT32)


@pytest.mark.parametrize("split", [1, 2, 5])
def test_token_mean_is_over_all_tokens_however_they_are_split(split):
    losses = jnp.array([1.0, 1.0, 1.0, 1.0, 5.0])
    weight = token_weights(np.array([4, 1]), "token-mean", tokens=5, rollouts=2, max_completion_length=4)
    assert (weight == np.float32(0.2)).all()
    parts = np.array_split(np.arange(5), split)
    total = sum(float(aggregate(losses[p], jnp.full(len(p), 0.2), jnp.ones(len(p), bool))) for p in parts)
    assert total == pytest.approx(1.8, rel=FLOAT32)


def test_rollouts_without_loss_tokens_have_no_weight():
    for mode in AGGREGATIONS:
        got = token_weights(np.array([0, 2]), mode, tokens=2, rollouts=1, max_completion_length=4)
        assert got[0] == 0
        assert got[1] > 0
        assert (token_weights(np.array([0, 0]), mode, tokens=0, rollouts=0, max_completion_length=4) == 0).all()


def test_an_unknown_mode_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="token-mean, seq-mean-token-sum"):
        token_weights(np.array([1]), "mean", tokens=1, rollouts=1, max_completion_length=1)


# The whole loss


def one_token(prox=-1.0, *, behavior=None, advantage=1.0, ref=None):
    def full(value):
        return jnp.full(1, value, jnp.float32)

    return ScoredTokens(
        mask=jnp.ones(1, bool),
        advantage=full(advantage),
        weight=full(1.0),
        logp_behavior=full(prox if behavior is None else behavior),
        logp_prox=full(prox),
        logp_ref=None if ref is None else full(ref),
    )


LENGTHS = np.array([3, 1, 5, 2])


def random_step(seed, config):
    """Return four rollouts as flat arrays, and as the reference takes them."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(4), LENGTHS)
    prox, behavior, ref, logp = (rng.normal(-1.5, 0.4, len(owner)).astype(np.float32) for _ in range(4))
    advantages = rng.normal(size=4).astype(np.float32)
    weights = token_weights(LENGTHS, config.loss_agg_mode, tokens=11, rollouts=4, max_completion_length=6)
    per_token = (np.ones(len(owner), bool), advantages[owner], weights[owner], behavior, prox, ref)
    flat = ScoredTokens(*map(jnp.asarray, per_token))
    rows = [
        [
            reference.Token(*map(float, t))
            for t in zip(logp[owner == i], prox[owner == i], behavior[owner == i], ref[owner == i], strict=True)
        ]
        for i in range(4)
    ]
    return logp, flat, rows, [float(a) for a in advantages]


@pytest.mark.parametrize(
    ("mode", "estimator", "rollout_is"), list(itertools.product(AGGREGATIONS, KL_ESTIMATORS, ["none", "token"]))
)
def test_the_loss_equals_the_token_by_token_reference(mode, estimator, rollout_is):
    config = AlgorithmConfig(
        loss_agg_mode=mode, kl_estimator=estimator, rollout_is=rollout_is, beta=0.3, rollout_is_threshold=1.3
    )
    logp, tokens, rows, advantages = random_step(0, config)
    loss, metrics = policy_loss(jnp.asarray(logp), jnp.ones(11), tokens, config)
    assert float(loss) == pytest.approx(reference.step_loss(rows, advantages, config, 6), rel=1e-5)
    assert set(metrics) == set(METRICS)
    assert float(metrics["tokens"]) == 11


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("parts", [2, 3, 11])
def test_micro_batches_add_up_to_the_unsplit_loss_and_gradient(mode, parts):
    config = AlgorithmConfig(loss_agg_mode=mode, beta=0.1)
    logp, tokens, _, _ = random_step(1, config)

    def loss_and_metrics(x, where):
        members = tokens._replace(mask=jnp.asarray(np.isin(np.arange(11), where)))  # the rest of the micro-batch is filler
        return policy_loss(x, -x, members, config)

    grad = jax.value_and_grad(loss_and_metrics, has_aux=True)
    (loss, metrics), gradient = grad(jnp.asarray(logp), np.arange(11))
    total, gradients, combined = 0.0, jnp.zeros(11), empty_metrics()
    for where in np.array_split(np.random.default_rng(2).permutation(11), parts):
        (part, part_metrics), part_gradient = grad(jnp.asarray(logp), where)
        total, gradients, combined = total + part, gradients + part_gradient, combine_metrics(combined, part_metrics)
    assert float(total) == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(gradients, gradient, rtol=1e-5, atol=1e-7)
    for name in METRICS:
        assert float(combined[name]) == pytest.approx(float(metrics[name]), rel=1e-5), name


@pytest.mark.parametrize("filler", [0.0, 1.0, -5.0, -math.inf, math.inf, math.nan])
def test_what_stands_at_masked_positions_changes_no_bit(filler):
    config = AlgorithmConfig(beta=0.1, rollout_is="token")
    mask = jnp.array([True, False])

    def run(other):
        def both(value):
            return jnp.array([value, other], jnp.float32)

        tokens = ScoredTokens(mask, both(0.5), both(1.0), both(-1.1), both(-0.9), both(-2.0))
        return jax.jit(jax.value_and_grad(lambda x: policy_loss(x, both(0.7), tokens, config), has_aux=True))(both(-1.0))

    want, got = run(0.0), run(filler)
    for left, right in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
        assert np.isfinite(np.asarray(right)).all()
    assert float(got[1][1]) == 0.0


def test_metrics_count_clips_and_gaps():
    config = AlgorithmConfig(rollout_is_threshold=1.5)
    logp = jnp.log(jnp.array([1.5, 0.5, 1.0, 1.5]))
    tokens = ScoredTokens(
        mask=jnp.array([True, True, True, False]),
        advantage=jnp.array([1.0, -1.0, 1.0, 1.0]),
        weight=jnp.ones(4),
        logp_behavior=jnp.array([-1.0, -0.05, 0.2, -9.0]),
        logp_prox=jnp.zeros(4),
    )
    _, metrics = policy_loss(logp, jnp.array([1.0, 2.0, 3.0, 100.0]), tokens, config)
    want = {
        "tokens": 3, "entropy": 6, "clipped_low": 1, "clipped_high": 1, "ratio": 3, "ratio_max": 1.5,
        "is_truncated": 1, "gap": 1.25, "gap_max": 1.0, "gap_outside": 2, "kl_ref": 0,
    }  # fmt: skip
    for name, value in want.items():
        assert float(metrics[name]) == pytest.approx(value, rel=FLOAT32), name
    assert set(METRICS) > MAXIMA


def test_equal_rewards_without_kl_give_exactly_zero_gradient():
    tokens = one_token(advantage=0.0)
    gradient = jax.grad(lambda x: policy_loss(x, jnp.zeros(1), tokens, AlgorithmConfig())[0])(jnp.array([-1.3]))
    assert float(gradient[0]) == 0.0


def test_passing_logp_as_its_own_proximal_policy_keeps_the_gradient():
    def loss(x):
        tokens = one_token(behavior=-1.0, advantage=2.0)._replace(logp_prox=x)
        return policy_loss(x, jnp.zeros(1), tokens, AlgorithmConfig(rollout_is="none"))[0]

    assert float(jax.grad(loss)(jnp.array([-1.0]))[0]) == -2.0


def test_a_kl_weight_without_reference_is_an_error():
    with pytest.raises(ValueError, match="logp_ref"):
        policy_loss(jnp.zeros(1), jnp.zeros(1), one_token(), AlgorithmConfig(beta=0.1))


def test_the_gap_quantile_reads_masked_tokens_only():
    prox, mask = np.array([0.0, 1.0, 2.0, math.nan]), np.array([True, True, True, False])
    assert gap_quantile(prox, np.zeros(4), mask, 0.5) == 1.0
    assert gap_quantile(prox, np.zeros(4), mask & False, 0.95) == 0.0
