"""Collecting rollouts: tasks become groups, while the device samples and CPU workers judge at the same time.

Owns the life of an episode: open, sample, act, judge, repeat; retries of failed environments; and the one flat token
sequence a rollout is. Refuses to own how tokens are drawn (sampler) and how worlds work (envs).

    driver            engine (device)          pool (CPU workers)
      | reset ------------------------------------> |
      | <------------------------------ observation |
      | submit -----------> | decode chunk          |
      | <------- completion |                       |
      | step ---------------|---------------------> |     the next chunk decodes meanwhile
      | <-------------------|---------- StepResult  |     done, or another turn

Text goes to the environment; tokens stay. What the environment says is encoded once and appended, what the model wrote
is never encoded again.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from rljax.config import Config
from rljax.data.tokenizer import Tokenizer
from rljax.envs.pool import LocalPool
from rljax.envs.replies import Reply, score_from, turn_rewards
from rljax.records import Completion, Group, Observation, Provenance, Rollout, SamplingParams, StepResult, Task
from rljax.rollouts.sampling import train_params
from rljax.sampler.engine import Engine, Request, draw_key
from rljax.sampler.stops import text_before_stop
from rljax.telemetry.profile import Clock

_POOL_WAIT = 0.2  # seconds between two looks at `stop` while only environments work
_PATIENCE = 0.1  # of the time the last chunk took: how long free slots wait for environments to fill them
_FIRST_PATIENCE = 1.0  # seconds, before any chunk was timed


class Stopped(Exception):
    """Collection was given up because the run is asked to stop."""


class EnvironmentFailure(RuntimeError):
    """So many rollouts could not be scored that training on the rest would mislead."""


@dataclass(frozen=True, slots=True)
class Job:
    """One task to attempt.

    Example:
        Job(task=task, first_attempt=0)
    """

    task: Task
    """The problem."""
    first_attempt: int
    """Number of its first attempt: a task that comes again in a later epoch goes on counting, so its draws differ."""


@dataclass(slots=True)
class _Episode:
    """One rollout in progress."""

    task: Task
    attempt: int
    tries: int = 0
    tools: tuple = ()
    tokens: list[int] = field(default_factory=list)
    provenance: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    heard: list[StepResult] = field(default_factory=list)
    choices: list[np.ndarray] = field(default_factory=list)
    replayed: int = 0
    finish_reason: str = "length"
    closed: bool = False
    rollout: Rollout | None = None

    @property
    def name(self) -> tuple[str, int, int]:
        return self.task.id, self.attempt, self.tries

    @property
    def cache_key(self) -> tuple[str, int]:
        """A later try tells a fresh world the same messages, so it continues the same cache."""
        return self.task.id, self.attempt

    def append(self, tokens: Sequence[int], provenance: Provenance) -> None:
        """Append tokens that the model did not write."""
        self.tokens += map(int, tokens)
        self.provenance += [int(provenance)] * len(tokens)
        self.logp += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def append_completion(self, completion: Completion) -> None:
        self.tokens += completion.tokens.tolist()
        self.provenance += [int(Provenance.MODEL)] * len(completion.tokens)
        self.logp += completion.logp.tolist()
        self.versions += completion.versions.tolist()
        if completion.choices is not None:
            # What an earlier turn computed stays: its tokens were drawn under those experts.
            self.choices.append(completion.choices[sum(map(len, self.choices)) :])


class Collector:
    """Runs episodes on an engine and a pool."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        pool: LocalPool,
        tokenizer: Tokenizer,
        clock: Clock,
        stop: Callable[[], bool] = lambda: False,
    ):
        """Wire the parts together.

        Args:
            config: Limits, retries and the seed.
            engine: Samples completions.
            pool: Runs environments.
            tokenizer: Between messages and tokens.
            clock: Counts sampling and waiting.
            stop: Asked often; when it answers True, collection raises `Stopped`.
        """
        self._config, self._engine, self._pool, self._tokenizer = config, engine, pool, tokenizer
        self._clock, self._stop = clock, stop
        self._episodes: dict[tuple[str, int, int], _Episode] = {}
        self._purpose, self._sampling = "train", train_params(config)
        self._chunk_seconds: float | None = None

    def collect(self, jobs: Sequence[Job], num_generations: int, purpose: str, sampling: SamplingParams) -> list[Group]:
        """Attempt every task `num_generations` times and return the groups, in the order of the jobs.

        Args:
            jobs: Tasks and the numbers of their first attempts; no two equal.
            num_generations: Attempts per task.
            purpose: Separates the draws of training from those of evaluation.
            sampling: How the model's messages are drawn.

        Raises:
            Stopped: `stop` answered True.
            EnvironmentFailure: more than `env.max_failure_fraction` of the rollouts could not be scored.
        """
        self._purpose, self._sampling = purpose, sampling
        episodes = [[_Episode(job.task, job.first_attempt + index) for index in range(num_generations)] for job in jobs]
        try:
            for episode in (episode for group in episodes for episode in group):
                self._open(episode)
            self._run()
        except BaseException:
            self._engine.clear()
            for name in self._episodes:
                self._pool.close_episode(name)
            raise
        finally:
            self._episodes.clear()
        groups = [Group(job.task, tuple(map(_finished, group))) for job, group in zip(jobs, episodes, strict=True)]
        self._refuse_failure(groups)
        return groups

    def _run(self) -> None:
        """Drive engine and pool until every episode is over."""
        while self._episodes:
            if self._stop():
                raise Stopped
            if not self._engine.pending:
                with self._clock.bucket("env_wait"):
                    self._listen(_POOL_WAIT)
                continue
            with self._clock.bucket("env_wait"):
                self._fill_slots()
            with self._clock.bucket("sampling"):
                begin = time.perf_counter()
                self._engine.step()  # returns at once; the device decodes while the replies below are handled
                self._listen(0.0)
                for ticket, completion in self._engine.poll():
                    assert isinstance(ticket, tuple)
                    self._act(self._episodes[ticket], completion)
                self._chunk_seconds = time.perf_counter() - begin

    def _listen(self, wait: float) -> None:
        """Handle what environments have answered, waiting so long (seconds) for a first answer."""
        for reply in self._pool.poll(wait):
            self._hear(reply)

    def _fill_slots(self) -> None:
        """Wait a little for environments that work while slots are free: a chunk costs the same with few rollouts."""
        patience = _FIRST_PATIENCE if self._chunk_seconds is None else _PATIENCE * self._chunk_seconds
        deadline = time.perf_counter() + patience
        while self._engine.free and self._pool.pending and (left := deadline - time.perf_counter()) > 0:
            self._listen(min(left, _POOL_WAIT))

    def _open(self, episode: _Episode) -> None:
        self._episodes[episode.name] = episode
        seed = draw_key(self._config.run.seed, f"{self._purpose}/env", episode.task.id, episode.attempt)[0]
        self._pool.reset(episode.name, episode.task, seed)

    def _hear(self, reply: Reply) -> None:
        """Handle one answer of an environment."""
        name = reply.episode
        assert isinstance(name, tuple)
        episode = self._episodes[name]
        if reply.outcome != "ok" and episode.tries < self._config.env.max_retries:
            # The model's messages are kept and told to a fresh world again: a retry never samples anew.
            self._pool.close_episode(name)
            del self._episodes[name]
            episode.tries, episode.replayed = episode.tries + 1, 0
            episode.replies.clear()
            self._open(episode)
        elif reply.outcome != "ok":
            episode.replies.append(reply)
            self._end(episode)
        else:
            try:
                over = self._take_in(episode, reply)
            except ValueError as error:  # what this environment said cannot be used; the other episodes go on
                episode.replies.append(replace(reply, outcome="error", value=None, detail=f"after the {reply.kind}: {error}"))
                over = True
            if over:
                self._end(episode)
            else:
                self._continue(episode)

    def _take_in(self, episode: _Episode, reply: Reply) -> bool:
        """Append what the environment said and tell whether the episode is over.

        Raises:
            ValueError: it cannot be put into tokens, or it contradicts what the environment said at an earlier try.
        """
        if isinstance(reply.value, Observation):
            if not episode.tokens:
                episode.tools = tuple(reply.value.tools)
                prompt = self._tokenizer.apply_chat_template(reply.value.messages, tools=episode.tools)
                episode.append(prompt, Provenance.PROMPT)
            return False
        assert isinstance(reply.value, StepResult)
        episode.replies.append(reply)
        episode.replayed += 1
        result, again = reply.value, episode.replayed <= len(episode.heard)
        if again and (result.messages, result.done) != (episode.heard[episode.replayed - 1].messages, False):
            raise ValueError("the environment answered the same messages otherwise when the episode was tried again")
        if not result.done and not again:
            ids = self._tokenizer.reply_ids(result.messages, ended=episode.closed, tools=episode.tools)
            episode.append(ids, Provenance.ENVIRONMENT)
            episode.heard.append(result)
        return result.done

    def _continue(self, episode: _Episode) -> None:
        """Tell the environment a message it has not heard, or ask the model for the next one."""
        if episode.replayed < len(episode.texts):
            self._pool.step(episode.name, episode.texts[episode.replayed])
            return
        sampler = self._config.sampler
        if len(episode.tokens) > sampler.max_prompt_length:
            if score_from(episode.replies).status != "score":
                what = f"the conversation of {len(episode.texts)} turns" if episode.texts else "the prompt"
                detail = f"{what} has {len(episode.tokens)} tokens; sampler.max_prompt_length is {sampler.max_prompt_length}"
                episode.replies.append(Reply(episode.name, "step" if episode.texts else "reset", "error", None, detail))
            episode.finish_reason = "length"
            self._end(episode)
            return
        key = draw_key(self._config.run.seed, self._purpose, episode.task.id, episode.attempt)
        self._engine.submit([Request(episode.name, tuple(episode.tokens), key, self._sampling, episode.cache_key)])

    def _act(self, episode: _Episode, completion: Completion) -> None:
        """Take in one message of the model and tell the environment."""
        episode.append_completion(completion)
        episode.finish_reason = completion.finish_reason
        # A stop string ends a message without the token that closes the turn.
        episode.closed = isinstance(completion.stop, int)
        decode = partial(self._tokenizer.decode, skip_special=True)
        episode.texts.append(text_before_stop(completion.tokens.tolist(), completion.stop, decode))
        self._continue(episode)

    def _end(self, episode: _Episode) -> None:
        del self._episodes[episode.name]
        self._pool.close_episode(episode.name)
        self._engine.release(episode.cache_key)
        episode.rollout = Rollout(
            task_id=episode.task.id,
            attempt=episode.attempt,
            tokens=np.array(episode.tokens, np.int32),
            provenance=np.array(episode.provenance, np.int8),
            logp_behavior=np.array(episode.logp, np.float32),
            versions=np.array(episode.versions, np.int32),
            finish_reason="stop" if episode.finish_reason == "stop" else "length",
            score=score_from(episode.replies),
            turns=len(episode.texts),
            text="\n".join(episode.texts),
            choices=np.concatenate(episode.choices) if episode.choices else None,
            turn_rewards=turn_rewards(episode.replies, len(episode.texts)),
        )

    def _refuse_failure(self, groups: Sequence[Group]) -> None:
        scores = [rollout.score for group in groups for rollout in group.rollouts]
        failed = [score for score in scores if score.status != "score"]
        limit = self._config.env.max_failure_fraction
        if len(failed) > limit * len(scores):
            cause, times = Counter(f"{score.status}: {score.detail}" for score in failed).most_common(1)[0]
            raise EnvironmentFailure(
                f"{len(failed)} of {len(scores)} rollouts could not be scored, more than env.max_failure_fraction = {limit} "
                f"allows; {times} times the cause was {cause}"
            )


def _finished(episode: _Episode) -> Rollout:
    assert episode.rollout is not None
    return episode.rollout
