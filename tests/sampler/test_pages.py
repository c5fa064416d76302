"""With a kernel that reads pages, whatever the cache goes through, rollouts are those of XLA's attention."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.records import Completion
from rljax.sampler.cache import BLOCK, Slots
from rljax.sampler.engine import Engine, Request
from rljax.sampler.kernels import AttentionChoice, GpuKernel, Kernel, TpuKernel
from tests.compilations import compilations
from tests.sampler.interpreted import interpreted
from tests.tiny_model import ARCH, drain, engine_of, host_params, published, request, run

ATOL = 1e-5
"""Sums in another order over two layers in float32; log-probabilities are of the order 10 (nats)."""
ONE_CODE = 0.01
"""What another code may change (nats), where a number stood in the middle between two: see decision 22."""
CAPPED = dataclasses.replace(ARCH, attention_soft_cap=3.0)
ARCHS = {"capped": CAPPED, "windowed": dataclasses.replace(CAPPED, window=24, windowed_layers=(1,))}
KERNELS: dict[str, Kernel | None] = {"xla": None, "tpu": TpuKernel(), "gpu": GpuKernel()}
STOP = 2
LONG = tuple(int(token) for token in np.random.default_rng(5).integers(8, ARCH.vocab_size, 90))
OPTIONS: dict[str, Any] = {"max_prompt_length": 100, "max_completion_length": 40, "prefill_chunk": 48}


@cache
def engine(by: str, arch: str = "capped", mesh: str = "one", cache_dtype: str = "as-is") -> Engine:
    """Return an engine that computes prompts in pieces, keeps caches, and has room for half of what its slots may hold."""
    small: dict[str, Any] = {"slots": 8} if mesh == "tensor" else {"slots": 4, "cache_tokens": 10 * BLOCK}
    return engine_of(
        mesh, arch=ARCHS[arch], **small, **OPTIONS, stop_ids=(STOP,), reuse_cache=True, cache_dtype=cache_dtype,
        attention=AttentionChoice(KERNELS[by], "the test"), batch_invariant=True,
    )  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def on_cpus() -> Any:
    with interpreted():
        yield


def group(length: int, attempts: int = 3, max_tokens: int = 9) -> list[Request]:
    return [request((f"t{length}", attempt), LONG[:length], max_tokens) for attempt in range(attempts)]


def requests() -> list[Request]:
    """Return groups whose prompts' last blocks are empty, filled in part or full: the last token of a prompt is not in it."""
    return [asked for length in (1, 20, 33, 34, 65, 90) for asked in group(length)]


@cache
def expected(arch: str = "capped", cache_dtype: str = "as-is") -> dict[Any, Completion]:
    return run(engine("xla", arch, cache_dtype=cache_dtype), requests())


def assert_same(found: dict[Any, Completion], others: dict[Any, Completion], most: float = ATOL) -> None:
    assert found.keys() == others.keys()
    errors = []
    for ticket, done in found.items():
        assert done.tokens.tolist() == others[ticket].tokens.tolist(), ticket
        errors.append(np.abs(done.logp - others[ticket].logp))
    assert np.concatenate(errors).max() < most
    assert np.median(np.concatenate(errors)) < ATOL


def assert_nothing_is_held(held: Engine) -> None:
    assert held.pending == 0
    assert all(ledger.prompts.used == ledger.own.used == 0 for ledger in held._schedule.ledgers)


@pytest.mark.parametrize("by", ["tpu", "gpu"])
def test_groups_on_shared_prompts_draw_the_same_and_nothing_is_compiled_twice(by: str) -> None:
    others, one = expected(), engine(by)
    with compilations() as found:
        assert_same(run(one, requests()), others)
    assert (found["decode_chunk"], found["copied"]) == (1, 1)
    assert_nothing_is_held(engine(by))


def stale(held: Engine) -> None:
    """Leave what is not finite in every page."""

    def spoil(leaf: jax.Array) -> jax.Array:
        return jax.device_put(jnp.full_like(leaf, 127 if leaf.dtype == jnp.int8 else jnp.nan), leaf.sharding)

    held._state = Slots(jax.tree.map(spoil, held._state.cache), held._state.progress)


@pytest.mark.parametrize(
    ("by", "arch", "cache_dtype", "most"), [("tpu", "windowed", "as-is", ATOL), ("gpu", "capped", "int8", ONE_CODE)]
)
def test_on_many_devices_with_windows_or_codes_and_over_stale_pages_they_are_the_same(
    by: str, arch: str, cache_dtype: str, most: float
) -> None:
    many = engine(by, arch, "tensor", cache_dtype)
    kernel = many.attention.kernel
    assert kernel is not None
    assert {leaf.sharding.spec for leaf in jax.tree.leaves(many._state.cache)} == {kernel.spec}
    stale(many)
    assert_same(run(many, requests()), expected(arch, cache_dtype), most)
    assert_nothing_is_held(many)


@pytest.mark.parametrize("by", ["tpu", "gpu"])
def test_a_later_turn_on_a_kept_cache_is_that_of_a_whole_prompt(by: str) -> None:
    first = [request((f"turns {length}", 0), LONG[:length], 16, cache_key=length) for length in (1, 20, 40)]
    stale(engine(by))
    said = {asked.ticket: run(engine(by), [asked])[asked.ticket].tokens.tolist() for asked in first}
    replies = (50, 51, 52), tuple(range(80, 97)), (99,)
    later = [
        request(asked.ticket, (*asked.prompt, *said[asked.ticket], *reply), 12, cache_key=asked.cache_key)
        for asked, reply in zip(first, replies, strict=True)
    ]
    engine(by).take_metrics()
    done = run(engine(by), later)
    assert engine(by).take_metrics()["cache/reused_fraction"] > 0.7
    assert_same(done, run(engine("xla"), [dataclasses.replace(asked, cache_key=None) for asked in later]))
    for asked in first:
        engine(by).release(asked.cache_key)
    assert_nothing_is_held(engine(by))


@pytest.mark.parametrize("by", ["tpu", "gpu"])
def test_one_that_was_sent_back_or_aborted_draws_the_same(by: str) -> None:
    many = [request((f"sent back {attempt % 2}", attempt), LONG[attempt % 2 :][:40], 40) for attempt in range(4)]
    engine(by).take_metrics()
    done = run(engine(by), many)
    assert engine(by).take_metrics()["cache/preempted"] > 0
    assert max(len(completion.tokens) for completion in done.values()) > 33  # into a third block
    assert_same(done, run(engine("xla"), many))
    whole = request(("t20", 0), LONG[:20], 9, cache_key="t")
    engine(by).submit([whole])
    engine(by).step()
    assert engine(by).poll() == []
    part = engine(by).abort(whole.ticket).tokens.tolist()
    assert len(part) == 5
    rest = request(whole.ticket, (*whole.prompt, *part), 4, cache_key="t")
    assert [*part, *run(engine(by), [rest])[rest.ticket].tokens] == expected()[whole.ticket].tokens.tolist()
    engine(by).release("t")
    assert_nothing_is_held(engine(by))


@pytest.mark.parametrize("by", ["tpu", "gpu"])
def test_new_weights_compute_prompts_anew(by: str) -> None:
    asked = [request(("weights", attempt), LONG[:20], 9) for attempt in range(2)]
    found = []
    for one in (engine(by), engine("xla")):
        one.submit(asked[:1])
        one.step()
        assert one.poll() == []
        one.set_weights(published(one, host_params(1)), 1)
        one.submit(asked[1:])
        found.append(drain(one))
        one.set_weights(published(one, host_params()), 0)
    assert found[0][asked[0].ticket].versions.tolist() == found[1][asked[0].ticket].versions.tolist() == [0] * 5 + [1] * 4
    assert_same(*found)


def test_a_warm_engine_compiles_nothing() -> None:
    warm = engine_of(slots=4, max_prompt_length=40, max_completion_length=8, attention=engine("gpu").attention)
    assert warm.warm_up() == 4
    with compilations() as found:
        run(warm, [request(("t", 0), LONG[:40], 8), request(("t", 1), LONG[:1], 2)])
    assert not found
