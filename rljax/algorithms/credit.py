"""Credit below the rollout, on the host: which tokens a reward lands on, and how it reaches the tokens before them.

Owns returns per turn, rewards per token and generalised advantage estimation. Refuses to own comparisons between rollouts
(advantages.py), and masks: only loss tokens are given, so what the environment wrote is no state of its own, and the
state after a message's last token is the one before the next message's first.

    tokens of a rollout   p p A A e e B B B        p: prompt, A B: the model's turns, e: the environment
    rewards of its turns      0.5      1.0
    loss tokens               A A      B B B
    rewards per token         0 0.5    0 0 1.0     the rest of the rollout's reward, if any, lands on the last one, too
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Turn(NamedTuple):
    """One message of the model.

    Example:
        Turn(reward=0.5, tokens=12)
    """

    reward: float | None
    """What the environment gave for it; None where it was not judged."""
    tokens: int
    """Its loss tokens."""


def turn_returns(turns: Sequence[Turn], gamma: float) -> list[float | None]:
    """Return what each turn led to: G_k = sum over judged turns j >= k of gamma^(j - k) r_j.

    None for turns after the last judged one: nothing is known about them, which is not a return of 0.
    """
    returns: list[float | None] = []
    later = None
    for turn in reversed(turns):
        later = None if later is None else gamma * later
        if turn.reward is not None:
            later = turn.reward + (0.0 if later is None else later)
        returns.append(later)
    return returns[::-1]


def token_rewards(
    rewards: Float[np.ndarray, " k"], lengths: Int[np.ndarray, " k"], turns: Sequence[Sequence[Turn]]
) -> Float[np.ndarray, " t"]:
    """Return the reward of each loss token, one rollout after the other; those of a rollout add up to its reward.

    A turn's reward lands on its last token. What the rollout's reward has beyond those of its turns (a penalty on length)
    lands on the last token of all. A rollout without loss tokens has no place for a reward.
    """
    landed = np.zeros(int(lengths.sum()))
    start = 0
    for reward, length, own in zip(rewards, lengths, turns, strict=True):
        if length:
            assert sum(turn.tokens for turn in own) == length, "turns hold all loss tokens of their rollout"
            given = [0.0 if turn.reward is None else turn.reward for turn in own]
            last = start + np.cumsum([turn.tokens for turn in own]) - 1
            landed[last] = given
            landed[last[-1]] += reward - np.sum(given)
        start += int(length)
    return landed


def generalised_advantages(
    rewards: Float[np.ndarray, " t"],
    values: Float[np.ndarray, " t"],
    lengths: Int[np.ndarray, " k"],
    gamma: float,
    gae_lambda: float,
) -> Float[np.ndarray, " t"]:
    """Return the advantage of each loss token, one rollout after the other (GAE, arXiv:1506.02438, eq. 16).

    A_t = delta_t + gamma lambda A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t, and nothing after a rollout's last token:
    V and A are 0 there, also where the length limit cut it, since its reward judges it as it stands.

    Args:
        rewards: Reward of each token.
        values: Expected return before the token is drawn.
        lengths: Loss tokens of each rollout.
        gamma: Discount per token.
        gae_lambda: 1 gives the return minus the value, 0 the temporal difference delta_t (eq. 18 and 17).
    """
    last = np.cumsum(lengths) - 1
    following = np.zeros(len(values))
    following[:-1] = values[1:]
    following[last[lengths > 0]] = 0.0
    advantages = rewards + gamma * following - values
    for back in range(1, int(lengths.max(initial=0))):
        here = last[lengths > back] - back
        advantages[here] += gamma * gae_lambda * advantages[here + 1]
    return advantages
