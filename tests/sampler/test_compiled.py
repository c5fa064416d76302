"""What the compiled sampler does not do: copy the cache, or move parameters between devices."""

import math
import re
from collections.abc import Iterator
from functools import cache

import jax
import pytest

from tests.tiny_model import ARCH, some_requests, warm_engine

SLOTS, POSITIONS = 8, 40
EXCHANGES = {"all-gather", "all-gather-start", "all-to-all", "collective-permute"}
SMALLEST_MATRIX = ARCH.embed_dim * ARCH.num_heads * ARCH.head_dim
INSTRUCTION = re.compile(r"= (?:\()?\w+\[([\d,]*)\]\S* (?:.*?\) )?([a-z][a-z-]*)\(")


@cache
def programs(mesh: str) -> dict[str, str]:
    """Return the text of the compiled programs."""
    engine = warm_engine(mesh)
    assert engine._params is not None
    with jax.set_mesh(engine.mesh):
        decode = engine._decode.lower(engine._params, engine._state, engine._stop_ids)
        engine.submit(some_requests(2))
        fill = engine._fill.lower(engine._params, engine._state, engine._admit())
    engine.abort()
    return {"decode": decode.compile().as_text(), "fill": fill.compile().as_text()}


def outputs(text: str, operations: set[str]) -> Iterator[tuple[int, ...]]:
    """Yield the (first) output shape of every instruction of these kinds, those inside fused ones included."""
    for line in text.splitlines():
        found = INSTRUCTION.search(line)
        if found and found[2] in operations:
            yield tuple(int(size) for size in found[1].split(",") if size)


@pytest.mark.parametrize("program", ["decode", "fill"])
@pytest.mark.parametrize(("mesh", "shards", "heads"), [("one", 1, 2), ("tensor", 4, 1)])
def test_no_copy_of_a_layers_cache_is_made(mesh: str, shards: int, heads: int, program: str) -> None:
    # Of several slots on a device; a single one XLA:CPU does copy.
    text = programs(mesh)[program]
    layer = (SLOTS // shards, heads, POSITIONS, ARCH.head_dim)
    assert f"f32[{','.join(map(str, layer))}]" in text  # else nothing is looked for
    same = sorted(layer)
    assert [shape for shape in outputs(text, {"copy", "transpose", "convert"}) if sorted(shape) == same] == []


@pytest.mark.parametrize("program", ["decode", "fill"])
def test_data_shards_do_not_exchange_parameters(program: str) -> None:
    assert [shape for shape in outputs(programs("fsdp")[program], EXCHANGES) if math.prod(shape) >= SMALLEST_MATRIX] == []


def test_data_shards_do_not_exchange_slots() -> None:
    assert list(outputs(programs("fsdp")["decode"], EXCHANGES)) == []


@pytest.mark.parametrize("program", ["decode", "fill"])
def test_tensor_shards_do_not_exchange_parameters(program: str) -> None:
    assert [shape for shape in outputs(programs("tensor")[program], EXCHANGES) if math.prod(shape) >= SMALLEST_MATRIX] == []
