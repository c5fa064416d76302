"""The records that travel between the parts of rljax.

Owns the plain data that crosses package boundaries: tasks, observations, scores, rollouts, groups.
Refuses to own behaviour (sampling, scoring, packing) and device arrays; nothing here imports jax, so
environment workers can use these records without paying for it.

    Task -> (env.reset) Observation -> (sampler) Completion -> (env.step) StepResult -> Rollout -> Group
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np

Message = Mapping[str, Any]
"""One chat message as chat templates take it: `role`, `content`, and optionally `tool_calls`."""

FinishReason = Literal["stop", "length"]
"""Why sampling ended: an end token was drawn (`stop`) or the token budget was spent (`length`)."""

ScoreStatus = Literal["score", "error", "timeout"]
"""Whether a rollout was judged. Only `score` enters group statistics: a failure is never a reward of 0."""


class Provenance(IntEnum):
    """Who wrote a token. The loss mask is `provenance == MODEL` and nothing else."""

    PROMPT = 0
    MODEL = 1
    ENVIRONMENT = 2


@dataclass(frozen=True, slots=True)
class Task:
    """One problem: what the model is asked and what the verifier needs.

    Example:
        Task(id="arithmetic/train/17", messages=({"role": "user", "content": "What is 3 + 4?"},), answer="7")
    """

    id: str
    """Unique name; keys the random draws, so the same id is the same problem in every run."""
    messages: tuple[Message, ...]
    """The conversation that opens the problem, as chat messages."""
    answer: Any = None
    """What the environment needs to judge; never shown to the model."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Anything else the environment wants back (difficulty, source file and line)."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows at the start of an episode.

    Example:
        Observation(messages=({"role": "user", "content": "What is 3 + 4?"},))
    """

    messages: tuple[Message, ...]
    """Messages the model sees first."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools on offer, handed to the chat template."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to one model message.

    Example:
        StepResult(messages=(), reward=1.0, done=True, components={"answer": 1.0})
    """

    messages: tuple[Message, ...]
    """Messages to append before the next turn; empty when `done`."""
    reward: float | None
    """Reward of this turn, or None when this turn is not judged."""
    done: bool
    """Whether the episode is over."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward before weighting, for the logs."""


@dataclass(frozen=True, slots=True)
class Score:
    """The verdict on one rollout.

    Example:
        Score(status="score", value=1.0, components={"answer": 1.0})
    """

    status: ScoreStatus
    """`score` when judged; `error` or `timeout` when the judge failed."""
    value: float | None
    """The reward; a finite float exactly when `status == "score"`."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, before weighting."""
    detail: str = ""
    """Cause of an error or timeout, for people."""

    def __post_init__(self) -> None:
        judged = self.value is not None and bool(np.isfinite(self.value))
        if judged != (self.status == "score"):
            raise ValueError(
                f"a Score needs a finite value exactly when its status is 'score'; got {self.status}, {self.value}"
            )


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled model message, as tokens.

    Example:
        Completion(tokens=np.array([28, 39, 2]), logp=np.array([-0.1, -0.4, -0.2]), version=3, finish_reason="stop")
    """

    tokens: np.ndarray
    """Sampled token ids, int32 [n]; includes the end token when one was drawn."""
    logp: np.ndarray
    """Log-probability of each token under the distribution it was drawn from, float32 [n], nats."""
    version: int
    """Weight version that produced the tokens."""
    finish_reason: FinishReason
    """Why it ended."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt at a Task: a flat token sequence with, per token, who wrote it.

    All per-token arrays have the same length n. `logp_behavior` is 0 where the model did not write the token.

    Example:
        Rollout(task_id="t", attempt=0, tokens=np.array([1, 5, 6, 2]), provenance=np.array([0, 0, 1, 1], np.int8),
                logp_behavior=np.array([0, 0, -0.5, -0.1], np.float32), versions=np.array([-1, -1, 3, 3], np.int32),
                finish_reason="stop", score=Score("score", 1.0), turns=1, text="7")
    """

    task_id: str
    """The Task this is an attempt at."""
    attempt: int
    """Which attempt, 0 .. num_generations - 1; with the task id and position it keys every draw."""
    tokens: np.ndarray
    """Token ids, int32 [n]: prompt, model and environment tokens in order, never re-encoded from text."""
    provenance: np.ndarray
    """`Provenance` of each token, int8 [n]."""
    logp_behavior: np.ndarray
    """Log-probability under the sampling distribution, float32 [n], nats."""
    versions: np.ndarray
    """Weight version of each token, int32 [n]; -1 where the model did not write it."""
    finish_reason: FinishReason
    """Why the last model turn ended."""
    score: Score
    """The environment's verdict."""
    turns: int
    """Number of model messages."""
    text: str
    """What the model wrote, for people; derived from the tokens, never encoded again."""
    turn_rewards: tuple[float | None, ...] = ()
    """Reward of each model message, None where it was not judged; empty where only the rollout as a whole was."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if self.turn_rewards and len(self.turn_rewards) != self.turns:
            raise ValueError(f"Rollout.turn_rewards has {len(self.turn_rewards)} entries for {self.turns} turns")
        for name in ("provenance", "logp_behavior", "versions"):
            if len(getattr(self, name)) != n:
                raise ValueError(f"Rollout.{name} has {len(getattr(self, name))} entries for {n} tokens")

    @property
    def mask(self) -> np.ndarray:
        """Which tokens the model wrote, bool [n]."""
        return self.provenance == Provenance.MODEL

    @property
    def completion_length(self) -> int:
        """Number of tokens the model wrote."""
        return int(self.mask.sum())

    @property
    def version(self) -> int:
        """Oldest weight version among the model's tokens; -1 when it wrote none."""
        versions = self.versions[self.mask]
        return int(versions.min()) if len(versions) else -1


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one Task; advantages are relative to it.

    Example:
        Group(task=task, rollouts=(rollout_0, rollout_1))
    """

    task: Task
    """The problem they all attempt."""
    rollouts: tuple[Rollout, ...]
    """Its attempts, ordered by `attempt`."""


@dataclass(frozen=True, slots=True)
class RunMeta:
    """The host-side half of a checkpoint: everything a resumed run needs that is not a device array.

    Example:
        RunMeta(step=20, version=20, seed=0, prompt_position=160, config_hash="9f2c...", dataset_fingerprint="a41b...")
    """

    step: int
    """Optimizer updates done."""
    version: int
    """Weight version the next rollouts will be sampled from."""
    seed: int
    """Root of every random draw."""
    prompt_position: int
    """Tasks consumed from the prompt stream, over all processes and epochs."""
    config_hash: str
    """Hash of the configuration fields that decide the result."""
    dataset_fingerprint: str
    """Content hash of the tasks, in order."""
