import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithm_config import AlgorithmConfig
from rljax.algorithms.kl import KL_ESTIMATORS
from rljax.algorithms.losses import (
    AGGREGATIONS,
    MAXIMA,
    METRICS,
    SURROGATES,
    ScoredTokens,
    aggregate,
    clip_loss,
    combine_metrics,
    empty_metrics,
    gap_quantile,
    policy_loss,
    token_weights,
)
from rljax.presets import PRESETS
from tests.reference import policy_loss as reference

FLOAT32 = 2e-6
"""Relative rounding of a few float32 operations."""


def scalar(value):
    return jnp.asarray(value, jnp.float32)


def clip_of(logp, prox, advantage, epsilon=0.2, epsilon_high=0.28, epsilon_c=None):
    config = AlgorithmConfig(epsilon=epsilon, epsilon_high=epsilon_high, epsilon_c=epsilon_c)
    return clip_loss(logp, jnp.exp(logp - prox), scalar(advantage), config)


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
        return clip_of(logp, -1.0, advantage).loss

    logp = scalar(-1.0 + math.log(ratio))
    got = clip_of(logp, -1.0, advantage)
    assert float(got.loss) == pytest.approx(loss, rel=FLOAT32)
    assert float(jax.grad(loss_of)(logp)) == pytest.approx(gradient, rel=FLOAT32)
    assert (bool(got.clipped_low), bool(got.clipped_high)) == (low, high)


@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_on_policy_the_ratio_is_exactly_one_and_the_gradient_is_the_policy_gradient(epsilon):
    def loss_and_ratio(logp):
        config = AlgorithmConfig(epsilon=epsilon, epsilon_high=epsilon)
        loss, metrics = policy_loss(logp, jnp.zeros(1), one_token(-3.7, advantage=0.5), config)
        return loss, metrics["ratio"]

    gradient, ratio = jax.grad(loss_and_ratio, has_aux=True)(jnp.array([-3.7]))
    assert float(ratio) == 1.0
    assert float(gradient[0]) == -0.5


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "cut"),
    [
        (4.0, -2.0, 6.0, 0.0, True),  # at most -3 A
        (2.0, -2.0, 4.0, 4.0, False),
        (4.0, 2.0, -2.56, 0.0, False),  # the usual clip
        (0.5, -2.0, 1.6, 0.0, False),
    ],
)
def test_the_dual_clip_bounds_the_loss_of_bad_tokens(ratio, advantage, loss, gradient, cut):
    logp = scalar(-3.0 + math.log(ratio))
    got = clip_of(logp, -3.0, advantage, epsilon_c=3.0)
    assert float(got.loss) == pytest.approx(loss, rel=FLOAT32)
    slope = jax.grad(lambda x: clip_of(x, -3.0, advantage, epsilon_c=3.0).loss)(logp)
    assert float(slope) == pytest.approx(gradient, rel=FLOAT32)
    assert bool(got.clipped_dual) == cut


@pytest.mark.parametrize(
    ("surrogate", "ratio", "advantage", "loss", "gradient"),
    [
        ("reinforce", 1.5, 2.0, 2.0, -2.0),  # logp is -1
        ("cispo", 1.5, 2.0, 1.28 * 2.0, -1.28 * 2.0),  # bounded weight, whole gradient
        ("cispo", 0.5, -2.0, -0.8 * 2.0, 0.8 * 2.0),
        ("sapo", 1.0, 2.0, -4.0, -2.0),
        ("sapo", 1.0, -2.0, 4.0 / 1.05, 2.0),
        ("sapo", 2.0, 2.0, -8.0 / (1 + math.exp(-1)), -8.0 * math.exp(-1) / (1 + math.exp(-1)) ** 2 * 2.0),
    ],
)
def test_the_other_surrogates_by_hand(surrogate, ratio, advantage, loss, gradient):
    config = AlgorithmConfig.model_validate({"surrogate": surrogate, "rollout_is": "none"})
    tokens = one_token(-1.0 - math.log(ratio), advantage=advantage)
    value, slope = jax.value_and_grad(lambda x: policy_loss(x, jnp.zeros(1), tokens, config)[0])(jnp.array([-1.0]))
    assert float(value) == pytest.approx(loss, rel=1e-5)
    assert float(slope[0]) == pytest.approx(gradient, rel=1e-5)


@pytest.mark.parametrize("level", get_args(AlgorithmConfig.model_fields["importance_sampling_level"].annotation))
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_descent_raises_the_logprob_of_good_tokens_and_lowers_that_of_bad_ones(surrogate, level):
    config = AlgorithmConfig.model_validate({"surrogate": surrogate, "importance_sampling_level": level})
    for advantage in (1.0, -1.0):
        tokens = one_token(advantage=advantage)
        gradient = jax.grad(lambda x, t=tokens: policy_loss(x, jnp.zeros(1), t, config)[0])(jnp.array([-1.0]))
        assert float(gradient[0]) == pytest.approx(-advantage, rel=1e-6)  # on-policy all of them agree


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("difference", [-200.0, 200.0])
def test_extreme_ratios_stay_finite(surrogate, difference):
    config = AlgorithmConfig.model_validate({"surrogate": surrogate, "rollout_is": "none"})
    for advantage in (-1.0, 1.0):
        tokens = one_token(0.0, advantage=advantage)
        value, gradient = jax.value_and_grad(lambda x, t=tokens: policy_loss(x, jnp.zeros(1), t, config)[0])(
            jnp.array([difference])
        )
        assert np.isfinite([float(value), float(gradient[0])]).all()


def test_the_entropy_bonus_lowers_the_loss_by_its_weight():
    tokens = one_token(advantage=0.0)
    config = AlgorithmConfig(entropy_coef=0.25)
    loss, slope = jax.value_and_grad(lambda h: policy_loss(jnp.array([-1.0]), h, tokens, config)[0])(jnp.array([3.0]))
    assert (float(loss), float(slope[0])) == (-0.75, -0.25)


def test_every_name_of_the_configuration_is_in_a_table():
    fields = AlgorithmConfig.model_fields
    assert set(get_args(fields["surrogate"].annotation)) == set(SURROGATES)
    assert set(get_args(fields["loss_agg_mode"].annotation)) == set(AGGREGATIONS)


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
        rollout=jnp.zeros(1, jnp.int32),
        logp_ref=None if ref is None else full(ref),
    )


ALGORITHMS = {
    **{preset: {"preset": preset} for preset in PRESETS if preset != "gdpo"},
    "dual clip": {"epsilon_c": 1.1},
    "entropy": {"entropy_coef": 0.3},
    "sequence cispo": {"surrogate": "cispo", "importance_sampling_level": "sequence"},
    "sequence sapo": {"surrogate": "sapo", "importance_sampling_level": "sequence"},
    "bypass": {"proximal": "behavior", "rollout_is": "none"},
    "no correction": {"rollout_is": "none"},
    **{mode: {"loss_agg_mode": mode} for mode in AGGREGATIONS},
    **{f"kl {name}": {"beta": 0.3, "kl_estimator": name} for name in KL_ESTIMATORS},
    **{
        f"{mode} {level}": {"rollout_is": level, "rollout_is_mode": mode, "rollout_is_threshold_lower": 0.8}
        for mode in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
    },
}
"""Options by name: every preset, and every switch of the loss at least once."""

LENGTHS = np.array([3, 1, 5, 2])
SLOTS = 12
OWNERS = np.append(np.repeat(np.arange(4), LENGTHS), -1).astype(np.int32)  # one slot is filler


def config_of(name: str) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"rollout_is_threshold": 1.3, **ALGORITHMS[name]})


def random_step(seed, config):
    """Return four rollouts in one row of slots, and as the reference takes them."""
    rng = np.random.default_rng(seed)
    prox, behavior, ref, logp = (rng.normal(-1.5, 0.4, SLOTS).astype(np.float32) for _ in range(4))
    entropy = rng.uniform(0, 3, SLOTS).astype(np.float32)
    advantages = rng.normal(size=5).astype(np.float32)
    weights = token_weights(LENGTHS, config.loss_agg_mode, tokens=11, rollouts=4, max_completion_length=6)
    weights = np.append(weights, np.float32(0))
    per_token = (OWNERS >= 0, advantages[OWNERS], weights[OWNERS], behavior, prox, OWNERS, ref)
    flat = ScoredTokens(*map(jnp.asarray, per_token))
    columns = (logp, prox, behavior, ref, entropy)
    rows = [
        [reference.Token(*map(float, t)) for t in zip(*(column[i == OWNERS] for column in columns), strict=True)]
        for i in range(4)
    ]
    return jnp.asarray(logp), jnp.asarray(entropy), flat, rows, [float(a) for a in advantages[:4]]


def outcome_of(config, logp, entropy, tokens):
    """Return loss, gradient and metrics; not under jit, since operations compile once for all algorithms."""
    run = jax.value_and_grad(lambda x: policy_loss(x, entropy, tokens, config), has_aux=True)
    (loss, metrics), gradient = run(logp)
    return loss, gradient, metrics


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_equal_the_token_by_token_reference(name):
    config = config_of(name)
    for seed in range(3):
        logp, entropy, tokens, rows, advantages = random_step(seed, config)
        loss, gradient, metrics = outcome_of(config, logp, entropy, tokens)
        want, slopes = reference.step_loss(rows, advantages, config, 6)
        assert float(loss) == pytest.approx(want, rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(gradient[:11], np.concatenate([np.array(row) for row in slopes]), rtol=2e-5, atol=1e-6)
        assert float(gradient[11]) == 0.0
        assert set(metrics) == set(METRICS)
        assert float(metrics["tokens"]) == 11


def lay_out(values, rows):
    """Put the rollouts into rows of slots: `rows` lists the rollouts of each row; NaN or -1 in filler."""
    values = np.asarray(values)
    filler = -1 if values.dtype == np.int32 else False if values.dtype == bool else np.nan
    out = np.full((len(rows), SLOTS), filler, values.dtype)
    for row, members in enumerate(rows):
        taken = np.concatenate([values[member == OWNERS] for member in members]) if members else values[:0]
        out[row, : len(taken)] = taken
    return jnp.asarray(out)


ROWS = [[3, 0], [2, 1], [], [], [], [], [], []]
"""Rollouts of each row, the same tokens as in one row of four."""


@pytest.mark.parametrize("name", ALGORITHMS)
def test_packing_micro_batches_and_devices_change_nothing_and_filler_may_be_nan(name):
    config = config_of(name)
    logp, entropy, tokens, _, _ = random_step(1, config)
    want, slopes, metrics = outcome_of(config, logp, entropy, tokens)
    packed = jax.tree.map(lambda leaf: lay_out(leaf, ROWS), (logp, entropy, tokens))
    by_rollout = np.concatenate([np.asarray(slopes)[member == OWNERS] for members in ROWS for member in members])
    mask = np.asarray(packed[2].mask)

    def check(loss, gradient, found):
        assert float(loss) == pytest.approx(float(want), rel=1e-5, abs=1e-6)
        np.testing.assert_allclose(np.asarray(gradient)[mask], by_rollout, rtol=2e-5, atol=1e-6)
        assert (np.asarray(gradient)[~mask] == 0).all()
        for metric in METRICS:
            assert float(found[metric]) == pytest.approx(float(metrics[metric]), rel=1e-5, abs=1e-5), metric

    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    # One program on the mesh: many small ones with collectives, queued by one thread after the other, can wait for each other.
    on_mesh = jax.jit(lambda *inputs: outcome_of(config, *inputs))
    check(*on_mesh(*jax.tree.map(lambda leaf: jax.device_put(leaf, spread), packed)))
    micro = [outcome_of(config, *jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], packed)) for i in range(8)]
    combined = empty_metrics()
    for _, _, part in micro:
        combined = combine_metrics(combined, part)
    check(sum(float(loss) for loss, _, _ in micro), np.concatenate([np.asarray(g) for _, g, _ in micro]), combined)


@pytest.mark.parametrize("name", ["clip", "gspo", "dapo"])
def test_the_second_update_is_off_policy_and_the_first_is_not(name):
    """The ratio is against log-probabilities frozen before the updates, so that the clip can act."""
    config = AlgorithmConfig.model_validate({} if name == "clip" else {"preset": name})
    _, entropy, tokens, _, _ = random_step(0, config)
    first, second = tokens.logp_prox, tokens.logp_prox + 0.5
    _, _, metrics = outcome_of(config, first, entropy, tokens)
    assert (float(metrics["ratio"]), float(metrics["ratio_max"])) == (11.0, 1.0)
    assert float(metrics["clipped_low"]) == float(metrics["clipped_high"]) == 0.0
    _, _, metrics = outcome_of(config, second, entropy, tokens)
    assert float(metrics["ratio_max"]) == pytest.approx(math.exp(0.5), rel=1e-5)
    assert float(metrics["clipped_high"]) > 0.0


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("parts", [2, 3, 11])
def test_micro_batches_add_up_to_the_unsplit_loss_and_gradient(mode, parts):
    config = AlgorithmConfig(loss_agg_mode=mode, beta=0.1)
    logp, _, tokens, _, _ = random_step(1, config)

    def loss_and_metrics(x, where):
        members = tokens._replace(mask=jnp.asarray(np.isin(np.arange(SLOTS), where)))  # the rest of the micro-batch is filler
        return policy_loss(x, -x, members, config)

    grad = jax.value_and_grad(loss_and_metrics, has_aux=True)
    (loss, metrics), gradient = grad(logp, np.arange(11))
    total, gradients, combined = 0.0, jnp.zeros(SLOTS), empty_metrics()
    for where in np.array_split(np.random.default_rng(2).permutation(11), parts):
        (part, part_metrics), part_gradient = grad(logp, where)
        total, gradients, combined = total + part, gradients + part_gradient, combine_metrics(combined, part_metrics)
    assert float(total) == pytest.approx(float(loss), rel=1e-5)
    np.testing.assert_allclose(gradients, gradient, rtol=1e-5, atol=1e-7)
    for name in METRICS:
        assert float(combined[name]) == pytest.approx(float(metrics[name]), rel=1e-5), name


@pytest.mark.parametrize("filler", [0.0, 1.0, -5.0, -math.inf, math.inf, math.nan])
@pytest.mark.parametrize("name", ["kl k3", "kl k3-ratio", "entropy", "sequence cispo", "sapo", "gspo_token", "mask sequence"])
def test_what_stands_at_masked_positions_changes_no_bit(name, filler):
    config = config_of(name)
    mask = jnp.array([True, False])

    def run(other):
        def both(value):
            return jnp.array([value, other], jnp.float32)

        numbers = jnp.array([0, -1], jnp.int32)
        tokens = ScoredTokens(mask, both(0.5), both(1.0), both(-1.1), both(-0.9), numbers, both(-2.0))
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
        rollout=jnp.zeros(4, jnp.int32),
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
