"""PPO's critic, one rollout and one token at a time, in plain Python: returns, advantages, the value loss.

Every formula is a sum written out from the papers; nothing is recursive, and nothing is shared with rljax.
"""

from collections.abc import Sequence


def advantages(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Return A_t = sum over l of (gamma lambda)^l delta_{t+l} for the tokens of one rollout (arXiv:1506.02438, eq. 16)."""
    n = len(rewards)
    delta = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** later * delta[t + later] for later in range(n - t)) for t in range(n)]


def rewards_of(turns: Sequence[tuple[float | None, int]], whole: float, costs: Sequence[float]) -> list[float]:
    """Return the reward of each token from (reward, tokens) of each turn, the rollout's reward, and what tokens cost."""
    out = [-cost for cost in costs]
    place = -1
    for reward, tokens in turns:
        place += tokens
        out[place] += 0.0 if reward is None else reward
    out[place] += whole - sum(reward for reward, _ in turns if reward is not None)
    return out


def loss(value: float, old: float, target: float, clip: float | None) -> tuple[float, float]:
    """Return half the squared error, the larger one of the plain and the bounded value, and its slope by the value."""
    plain = (value - target) ** 2 / 2
    if clip is None:
        return plain, value - target
    near = min(max(value, old - clip), old + clip)
    bounded = (near - target) ** 2 / 2
    return (bounded, 0.0) if bounded > plain else (plain, value - target)


def turn_returns(rewards: Sequence[float | None], gamma: float) -> list[float | None]:
    """Return, per turn, the discounted sum of the rewards from it on; None where there is none."""
    out: list[float | None] = []
    for turn in range(len(rewards)):
        later = [gamma ** (at - turn) * r for at, r in enumerate(rewards) if at >= turn and r is not None]
        out.append(sum(later) if later else None)
    return out
