"""With keys and values in 8 bits, whatever the cache goes through, rollouts are those of a forward pass that rounds them."""

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.models.attention import AttentionOptions, Scales, attend, attend_part
from rljax.models.block import KeyValue
from rljax.records import Completion
from rljax.sampler.cache import in_int8
from rljax.sampler.engine import Engine, Request
from tests.reference import decoder
from tests.reference.generate import generate
from tests.tiny_model import ARCH, drain, engine_of, host_params, published, request, run

LOGP_ATOL = 2e-5
"""Float32 against float64 over two layers; log-probabilities are of the order 10 (nats)."""
MARGIN = 1e-4
"""Steps. Where a number is this close to the middle between two codes, float32 and float64 may choose different ones: its error
is a few times 1e-7 of up to 127 steps, and more after a layer."""
ONE_CODE = 0.01
"""What another code may change (nats): a fraction of what rounding all numbers changes, some 0.004 and at most 0.03."""
ROUNDING = {"float32": 1e-6, "bfloat16": 2**-7}
"""Relative to the largest result: float32 sums, or weights and results of 8 significant bits."""
STOP = 2
LONG = tuple(int(token) for token in np.random.default_rng(5).integers(8, ARCH.vocab_size, 90))


@cache
def engine() -> Engine:
    """Return an engine that computes prompts in pieces, keeps caches, and has room for half of what its slots may hold."""
    options: dict[str, Any] = {"slots": 4, "max_prompt_length": 100, "max_completion_length": 40, "cache_tokens": 9 * 32}
    return engine_of(**options, prefill_chunk=32, stop_ids=(STOP,), reuse_cache=True, cache_dtype="int8")


class Watched:
    """Rounds as the oracle does, and notes how close a number came to the middle between two codes (steps)."""

    margin = 0.5

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Return the rows as multiples of their largest number's 127th."""
        codes = x / np.abs(x).max(-1, keepdims=True) * 127
        self.margin = min(self.margin, np.abs(codes - np.floor(codes) - 0.5).min())
        return decoder.in_int8(x)


def is_clear(asked: Request, done: Completion, seed: int = 0) -> bool:
    """Assert that a completion is the oracle's; say whether no number stood in the middle, so that rounding is all there is."""
    kept, limits = Watched(), {"max_tokens": asked.params.max_tokens, "temperature": 1.0, "stop_ids": (STOP,)}
    tokens, logp = generate(ARCH, host_params(seed), asked.prompt, asked.key, **limits, kept=kept)
    assert done.tokens.tolist() == tokens
    np.testing.assert_allclose(done.logp, logp, rtol=0, atol=LOGP_ATOL if kept.margin > MARGIN else ONE_CODE)
    return kept.margin > MARGIN


def test_a_group_on_a_prompt_in_pieces_is_that_of_the_rounded_forward() -> None:
    clear = []
    for length in (1, 21, 34, 90):
        group = [request((f"t{length}", attempt), LONG[:length], 12, prompt_logprobs=True) for attempt in range(3)]
        done = run(engine(), group)
        clear += [is_clear(asked, done[asked.ticket]) for asked in group]
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), host_params())
        for kept, atol in ((decoder.in_int8, ONE_CODE), (decoder.as_is, 0.0)):
            expected = decoder.logprobs(ARCH, wide, np.array([LONG[:length]]), 1.0, kept=kept)[0]
            error = np.abs(np.asarray(done[group[0].ticket].prompt_logp)[1:] - expected)
            assert (error <= atol).all() or (kept is decoder.as_is and error.mean() > 1e-3)
    assert sum(clear) > len(clear) / 3


def test_a_turn_is_the_same_on_the_kept_cache_and_recomputed() -> None:
    """Decode steps wrote what the first turn leaves; a prefill computes it again where it was not kept."""
    first = request(("turns", 0), LONG[:20], 16, cache_key="kept")
    said = run(engine(), [first])[first.ticket].tokens.tolist()
    assert len(said) > 8
    later = request(("turns", 0), (*LONG[:20], *said, 50, 51, 52), 12, cache_key="kept")
    engine().take_metrics()
    for kept in (True, False):
        is_clear(later, run(engine(), [later])[later.ticket])
        assert (engine().take_metrics()["cache/reused_fraction"] > 0.8) == kept
        engine()._schedule.release("kept", for_good=False)
    engine().release("kept")


def test_one_that_was_sent_back_or_aborted_draws_the_same_tokens() -> None:
    group = [request((f"sent back {attempt % 2}", attempt), LONG[attempt % 2 :][:40], 40) for attempt in range(4)]
    engine().take_metrics()
    done = run(engine(), group)
    assert engine().take_metrics()["cache/preempted"] > 0
    assert max(len(completion.tokens) for completion in done.values()) > 33  # into a second block
    for asked in group:
        is_clear(asked, done[asked.ticket])
    whole = request(("aborted", 0), LONG[:30], 20)
    engine().submit([whole])
    for _ in range(2):
        engine().step()
        engine().poll()
    drawn = engine().abort(whole.ticket).tokens.tolist()
    assert len(drawn) == 10
    rest = Request(whole.ticket, (*whole.prompt, *drawn), whole.key, request(("", 0), (1,), 10).params)
    is_clear(rest, run(engine(), [rest])[rest.ticket])


def test_new_weights_round_anew() -> None:
    asked = [request(("weights", attempt), LONG[:20], 12) for attempt in range(2)]
    engine().submit(asked[:1])
    engine().step()
    assert engine().poll() == []
    engine().set_weights(published(engine(), host_params(1)), 1)
    try:
        engine().submit(asked[1:])
        done = drain(engine())
        assert sorted(set(done[asked[0].ticket].versions.tolist())) == [0, 1]
        is_clear(asked[1], done[asked[1].ticket], seed=1)
    finally:
        engine().set_weights(published(engine(), host_params()), 0)


def by_hand(x: jax.Array) -> np.ndarray:
    return np.asarray(decoder.in_int8(np.asarray(x, np.float64)))


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("cap", [None, 2.0])
def test_attention_to_codes_is_attention_to_what_they_stand_for(cap: float | None, dtype: str) -> None:
    rng = np.random.default_rng(0)
    n, k, m, c, t, s = 3, 2, 2, 8, 32, 4
    # Keys and values of very different sizes: one scale for all of them would not do.
    sizes = np.exp(rng.normal(size=(2, n, k, t, 1)))
    keys, values = (jnp.asarray(rng.normal(size=(n, k, t, c)) * size, dtype) for size in sizes)
    keys = keys.at[0, 0, 5].set(0.0)
    query = jnp.asarray(rng.normal(size=(n, s, k, m, c)), dtype)
    mask = jnp.asarray(rng.random((n, s, t)) < 0.7).at[:, :, 0].set(True)
    options = AttentionOptions(0.3, None, cap)
    codes = jax.jit(in_int8)(KeyValue(keys, values))
    assert codes.scales is not None
    assert (codes.key.dtype, codes.scales.key.dtype, codes.scales.key.shape) == (jnp.int8, jnp.float32, (n, k, t))
    scores = np.einsum("nskmc,nktc->nskmt", np.asarray(query, np.float64), by_hand(keys)) * 0.3
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    weights = np.exp(scores) * np.asarray(mask)[:, :, None, None]
    expected = np.einsum("nskmt,nktc->nskmc", weights / weights.sum(-1, keepdims=True), by_hand(values))
    atol = ROUNDING[dtype] * np.abs(expected).max()
    whole = jax.jit(lambda query, seen: attend(query, seen.key, seen.value, mask, options, scales=seen.scales))
    found = whole(query, codes)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=atol)
    readers = query.transpose(0, 2, 1, 3, 4)  # [n, k, g, m, c]
    part = jax.jit(partial(attend_part, options=options))(
        readers, codes.key.swapaxes(2, 3), codes.value, mask, scales=codes.scales
    )
    joined = np.asarray(part.out / part.total[..., None], np.float64).transpose(0, 2, 1, 3, 4)
    np.testing.assert_allclose(joined, expected, rtol=0, atol=atol)
    worse = Scales(codes.scales.key, codes.scales.value.at[1, 0, 3].set(jnp.nan))
    assert not np.isfinite(whole(query, codes._replace(scales=worse))).all(), "what is not finite shows"
