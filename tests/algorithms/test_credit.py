"""Credit below the rollout: generalised advantages over a critic, and turns compared with turns."""

import math

import numpy as np
import pytest

from rljax.algorithm_config import AlgorithmConfig
from rljax.algorithms.advantages import Advantages, estimate_advantages
from rljax.algorithms.credit import Turn, generalised_advantages, token_rewards, turn_returns
from tests.reference import advantages as of_groups
from tests.reference import critic as reference

ROUNDING = 1e-6
"""Advantages are computed in float64 and stored in float32."""

TURNS = [
    [Turn(0.5, 2), Turn(1.0, 3)],
    [Turn(None, 1), Turn(-0.25, 4)],
    [Turn(2.0, 1)],
    [Turn(0.25, 3), Turn(None, 2), Turn(None, 1)],
]
PENALTIES = [0.0, -0.5, 0.0, -0.125]
LENGTHS = np.array([sum(turn.tokens for turn in own) for own in TURNS])
REWARDS = [sum(turn.reward or 0.0 for turn in own) + extra for own, extra in zip(TURNS, PENALTIES, strict=True)]


def gae_options(**more) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"advantage": "gae", "whiten_advantages": False, **more})


def drawn(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=n) for n in LENGTHS]


def estimated(config: AlgorithmConfig, order=range(4), groups=(0, 0, 1, 1), turns=TURNS, **known) -> Advantages:
    costs, values = (None if rows is None else [rows[i] for i in order] for rows in (known.get("costs"), known.get("values")))
    return estimate_advantages(
        [REWARDS[i] for i in order],
        [groups[i] for i in order],
        config,
        lengths=LENGTHS[list(order)],
        turns=[turns[i] for i in order],
        costs=costs,
        values=values,
    )


# Generalised advantages


def test_a_rollout_of_three_tokens_by_hand():
    # delta = 0 + 0.5 * 2 - 1, 0 + 0.5 * 3 - 2, 4 - 3 = 0, -0.5, 1; gamma * lambda = 0.25
    got = generalised_advantages(np.array([0.0, 0.0, 4.0]), np.array([1.0, 2.0, 3.0]), np.array([3]), 0.5, 0.5)
    assert got.tolist() == [-0.0625, -0.25, 1.0]


@pytest.mark.parametrize("lam", [1.0, 0.95, 0.3, 0.0])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_advantages_and_returns_are_those_of_the_paper(gamma, lam):
    costs, values = drawn(0), drawn(1)
    got = estimated(gae_options(gamma=gamma, gae_lambda=lam), costs=costs, values=values)
    assert got.returns is not None
    want = []
    for own, whole, cost, value in zip(TURNS, REWARDS, costs, values, strict=True):
        want.append(reference.advantages(reference.rewards_of(own, whole, cost.tolist()), value.tolist(), gamma, lam))
    flat = np.concatenate([np.array(row) for row in want])
    np.testing.assert_allclose(got.tokens, flat, rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(got.returns, flat + np.concatenate(values), rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(got.values, [row[0] for row in want], rtol=0, atol=ROUNDING)
    assert got.tokens.dtype == got.returns.dtype == np.float32


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_the_ends_of_lambda_are_the_return_minus_the_value_and_the_temporal_difference(gamma):
    rng = np.random.default_rng(2)
    rewards, values = rng.normal(size=5), rng.normal(size=5)
    lengths = np.array([5])
    returns = [sum(gamma ** (u - t) * rewards[u] for u in range(t, 5)) for t in range(5)]
    np.testing.assert_allclose(generalised_advantages(rewards, values, lengths, gamma, 1.0), returns - values, atol=1e-12)
    after = [*values[1:], 0.0]
    want = rewards + gamma * np.array(after) - values
    np.testing.assert_allclose(generalised_advantages(rewards, values, lengths, gamma, 0.0), want, atol=1e-12)


def test_with_the_true_values_nothing_is_better_than_expected():
    rewards, gamma = np.array([0.0, 1.0, 0.0, 2.0]), 0.5
    values = np.array([0.5 + 2 / 8, 1.0 + 2 / 4, 1.0, 2.0])
    for lam in (0.0, 0.5, 1.0):
        assert generalised_advantages(rewards, values, np.array([4]), gamma, lam).tolist() == [0.0] * 4


def test_what_the_environment_writes_is_no_state_of_its_own():
    """A token, two of the environment, a token with reward 1: the first is one step away from it."""
    got = estimate_advantages(
        [1.0, 0.0],
        ["q", "q"],
        gae_options(gamma=0.5, gae_lambda=1.0),
        lengths=np.array([2, 2]),
        turns=[[Turn(None, 1), Turn(1.0, 1)], [Turn(None, 1), Turn(0.0, 1)]],
    )
    assert got.tokens.tolist() == [0.5, 1.0, 0.0, 0.0]


def test_rewards_land_on_the_last_token_of_their_turn_and_the_rest_on_the_last_of_all():
    got = token_rewards(np.array([*REWARDS, 7.0]), np.array([*LENGTHS, 0]), [*TURNS, [Turn(7.0, 0)]])
    rows = np.split(got, np.cumsum(LENGTHS)[:-1])
    assert [row.tolist() for row in rows] == [[0, 0.5, 0, 0, 1.0], [0, 0, 0, 0, -0.75], [2.0], [0, 0, 0.25, 0, 0, -0.125]]


def test_whitening_is_over_the_tokens_of_the_batch_and_leaves_returns_alone():
    values = drawn(3)
    plain, white = (estimated(gae_options(whiten_advantages=white), values=values) for white in (False, True))
    np.testing.assert_allclose(
        white.tokens, (plain.tokens - plain.tokens.mean()) / plain.tokens.std(ddof=1), rtol=0, atol=2 * ROUNDING
    )
    assert white.returns is not None
    assert plain.returns is not None
    assert white.returns.tolist() == plain.returns.tolist()


@pytest.mark.parametrize("whiten", [False, True])
def test_neither_order_nor_groups_change_what_a_critic_says(whiten):
    config, values, costs = gae_options(whiten_advantages=whiten), drawn(1), drawn(0)
    want = estimated(config, values=values, costs=costs)
    pieces = np.split(want.tokens, np.cumsum(LENGTHS)[:-1])
    for order in ((3, 1, 0, 2), (2, 3, 1, 0)):
        got = estimated(config, order, groups=(0, 1, 2, 3), values=values, costs=costs)
        np.testing.assert_array_equal(got.tokens, np.concatenate([pieces[i] for i in order]))
        assert got.used.all(), "a rollout alone is compared with the critic"


def test_what_was_not_scored_is_left_out_and_what_has_no_loss_tokens_has_no_advantage():
    config, values = gae_options(), drawn(1)
    want = estimated(config, values=values)
    got = estimate_advantages(
        [*REWARDS, None, 5.0],
        [0, 0, 1, 1, 2, 2],
        config,
        lengths=np.array([*LENGTHS, 2, 0]),
        turns=[*TURNS, [], [Turn(5.0, 0)]],
        values=[*values, np.array([math.nan] * 2), np.zeros(0)],
    )
    np.testing.assert_array_equal(got.tokens, want.tokens)
    assert got.values.tolist() == [*want.values.tolist(), 0.0, 0.0]
    assert got.used.tolist() == [True] * 4 + [False, True]
    assert [group.dropped for group in got.groups] == [None, None, None]
    nothing = estimate_advantages([None], [0], config, lengths=np.array([2]), turns=[[]], values=[np.zeros(2)])
    assert nothing.groups[0].dropped == "0 of 1 rollouts scored; a group needs at least 1"
    assert len(nothing.tokens) == 0


# Turns against turns


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_a_turns_return_is_what_came_from_it_on(gamma):
    rewards = [None, 1.0, None, 2.0, None]
    got = turn_returns([Turn(reward, 1) for reward in rewards], gamma)
    assert got == reference.turn_returns(rewards, gamma)
    assert got[-1] is None, "nothing is known after the last judged turn"
    assert turn_returns([], gamma) == []


@pytest.mark.parametrize("row", ["grpo", "rloo"])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_turns_are_compared_with_the_same_turn_of_their_group(row, gamma):
    rewards = [[1.0, 0.0], [0.0, 1.0], [0.0, 0.5], [None, 2.0], [1.0, -1.0]]
    groups, tokens = [0, 0, 0, 1, 1], [(2, 1), (1, 3), (1, 1), (2, 2), (1, 2)]
    config = AlgorithmConfig.model_validate({"advantage": row, "credit": "turn", "gamma": gamma, "scale_rewards": "none"})
    turns = [[Turn(r, n) for r, n in zip(own, size, strict=True)] for own, size in zip(rewards, tokens, strict=True)]
    got = estimate_advantages(
        [sum(r or 0.0 for r in own) for own in rewards], groups, config, lengths=np.array([sum(n) for n in tokens]), turns=turns
    )
    want = []
    for turn in range(2):
        returns = [reference.turn_returns(own, gamma)[turn] for own in rewards]
        split = [[r for r, group in zip(returns, groups, strict=True) if group == number] for number in (0, 1)]
        want.append(of_groups.grpo(split, config) if row == "grpo" else of_groups.rloo(split))
    expected = [want[turn][i] for i, size in enumerate(tokens) for turn in range(2) for _ in range(size[turn])]
    np.testing.assert_allclose(got.tokens, expected, rtol=0, atol=ROUNDING)
    np.testing.assert_allclose(got.values, want[0], rtol=0, atol=ROUNDING)
    assert got.returns is None


def test_an_early_success_is_not_blamed_for_what_came_later():
    """Two rollouts with equal sums: as wholes they teach nothing, turn by turn they do."""
    known = {"lengths": np.array([2, 2]), "turns": [[Turn(1.0, 1), Turn(0.0, 1)], [Turn(0.0, 1), Turn(1.0, 1)]]}
    options = {"advantage": "grpo", "scale_rewards": "none"}
    whole = estimate_advantages([1.0, 1.0], [0, 0], AlgorithmConfig.model_validate(options), **known)
    turns = estimate_advantages([1.0, 1.0], [0, 0], AlgorithmConfig.model_validate({**options, "credit": "turn"}), **known)
    assert whole.tokens.tolist() == [0.0] * 4
    assert turns.tokens.tolist() == [0.0, -0.5, 0.0, 0.5]


def test_a_turn_that_no_other_rollout_reached_has_the_advantage_of_its_rollout():
    config = AlgorithmConfig.model_validate({"credit": "turn", "scale_rewards": "none"})
    turns = [[Turn(None, 1), Turn(None, 2), Turn(1.0, 1)], [Turn(None, 1), Turn(0.0, 1)], [Turn(0.0, 2)]]
    got = estimate_advantages([1.0, 0.0, 0.0], [0] * 3, config, lengths=np.array([4, 2, 2]), turns=turns)
    third = 2 / 3
    want = [third, 0.5, 0.5, third] + [-1 / 3, -0.5] + [-1 / 3] * 2
    np.testing.assert_allclose(got.tokens, want, rtol=0, atol=ROUNDING)


def test_a_turn_after_the_last_verdict_enters_no_statistics():
    config = AlgorithmConfig.model_validate({"credit": "turn", "scale_rewards": "none"})
    turns = [[Turn(1.0, 1), Turn(None, 1)], [Turn(0.0, 1), Turn(0.5, 1)], [Turn(0.5, 1), Turn(1.5, 1)]]
    got = estimate_advantages([1.0, 0.5, 2.0], [0] * 3, config, lengths=np.array([2, 2, 2]), turns=turns)
    mean = (1.0 + 0.5 + 2.0) / 3
    want = [1.0 - mean, 0.0, 0.5 - mean, -0.5, 2.0 - mean, 0.5]
    np.testing.assert_allclose(got.tokens, want, rtol=0, atol=ROUNDING)


def test_without_a_scored_rollout_there_is_no_credit():
    got = estimate_advantages([None, None], [0, 0], AlgorithmConfig(credit="turn"), lengths=np.array([2, 1]), turns=[[], []])
    assert (got.tokens.tolist(), got.used.tolist()) == ([], [False, False])


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_with_single_turns_credit_by_turn_is_credit_by_rollout(scale):
    rewards, groups, lengths = [1.0, 0.0, 0.0, 2.0, 5.0], [0, 0, 0, 1, 1], np.array([2, 1, 3, 1, 2])
    whole, turns = (
        estimate_advantages(
            rewards, groups, AlgorithmConfig.model_validate({"credit": credit, "scale_rewards": scale}), lengths=lengths
        )
        for credit in ("rollout", "turn")
    )
    np.testing.assert_array_equal(turns.tokens, whole.tokens)
    np.testing.assert_array_equal(turns.values, whole.values)
