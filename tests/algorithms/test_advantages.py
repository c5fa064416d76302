import math
import random

import numpy as np
import pytest

from rljax.algorithms.advantages import group_advantages, sample_std

ROUNDING = 1e-6
"""Advantages are computed in float64 and stored in float32."""


def test_advantages_are_centred_and_divided_by_the_sample_standard_deviation():
    got = group_advantages([1.0, 0.0, 0.0, 0.0], ["q"] * 4, "group").values
    # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4
    np.testing.assert_allclose(got, [1.5, -0.5, -0.5, -0.5], atol=ROUNDING)
    assert got.dtype == np.float32


def test_batch_scaling_uses_one_deviation_for_all_groups():
    rewards = [1.0, 0.0, 4.0, 2.0]
    got = group_advantages(rewards, ["a", "a", "b", "b"], "batch").values
    std = math.sqrt(sum((r - 1.75) ** 2 for r in rewards) / 3)
    np.testing.assert_allclose(got, np.array([0.5, -0.5, 1.0, -1.0]) / std, atol=ROUNDING)


def test_without_scaling_advantages_are_centred_rewards():
    got = group_advantages([1.0, 0.0, 4.0, 2.0], ["a", "a", "b", "b"], "none").values
    np.testing.assert_array_equal(got, [0.5, -0.5, 1.0, -1.0])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("rewards", [[0.95] * 8, [1.0, 1.0, 1.0, 1.0 + 1e-9], [1e6] * 3 + [1e6 + 1e-3]])
def test_equal_rewards_give_zero_and_a_flag(rewards, scale):
    got = group_advantages(rewards, ["q"] * len(rewards), scale)
    np.testing.assert_array_equal(got.values, np.zeros(len(rewards)))
    assert got.groups[0].zero_variance
    assert got.groups[0].dropped is None
    assert got.used.all()


def test_a_small_real_difference_stays_a_difference():
    got = group_advantages([0.0, 0.001], ["q", "q"], "group")
    assert not got.groups[0].zero_variance
    np.testing.assert_allclose(got.values, [-math.sqrt(0.5), math.sqrt(0.5)], atol=ROUNDING)


def test_one_outlier_among_equal_rewards_is_bounded():
    got = group_advantages([0.0] + [0.95] * 7, ["q"] * 8, "group").values
    assert np.abs(got).max() <= 7 / math.sqrt(8) + ROUNDING  # the largest a sample-scaled value can be
    assert got[0] < 0 < got[1]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grouping_is_by_id_whatever_the_order(scale):
    rewards = [0.1, 0.7, 0.30000000000000004, 0.3, 0.2, 0.9, 0.4, 0.6]
    ids = ["q1"] * 4 + ["q2"] * 4
    want = group_advantages(rewards, ids, scale).values
    for seed in range(20):
        order = list(range(8))
        random.Random(seed).shuffle(order)
        got = group_advantages([rewards[i] for i in order], [ids[i] for i in order], scale).values
        np.testing.assert_array_equal(got, want[order])  # the same bits


def test_groups_do_not_influence_each_other():
    both = group_advantages([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], ["q1"] * 4 + ["q2"] * 4, "group").values
    np.testing.assert_array_equal(both[:4], group_advantages([1.0, 0.0, 0.0, 0.0], ["q1"] * 4, "group").values)
    np.testing.assert_array_equal(both[4:], group_advantages([0.0, 0.0, 1.0, 1.0], ["q2"] * 4, "group").values)


def test_groups_are_judged_whole():
    rows = {"a": [1, 0, 0, 0], "b": [1, 1, 1, 0], "c": [1, 1, 0, 0], "d": [1, 1, 1, 1]}
    rewards = [float(r) for row in rows.values() for r in row]
    got = group_advantages(rewards, [name for name in rows for _ in range(4)], "group")
    assert [group.zero_variance for group in got.groups] == [False, False, False, True]
    assert (got.values[:12] != 0).all()


def test_an_unscored_rollout_enters_no_statistics():
    got = group_advantages([1.0, None, 0.0], ["q"] * 3, "group")
    np.testing.assert_array_equal(got.used, [True, False, True])
    np.testing.assert_allclose(got.values, [math.sqrt(0.5), 0.0, -math.sqrt(0.5)], atol=ROUNDING)
    assert (got.groups[0].scored, got.groups[0].rollouts, got.groups[0].mean) == (2, 3, 0.5)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize(("rewards", "scored"), [([1.0], 1), ([None, 1.0, None], 1), ([None, None], 0)])
def test_a_group_with_fewer_than_two_scores_is_dropped_with_a_reason(rewards, scored, scale):
    got = group_advantages([*rewards, 0.0, 1.0], ["alone"] * len(rewards) + ["pair"] * 2, scale)
    alone = got.groups[0]
    assert alone.dropped == f"{scored} of {len(rewards)} rollouts scored; a group needs at least 2"
    np.testing.assert_array_equal(got.used, [False] * len(rewards) + [True, True])
    assert np.isfinite(got.values).all()
    assert (got.values[: len(rewards)] == 0).all()
    if scale == "batch":
        np.testing.assert_allclose(got.values[-2:], [-math.sqrt(0.5), math.sqrt(0.5)], atol=ROUNDING)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_an_error(reward):
    with pytest.raises(ValueError, match="rollout 1 of group 'q'"):
        group_advantages([0.0, reward], ["q", "q"], "group")


def test_the_sample_deviation_is_accurate_far_from_zero():
    assert sample_std([1e8, 1e8 + 1, 1e8 + 2]) == 1.0


def test_no_rollouts_give_no_advantages():
    got = group_advantages([], [], "batch")
    assert got.values.shape == (0,)
    assert got.groups == ()
