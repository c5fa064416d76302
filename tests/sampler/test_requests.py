"""What one request asks of the draw is what it gets, and nobody else does."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from rljax.records import Completion
from rljax.sampler.attempts import n_best
from rljax.sampler.engine import Engine, Request, draw_key
from tests.reference import decoder
from tests.reference.generate import uniform_at
from tests.reference.truncation import distribution, softmax
from tests.tiny_model import ARCH, STOP_IDS, bits, engine_of, host_params, request, run, some_requests

LOGP_ATOL = 2e-5
"""Float32 against float64 over two layers; log-probabilities are of the order 10 (nats)."""
EDGE = 2e-6
"""A uniform number this close to a step of the float64 distribution may fall on either side of the float32 one."""
PROMPT = (11, 50, 12, 90, 13)


class Letters:
    """Writes a letter for each token: there are ten."""

    def push(self, token_id: Any) -> str:
        """Write it."""
        return "abcdefghij"[int(token_id) % 10]

    def flush(self) -> str:
        """Hold nothing back."""
        return ""


def spelled(tokens: Sequence[int]) -> str:
    return "".join(map(Letters().push, tokens))


@cache
def engine(mesh: str = "one", dtype: str = "float32") -> Engine:
    """Return an engine that reports log-probabilities and knows letters."""
    return engine_of(mesh, dtype=dtype, logprobs=3 if dtype == "float32" else None, open_text=Letters)


def asked_of_everything() -> list[Request]:
    """Return requests, each with a rule of its own."""
    rules: list[dict[str, Any]] = [
        {"top_k": 7, "logprobs": 3},
        {"top_p": 0.8, "temperature": 0.7, "logprobs": 1},
        {"min_p": 0.2, "temperature": 1.5, "logprobs": 0},
        {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
        {"logit_bias": {40: 6.0, 41: -np.inf}, "temperature": 0.9, "prompt_logprobs": True},
        {"allowed_token_ids": (2, 9, 77, 100, 205, 299), "min_tokens": 6},
        {"min_tokens": 10, "top_p": 0.95},
        {"ignore_eos": True, "stop_token_ids": (*range(20, 30), 55), "min_tokens": 3},
        {"top_k": 3, "temperature": 0.0},
    ]
    rng = np.random.default_rng(5)
    prompts = [rng.integers(8, ARCH.vocab_size, length).tolist() for length in (3, 9, 24, 1, 12, 7, 5, 17, 4)]
    return [request((f"rule {n}", 0), prompts[n], **rule) for n, rule in enumerate(rules)]


@pytest.fixture(scope="module")
def everything() -> dict[Any, Completion]:
    return run(engine(), [*asked_of_everything(), *some_requests(6)])


def test_every_rule_gives_its_own_distribution(everything: dict[Any, Completion]) -> None:
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), host_params())
    for asked in asked_of_everything():
        done, params, prompt = everything[asked.ticket], asked.params, list(asked.prompt)
        after = decoder.logits(ARCH, wide, np.array([[*prompt, *done.tokens]]))[0]
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(STOP_IDS))
        bias = np.zeros(ARCH.vocab_size)
        if params.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[list(params.allowed_token_ids)] = 0.0
        for token, value in params.logit_bias.items():
            bias[token] += value
        cuts = {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p}
        for place, token in enumerate(done.tokens):
            scores, early = after[len(prompt) + place - 1], place < params.min_tokens
            if params.temperature == 0:
                assert (token, done.logp[place]) == (scores.argmax(), 0.0)
                continue
            rule = {"temperature": params.temperature, "bias": bias, **cuts}
            probability = distribution(scores, forbidden=sorted(ends) if early else (), **rule)
            upto = np.cumsum(probability)
            number = uniform_at(asked.key, len(prompt) + place)
            assert upto[token] - probability[token] - EDGE <= number <= upto[token] + EDGE
            np.testing.assert_allclose(done.logp[place], np.log(probability[token]), rtol=0, atol=LOGP_ATOL)
        places = np.isin(done.tokens, sorted(ends))
        assert not places[: params.min_tokens].any()
        assert not places[:-1].any()
        assert (done.stop, done.finish_reason) == ((done.tokens[-1], "stop") if places[-1] else (None, "length"))
    assert sum(done.finish_reason == "stop" for ticket, done in everything.items() if "rule" in ticket[0]) >= 3


def test_the_models_own_opinion_is_reported_to_those_who_ask(everything: dict[Any, Completion]) -> None:
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), host_params())
    for asked in asked_of_everything():
        done, params, prompt = everything[asked.ticket], asked.params, list(asked.prompt)
        logp = np.log(softmax_rows(decoder.logits(ARCH, wide, np.array([[*prompt, *done.tokens]]))[0]))
        drawn = logp[len(prompt) - 1 : -1]
        assert (done.logp_raw is None) == (done.top is None) == (params.logprobs is None)
        if done.logp_raw is not None and done.top is not None:
            places = np.arange(len(done.tokens))
            np.testing.assert_allclose(done.logp_raw, drawn[places, done.tokens], rtol=0, atol=LOGP_ATOL)
            assert done.top.ids.tolist() == np.argsort(-drawn, axis=1)[:, : params.logprobs].tolist()
            expected = np.take_along_axis(drawn, done.top.ids, axis=1)
            np.testing.assert_allclose(done.top.logp, expected, rtol=0, atol=LOGP_ATOL)
        assert (done.prompt_logp is not None) == params.prompt_logprobs
        if done.prompt_logp is not None:
            assert np.isnan(done.prompt_logp[0])
            expected = logp[np.arange(len(prompt) - 1), prompt[1:]]
            np.testing.assert_allclose(done.prompt_logp[1:], expected, rtol=0, atol=LOGP_ATOL)


def softmax_rows(scores: np.ndarray) -> np.ndarray:
    return np.array([softmax(row) for row in scores])


OTHER = [pytest.param(*case, marks=pytest.mark.slow) for case in (("one", "bfloat16"), ("tensor", "float32"))]


@pytest.mark.parametrize(("mesh", "dtype"), [("one", "float32"), *OTHER])
def test_rules_of_neighbours_change_no_bit(mesh: str, dtype: str) -> None:
    plain = some_requests(6)
    rules = [asked for asked in asked_of_everything() if dtype == "float32" or asked.params.logprobs is None]
    expected = bits(run(engine(mesh, dtype), plain))
    # Plain ones first, in between and last: they meet the rules in other slots of the same chunk, and without them.
    found = bits(run(engine(mesh, dtype), [*plain[:4], *rules[:5], *plain[4:8], *rules[5:], *plain[8:]]))
    assert {ticket: found[ticket] for ticket in expected} == expected
    alone = bits(run(engine(mesh, dtype), rules[2:4]))
    assert {ticket: found[ticket] for ticket in alone} == alone


def test_rules_stay_with_their_request_when_slots_change_hands() -> None:
    limits = [request(("long", n), PROMPT, 16, ignore_eos=True, allowed_token_ids=(90 + n,)) for n in range(12)]
    done = run(engine(), [*some_requests(4), *limits])
    for n in range(12):
        assert done["long", n].tokens.tolist() == [90 + n] * 16
        np.testing.assert_allclose(done["long", n].logp, 0, atol=1e-6)


def test_stop_strings_cut_completions_and_change_nothing_before_the_cut() -> None:
    plain = [request(("t", n), PROMPT) for n in range(24)]
    whole = run(engine(), plain)
    stop = ("ab", "cde", "h")
    found = run(engine(), [request(("t", n), PROMPT, stop=stop) for n in range(24)])
    ended = set()
    for ticket, done in found.items():
        said = [spelled(whole[ticket].tokens[: n + 1]) for n in range(len(whole[ticket].tokens))]
        first = next((n + 1 for n, text in enumerate(said) if any(known in text for known in stop)), len(said))
        assert done.tokens.tolist() == whole[ticket].tokens[:first].tolist()
        assert done.logp.tobytes() == whole[ticket].logp[:first].tobytes()
        if any(known in said[first - 1] for known in stop):
            assert done.finish_reason == "stop"
            assert isinstance(done.stop, str)
            assert said[first - 1].endswith(done.stop)
            ended.add((done.stop, first % 5))
        else:
            assert (done.stop, done.finish_reason) == (whole[ticket].stop, whole[ticket].finish_reason)
    assert {len(known) > 1 for known, _ in ended} == {True, False}, "in one token and across tokens"
    assert len({place for _, place in ended}) >= 3, "at the end of a chunk and inside"


def test_a_slot_that_stopped_is_free_at_once_and_draws_no_more() -> None:
    made = engine()
    expected = bits(run(made, some_requests(3)))
    endless = {"ignore_eos": True, "allowed_token_ids": (90, 91)}
    made.submit([request(("t", n), PROMPT, stop=("a",) if n < 4 else (), **endless) for n in range(8)])
    made.step()
    done = dict(made.poll())
    assert len(done) >= 2
    assert made.free == len(done)
    made.step()
    assert int((np.asarray(made._state.progress.remaining) > 0).sum()) <= 8 - len(done)
    made.clear()
    assert bits(run(made, some_requests(3))) == expected


def test_a_stream_ends_with_the_token_that_completes_a_stop_string() -> None:
    for attempt in range(6):
        asked = request(("t", attempt), PROMPT, stop=("b", "cd"), ignore_eos=True)
        whole = run(engine(), [asked])["t", attempt].tokens
        assert np.concatenate(list(engine().stream(asked))).tolist() == whole.tolist()


def test_several_attempts_come_ranked() -> None:
    keys = [draw_key(0, "test", "t", attempt) for attempt in range(5)]
    params = request(("t", 0), PROMPT, top_k=40, temperature=0.8).params
    ranked = n_best(engine(), PROMPT, keys, params)
    means = [float(np.mean(done.logp_raw)) for done in ranked]
    assert means == sorted(means, reverse=True)
    single = run(engine(), [Request(n, PROMPT, key, params) for n, key in enumerate(keys)])
    assert sorted(done.tokens.tolist() for done in ranked) == sorted(done.tokens.tolist() for done in single.values())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"allowed_token_ids": ()}, "leave no token to draw; allow at least one"),
        ({"allowed_token_ids": (5,), "logit_bias": {5: -np.inf}}, "leave no token to draw"),
        ({"allowed_token_ids": (2, 7), "min_tokens": 1}, "leave end tokens alone, and min_tokens forbids those"),
        ({"allowed_token_ids": (300,)}, r"allowed_token_ids has the ids \[300\]; the model has ids from 0 to 299"),
        ({"logit_bias": {-1: 1.0}}, r"logit_bias has the ids \[-1\]"),
        ({"stop_token_ids": (1000,)}, r"stop_token_ids has the ids \[1000\]"),
        ({"logprobs": 4}, "logprobs is 4, and the engine reports at most 3; make it with logprobs=4"),
        ({"logit_bias": {3: np.inf}}, "logit_bias is .*; it must be finite numbers, or -inf"),
        ({"logit_bias": {3: np.nan}}, "logit_bias is .*; it must be finite numbers, or -inf"),
        ({"top_k": -2}, "top_k is -2; it must be at least 1, or 0"),
        ({"top_p": 1.5}, "top_p is 1.5; it must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"min_tokens": 17}, r"min_tokens is 17; it must be between 0 and max_tokens \(16\)"),
        ({"stop": ("a", "")}, "must be strings that are not empty"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_sampled(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine().submit([request(("bad", 0), PROMPT, **rule)])
    assert engine().pending == 0


def test_an_engine_without_text_or_reports_says_so() -> None:
    made = engine_of()
    with pytest.raises(ValueError, match="stop strings need an engine that knows the tokens' text; make it with open_text"):
        made.submit([request(("t", 0), PROMPT, stop=("a",))])
    with pytest.raises(ValueError, match="logprobs is 0, and the engine reports none; make it with logprobs=0"):
        made.submit([request(("t", 0), PROMPT, logprobs=0)])
