"""The programs are a small declared set: after the warm-up nothing compiles, whatever lengths arrive."""

from typing import Any

import numpy as np
import pytest

from rljax.records import SamplingParams
from rljax.sampler.blocks import Size
from rljax.sampler.shapes import ladder, least, shapes_of
from tests.compilations import compilations
from tests.tiny_model import ARCH, engine_of, request


def test_after_the_warm_up_nothing_compiles() -> None:
    options: dict[str, Any] = {"slots": 8, "max_prompt_length": 24, "max_completion_length": 32, "stop_ids": (2,)}
    engine = engine_of(**options, prefill_chunk=16, reuse_cache=True)
    with compilations() as found:
        assert engine.warm_up() == 7
        assert found.total() == 7
    rng, asked = np.random.default_rng(0), 0
    with compilations() as found:
        while asked < 500 or engine.pending:
            if asked < 500 and engine.free:
                tokens = rng.integers(8, ARCH.vocab_size, rng.integers(1, 25)).tolist()
                limit = int(rng.integers(1, 33) if asked % 8 == 0 else rng.integers(1, 6))
                engine.submit([request((f"t{asked // 2}", asked % 2), tokens, limit, cache_key=asked)])
                asked += 1
                if rng.random() < 0.5:
                    continue
            engine.step()
            for ticket, done in engine.poll():
                task, attempt = ticket
                key = 2 * int(task[1:]) + attempt
                if asked < 500 and len(done.tokens) < 20:
                    # A later turn, of one of the lengths that come, on the cache of the one before.
                    held = engine._schedule._held.get(key)
                    more = rng.integers(8, ARCH.vocab_size, rng.integers(0, 12)).tolist()
                    if held is not None and len(held.tokens) + 1 + len(more) <= 24:
                        tokens = (*held.tokens, int(done.tokens[-1]), *more)
                        engine.submit([request(ticket, tokens, 3, cache_key=key)])
                        asked += 1
                        continue
                engine.release(key)
    assert engine.take_metrics()["cache/reused_fraction"] > 0.3
    assert not found


def test_requests_with_rules_are_warmed_up_too() -> None:
    options: dict[str, Any] = {"slots": 4, "max_prompt_length": 8, "max_completion_length": 8, "logprobs": 2}
    plain, asked = SamplingParams(8), (SamplingParams(8, top_k=5, top_p=0.9), SamplingParams(8, stop_token_ids=(3, 4, 5)))
    without = engine_of(**options).warm_up((plain,))
    engine = engine_of(**options)
    shapes = len(engine._shapes.decode())
    assert engine.warm_up((plain, *asked)) == without + shapes
    with compilations() as found:
        for index, sampling in enumerate(({}, {"top_k": 5}, {"stop_token_ids": (3, 4, 5)}, {"min_p": 0.1}, {})):
            tokens = list(range(8, 8 + 1 + index))
            engine.submit([request((f"t{index}", attempt), tokens, 8, **sampling) for attempt in range(2)])
            while engine.pending:
                engine.step()
                engine.poll()
    assert not found


@pytest.mark.parametrize(
    ("slots", "prompt", "completion", "continued", "programs"),
    [
        (64, 128, 128, True, (3, 2, 8)),
        (64, 128, 128, False, (3, 0, 4)),
        (64, 2048, 2048, True, (4, 9, 15)),
        (1, 1, 1, True, (1, 1, 1)),
    ],
)
def test_the_set_is_small(slots: int, prompt: int, completion: int, continued: bool, programs: tuple[int, int, int]) -> None:
    shapes = shapes_of(slots, max(1, slots // 8), prompt, completion, 256, None, continued)
    assert (len(shapes.prompts), len(shapes.pieces) * len(shapes.seen), len(shapes.decode())) == programs


def test_one_shape_serves_every_step_of_a_batch_invariant_engine() -> None:
    usual = shapes_of(8, 2, 100, 300, 256, None, continued=True)
    assert len(usual.decode()) > 3
    assert usual.largest().decode() == [Size(8, sum(usual.prompt_arenas), sum(usual.own_arenas), (4, 13))]


def test_every_size_has_a_shape() -> None:
    shapes = shapes_of(8, 2, 100, 70, 256, None, continued=True)
    assert ladder(16, 2, 100) == (16, 32, 64, 100)
    assert (ladder(16, 4, 100), ladder(16, 4, 200)) == ((16, 100), (16, 64, 200))
    assert [least(shapes.prompts, size) for size in (1, 24, 25, 49, 99)] == [48, 48, 48, 96, 100]
    sizes = shapes.decode()
    assert len(set(sizes)) == len(sizes)
    assert shapes.fitting([Size(1, 0, 1, (0, 1))]) == sizes[0]
    assert all(shapes.fitting([size]).holds(size) for size in sizes)
    assert shapes.fitting([Size(8, 1, 1, (0, 1)), Size(1, 32, 1, (4, 1)), Size(1, 1, 48, (1, 6))]) == Size(8, 32, 48, (4, 6))
    assert sum(shapes.own_arenas) == 8 * 6  # of a rollout of 170 tokens with a first prompt of one


def test_few_rollouts_with_long_completions_have_shapes_of_their_own() -> None:
    shapes = shapes_of(64, 8, 46, 512, 256, None, continued=False)
    assert (shapes.rows, shapes.ends) == ((24, 64), ([16, 48, 128], [128, 256, 512, 1024]))
    few = [size for size in shapes.decode() if size.rows == 24]
    assert few == [Size(24, 48, own, (2, 16)) for own in (128, 256, 512)]  # 24 rollouts have 384 blocks at most
    assert shapes.fitting([Size(24, 48, 384, (2, 16))]) == few[-1]
    assert shapes.fitting([Size(25, 16, 128, (2, 3))]) == Size(64, 16, 128, (2, 4))
    assert all(shapes_of(64, 8, 46, 64, 256, None, continued).rows == (64,) for continued in (False, True))
    assert shapes_of(15, 8, 46, 512, 256, None, continued=False).rows == (15,)


def test_a_small_cache_is_split_between_the_pools_and_never_exceeded() -> None:
    for blocks in range(7, 60):
        shapes = shapes_of(4, 2, 100, 80, 256, blocks * 32, continued=True)
        prompts, own = sum(shapes.prompt_arenas), sum(shapes.own_arenas)
        assert prompts >= 4
        assert own >= 3
        assert prompts + own <= blocks
        assert prompts + own == min(blocks, 4 * (4 + 6))
