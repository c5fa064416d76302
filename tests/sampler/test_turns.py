"""A conversation goes on from the cache of its earlier turns, draws what it would draw without one, and gives it back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rljax.models.arch import Arch
from rljax.records import Completion
from rljax.sampler.cache import BLOCK
from rljax.sampler.engine import Engine
from rljax.sampler.schedule import Request
from tests.reference.generate import generate
from tests.tiny_model import ARCH, bits, drain, engine_of, host_params, published, request, run

LOGP_ATOL = 2e-5
"""Float32 against float64 over two layers; log-probabilities are of the order 10 (nats)."""
STOP = 2
OPTIONS: dict[str, Any] = {
    "slots": 4,
    "max_prompt_length": 100,
    "max_completion_length": 66,
    "stop_ids": (STOP,),
    "reuse_cache": True,
}

PROMPT = tuple(range(20, 60))  # more than a block
REPLIES = ((70, 71, 72), tuple(range(80, 97)), (99,))  # the second one reaches into another block
LIMITS = (9, 14, 1, 12)


@pytest.fixture(scope="module")
def shared() -> Engine:
    return engine_of(**OPTIONS)


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.take_metrics()
    assert_nothing_is_held(shared)
    return shared


def assert_nothing_is_held(engine: Engine) -> None:
    assert engine.pending == 0
    assert [(ledger.prompts.used, ledger.own.used) for ledger in engine._schedule.ledgers] == [(0, 0)]


class Conversation:
    """A rollout of several turns, with replies that are known before."""

    def __init__(self, name: str, attempt: int, prompt: Sequence[int], reuse: bool = True):
        self.ticket, self.tokens, self.turns = (name, attempt), list(prompt), []
        self.reuse, self.asked = reuse, []

    def ask(self) -> Request:
        turn = len(self.turns)
        asked = request(self.ticket, self.tokens, LIMITS[turn], cache_key=self.ticket if self.reuse else None)
        self.asked.append(asked)
        return asked

    def hear(self, completion: Completion) -> bool:
        """Take in a turn and say whether there is another."""
        self.turns.append(completion)
        self.tokens += completion.tokens.tolist()
        if len(self.turns) == len(LIMITS):
            return False
        self.tokens += REPLIES[len(self.turns) - 1]
        return True


def talk(engine: Engine, conversations: Sequence[Conversation]) -> None:
    """Lead conversations to their end, each turn asked for as soon as the one before has come."""
    by_ticket = {conversation.ticket: conversation for conversation in conversations}
    engine.submit([conversation.ask() for conversation in conversations])
    while engine.pending:
        engine.step()
        for ticket, completion in engine.poll():
            if by_ticket[ticket].hear(completion):
                engine.submit([by_ticket[ticket].ask()])
            else:
                engine.release(ticket)


def some_conversations(reuse: bool = True, count: int = 4) -> list[Conversation]:
    return [Conversation(f"t{index // 2}", index % 2, PROMPT[: 40 - 3 * (index // 2)], reuse) for index in range(count)]


def outcome(conversations: Sequence[Conversation]) -> list[Any]:
    return [bits(dict(enumerate(conversation.turns))) for conversation in conversations]


def assert_equals_whole_forward(asked: Request, done: Completion, arch: Arch = ARCH) -> None:
    limits = {"max_tokens": asked.params.max_tokens, "temperature": 1.0, "stop_ids": (STOP,)}
    tokens, logp = generate(arch, host_params(), asked.prompt, asked.key, **limits)
    assert done.tokens.tolist() == tokens
    np.testing.assert_allclose(done.logp, logp, rtol=0, atol=LOGP_ATOL)


class Watched:
    """Notes the tokens of every prompt or piece that an engine computes."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.lengths: dict[str, list[int]] = {"_fill": [], "_extend": []}
        for name in self.lengths:
            monkeypatch.setattr(engine, name, self.noting(name, getattr(engine, name)))

    def noting(self, name: str, program: Any) -> Any:
        def noted(params: Any, state: Any, new: Any) -> Any:
            self.lengths[name] += [length for length in np.asarray(new.lengths).tolist() if length]
            return program(params, state, new)

        return noted


@pytest.fixture(scope="module")
def reused(shared: Engine) -> list[Conversation]:
    conversations = some_conversations()
    talk(shared, conversations)
    return conversations


def test_turns_on_a_kept_cache_are_those_of_the_whole_forward(reused: list[Conversation]) -> None:
    for conversation in reused[::3]:
        for asked, done in zip(conversation.asked, conversation.turns, strict=True):
            assert_equals_whole_forward(asked, done)


def test_a_later_turn_computes_only_what_is_new(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, (conversation,) = Watched(engine, monkeypatch), some_conversations(count=1)
    talk(engine, [conversation])
    # The last token of a turn was drawn and never fed, and the last one of a reply is fed by the decode loop.
    assert watched.lengths == {"_fill": [len(PROMPT) - 1], "_extend": [len(reply) for reply in REPLIES]}
    later = [len(asked.prompt) - 1 for asked in conversation.asked[1:]]
    assert engine.take_metrics()["cache/reused_fraction"] == pytest.approx(1 - sum(map(len, REPLIES)) / sum(later))
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("count", [1, 3])
def test_a_conversation_does_not_depend_on_its_company(engine: Engine, reused: list[Conversation], count: int) -> None:
    alone = some_conversations(count=4)[4 - count :]
    talk(engine, alone)
    assert outcome(alone) == outcome(reused[4 - count :])
    assert_nothing_is_held(engine)


def test_without_a_key_everything_is_computed_again_and_the_tokens_are_the_same(
    engine: Engine, reused: list[Conversation], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, conversations = Watched(engine, monkeypatch), some_conversations(reuse=False)
    talk(engine, conversations)
    assert not watched.lengths["_extend"]
    assert [one.tokens for one in conversations] == [one.tokens for one in reused]
    assert "cache/reused_fraction" not in engine.take_metrics()
    assert_nothing_is_held(engine)


def test_what_is_parked_gives_way_to_those_who_need_room(reused: list[Conversation]) -> None:
    small = engine_of(**OPTIONS, cache_tokens=8 * BLOCK)
    conversations = some_conversations()
    talk(small, conversations)
    assert [one.tokens for one in conversations] == [one.tokens for one in reused]
    for one, other in zip(conversations, reused, strict=True):
        for found, expected in zip(one.turns, other.turns, strict=True):
            np.testing.assert_allclose(found.logp, expected.logp, rtol=0, atol=LOGP_ATOL)
    counts = small.take_metrics()
    assert counts["cache/evicted"] > 0
    assert counts["cache/reused_fraction"] < 1
    assert counts["cache/occupancy_max"] == 1.0
    assert_nothing_is_held(small)


def test_on_many_devices_conversations_are_the_same(reused: list[Conversation]) -> None:
    engine = engine_of("tensor", **OPTIONS)  # one slot per data shard, to which its conversation comes back
    conversations = some_conversations(count=4) + some_conversations(count=6)[4:]
    talk(engine, conversations)
    assert [one.tokens for one in conversations[:4]] == [one.tokens for one in reused]
    counts = engine.take_metrics()
    assert counts["cache/reused_fraction"] > 0.8


def test_another_beginning_or_another_key_reuses_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = request(("t", 0), PROMPT, 8, cache_key="t")
    said = tuple(run(engine, [first])["t", 0].tokens.tolist())
    watched = Watched(engine, monkeypatch)
    other = request(("t", 1), (*PROMPT, *said, 5), 8, cache_key="other")
    assert_equals_whole_forward(other, run(engine, [other])["t", 1])
    changed = request(("t", 0), (*PROMPT[:-1], 9, *said, 5), 8, cache_key="t")
    assert_equals_whole_forward(changed, run(engine, [changed])["t", 0])
    assert watched.lengths == {"_fill": [len(PROMPT) + len(said)] * 2, "_extend": []}
    for key in ("t", "other"):
        engine.release(key)
    assert_nothing_is_held(engine)


def test_a_cache_that_ended_with_a_full_block_is_whole_when_others_decode_on(engine: Engine) -> None:
    # 64 own tokens fill two blocks four steps into a chunk of five, in which the other one goes on.
    asked = request(("full", 1), (40, 41), 64, cache_key="full")
    engine.submit([asked])
    engine.step()
    assert engine.poll() == []
    engine.submit([request(("late", 2), (50, 51), 64)])
    done = drain(engine)
    assert {len(one.tokens) for one in done.values()} == {64}, "other prompts, if one ended early"
    again = request(("full", 1), (*asked.prompt, *done["full", 1].tokens.tolist(), 30, 31), 8, cache_key="full")
    assert_equals_whole_forward(again, run(engine, [again])["full", 1])
    engine.release("full")
    assert_nothing_is_held(engine)


def aborted(engine: Engine, asked: Request, chunks: int) -> Completion:
    engine.submit([asked])
    for _ in range(chunks):
        engine.step()
        assert engine.poll() == []
    return engine.abort(asked.ticket)


def rest(asked: Request, part: Completion) -> Request:
    drawn = part.tokens.tolist()
    return request(asked.ticket, (*asked.prompt, *drawn), asked.params.max_tokens - len(drawn), cache_key=asked.cache_key)


@pytest.mark.parametrize("key", ["t", None])
def test_an_aborted_rollout_is_continued_with_the_draws_it_would_have_made(engine: Engine, key: str | None) -> None:
    asked = request(("t", 3), PROMPT, 33, cache_key=key)
    whole = run(engine, [asked])["t", 3]
    engine.release("t")
    assert len(whole.tokens) > 12, "another seed, if it ended early"
    part = aborted(engine, asked, 2)
    assert (part.finish_reason, part.tokens.tolist()) == ("abort", whole.tokens[:10].tolist())
    continued = run(engine, [rest(asked, part)])["t", 3]
    assert [*part.tokens, *continued.tokens] == whole.tokens.tolist()
    if key is not None:  # the cache was parked, so not even a bit has changed
        assert part.logp.tobytes() + continued.logp.tobytes() == whole.logp.tobytes()
        engine.release(key)
    np.testing.assert_allclose([*part.logp, *continued.logp], whole.logp, rtol=0, atol=LOGP_ATOL)
    assert_nothing_is_held(engine)


def test_an_abort_leaves_the_others_alone_and_frees_the_slot(engine: Engine) -> None:
    kept, gone = request(("t", 0), PROMPT, 20), request(("t", 1), PROMPT, 20)
    alone = bits(run(engine, [kept]))
    engine.submit([gone, kept])
    engine.step()
    engine.poll()
    assert len(engine.abort(gone.ticket).tokens) == 5
    waiting = request(("t", 2), PROMPT, 3)
    engine.submit([waiting])
    assert len(engine.abort(waiting.ticket).tokens) == 0
    with pytest.raises(KeyError, match="no rollout with the ticket"):
        engine.abort(waiting.ticket)
    assert bits(drain(engine)) == alone
    assert_nothing_is_held(engine)


def test_new_weights_free_what_is_parked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(("t", 0), PROMPT, 8, cache_key="t")
    said = run(engine, [asked])["t", 0].tokens.tolist()
    params = engine._params
    assert params is not None
    watched = Watched(engine, monkeypatch)
    engine.set_weights(params, 1)
    assert_nothing_is_held(engine)
    again = request(("t", 0), (*PROMPT, *said, 9), 8, cache_key="t")
    done = run(engine, [again])["t", 0]
    assert watched.lengths == {"_fill": [len(PROMPT) + len(said)], "_extend": []}
    assert set(done.versions.tolist()) == {1}
    assert engine.take_metrics()["cache/reused_fraction"] == 0
    engine.release("t")
    engine.set_weights(params, 0)


def test_weights_that_come_between_chunks_are_used_from_the_next_token_on(engine: Engine) -> None:
    old, new = engine._params, published(engine, host_params(seed=1))
    assert old is not None
    running, later = request(("t", 3), PROMPT, 33, cache_key="t"), request(("late", 0), PROMPT, 8)
    before = run(engine, [running])["t", 3]
    engine.release("t")
    engine.submit([running])
    for _ in range(2):
        engine.step()
        assert engine.poll() == []
    engine.set_weights(new, 1)
    engine.submit([later])  # its prompt is stored, but by the old weights
    done = drain(engine)
    try:
        mixed = done["t", 3]
        assert mixed.versions.tolist() == [0] * 10 + [1] * (len(mixed.tokens) - 10)
        assert mixed.tokens[:10].tolist() == before.tokens[:10].tolist()
        assert mixed.logp[:10].tobytes() == before.logp[:10].tobytes()
        assert mixed.logp[10] != before.logp[10]
        assert_nothing_is_held(engine)  # a cache of two versions is not parked
        # Nothing is stored now, so this is what an engine samples that never had the old weights.
        assert bits({later.ticket: done[later.ticket]}) == bits(run(engine, [later]))
    finally:
        engine.release("t")
        engine.set_weights(old, 0)
