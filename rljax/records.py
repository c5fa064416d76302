"""The records that travel between the parts of rljax.

Owns the plain data that crosses package boundaries: tasks, observations, scores, how to sample, rollouts, groups.
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

FinishReason = Literal["stop", "length", "abort"]
"""Why sampling ended: an end token or a stop string came (`stop`), the token budget was spent (`length`), or a completion was
taken back unfinished (`abort`), as no rollout ends."""

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
class SamplingParams:
    """How one completion is drawn, and what is reported of it.

    The rule, in this order: `logit_bias` is added and tokens that are not allowed are taken out; the logits are divided by
    `temperature`; `top_k`, then `top_p`, then `min_p` leave likely tokens only; one uniform number draws from what is left,
    renormalised. Formulas and what happens at ties: docs/math.md, "Drawing a token". The random key is no part of this
    record: it belongs to the request.

    Example:
        SamplingParams(max_tokens=64, temperature=0.7, top_p=0.9, stop=("\\n\\n",))
    """

    max_tokens: int
    """Longest completion (tokens)."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_k: int = 0
    """Keep so many most likely tokens, and those as likely as the last of them; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probability comes to this, and those as likely as the last; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the most likely one; 0 keeps all."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logit of a token id; -inf forbids the token."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only token ids that may be drawn; None for all."""
    min_tokens: int = 0
    """Tokens before the first that may end the completion: end tokens are not drawn among them, stop strings not seen."""
    stop: tuple[str, ...] = ()
    """Strings that end the completion; see `Completion.stop` for what is kept."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end it, besides the engine's end tokens."""
    ignore_eos: bool = False
    """Whether the engine's end tokens are tokens like any other."""
    logprobs: int | None = None
    """Report `Completion.logp_raw` and so many most likely tokens at each position; None reports neither."""
    prompt_logprobs: bool = False
    """Report `Completion.prompt_logp`."""

    def __post_init__(self) -> None:
        def check(right: bool, name: str, rule: str) -> None:
            if not right:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be {rule}")

        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(0 <= self.temperature < float("inf"), "temperature", "a finite number, at least 0")
        check(self.top_k >= -1, "top_k", "at least 1, or 0 (or -1) to keep all tokens")
        check(0 < self.top_p <= 1, "top_p", "above 0 and at most 1, which keeps all tokens")
        check(0 <= self.min_p <= 1, "min_p", "between 0, which keeps all tokens, and 1")
        finite_or_forbidden = all(bias < float("inf") for bias in self.logit_bias.values())  # nan compares as False
        check(finite_or_forbidden, "logit_bias", "finite numbers, or -inf for tokens that are never to be drawn")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"between 0 and max_tokens ({self.max_tokens})")
        check(all(self.stop), "stop", "strings that are not empty")
        check(self.logprobs is None or self.logprobs >= 0, "logprobs", "at least 0, or None for no report")

    @property
    def reshapes(self) -> bool:
        """Whether the distribution drawn from is another than softmax(logits / temperature) at some token."""
        cuts = self.top_k > 0 or self.top_p < 1 or self.min_p > 0
        return cuts or bool(self.logit_bias) or self.allowed_token_ids is not None or self.min_tokens > 0


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens at each position of a completion, most likely first, whether they could be drawn or not.

    Example:
        TopTokens(ids=np.array([[28, 5], [39, 2]]), logp=np.array([[-0.1, -2.4], [-0.4, -1.5]]))
    """

    ids: np.ndarray
    """Token ids, int32 [n, k]."""
    logp: np.ndarray
    """Their log-probabilities under the model itself, as `Completion.logp_raw`, float32 [n, k], nats."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled model message, as tokens.

    Example:
        Completion(tokens=np.array([28, 39, 2]), logp=np.array([-0.1, -0.4, -0.2]), versions=np.array([3, 3, 4], np.int32),
                   finish_reason="stop", stop=2)
    """

    tokens: np.ndarray
    """Sampled token ids, int32 [n]; includes the end token when one was drawn."""
    logp: np.ndarray
    """Log-probability of each token under the distribution it was drawn from, tempered, biased, truncated and
    renormalised, float32 [n], nats. This is `logp_behavior` of a rollout."""
    versions: np.ndarray
    """Weight version that drew each token, int32 [n]."""
    finish_reason: FinishReason
    """Why it ended."""
    stop: str | int | None
    """What ended it: an end token's id or a stop string; None at the length limit.

    A stop string is found in the decoded text, across tokens. Tokens up to and including the one that completes it stay, with
    their log-probabilities, and there are none after it. The text, in contrast, ends before the stop string. A conversation
    goes on with the tokens, never with the text.
    """
    logp_raw: np.ndarray | None = None
    """Log-probability of each token under the model itself: temperature 1, nothing added or taken out, float32 [n], nats;
    None when it was not asked for."""
    top: TopTokens | None = None
    """The most likely tokens of each position; None when they were not asked for."""
    prompt_logp: np.ndarray | None = None
    """Log-probability of each prompt token given those before it, under the model itself; NaN for the first, which
    nothing comes before. float32 [prompt length], nats; None when it was not asked for."""
    choices: np.ndarray | None = None
    """Experts that the prompt's tokens and these went to, the last one excepted, which went nowhere: [prompt + n - 1, layers
    with experts, per token], uint8, or uint16 for more than 256 experts; None unless the sampler records them."""


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
    choices: np.ndarray | None = None
    """Experts that the first k tokens went to in the sampler, [k, layers with experts, per token], each from the turn that
    first computed it; behind are the last token the model wrote and what follows it. None unless they are recorded."""
    turn_rewards: tuple[float | None, ...] = ()
    """Reward of each model message, None where it was not judged; empty where only the rollout as a whole was."""

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if self.choices is not None and len(self.choices) > n:
            raise ValueError(f"Rollout.choices has {len(self.choices)} entries for {n} tokens")
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
