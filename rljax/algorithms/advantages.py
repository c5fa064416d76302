"""From rewards to advantages, on the host.

Owns the estimators (rows of `ADVANTAGES`), the shaping of rewards by length, and the verdict which groups carry a
signal. Refuses to own where rewards come from, how they spread over turns and tokens (credit.py), packing and losses.
Grouping is by id, never by position, so slicing and shuffling change nothing.

    rewards, groups, lengths, costs, turns, values --row--> one advantage per rollout and per loss token
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from rljax.algorithm_config import AlgorithmConfig
from rljax.algorithms.credit import Turn, generalised_advantages, token_rewards, turn_returns

ZERO_VARIANCE_TOLERANCE = 1e-6
"""Rewards whose range is at most this (times their magnitude, if above 1) are equal: rounding is not a preference."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What became of one group.

    Example:
        GroupOutcome(id="arithmetic/train/17", rollouts=8, scored=7, mean=0.25, zero_variance=False, dropped=None)
    """

    id: Hashable
    """The group's id, as given."""
    rollouts: int
    """Number of its rollouts."""
    scored: int
    """Number of them with a reward."""
    mean: float | None
    """Mean reward of the scored ones; None when there are none."""
    zero_variance: bool
    """Whether its rewards are equal (or it was dropped): compared with itself it teaches nothing."""
    dropped: str | None
    """Why the group is not trained on, or None."""

    @property
    def informative(self) -> bool:
        """Whether the group compares rollouts of which one is better than another."""
        return self.dropped is None and not self.zero_variance


@dataclass(frozen=True, slots=True)
class Advantages:
    """The advantages of one batch of rollouts, in the order given.

    Example:
        Advantages(values=np.array([0.7, -0.7, 0], np.float32), tokens=np.array([0.7, 0.7, -0.7], np.float32),
                   used=np.array([True, True, False]), groups=(outcome,))
    """

    values: Float[np.ndarray, " n"]
    """Advantage of each rollout, float32; 0 where it is not used. Where tokens differ: that of its first token."""
    tokens: Float[np.ndarray, " t"]
    """Advantage of each loss token of the used rollouts, one rollout after the other, float32."""
    used: Bool[np.ndarray, " n"]
    """Whether the rollout is scored and its group not dropped; only these may enter the loss and its denominators."""
    groups: tuple[GroupOutcome, ...]
    """The groups, in order of first appearance."""
    returns: Float[np.ndarray, " t"] | None = None
    """What the critic's value of each loss token should be, float32; None without a critic."""


class Scored(NamedTuple):
    """What the rows of `ADVANTAGES` are given: the k used rollouts of a batch and their t loss tokens."""

    rewards: Float[np.ndarray, " k"]
    """Reward of each rollout."""
    groups: Int[np.ndarray, " k"]
    """Number of its group."""
    lengths: Int[np.ndarray, " k"]
    """Its loss tokens."""
    costs: Float[np.ndarray, " t"]
    """What each loss token takes off the reward, one rollout after the other."""
    parts: Mapping[str, Float[np.ndarray, " k"]]
    """The named rewards that have a weight."""
    turns: Sequence[Sequence[Turn]]
    """Its turns."""
    values: Float[np.ndarray, " t"]
    """The critic's value before each loss token is drawn; 0 without a critic."""

    @property
    def owners(self) -> Int[np.ndarray, " t"]:
        """Rollout of each loss token."""
        return np.repeat(np.arange(len(self.rewards)), self.lengths)

    @property
    def net(self) -> Float[np.ndarray, " k"]:
        """Reward of each rollout without what its tokens cost."""
        return self.rewards - np.bincount(self.owners, self.costs, minlength=len(self.rewards))


class Values(NamedTuple):
    """What the rows of `ADVANTAGES` return, in float64."""

    rollouts: Float[np.ndarray, " k"]
    """Advantage of each rollout; where its tokens differ, that of the first."""
    tokens: Float[np.ndarray, " t"]
    """Advantage of each loss token."""
    returns: Float[np.ndarray, " t"] | None = None
    """What the critic's value of each loss token should be; None without a critic."""


def estimate_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[Hashable],
    config: AlgorithmConfig,
    *,
    lengths: Int[np.ndarray, " n"] | None = None,
    costs: Sequence[Float[np.ndarray, " _"]] | None = None,
    parts: Sequence[Mapping[str, float]] | None = None,
    turns: Sequence[Sequence[Turn]] | None = None,
    values: Sequence[Float[np.ndarray, " _"]] | None = None,
) -> Advantages:
    """Turn rewards into advantages by the row of `ADVANTAGES` that `config.advantage` names.

    A reward of None (not scored) enters no statistics. Groups with fewer than two scored rollouts are dropped, unless
    there is a critic to compare with. Sums over groups are exact, so the order of the rollouts does not change a bit.
    Raises ValueError for a reward that is not finite, or a named reward that is missing.

    Args:
        rewards: One per rollout.
        group_ids: The group of each.
        config: Names the row.
        lengths: Loss tokens of each rollout; default: one each.
        costs: What each loss token takes off the reward; default: nothing.
        parts: The named rewards of each rollout.
        turns: The turns of each rollout; default: a single one.
        values: The critic's value before each loss token is drawn; default: 0.
    """
    outcomes = group_outcomes(rewards, group_ids, least_scored(config))
    numbers = {outcome.id: number for number, outcome in enumerate(outcomes)}
    groups = np.array([numbers[group_id] for group_id in group_ids], np.int64)
    used = np.array(
        [reward is not None and outcomes[group].dropped is None for reward, group in zip(rewards, groups, strict=True)], bool
    )
    chosen: list[int] = np.flatnonzero(used).tolist()
    own_lengths = np.ones(len(chosen), np.int64) if lengths is None else np.asarray(lengths, np.int64)[chosen]
    own_rewards = np.array([rewards[index] for index in chosen], np.float64)
    single = [[Turn(reward, length)] for reward, length in zip(own_rewards.tolist(), own_lengths.tolist(), strict=True)]
    scored = Scored(
        own_rewards,
        groups[chosen],
        own_lengths,
        _joined(costs, chosen, own_lengths),
        {name: _named(parts, name, chosen) for name in config.reward_weights},
        single if turns is None else [turns[index] for index in chosen],
        _joined(values, chosen, own_lengths),
    )
    row = ADVANTAGES[config.advantage]
    found = by_turn(scored, config, row) if config.credit == "turn" else row(scored, config)
    of_rollouts = np.zeros(len(rewards), np.float32)
    of_rollouts[chosen] = found.rollouts
    returns = None if found.returns is None else found.returns.astype(np.float32)
    return Advantages(of_rollouts, found.tokens.astype(np.float32), used, outcomes, returns)


def least_scored(config: AlgorithmConfig) -> int:
    """Return how many rollouts of a group must be scored for it to be trained on: one where they are not compared, else 2."""
    return 1 if config.advantage in ("gae", "return") else 2


def group_outcomes(rewards: Sequence[float | None], group_ids: Sequence[Hashable], least: int = 2) -> tuple[GroupOutcome, ...]:
    """Judge each group, in order of first appearance: scored rollouts, mean, whether its rewards are all equal.

    A group with fewer than `least` scored rollouts is dropped. Equality is by range, max - min <= 1e-6 * max(1, max |R|),
    never by a computed deviation.
    Raises ValueError for a reward that is not finite.
    """
    assert len(rewards) == len(group_ids), (len(rewards), len(group_ids))
    members: dict[Hashable, list[float | None]] = {}
    for index, (reward, group_id) in enumerate(zip(rewards, group_ids, strict=True)):
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"rollout {index} of group {group_id!r} has reward {reward}; report a failure to score as None")
        members.setdefault(group_id, []).append(reward)
    outcomes = []
    for group_id, all_rewards in members.items():
        own = [reward for reward in all_rewards if reward is not None]
        mean = math.fsum(own) / len(own) if own else None
        dropped = None
        if len(own) < least:
            dropped = f"{len(own)} of {len(all_rewards)} rollouts scored; a group needs at least {least}"
        outcomes.append(GroupOutcome(group_id, len(all_rewards), len(own), mean, _are_equal(own), dropped))
    return tuple(outcomes)


def overlong_penalties(lengths: Int[np.ndarray, " n"], limit: int, buffer: int, factor: float) -> Float[np.ndarray, " n"]:
    """Return what each message's length (tokens) adds to its reward: 0, falling to -factor at the limit.

    0 up to limit - buffer, then factor * ((limit - buffer) - length) / buffer, never below -factor (DAPO,
    arXiv:2503.14476, eq. 13). A buffer of 0 adds nothing.
    """
    if buffer == 0:
        return np.zeros(len(lengths))
    return factor * np.clip(((limit - buffer) - np.asarray(lengths, np.float64)) / buffer, -1.0, 0.0)


def grpo(scored: Scored, config: AlgorithmConfig) -> Values:
    """Return (R - mean(group)) / scale (GRPO, arXiv:2402.03300 section 4.1.2; scale 1: Dr. GRPO, arXiv:2503.20783).

    The scale is the sample standard deviation (ddof = 1) of the group's rewards for `group`, of all for `batch`, and 1
    for `none`. No epsilon is added: a group without variance is centred and not scaled.
    """
    return _of_rollouts(scored, _scaled(scored, _by_group(scored.net, scored, _centred), config))


def rloo(scored: Scored, config: AlgorithmConfig) -> Values:
    """Return (R - mean(the group's other rewards)) / scale (arXiv:2402.14740); scales as in `grpo`."""

    def against_others(own: np.ndarray) -> np.ndarray:
        return _centred(own) * (len(own) / (len(own) - 1))

    return _of_rollouts(scored, _scaled(scored, _by_group(scored.net, scored, against_others), config))


def reinforce_pp(scored: Scored, config: AlgorithmConfig) -> Values:
    """Whiten each token's return over all loss tokens of the batch (REINFORCE++, arXiv:2501.03262).

    A token's return is the reward without the costs of it and the tokens after it.
    """
    returns = _returns(scored)
    mean, scale = _whitening(returns)
    return Values((scored.net - mean) / scale, (returns - mean) / scale)


def reinforce_pp_baseline(scored: Scored, config: AlgorithmConfig) -> Values:
    """Centre by the group's mean, then whiten over all loss tokens of the batch (REINFORCE++-baseline, arXiv:2501.03262)."""
    centred = _by_group(scored.net, scored, _centred)
    mean, scale = _whitening(centred[scored.owners])
    return _of_rollouts(scored, (centred - mean) / scale)


def maxrl(scored: Scored, config: AlgorithmConfig) -> Values:
    """Return (R - mean(group)) / mean(group) (MaxRL, arXiv:2602.02710); 0 where all rewards are 0.

    With rewards of 0 and 1 its expectation is the gradient of the likelihood of success, cut at the order of the
    group's size. Raises ValueError for a negative reward.
    """
    if (scored.rewards < 0).any():
        raise ValueError(
            f"algorithm.advantage = 'maxrl' needs rewards of 0 and above, and one is {scored.rewards.min():g}; "
            "change the reward, or choose another advantage"
        )

    def by_mean(own: np.ndarray) -> np.ndarray:
        centred = _centred(own)
        return centred / (math.fsum(own) / len(own)) if centred.any() else centred

    return _of_rollouts(scored, _by_group(scored.net, scored, by_mean))


def gdpo(scored: Scored, config: AlgorithmConfig) -> Values:
    """Normalise each named reward in the group, add them by weight, whiten over the batch (GDPO, arXiv:2601.05242).

    A named reward that is equal in the whole group adds 0 there, whatever the others do.
    """
    total = np.zeros(len(scored.rewards))
    for name, weight in config.reward_weights.items():
        total += weight * _by_group(scored.parts[name], scored, _standardised)
    mean, scale = _whitening(total)
    return _of_rollouts(scored, (total - mean) / scale)


def gae(scored: Scored, config: AlgorithmConfig) -> Values:
    """Return generalised advantages over the critic's values (PPO; `credit.generalised_advantages`).

    A token's reward is what lands on it (`credit.token_rewards`) without its cost. The returns that the critic learns are
    advantage + value, the lambda-returns; then the advantages alone are whitened, over all loss tokens of the batch.
    """
    rewards = token_rewards(scored.rewards, scored.lengths, scored.turns) - scored.costs
    advantages = generalised_advantages(rewards, scored.values, scored.lengths, config.gamma, config.gae_lambda)
    mean, scale = _whitening(advantages) if config.whiten_advantages else (0.0, 1.0)
    tokens = (advantages - mean) / scale
    first, some = np.cumsum(scored.lengths) - scored.lengths, scored.lengths > 0
    of_rollouts = np.zeros(len(scored.rewards))
    of_rollouts[some] = tokens[first[some]]
    return Values(of_rollouts, tokens, advantages + scored.values)


def plain_return(scored: Scored, config: AlgorithmConfig) -> Values:
    """Return each token's return as it is, without a baseline (REINFORCE; Williams 1992, doi:10.1007/BF00992696).

    A token's return is as in `reinforce_pp`. The gradient has the same mean as with a baseline, and more variance: what the
    other rows are measured by.
    """
    return Values(scored.net, _returns(scored))


def by_turn(scored: Scored, config: AlgorithmConfig, row: Callable[[Scored, AlgorithmConfig], Values]) -> Values:
    """Apply a row to turns in place of rollouts: a turn's return against those of the same turn in its group.

    Step-level groups as in GiGPO (arXiv:2505.10978, section 4), made by the number of the turn, with the discounted returns
    of `credit.turn_returns`. A turn that no other rollout of its group has reached has nothing to be compared with, and
    takes the advantage of its rollout; one after the last judged turn has no return, enters no statistics, and gets 0.
    """
    whole = row(scored, config).rollouts
    returns = [turn_returns(own, config.gamma) for own in scored.turns]
    credits = [
        [0.0 if known is None else float(advantage) for known in own] for own, advantage in zip(returns, whole, strict=True)
    ]
    for number in range(max(map(len, returns), default=0)):
        reached = np.array([len(own) > number and own[number] is not None for own in returns], bool)
        peers = np.bincount(scored.groups[reached], minlength=int(scored.groups.max(initial=0)) + 1)
        chosen: list[int] = np.flatnonzero(reached & (peers[scored.groups] >= 2)).tolist()
        lengths = np.array([scored.turns[index][number].tokens for index in chosen], np.int64)
        nothing = np.zeros(int(lengths.sum()))
        rewards = np.array([returns[index][number] for index in chosen], np.float64)
        turn = Scored(rewards, scored.groups[chosen], lengths, nothing, {}, [], nothing)
        for index, credit in zip(chosen, row(turn, config).rollouts, strict=True):
            credits[index][number] = float(credit)
    lengths = np.array([turn.tokens for own in scored.turns for turn in own], np.int64)
    tokens = np.repeat(np.array([credit for own in credits for credit in own], np.float64), lengths)
    return Values(np.array([own[0] if own else 0.0 for own in credits]), tokens)


def sample_std(values: Sequence[float]) -> float:
    """Return the sample standard deviation, sqrt(sum((x - mean)^2) / (n - 1)), of at least two values."""
    assert len(values) >= 2, "a sample standard deviation needs two values"
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _returns(scored: Scored) -> np.ndarray:
    """Return, per loss token, the reward of its rollout without the costs of it and the tokens after it."""
    total = np.cumsum(scored.costs)
    ends = np.cumsum(scored.lengths)
    before = total - scored.costs
    last = np.concatenate([np.zeros(1), total])[ends][scored.owners]
    return scored.rewards[scored.owners] - (last - before)


def _by_group(values: np.ndarray, scored: Scored, of_group: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Apply a function to the values of each group."""
    out = np.zeros(len(values))
    for group in np.unique(scored.groups):
        own = scored.groups == group
        out[own] = of_group(values[own])
    return out


def _centred(own: np.ndarray) -> np.ndarray:
    return np.zeros(len(own)) if _are_equal(own.tolist()) else own - math.fsum(own) / len(own)


def _standardised(own: np.ndarray) -> np.ndarray:
    centred = _centred(own)
    return centred / sample_std(own.tolist()) if centred.any() else centred


def _scaled(scored: Scored, centred: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """Divide centred rewards as `scale_rewards` says."""
    if config.scale_rewards == "group":
        # Where only the costs differ, dividing by their deviation would blow them up to the size of a reward.
        flat = _by_group(scored.rewards, scored, lambda own: np.full(len(own), float(_are_equal(own.tolist()))))
        deviations = _by_group(scored.net, scored, lambda own: np.full(len(own), sample_std(own.tolist())))
        return centred / np.where((flat > 0) | (centred == 0), 1.0, deviations)
    if config.scale_rewards == "batch" and not _are_equal(scored.net.tolist()):
        return centred / sample_std(scored.net.tolist())
    return centred


def _whitening(values: np.ndarray) -> tuple[float, float]:
    """Return mean and sample standard deviation; infinity for it when all values are equal, so that they become 0."""
    known = values.tolist()
    mean = math.fsum(known) / max(len(known), 1)
    return mean, math.inf if _are_equal(known) else sample_std(known)


def _of_rollouts(scored: Scored, values: np.ndarray) -> Values:
    return Values(values, values[scored.owners])


def _joined(per_rollout: Sequence[np.ndarray] | None, chosen: Sequence[int], lengths: np.ndarray) -> np.ndarray:
    """Return what is known of each loss token of the chosen rollouts, one after the other; zeros where nothing is."""
    if per_rollout is None:
        return np.zeros(int(lengths.sum()))
    assert all(len(per_rollout[index]) == length for index, length in zip(chosen, lengths, strict=True)), "one per loss token"
    return np.concatenate([np.zeros(0), *(per_rollout[index] for index in chosen)])


def _named(parts: Sequence[Mapping[str, float]] | None, name: str, chosen: Sequence[int]) -> np.ndarray:
    assert parts is not None, "reward_weights need the named rewards of each rollout"
    found = [parts[index] for index in chosen]
    for own in found:
        if name not in own:
            raise ValueError(
                f"algorithm.reward_weights has {name!r}, and a rollout's named rewards are {sorted(own)}; weigh those, or "
                "let the environment name this one in `components`"
            )
    return np.array([own[name] for own in found], np.float64)


def _are_equal(rewards: Sequence[float]) -> bool:
    if len(rewards) < 2:
        return True
    magnitude = max(1.0, max(abs(reward) for reward in rewards))
    return max(rewards) - min(rewards) <= ZERO_VARIANCE_TOLERANCE * magnitude


ADVANTAGES: dict[str, Callable[[Scored, AlgorithmConfig], Values]] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "maxrl": maxrl,
    "gdpo": gdpo,
    "gae": gae,
    "return": plain_return,
}
"""Estimators by the names of `algorithm.advantage`."""
