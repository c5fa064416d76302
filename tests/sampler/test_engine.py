"""The engine samples what is asked of it: all requests, each to its own end, in any number of slots."""

from typing import Any

import jax
import numpy as np
import pytest

from rljax.sampler.cache import BLOCK
from rljax.sampler.engine import Engine
from tests.compilations import compilations
from tests.reference.generate import generate
from tests.tiny_model import (
    ARCH,
    STOP_IDS,
    bits,
    drain,
    engine_of,
    host_params,
    mesh_of,
    request,
    run,
    some_requests,
    warm_engine,
)

LOGP_ATOL = 2e-5
"""Float32 against float64 over two layers; log-probabilities are of the order 10 (nats)."""

PROMPT = (11, 50, 12, 90, 13)


@pytest.fixture
def engine() -> Engine:
    return warm_engine()


def lengths_by_reason(completions: dict[Any, Any], reason: str) -> list[int]:
    return [len(done.tokens) for done in completions.values() if done.finish_reason == reason]


def test_every_completion_ends_at_its_first_stop_token_or_at_its_limit(engine: Engine) -> None:
    requests = some_requests(24, 4)
    done = run(engine, requests)
    assert set(done) == {asked.ticket for asked in requests}
    ends = set()
    for asked in requests:
        tokens, reason = done[asked.ticket].tokens, done[asked.ticket].finish_reason
        assert not np.isin(tokens[:-1], STOP_IDS).any()
        assert (tokens[-1] in STOP_IDS) == (reason == "stop")
        assert len(tokens) == asked.params.max_tokens or (reason == "stop" and len(tokens) < asked.params.max_tokens)
        assert len(done[asked.ticket].logp) == len(tokens)
        assert done[asked.ticket].versions.tolist() == [0] * len(tokens)
        if reason == "stop":
            ends.add(int(tokens[-1]))
    assert len(ends) >= 15  # many different stop tokens, not the first of them alone
    assert len(lengths_by_reason(done, "stop")) >= 20
    assert len(lengths_by_reason(done, "length")) >= 20


def test_a_limit_cuts_a_completion_and_changes_nothing_before_the_cut(engine: Engine) -> None:
    long, short = (run(engine, [request(("t", n), PROMPT, limit) for n in range(8)]) for limit in (16, 3))
    cut = [ticket for ticket in long if len(long[ticket].tokens) > 3]
    assert len(cut) >= 3
    for ticket in cut:
        assert short[ticket].tokens.tolist() == long[ticket].tokens[:3].tolist()
        assert short[ticket].finish_reason == "length"


def test_one_token_prompts_and_one_token_completions_are_possible(engine: Engine) -> None:
    done = run(engine, [request(("short", 0), (40,), 1), request(("short", 1), (40,), 16), request(("full", 0), [9] * 24, 16)])
    assert len(done["short", 0].tokens) == 1
    assert done["short", 0].tokens[0] != done["short", 1].tokens[0]  # another attempt


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), 1, "has 0 tokens"),
        ([9] * 25, 1, "has 25 tokens; sampler.max_prompt_length allows 1 to 24"),
        ([9], 0, "max_tokens is 0; it must be at least 1"),
        ([9], 17, "asks for 17 tokens; sampler.max_completion_length allows 1 to 16"),
    ],
)
def test_requests_that_do_not_fit_are_refused_and_nothing_is_queued(
    engine: Engine, prompt: Any, max_tokens: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.submit([request(("good", 0), PROMPT), request(("bad", 0), prompt, max_tokens)])
    assert engine.pending == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_ids": ()}, "no token ends a completion"),
        ({"slots": 12}, r"sampler.slots \(12\) must be a multiple of mesh.replica x mesh.fsdp \(8\)"),
        ({"cache_tokens": 8 * 47}, "a prompt of 24 and a completion of 16 tokens exceed the cache of 47 tokens per data shard"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    good = {"stop_ids": (2,), "slots": 8, "max_prompt_length": 24, "max_completion_length": 16, "cache_tokens": None}
    good |= {"readers": 2, "decode_chunk_steps": 5, "dtype": "float32"}
    arguments: dict[str, Any] = {**good, **options}
    with pytest.raises(ValueError, match=message):
        Engine(ARCH, mesh_of("fsdp"), arguments.pop("stop_ids"), **arguments)


class Watched:
    """Notes what an engine prefills."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.rows, fill = [], engine._fill

        def noted(params: Any, state: Any, new: Any) -> Any:
            self.rows.append(int((np.asarray(new.lengths) > 0).sum()))
            return fill(params, state, new)

        monkeypatch.setattr(engine, "_fill", noted)


@pytest.mark.parametrize(("attempts", "rows"), [(2, 1), (3, 2), (8, 4)])
def test_a_prompt_is_computed_once_for_all_its_readers(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, attempts: int, rows: int
) -> None:
    watched = Watched(engine, monkeypatch)
    run(engine, [request(("t", attempt), PROMPT, 2) for attempt in range(attempts)])
    assert watched.rows == [rows]


def test_a_stored_prompt_is_not_computed_again_for_a_latecomer(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = bits(run(engine, [request(("t", 1), PROMPT)]))
    watched = Watched(engine, monkeypatch)
    engine.submit([request(("t", 0), PROMPT)])
    engine.step()
    engine.submit([request(("t", 1), PROMPT)])
    done = bits(drain(engine))
    assert watched.rows == [1]
    assert done["t", 1] == alone["t", 1]


def test_one_prefill_takes_as_many_prompts_as_it_has_rows(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(engine, monkeypatch)
    prompts = [(*PROMPT, last, 9) for last in range(20, 26)]
    run(engine, [request((f"t{prompt}", 0), prompt, 2) for prompt in prompts])
    assert watched.rows == [4, 2]


def test_attempts_at_one_prompt_differ_and_repeat_to_the_bit(engine: Engine) -> None:
    group = [request(("t", attempt), PROMPT) for attempt in range(8)]
    first = run(engine, group)
    assert len({done.tokens.tobytes() for done in first.values()}) == 8
    assert bits(run(engine, group)) == bits(first)


def test_greedy_attempts_are_equal(engine: Engine) -> None:
    done = run(engine, [request(("t", attempt), PROMPT, temperature=0.0) for attempt in range(3)])
    assert len({completion.tokens.tobytes() for completion in done.values()}) == 1
    assert all((completion.logp == 0).all() for completion in done.values())


def test_after_an_abort_nothing_is_left_and_nothing_compiles_again(engine: Engine) -> None:
    expected = bits(run(engine, some_requests(4)))
    with compilations() as found:
        engine.submit(some_requests(12, seed=5))
        engine.step()
        engine.clear()
        assert engine.pending == 0
        assert engine.poll() == []
        engine.step()
        assert bits(run(engine, some_requests(4))) == expected
    assert not found


def test_requests_may_come_while_others_are_decoded(engine: Engine) -> None:
    requests = some_requests(10)
    expected = bits(run(engine, requests))
    engine.submit(requests[:10])
    engine.step()
    engine.submit(requests[10:])
    assert bits(drain(engine)) == expected


def test_a_stream_yields_all_tokens_in_order(engine: Engine) -> None:
    for attempt in range(4):
        asked = request(("t", attempt), PROMPT)
        whole = run(engine, [asked])["t", attempt].tokens
        parts = list(engine.stream(asked))
        assert np.concatenate(parts).tolist() == whole.tolist()
        assert len(parts) == -(-len(whole) // 5)  # one part per chunk
    assert engine.pending == 0


def test_the_programs_compile_once_per_size() -> None:
    engine = engine_of()
    with compilations() as found:
        for seed in range(2):
            run(engine, some_requests(12, 3, seed=seed))
            run(engine, some_requests(2, 1, seed=seed + 2))
    # One length for prompts of up to 24 tokens, and one or both arenas of prompts in use.
    assert (found["fill"], found["decode_chunk"]) == (1, 2)


def test_bfloat16_is_sampled_in_bfloat16_and_repeats() -> None:
    engine = warm_engine(dtype="bfloat16")
    assert engine._params is not None
    assert {leaf.dtype.name for leaf in jax.tree.leaves(engine._params)} == {"bfloat16"}
    first = run(engine, some_requests(8))
    assert bits(run(engine, some_requests(8))) == bits(first)
    assert bits(first) != bits(run(warm_engine(), some_requests(8)))
    assert all(np.isfinite(done.logp).all() and done.logp.dtype == np.float32 for done in first.values())


def long_engine(cache_tokens: int | None = None) -> Engine:
    """Return an engine whose prompts and completions take several blocks each."""
    return engine_of(slots=4, max_prompt_length=100, max_completion_length=80, cache_tokens=cache_tokens, stop_ids=(2,))


def nothing_is_held(engine: Engine) -> bool:
    return all(ledger.prompts.used == ledger.own.used == 0 for ledger in engine._schedule.ledgers)


def long_requests() -> list[Any]:
    rng = np.random.default_rng(3)
    prompts = [rng.integers(8, ARCH.vocab_size, length).tolist() for length in (1, 31, 32, 33, 34, 65, 97, 100)]
    limits = [80, 31, 32, 33, 64, 65, 80, 80]
    return [
        request((f"t{index}", attempt), prompt, limit)
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        for attempt in range(2)
    ]


@pytest.fixture(scope="module")
def long_completions() -> dict[Any, Any]:
    return run(long_engine(), long_requests())


def test_rollouts_of_many_blocks_are_those_of_the_whole_forward(long_completions: dict[Any, Any]) -> None:
    for asked in long_requests()[::3]:
        done = long_completions[asked.ticket]
        limits = {"max_tokens": asked.params.max_tokens, "temperature": 1.0, "stop_ids": (2,)}
        tokens, logp = generate(ARCH, host_params(), asked.prompt, asked.key, **limits)
        assert done.tokens.tolist() == tokens
        np.testing.assert_allclose(done.logp, logp, rtol=0, atol=LOGP_ATOL)


@pytest.mark.parametrize("blocks", [7, 9])
def test_in_a_small_cache_rollouts_wait_or_start_again_and_stay_the_same(long_completions: dict[Any, Any], blocks: int) -> None:
    engine = long_engine(cache_tokens=blocks * BLOCK)
    assert bits(run(engine, long_requests())) == bits(long_completions)
    assert engine.take_metrics()["cache/preempted"] > 0
    assert nothing_is_held(engine)


def test_a_rollout_of_many_blocks_is_the_same_alone(long_completions: dict[Any, Any]) -> None:
    engine = long_engine()
    for asked in long_requests()[1::5]:
        assert bits(run(engine, [asked])) == bits({asked.ticket: long_completions[asked.ticket]})
