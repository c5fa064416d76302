"""Long prompts are computed in pieces between the chunks of those that decode, with the same result."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.models.attention import AttentionOptions, attend, position_mask
from rljax.models.block import KeyValue
from rljax.sampler.cache import BLOCK, Blocks, LayerCache
from rljax.sampler.engine import Engine
from rljax.sampler.paged import Pieces, pieces_attention
from tests.reference.generate import generate
from tests.tiny_model import ARCH, bits, drain, engine_of, host_params, mesh_of, request, run

LOGP_ATOL = 2e-5
"""Float32 against float64 over two layers; log-probabilities are of the order 10 (nats)."""
ATOL = 2e-6
"""Float32 sums in another order; what is summed is of the order 1."""
CHUNK = 32
LONG = tuple(int(token) for token in np.random.default_rng(5).integers(8, ARCH.vocab_size, 90))


@cache
def engine() -> Engine:
    options: dict[str, Any] = {"slots": 4, "max_prompt_length": 100, "max_completion_length": 40, "stop_ids": (2,)}
    return engine_of(**options, prefill_chunk=CHUNK, reuse_cache=True)


@pytest.mark.parametrize("length", [CHUNK + 1, CHUNK + 2, 90])
def test_a_prompt_in_pieces_is_continued_as_the_whole_forward_continues_it(length: int) -> None:
    group = [request((f"t{length}", attempt), LONG[:length], 12) for attempt in range(3)]
    done = run(engine(), group)
    for asked in group[::2]:
        limits = {"max_tokens": 12, "temperature": 1.0, "stop_ids": (2,)}
        tokens, logp = generate(ARCH, host_params(), asked.prompt, asked.key, **limits)
        assert done[asked.ticket].tokens.tolist() == tokens
        np.testing.assert_allclose(done[asked.ticket].logp, logp, rtol=0, atol=LOGP_ATOL)


def test_those_that_run_are_decoded_while_a_long_prompt_is_computed() -> None:
    running, long = request(("short", 1), (11, 12, 13), 40), [request(("long", attempt), LONG, 6) for attempt in range(2)]
    alone = [bits(run(engine(), asked)) for asked in ([running], long)]
    engine().submit([running])
    engine().step()
    assert engine().poll() == []
    engine().submit(long)
    counts = []
    for _ in range(3):  # 89 tokens are three pieces
        assert not any(held.started for held in list(engine()._schedule.running.values())[1:])
        engine().step()
        assert engine().poll() == []
        counts.append(int(engine()._state.progress.count[0]))
    assert counts == [10, 15, 20]
    assert all(held.started for held in engine()._schedule.running.values())
    assert bits(drain(engine())) == alone[0] | alone[1]


def test_one_that_comes_while_its_prompt_is_computed_waits_for_it_and_joins() -> None:
    first, second = (request(("long", attempt), LONG, 6) for attempt in range(2))
    expected = bits(run(engine(), [first, second]))
    engine().submit([first])
    engine().step()
    engine().submit([second])
    assert engine().poll() == []
    engine().step()
    assert len({id(engine()._schedule.ledgers[0].prompt_of(slot)) for slot in (0, 1)}) == 1
    assert bits(drain(engine())) == expected


def test_an_abort_in_the_middle_of_a_prompt_leaves_nothing() -> None:
    asked = request(("long", 0), LONG, 6, cache_key="long")
    expected = bits(run(engine(), [asked]))
    engine().release("long")
    engine().submit([asked])
    engine().step()
    assert engine().abort(asked.ticket).finish_reason == "abort"
    (ledger,) = engine()._schedule.ledgers
    assert (engine().pending, ledger.prompts.used, ledger.own.used) == (0, 0, 0)
    assert bits(run(engine(), [asked])) == expected
    engine().release("long")


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_piece_sees_what_stands_before_it_and_no_stale_entry(window: int | None, sinks: bool) -> None:
    """A prompt of 40 tokens in blocks 2 and 0, then 30 own ones of which the last 7 are new, in own blocks 3 and 1."""
    rng = np.random.default_rng(0)
    k, m, c, prompt, known, new = 2, 2, 8, 40, 63, 7
    keys, values = (rng.normal(size=(k, known + new, c)).astype(np.float32) for _ in range(2))
    query = rng.normal(size=(1, new, k, m, c)).astype(np.float32)
    pool = {name: rng.normal(size=(4, k, BLOCK, c)).astype(np.float32) for name in ("pk", "pv", "ok", "ov")}  # stale
    for position in range(known):
        where, at = ("p", position) if position < prompt else ("o", position - prompt)
        block = ((2, 0) if where == "p" else (3, 1))[at // BLOCK]
        pool[f"{where}k"][block, :, at % BLOCK], pool[f"{where}v"][block, :, at % BLOCK] = (
            keys[:, position],
            values[:, position],
        )

    def arenas(name: str) -> tuple[Blocks, ...]:
        whole = Blocks(jnp.asarray(pool[f"{name}k"].swapaxes(2, 3)), jnp.asarray(pool[f"{name}v"]))
        return Blocks(whole.key[:1], whole.value[:1]), Blocks(whole.key[1:], whole.value[1:])

    pieces = Pieces(
        tokens=jnp.zeros((1, new), jnp.int32),
        lengths=jnp.array([new]),
        first=jnp.array([known]),
        origin=jnp.array([prompt]),
        base=jnp.array([2]),
        blocks=jnp.array([[2, 0, 4 + 3, 4 + 1, -1]]),
    )
    options = AttentionOptions(0.3, window)
    sink = jnp.asarray(rng.normal(size=(k, m)), jnp.float32) if sinks else None
    arch = dataclasses.replace(ARCH, num_kv_heads=k, window=window, windowed_layers=() if window is None else (0, 1))
    mesh = mesh_of("one")
    fresh = KeyValue(*(jnp.asarray(x[None, :, known:]) for x in (keys, values)))

    @jax.jit
    def run_it(query: jax.Array, fresh: KeyValue, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        return pieces_attention(arch, mesh, pieces)(query, fresh, cache, options, sink)

    with jax.set_mesh(mesh):
        found, cache = run_it(jnp.asarray(query), fresh, LayerCache(arenas("p"), arenas("o")))
    at = np.arange(known + new)
    mask = position_mask(jnp.asarray(at[None, known:]), jnp.asarray(at[None]), window)
    expected = attend(jnp.asarray(query), jnp.asarray(keys[None]), jnp.asarray(values[None]), mask, options, sink)
    np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)
    stored = np.concatenate([arena.value for arena in cache.own])
    np.testing.assert_array_equal(stored[3, :, 23:30], values[:, known:])
    pool["ov"][3, :, 23:30] = values[:, known:]
    np.testing.assert_array_equal(stored, pool["ov"])  # nothing else has changed
