"""Episodes become rollouts: who wrote which token, what happens when a world fails, and that nothing is sampled twice."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.convert import Checkpoint, read_checkpoint
from rljax.data.packing import message_lengths
from rljax.data.tokenizer import Tokenizer
from rljax.envs.base import task_maker
from rljax.envs.pool import LocalPool
from rljax.learner.state import learner_params
from rljax.mesh import build_mesh
from rljax.models import decoder
from rljax.pytree import Params
from rljax.records import Completion, Group, Provenance, Rollout, SamplingParams, Task
from rljax.rollouts.collector import Collector, EnvironmentFailure, Job, Stopped
from rljax.rollouts.stack import build_engine
from rljax.rollouts.weights import publisher
from rljax.sampler.engine import Engine, Request
from rljax.telemetry.profile import Clock
from tests.tiny_run import config, tiny_checkpoint

GENERATIONS = 4
VERSION = 7
EOT = 2
FORWARD_GAP = 1e-5  # nats; the cached decode and the whole forward pass are different programs

Say = Callable[[Request], Sequence[int]]


class ScriptedEngine(Engine):
    """Says what it is told to, so that a test knows every token; remembers what it was asked, and how much at a time."""

    def __init__(self, say: Say, slots: int = 0, stop: str | None = None) -> None:
        """Take the script and the stop string that ends what is said; without slots, nothing waits for them to fill."""
        self._say, self.slots, self._stop = say, slots, stop
        self.asked: list[Request] = []
        self.chunks: list[int] = []
        self.released: list[Any] = []
        self._open: list[Request] = []

    @property
    def pending(self) -> int:
        """Number of requests that have not been polled."""
        return len(self._open)

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests."""
        self.asked += requests
        self._open += requests

    def step(self) -> None:
        """Note how many run; everything is done in `poll`."""
        self.chunks.append(len(self._open))

    def poll(self) -> list[tuple[Any, Completion]]:
        """Answer every request; the log-probability of a token is minus a hundredth of its place."""
        done, self._open = self._open, []
        return [(request.ticket, _completion(self._say(request), self._stop)) for request in done]

    def release(self, cache_key: Any) -> None:
        """Note whose cache is no longer needed."""
        self.released.append(cache_key)

    def clear(self) -> None:
        """Forget everything."""
        self._open = []


class RecordingEngine(ScriptedEngine):
    """Says that every token went to the expert whose number is the length of the prompt it was computed for."""

    def poll(self) -> list[tuple[Any, Completion]]:
        """Answer every request."""
        prompts = {request.ticket: len(request.prompt) for request in self._open}
        return [
            (ticket, replace(done, choices=np.full((prompts[ticket] + len(done.tokens) - 1, 2, 1), prompts[ticket], np.uint8)))
            for ticket, done in super().poll()
        ]


def _completion(tokens: Sequence[int], stop: str | None) -> Completion:
    logp = -0.01 * (1 + np.arange(len(tokens), dtype=np.float32))
    ended = tokens[-1] == EOT or stop is not None
    found = EOT if tokens[-1] == EOT else stop
    return Completion(np.array(tokens, np.int32), logp, np.full(len(tokens), VERSION), "stop" if ended else "length", found)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(tiny_checkpoint())


@contextmanager
def collecting(
    tokenizer: Tokenizer,
    tmp_path: Path,
    engine: Engine,
    world: str,
    options: dict[str, Any] | None = None,
    stop: Callable[[], bool] = lambda: False,
    *more: str,
) -> Iterator[Collector]:
    settings = config(tmp_path / "run", "sampler.max_prompt_length=96", "env.step_timeout=0.5", "env.reset_timeout=5.0", *more)
    env = settings.env
    with LocalPool(
        f"tests.worlds:{world}",
        options or {},
        workers=env.workers,
        reset_timeout=env.reset_timeout,
        step_timeout=env.step_timeout,
    ) as pool:
        yield Collector(settings, engine, pool, tokenizer, Clock(), stop)


def tasks(count: int) -> list[Task]:
    make = task_maker("tests.worlds:Letters", {})
    return [make(index, "train") for index in range(count)]


def sampling(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=8, temperature=temperature)


def collect(collector: Collector, count: int = 2, generations: int = GENERATIONS) -> list[Group]:
    return collector.collect([Job(task, 0) for task in tasks(count)], generations, "train", sampling(1.0))


def rollouts(groups: Sequence[Group]) -> list[Rollout]:
    return [rollout for group in groups for rollout in group.rollouts]


def letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """Spell a text with one token per letter, which the encoder itself would not do for a word it knows."""
    return [token for character in text for token in tokenizer.encode(character)]


def test_free_slots_wait_for_environments_that_are_about_to_fill_them(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljax.rollouts.collector._FIRST_PATIENCE", 60.0)
    engine = ScriptedEngine(lambda request: letters(tokenizer, "abc"), slots=2 * GENERATIONS)
    with collecting(tokenizer, tmp_path, engine, "Letters") as collector:
        collect(collector, 2)
    assert engine.chunks == [2 * GENERATIONS]


def test_groups_come_in_the_order_of_the_jobs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "abc"))
    with collecting(tokenizer, tmp_path, engine, "Letters") as collector:
        jobs = [Job(task, first) for task, first in zip(tasks(3), (0, 4, 8), strict=True)]
        groups = collector.collect(jobs, GENERATIONS, "train", sampling(0.5))
    assert [group.task.id for group in groups] == ["train/0", "train/1", "train/2"]
    assert [[rollout.attempt for rollout in group.rollouts] for group in groups] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
    ]
    for group in groups:
        prompt = tokenizer.apply_chat_template(group.task.messages)
        for rollout in group.rollouts:
            assert rollout.tokens.tolist() == [*prompt, *letters(tokenizer, "abc")]
            assert rollout.provenance.tolist() == [Provenance.PROMPT] * len(prompt) + [Provenance.MODEL] * 3
            assert rollout.versions.tolist() == [-1] * len(prompt) + [VERSION] * 3
            assert rollout.logp_behavior.tolist() == pytest.approx([0.0] * len(prompt) + [-0.01, -0.02, -0.03])
            assert (rollout.turns, rollout.text, rollout.finish_reason) == (1, "abc", "length")
            assert (rollout.score.value, rollout.score.components) == (1.0, {"letters": 1.0, "characters": 3.0})
    assert {request.params.temperature for request in engine.asked} == {0.5}
    assert len({request.key for request in engine.asked}) == 12, "every rollout has its own draws"


def test_a_task_that_comes_twice_has_other_draws_in_every_attempt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "a"))
    (task,) = tasks(1)
    with collecting(tokenizer, tmp_path, engine, "Letters") as collector:
        groups = collector.collect([Job(task, 0), Job(task, GENERATIONS)], GENERATIONS, "train", sampling(1.0))
        assert [[rollout.attempt for rollout in group.rollouts] for group in groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        train = {request.key for request in engine.asked}
        assert len(train) == 2 * GENERATIONS
        collector.collect([Job(task, 0)], GENERATIONS, "eval", sampling(0.0))
    assert not train & {request.key for request in engine.asked[2 * GENERATIONS :]}, "evaluation takes no draw from training"


@pytest.mark.parametrize("ended", [True, False])
def test_tokens_of_a_conversation_stay_what_they_were(tokenizer: Tokenizer, tmp_path: Path, ended: bool) -> None:
    said = letters(tokenizer, "What") + [EOT] * ended
    assert tokenizer.encode("What") != letters(tokenizer, "What"), "the encoder would choose other tokens for this text"
    engine = ScriptedEngine(lambda request: said)
    with collecting(tokenizer, tmp_path, engine, "Dialogue") as collector:
        (group,) = collect(collector, 1, 2)
    reply = [{"role": "user", "content": "You said 'What'. Again?"}]
    prompt = tokenizer.apply_chat_template(group.task.messages)
    between = tokenizer.reply_ids(reply, ended=ended)
    # The turn is closed exactly once: by the model, or, when it was cut, by tokens that nobody trains on.
    assert (said + between).count(EOT) == 2, "its own end and that of the reply"
    for rollout in group.rollouts:
        assert rollout.tokens.tolist() == [*prompt, *said, *between, *said]
        expected = [Provenance.PROMPT] * len(prompt) + [Provenance.MODEL] * len(said)
        expected += [Provenance.ENVIRONMENT] * len(between) + [Provenance.MODEL] * len(said)
        assert rollout.provenance.tolist() == expected
        own = (-0.01 * (1 + np.arange(len(said)))).tolist()
        logps = [0.0] * len(prompt) + own + [0.0] * len(between) + own
        assert rollout.logp_behavior.tolist() == pytest.approx(logps)
        assert rollout.versions.tolist() == [VERSION if who == Provenance.MODEL else -1 for who in expected]
        assert (rollout.turns, rollout.text) == (2, "What\nWhat")
        assert rollout.turn_rewards == (None, rollout.score.value)
    assert {request.cache_key for request in engine.asked} == {("train/0", 0), ("train/0", 1)}
    assert sorted(engine.released) == [("train/0", 0), ("train/0", 1)], "each once, when its episode is over"
    second = engine.asked[-1]
    assert list(second.prompt) == [*prompt, *said, *between]
    keys = Counter(request.key for request in engine.asked)
    assert sorted(keys.values()) == [2, 2], "one rollout, one key: the positions of its draws go on"


def test_a_stop_string_is_cut_from_the_text_and_its_tokens_go_on(tokenizer: Tokenizer, tmp_path: Path) -> None:
    said = [*letters(tokenizer, "a"), *letters(tokenizer, "..")]
    engine = ScriptedEngine(lambda request: said, stop="..")
    with collecting(tokenizer, tmp_path, engine, "Dialogue") as collector:
        (group,) = collect(collector, 1, 1)
    prompt = tokenizer.apply_chat_template(group.task.messages)
    between = tokenizer.reply_ids([{"role": "user", "content": "You said 'a'. Again?"}], ended=False)
    assert between[0] == EOT, "the model did not close its turn"
    (rollout,) = group.rollouts
    assert rollout.tokens.tolist() == [*prompt, *said, *between, *said]
    assert rollout.tokens[rollout.mask].tolist() == said * 2
    assert (rollout.logp_behavior != 0).tolist() == rollout.mask.tolist()
    assert (rollout.finish_reason, rollout.text) == ("stop", "a\na")


def test_long_conversations_keep_their_books(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    written: dict[Any, list[list[int]]] = {}

    def say(request: Request) -> list[int]:
        tokens = rng.integers(3, 320, rng.integers(1, 5)).tolist() + [EOT] * int(rng.integers(0, 2))
        written.setdefault(request.ticket, []).append(tokens)
        return tokens

    options = {"turns": 4, "answer": "Go.", "judged": True}
    with collecting(tokenizer, tmp_path, ScriptedEngine(say), "Dialogue", options) as collector:
        groups = collect(collector, 4, 8)
    for rollout in rollouts(groups):
        n = len(rollout.tokens)
        assert len(rollout.provenance) == len(rollout.logp_behavior) == len(rollout.versions) == n
        model = [token for turn in written[rollout.task_id, rollout.attempt, 0] for token in turn]
        assert rollout.tokens[rollout.mask].tolist() == model
        assert (rollout.logp_behavior != 0).tolist() == rollout.mask.tolist()
        assert rollout.turns in range(1, 5)
        assert len(rollout.turn_rewards) == rollout.turns == len(message_lengths(rollout))
        judged = [reward for reward in rollout.turn_rewards if reward is not None]
        assert len(judged) == rollout.turns
        assert rollout.score.value == pytest.approx(sum(judged))
    assert any(rollout.turns == 4 for rollout in rollouts(groups))


@pytest.mark.parametrize("world", ["Dialogue", "Forgetful"])
def test_experts_are_those_of_the_turn_that_first_computed_a_token(tokenizer: Tokenizer, tmp_path: Path, world: str) -> None:
    engine = RecordingEngine(lambda request: letters(tokenizer, "abc"))
    options = {"turns": 3, "answer": "Go."} if world == "Dialogue" else {"trace": str(tmp_path)}
    with collecting(tokenizer, tmp_path, engine, world, options) as collector:
        groups = collect(collector)
    for rollout in rollouts(groups):
        prompts = [len(r.prompt) for r in engine.asked if r.ticket[:2] == (rollout.task_id, rollout.attempt)]  # type: ignore[index]
        assert len(prompts) == rollout.turns >= 2
        # A turn feeds its prompt and what it draws, but the last: that one the next turn computes.
        fed = np.diff([0, *(prompt + 3 - 1 for prompt in prompts)])
        assert rollout.choices is not None
        assert rollout.choices.shape == (len(rollout.tokens) - 1, 2, 1)
        assert rollout.choices[:, 1, 0].tolist() == np.repeat(prompts, fed).tolist()


def test_what_fails_once_is_tried_again_and_not_sampled_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "ab"))
    trace = tmp_path / "trace"
    trace.mkdir()
    with collecting(tokenizer, tmp_path, engine, "Troubled", {"tries": 1, "trace": str(trace)}) as collector:
        groups = collect(collector)
    assert [rollout.score.value for rollout in rollouts(groups)] == [1.0] * 8
    assert len(engine.asked) == 8
    assert [file.read_text() for file in trace.iterdir()] == ["'ab'\n'ab'\n"] * 8


def test_a_world_that_fails_before_the_first_token_is_opened_again(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "ab"))
    trace = tmp_path / "trace"
    trace.mkdir()
    options = {"tries": 1, "trace": str(trace), "at": "reset"}
    with collecting(tokenizer, tmp_path, engine, "Troubled", options) as collector:
        groups = collect(collector)
    assert [rollout.score.status for rollout in rollouts(groups)] == ["score"] * 8
    assert len(engine.asked) == 8


@pytest.mark.parametrize("otherwise", [False, True])
def test_a_conversation_is_told_again_to_a_fresh_world(tokenizer: Tokenizer, tmp_path: Path, otherwise: bool) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "ab"))
    options = {"trace": str(tmp_path), "otherwise": otherwise}
    more = ("env.max_failure_fraction=1.0",)
    with collecting(tokenizer, tmp_path, engine, "Forgetful", options, lambda: False, *more) as collector:
        groups = collect(collector)
    assert len(engine.asked) == 16, "two turns of eight rollouts"
    for rollout in rollouts(groups):
        assert rollout.turns == 2
        if otherwise:
            assert rollout.score.status == "error"
            assert "answered the same messages otherwise" in rollout.score.detail
        else:
            assert rollout.score.value == 1.0


FAILURES = {
    "error": ("error", "ConnectionError: the judge is out"),
    "hang": ("timeout", "s without a reply while running the step"),
    "exit": ("error", "exited with status 3"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_an_outcome_of_its_rollout_alone(tokenizer: Tokenizer, tmp_path: Path, kind: str) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "ab"))
    status, detail = FAILURES[kind]
    options = {"kind": kind, "share": 0.3}
    with collecting(tokenizer, tmp_path, engine, "Troubled", options, lambda: False, "env.max_retries=0") as collector:
        groups = collect(collector)
    failed = [rollout for rollout in rollouts(groups) if rollout.score.status != "score"]
    assert 1 <= len(failed) <= 4
    for rollout in failed:
        assert (rollout.score.status, rollout.score.value) == (status, None)
        assert detail in rollout.score.detail
        assert rollout.text == "ab", "what was sampled is kept for people"
    assert {rollout.score.value for rollout in rollouts(groups) if rollout not in failed} == {1.0}


def test_when_all_fail_the_cause_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "ab"))
    message = r"8 of 8 rollouts.*max_failure_fraction = 0.5.*ConnectionError: the judge is out"
    with collecting(tokenizer, tmp_path, engine, "Troubled") as collector, pytest.raises(EnvironmentFailure, match=message):
        collect(collector)


def test_half_may_fail(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "ab"))
    more = ("env.max_failure_fraction=1.0", "env.max_retries=0")
    with collecting(tokenizer, tmp_path, engine, "Troubled", {"at": "reset"}, lambda: False, *more) as collector:
        groups = collect(collector)
    for rollout in rollouts(groups):
        assert (rollout.turns, len(rollout.tokens), rollout.score.status) == (0, 0, "error")
        assert rollout.turn_rewards == ()
    assert engine.asked == []


def test_a_world_without_words_is_an_error_of_its_rollout(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "ab"))
    with collecting(tokenizer, tmp_path, engine, "Dialogue", {"silent": 0.3}) as collector:
        groups = collect(collector)
    failed = [rollout for rollout in rollouts(groups) if rollout.score.status == "error"]
    assert 1 <= len(failed) <= 4
    assert all("there is no reply to append" in rollout.score.detail for rollout in failed)
    assert all(rollout.turns == 2 for rollout in rollouts(groups) if rollout not in failed)


def test_a_prompt_that_is_too_long_is_an_error_with_its_length(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "ab"))
    (task,) = tasks(1)
    long = Task("long", ({"role": "user", "content": "z" * 200},))
    with collecting(tokenizer, tmp_path, engine, "Letters") as collector:
        groups = collector.collect([Job(task, 0), Job(long, 0)], GENERATIONS, "train", sampling(1.0))
    assert all(rollout.score.status == "score" for rollout in groups[0].rollouts)
    length = len(tokenizer.apply_chat_template(long.messages))
    for rollout in groups[1].rollouts:
        assert rollout.score.status == "error"
        assert f"the prompt has {length} tokens; sampler.max_prompt_length is 96" in rollout.score.detail


def test_a_conversation_that_grows_too_long_ends(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "ab"))
    options, more = {"turns": 9, "answer": "z" * 20}, ("env.max_failure_fraction=1.0",)
    with collecting(tokenizer, tmp_path, engine, "Dialogue", options, lambda: False, *more) as collector:
        groups = collect(collector, 1)
    for rollout in rollouts(groups):
        assert rollout.finish_reason == "length"
        assert 1 < rollout.turns < 9
        assert rollout.turn_rewards == (None,) * rollout.turns
        assert f"the conversation of {rollout.turns} turns has {len(rollout.tokens)} tokens" in rollout.score.detail


def test_collecting_is_given_up_on_request(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda request: letters(tokenizer, "ab"))
    asked = iter([False, True])
    with collecting(tokenizer, tmp_path, engine, "Slow", {"seconds": 0.2}, lambda: next(asked, False)) as collector:
        with pytest.raises(Stopped):
            collect(collector)
        assert engine.pending == 0
        groups = collect(collector)  # the same episodes can be opened again
    assert [rollout.score.value for rollout in rollouts(groups)] == [1.0] * 8


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return read_checkpoint(tiny_checkpoint())


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The real engine, on all devices there are."""
    settings = config(tmp_path_factory.mktemp("run"), "sampler.max_prompt_length=96")
    mesh = build_mesh(settings.mesh)
    made = build_engine(settings, checkpoint.arch, mesh, Tokenizer.load(tiny_checkpoint()))
    layout = learner_params(checkpoint.arch, mesh, "float32")
    params = jax.tree.map(lambda leaf, shape: jax.device_put(np.asarray(leaf), shape.sharding), checkpoint.params, layout)
    made.set_weights(publisher(checkpoint.arch, mesh, "float32")(params), VERSION)
    return made


def test_behaviour_is_what_the_model_says_of_every_sampled_token(
    tokenizer: Tokenizer, checkpoint: Checkpoint, engine: Engine, tmp_path: Path
) -> None:
    with collecting(tokenizer, tmp_path, engine, "Dialogue", {"answer": "Go on."}) as collector:
        groups = collect(collector)
    everyone = rollouts(groups)
    longest = max(len(rollout.tokens) for rollout in everyone)
    ids = np.array([np.pad(rollout.tokens, (0, longest - len(rollout.tokens))) for rollout in everyone])
    known = np.arange(longest) < np.array([len(rollout.tokens) for rollout in everyone])[:, None]
    logp = np.asarray(whole_forward(checkpoint, ids, known))
    for rollout, found in zip(everyone, logp, strict=True):
        (places,) = np.nonzero(rollout.mask)
        expected = found[places - 1, rollout.tokens[places]]
        np.testing.assert_allclose(rollout.logp_behavior[places], expected, atol=FORWARD_GAP, rtol=0)
        assert rollout.turns == 2
    assert engine.take_metrics()["cache/reused_fraction"] > 0.5
    assert all(ledger.prompts.used == ledger.own.used == 0 for ledger in engine._schedule.ledgers), "every cache is given back"


def whole_forward(checkpoint: Checkpoint, ids: np.ndarray, known: np.ndarray) -> jax.Array:
    """Return the log-probabilities [b, s, v] of every next token, without a cache."""

    @jax.jit
    def forward(params: Params) -> jax.Array:
        model = decoder.merge(checkpoint.arch, params)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        hidden, _ = model(jnp.array(ids), positions, jnp.array(known, jnp.int32), dtype=jnp.dtype("float32"))
        return jax.nn.log_softmax(decoder.logits(model, hidden))

    return forward(checkpoint.params)


def test_a_rollout_does_not_depend_on_its_company(tokenizer: Tokenizer, engine: Engine, tmp_path: Path) -> None:
    """Prompts of all padded lengths, in any order, with any number of workers and slots taken."""

    def ask(order: Sequence[int], workers: int) -> dict[tuple[str, int], tuple[list[int], bytes]]:
        with collecting(tokenizer, tmp_path, engine, "Letters", None, lambda: False, f"env.workers={workers}") as collector:
            groups = collector.collect([Job(tasks(8)[index], 0) for index in order], GENERATIONS, "train", sampling(1.0))
        return {(r.task_id, r.attempt): (r.tokens.tolist(), r.logp_behavior.tobytes()) for r in rollouts(groups)}

    together = ask(range(8), 2)
    prompts = {len(tokenizer.apply_chat_template(task.messages)) - 1 for task in tasks(8)}
    assert min(prompts) <= 16 < max(prompts), "prompts of more than one padded length"
    for order, workers in (([7, 6, 5, 4, 3, 2, 1, 0], 1), ([3], 1), ([4, 0], 2)):
        alone = ask(order, workers)
        assert alone == {name: together[name] for name in alone}
