"""What a pool answers: the reply to one request, how it is checked, and the score of an episode.

Owns the closed set of outcomes and the check of what an environment returned. Refuses to own processes (`pool.py`).
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rljax.records import Observation, Score, StepResult

Outcome = Literal["ok", "error", "timeout"]
"""How a request ended; `error` and `timeout` also end the episode."""

MAX_REWARD = 1e9
"""Largest absolute value of a reward or component; the square of more overflows float32 sums in group statistics."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of one request.

    Example:
        Reply(episode=("arithmetic/train/17", 3), kind="step", outcome="ok", value=StepResult((), 1.0, True), detail="")
    """

    episode: Hashable
    """The episode's name, as given to `reset`."""
    kind: Literal["reset", "step"]
    """What was asked."""
    outcome: Outcome
    """`ok`; `error` when the environment raised, answered nonsense or died; `timeout` when it was killed past its deadline."""
    value: Observation | StepResult | None
    """What `reset` (Observation) or `step` (StepResult) returned; None unless `ok`."""
    detail: str
    """Cause of an error or timeout, for people; empty when `ok`."""


def score_from(steps: Sequence[Reply]) -> Score:
    """Return the verdict on an episode from the replies to its steps: the sum of their rewards and of each component.

    A step that failed makes the whole episode an `error` or `timeout`, and so does an episode without any reward.
    """
    for reply in steps:
        if reply.outcome != "ok":
            return Score(status=reply.outcome, value=None, detail=reply.detail)
    results = [reply.value for reply in steps if isinstance(reply.value, StepResult)]
    rewards = [result.reward for result in results if result.reward is not None]
    if not rewards:
        return Score(status="error", value=None, detail="no step of the episode returned a reward")
    components: dict[str, float] = {}
    for result in results:
        for name, value in result.components.items():
            components[name] = components.get(name, 0.0) + value
    return Score(status="score", value=math.fsum(rewards), components=components)


def turn_rewards(steps: Sequence[Reply], turns: int) -> tuple[float | None, ...]:
    """Return the reward of each of the model's messages; None where the environment gave none or did not answer."""
    rewards = [reply.value.reward for reply in steps if isinstance(reply.value, StepResult)]
    assert len(rewards) <= turns, "an environment answers each message once"
    return (*rewards, *[None] * (turns - len(rewards)))


def record(kind: str, value: Any) -> Observation | StepResult:
    """Build the record from a worker's JSON; raise ValueError with what is wrong, to follow "returned"."""
    body = value.get("observation" if kind == "reset" else "step") if isinstance(value, dict) else None
    if not isinstance(body, dict):
        raise ValueError(f"no {'Observation' if kind == 'reset' else 'StepResult'}")
    messages = body["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise ValueError("messages that are not a sequence of mappings with a 'role'")
    if kind == "reset":
        tools = body["tools"]
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("tools that are not a sequence of mappings")
        return Observation(tuple(messages), tuple(tools))
    reward, done, components = body["reward"], body["done"], body["components"]
    if not isinstance(done, bool):
        raise ValueError(f"done = {done!r}, which is not a bool")
    if not isinstance(components, dict):
        raise ValueError("components that are not a mapping")
    return StepResult(
        messages=tuple(messages),
        reward=None if reward is None else _finite("reward", reward),
        done=done,
        components={name: _finite(f"component {name!r}", part) for name, part in components.items()},
    )


def _finite(name: str, value: Any) -> float:
    # Written so that NaN fails too, and before float(), which raises for huge integers.
    if not isinstance(value, (int, float)) or not abs(value) <= MAX_REWARD:
        raise ValueError(f"{name} = {str(value)[:100]!s}, which is not a finite number of at most {MAX_REWARD:g}")
    return float(value)
