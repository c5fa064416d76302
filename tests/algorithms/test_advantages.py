import math
import random
from typing import get_args

import numpy as np
import pytest

from rljax.algorithm_config import AlgorithmConfig
from rljax.algorithms.advantages import ADVANTAGES, Advantages, estimate_advantages, overlong_penalties, sample_std
from tests.reference import advantages as reference

ROUNDING = 1e-6
"""Advantages are computed in float64 and stored in float32."""


def group_advantages(rewards, group_ids, scale: str) -> Advantages:
    return estimate_advantages(rewards, group_ids, AlgorithmConfig.model_validate({"scale_rewards": scale}))


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


# Every row against a page of numpy, and by hand

GROUPS = [[1.0, 0.0, 0.0, 0.5], [0.25, 1.0, 2.0], [0.0, 1.0]]
IDS = [number for number, group in enumerate(GROUPS) for _ in group]
LENGTHS = [3, 1, 4, 2, 5, 1, 2, 6, 2]
PARTS = {"right": GROUPS, "short": [[0.0, 1.0, 2.0, 1.0], [5.0, 5.5, 4.0], [1.0, 0.0]]}
WEIGHTS = {"right": 1.0, "short": 0.25}


OF_GROUPS = [row for row in ADVANTAGES if row not in ("gae", "return")]
"""Rows that compare rollouts with each other; `gae` is tested in test_credit.py."""


def flat(groups):
    return [reward for group in groups for reward in group]


def options_of(row: str, **more) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"advantage": row, **({"reward_weights": WEIGHTS} if row == "gdpo" else {}), **more})


def estimated(row: str, groups=GROUPS, ids=IDS, lengths=LENGTHS, costs=None, parts=PARTS, **more) -> Advantages:
    columns = {name: flat(column) for name, column in parts.items()}
    named = [{name: column[index] for name, column in columns.items()} for index in range(len(columns["right"]))]
    return estimate_advantages(flat(groups), ids, options_of(row, **more), lengths=np.array(lengths), costs=costs, parts=named)


def by_hand(row: str) -> list[float]:
    config = options_of(row)
    return {
        "grpo": lambda: reference.grpo(GROUPS, config),
        "rloo": lambda: reference.rloo(GROUPS),
        "reinforce_pp": lambda: [tokens[0] for tokens in reference.reinforce_pp(GROUPS, [[0.0] * n for n in LENGTHS])],
        "reinforce_pp_baseline": lambda: reference.reinforce_pp_baseline(GROUPS, LENGTHS),
        "maxrl": lambda: reference.maxrl(GROUPS),
        "gdpo": lambda: reference.gdpo(PARTS, WEIGHTS),
    }[row]()


@pytest.mark.parametrize("row", OF_GROUPS)
def test_every_row_is_the_formula_of_its_paper(row):
    more = {"scale_rewards": "none"} if row == "rloo" else {}
    got = estimated(row, **more)
    np.testing.assert_allclose(got.values, by_hand(row), rtol=0, atol=ROUNDING)
    np.testing.assert_array_equal(got.tokens, np.repeat(got.values, LENGTHS))
    assert got.values.dtype == got.tokens.dtype == np.float32


@pytest.mark.parametrize(
    ("row", "want"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("reinforce_pp", [1.5, -0.5, -0.5, -0.5]),
        ("reinforce_pp_baseline", [1.5, -0.5, -0.5, -0.5]),
        ("maxrl", [3.0, -1.0, -1.0, -1.0]),
        ("gdpo", [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_one_right_answer_in_four(row, want):
    more = {"scale_rewards": "none"} if row == "rloo" else {}
    weights = {"reward_weights": {"right": 2.0}} if row == "gdpo" else {}
    rewards = [[1.0, 0.0, 0.0, 0.0]]
    got = estimated(row, rewards, [0] * 4, [1] * 4, parts={"right": rewards}, **more, **weights)
    np.testing.assert_allclose(got.values, want, atol=ROUNDING)


@pytest.mark.parametrize("row", OF_GROUPS)
def test_the_order_of_rollouts_changes_no_bit(row):
    want = estimated(row)
    for seed in range(5):
        order = list(range(9))
        random.Random(seed).shuffle(order)
        columns = {name: flat(column) for name, column in PARTS.items()}
        got = estimate_advantages(
            [flat(GROUPS)[i] for i in order],
            [IDS[i] for i in order],
            options_of(row),
            lengths=np.array([LENGTHS[i] for i in order]),
            parts=[{name: column[i] for name, column in columns.items()} for i in order],
        )
        np.testing.assert_array_equal(got.values, want.values[order])


@pytest.mark.parametrize("row", OF_GROUPS)
@pytest.mark.parametrize("rewards", [[0.95] * 8, [1.0] * 7 + [1.0 + 1e-9], [0.0] * 8])
def test_equal_rewards_give_exactly_zero_by_every_row(row, rewards):
    got = estimated(row, [rewards], [0] * 8, [1, 2, 3, 4] * 2, parts={"right": [rewards], "short": [[3.0] * 8]})
    np.testing.assert_array_equal(got.values, np.zeros(8))
    np.testing.assert_array_equal(got.tokens, np.zeros(20))
    assert got.groups[0].zero_variance


@pytest.mark.parametrize("row", OF_GROUPS)
def test_what_was_not_scored_is_no_zero_and_a_single_score_is_no_group(row):
    scored = estimated(row)
    columns = {name: flat(column) for name, column in PARTS.items()}
    named = [{name: column[index] for name, column in columns.items()} for index in range(9)]
    got = estimate_advantages(
        [*flat(GROUPS), None, 1.0, None],
        [*IDS, 0, "single", "single"],
        options_of(row),
        lengths=np.array([*LENGTHS, 2, 3, 4]),
        parts=[*named, {}, {"right": 1.0, "short": 0.0}, {}],
    )
    np.testing.assert_array_equal(got.values, [*scored.values, 0.0, 0.0, 0.0])
    np.testing.assert_array_equal(got.tokens, scored.tokens)
    assert got.used.tolist() == [True] * 9 + [False] * 3
    assert got.groups[3].dropped == "1 of 2 rollouts scored; a group needs at least 2"


def test_leave_one_out_does_not_divide_by_a_deviation():
    got = estimated("rloo", [[0.0] + [0.95] * 7], [0] * 8, [1] * 8, scale_rewards="none", parts={"right": [[0.0] * 8]})
    np.testing.assert_allclose(got.values, [-0.95] + [0.95 / 7] * 7, atol=ROUNDING)


def test_token_costs_come_off_the_return_of_the_tokens_before_them():
    rng = np.random.default_rng(0)
    costs = [rng.normal(size=n) for n in LENGTHS]
    got = estimated("reinforce_pp", costs=costs)
    want = reference.reinforce_pp(GROUPS, [list(cost) for cost in costs])
    np.testing.assert_allclose(got.tokens, np.concatenate([np.array(row) for row in want]), atol=ROUNDING)
    np.testing.assert_allclose(got.values, [row[0] for row in want], atol=ROUNDING)


def test_the_return_alone_is_the_reward_without_later_costs_and_needs_nobody_to_compare_with():
    costs = [np.array([0.5, 0.25, 0.0]), np.array([]), np.array([0.125])]
    got = estimate_advantages([1.0, 1.0, -2.0], ["a", "b", "c"], options_of("return"), lengths=np.array([3, 0, 1]), costs=costs)
    np.testing.assert_array_equal(got.tokens, np.array([0.25, 0.75, 1.0, -2.125], np.float32))
    np.testing.assert_array_equal(got.values, np.array([0.25, 1.0, -2.125], np.float32))
    assert got.used.all()


def test_equal_rewards_are_returns_all_the_same():
    got = estimate_advantages([1.0, 1.0, None], [0, 0, 0], options_of("return"), lengths=np.array([2, 1, 4]))
    np.testing.assert_array_equal(got.tokens, np.ones(3, np.float32))
    assert got.used.tolist() == [True, True, False]


@pytest.mark.parametrize("row", ["grpo", "rloo", "reinforce_pp_baseline"])
def test_costs_come_off_the_reward_of_the_rollout(row):
    costs = [np.full(n, 0.01 * (i + 1)) for i, n in enumerate(LENGTHS)]
    cheaper, first = [], 0
    for group in GROUPS:
        cheaper.append([reward - float(costs[first + i].sum()) for i, reward in enumerate(group)])
        first += len(group)
    np.testing.assert_allclose(estimated(row, costs=costs).values, estimated(row, cheaper).values, atol=ROUNDING)


def test_costs_alone_are_not_blown_up_to_a_reward():
    got = estimated(
        "grpo", [[1.0, 1.0]], [0, 0], [1, 1], costs=[np.array([1e-3]), np.array([3e-3])], parts={"right": [[1.0] * 2]}
    )
    np.testing.assert_allclose(got.values, [1e-3, -1e-3], atol=1e-9)


def test_a_named_reward_without_variance_adds_nothing_and_a_missing_one_is_named():
    constant = {"right": [[1.0, 0.0, 1.0, 0.0]], "short": [[7.0] * 4]}
    got = estimated("gdpo", [[0.0] * 4], [0] * 4, [1] * 4, parts=constant)
    np.testing.assert_allclose(got.values, np.array([1, -1, 1, -1]) * math.sqrt(3) / 2, atol=ROUNDING)
    with pytest.raises(ValueError, match=r"'short', and a rollout's named rewards are \['right'\]"):
        estimated("gdpo", [[0.0, 1.0]], [0, 0], [1, 1], parts={"right": [[0.0, 1.0]]})


def test_the_mean_reward_as_a_scale_needs_rewards_above_zero():
    with pytest.raises(ValueError, match=r"one is -0\.5"):
        estimated("maxrl", [[1.0, -0.5]], [0, 0], [1, 1], parts={"right": [[0.0, 0.0]]})


def test_every_name_of_the_configuration_is_a_row():
    assert set(get_args(AlgorithmConfig.model_fields["advantage"].annotation)) == set(ADVANTAGES)


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (40, -1.0)])
def test_the_penalty_grows_in_the_buffer_before_the_limit(length, penalty):
    assert overlong_penalties(np.array([length]), 16, 4, 1.0).tolist() == [penalty]
    assert overlong_penalties(np.array([length]), 16, 4, 0.5).tolist() == [penalty / 2]
    assert overlong_penalties(np.array([length]), 16, 0, 1.0).tolist() == [0.0]
