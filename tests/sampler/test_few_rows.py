"""When few rollouts are left, only their rows are decoded and only the blocks they read are attended to; they stay the same."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from rljax.records import Completion
from rljax.sampler.blocks import Size
from rljax.sampler.engine import Engine, Request
from tests import tiny_moe
from tests.compilations import compilations
from tests.sampler.test_compiled import outputs
from tests.tiny_model import ARCH, engine_of, request, run

LOGP_ATOL = 5e-6
"""Float32 sums in another order; log-probabilities are of the order 10 (nats)."""
CODES_ATOL = 1e-3
"""With a cache in 8 bits a sum in another order can be rounded to the next code, a 127th of the largest channel away."""
OPTIONS: dict[str, Any] = {"slots": 16, "max_completion_length": 130, "readers": 2, "decode_chunk_steps": 5}


def long_and_short(count: int, seed: int = 0, **sampling: Any) -> list[Request]:
    """Return requests of which every fourth is long: as many slots become free, in no order."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(8, ARCH.vocab_size, rng.integers(1, 25)).tolist() for _ in range(-(-count // 2))]
    limits = [int(rng.integers(70, 131) if index % 4 == 3 else rng.integers(1, 40)) for index in range(count)]
    return [request((f"t{i // 2}", i % 2), prompts[i // 2], limit, **sampling) for i, limit in enumerate(limits)]


def sizes_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Size]:
    """Return a list that will hold the size of every chunk of decode steps."""
    sizes, tables = [], engine._tables
    monkeypatch.setattr(engine, "_tables", lambda size, **options: sizes.append(size) or tables(size, **options))
    return sizes


def assert_same(few: dict[Any, Completion], all_: dict[Any, Completion], atol: float = LOGP_ATOL) -> None:
    assert few.keys() == all_.keys()
    for ticket, done in all_.items():
        assert few[ticket].tokens.tolist() == done.tokens.tolist()
        np.testing.assert_allclose(few[ticket].logp, done.logp, rtol=0, atol=atol)
        assert few[ticket].finish_reason == done.finish_reason


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"stop_ids": (0,)}, {}),
        ({"stop_ids": (0,), "cache_dtype": "int8", "logprobs": 2}, {"logprobs": 2}),
        ({"stop_ids": (0,)}, {"top_k": 9, "logit_bias": {11: 2.0, 12: -3.0}, "stop_token_ids": (13,), "min_tokens": 1}),
    ],
)
def test_the_last_rollouts_draw_what_they_draw_among_others(
    options: dict[str, Any], sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    few, all_ = engine_of(**OPTIONS, **options), engine_of(**OPTIONS, **options, batch_invariant=True)
    asked, sizes = long_and_short(40, **sampling), sizes_of(few, monkeypatch)
    found = {engine: run(engine, asked) for engine in (few, all_)}
    assert_same(found[few], found[all_], CODES_ATOL if "cache_dtype" in options else LOGP_ATOL)
    for ticket, done in found[all_].items():
        if done.top is not None:
            np.testing.assert_array_equal(found[few][ticket].top.ids, done.top.ids)
    assert {size.rows for size in sizes} == {6, 16}
    rows = [size.rows for size in sizes]
    assert rows[0] == 16
    assert rows[-1] == 6
    widest = max(size.own for size in sizes)
    assert sizes[-1].own < widest  # what is left has moved to the first blocks
    assert few.take_metrics()["sampler/occupancy"] > all_.take_metrics()["sampler/occupancy"]


def test_data_shards_choose_their_own_rows_and_experts_are_recorded() -> None:
    options = {"slots": 64, "max_completion_length": 70}
    few = tiny_moe.engine_of("replica", **options)
    all_ = tiny_moe.engine_of("replica", **options, batch_invariant=True)
    rng = np.random.default_rng(0)
    limits = [int(limit) for limit in np.where(np.arange(72) % 5 == 2, 70, rng.integers(1, 30, 72))]
    asked = [request((f"t{i // 4}", i % 4), [8 + i // 4] * (3 + i // 4), limit) for i, limit in enumerate(limits)]
    found = {engine: run(engine, asked) for engine in (few, all_)}
    assert_same(found[few], found[all_])
    for ticket, done in found[all_].items():
        np.testing.assert_array_equal(found[few][ticket].choices, done.choices)
    assert few.take_metrics()["sampler/occupancy"] > all_.take_metrics()["sampler/occupancy"]


def test_after_the_warm_up_few_rows_and_moved_blocks_compile_nothing() -> None:
    engine = engine_of(**OPTIONS, stop_ids=(0,))
    engine.warm_up()
    with compilations() as found:
        run(engine, long_and_short(40, seed=1))
    assert not found


def test_occupancy_is_the_share_of_rows_that_drew() -> None:
    engine = engine_of(slots=4, stop_ids=(ARCH.vocab_size,), max_completion_length=10)
    assert "sampler/occupancy" not in engine.take_metrics()
    run(engine, [request(("t", index), [9], limit) for index, limit in enumerate((10, 4, 3))])
    assert engine.take_metrics()["sampler/occupancy"] == pytest.approx(17 / 40)  # 10 steps of 4 rows
    assert "sampler/occupancy" not in engine.take_metrics()


@pytest.mark.parametrize("program", ["_decode", "_copy"])
def test_no_copy_of_a_layers_cache_is_made(program: str) -> None:
    engine = engine_of(**OPTIONS)
    few = engine._shapes.decode()[0]
    inputs: Sequence[Any] = (engine._state.cache[0], *engine._copies([[]]))
    if program == "_decode":
        inputs = (engine._params, engine._state, *engine._tables(few, empty=True), engine._stop_ids, None)
        assert few.rows < engine.slots
    with jax.set_mesh(engine.mesh):
        text = getattr(engine, program).lower(*inputs).compile().as_text()
    sizes = {leaf.shape for leaf in jax.tree.leaves(engine._state.cache)}
    assert all(f"f32[{','.join(map(str, size))}]" in text for size in sizes)  # else nothing is looked for
    kinds = {tuple(sorted(size)) for size in sizes}
    assert [shape for shape in outputs(text, {"copy", "transpose", "convert"}) if tuple(sorted(shape)) in kinds] == []
