"""What the compiled sampler does not do: copy the cache, or move parameters between devices."""

import math
import re
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import jax
import pytest

from rljax.models.block import INPUTS
from rljax.sampler.paged import Pieces
from tests.tiny_model import ARCH, some_requests, warm_engine

EXCHANGES = {"all-gather", "all-gather-start", "all-to-all", "collective-permute"}
SMALLEST_MATRIX = ARCH.embed_dim * ARCH.num_heads * ARCH.head_dim
INSTRUCTION = re.compile(r"= (?:\()?\w+\[([\d,]*)\]\S* (?:.*?\) )?([a-z][a-z-]*)\(")


@cache
def programs(mesh: str, weights_dtype: str = "as-is", cache_dtype: str = "as-is") -> dict[str, str]:
    """Return the text of the compiled programs."""
    engine = warm_engine(mesh, weights_dtype=weights_dtype, cache_dtype=cache_dtype)
    assert engine._params is not None
    lowered = {}
    with jax.set_mesh(engine.mesh):
        engine.submit(some_requests(2))
        with pytest.MonkeyPatch.context() as patch:
            for name in ("_fill", "_decode"):
                patch.setattr(engine, name, partial(note, lowered, name, getattr(engine, name)))
            engine.step()
    engine.clear()
    with jax.set_mesh(engine.mesh):
        pieces = engine._pieces(Pieces, [()] * engine.shards, 16, 2)
        lowered["_extend"] = engine._extend.lower(engine._params, engine._state, pieces)
    return {name.removeprefix("_"): program.compile().as_text() for name, program in lowered.items()}


def note(lowered: dict[str, Any], name: str, program: Any, *arguments: Any) -> Any:
    """Lower the program for these arguments, then run it."""
    lowered[name] = program.lower(*arguments)
    return program(*arguments)


def outputs(text: str, operations: set[str]) -> Iterator[tuple[int, ...]]:
    """Yield the (first) output shape of every instruction of these kinds, those inside fused ones included."""
    for line in text.splitlines():
        found = INSTRUCTION.search(line)
        if found and found[2] in operations:
            yield tuple(int(size) for size in found[1].split(",") if size)


@pytest.mark.parametrize("program", ["decode", "fill", "extend"])
@pytest.mark.parametrize(("mesh", "heads", "dtype"), [("one", 2, "as-is"), ("tensor", 1, "as-is"), ("tensor", 1, "int8")])
def test_no_copy_of_a_layers_cache_is_made(mesh: str, heads: int, dtype: str, program: str) -> None:
    text = programs(mesh, cache_dtype=dtype)[program]
    leaves = jax.tree.leaves(warm_engine(mesh, cache_dtype=dtype)._state.cache)
    sizes = {leaf.addressable_shards[0].data.shape for leaf in leaves if leaf.ndim == 4}
    for layer in sizes:
        assert layer[1] == heads
        if layer[0] > 1:  # a single block XLA:CPU does copy
            assert f"{'s8' if dtype == 'int8' else 'f32'}[{','.join(map(str, layer))}]" in text  # else nothing is looked for
    kinds = {tuple(sorted(layer)) for layer in sizes if layer[0] > 1}
    # XLA:CPU has no product of mixed types: in decode steps one layer's codes become an array, which no loop carries (below).
    copies = {"copy", "transpose"} | (set() if (dtype, program) == ("int8", "decode") else {"convert"})
    assert [shape for shape in outputs(text, copies) if tuple(sorted(shape)) in kinds] == []


@pytest.mark.parametrize("program", ["decode", "fill", "extend"])
def test_data_shards_do_not_exchange_parameters(program: str) -> None:
    assert [shape for shape in outputs(programs("fsdp")[program], EXCHANGES) if math.prod(shape) >= SMALLEST_MATRIX] == []


def test_data_shards_do_not_exchange_slots() -> None:
    assert list(outputs(programs("fsdp")["decode"], EXCHANGES)) == []


@pytest.mark.parametrize("program", ["decode", "fill", "extend"])
def test_tensor_shards_do_not_exchange_parameters(program: str) -> None:
    assert [shape for shape in outputs(programs("tensor")[program], EXCHANGES) if math.prod(shape) >= SMALLEST_MATRIX] == []


def carried(text: str, kind: str) -> int:
    """Add up the elements of a type that the largest loop of a program carries."""
    carries = [line.split(") while(")[0] for line in text.splitlines() if ") while(" in line]
    shapes = [re.findall(rf"\b{kind}\[([\d,]*)\]", carry) for carry in carries]
    return max(sum(math.prod(int(size) for size in shape.split(",") if size) for shape in found) for found in shapes)


def test_no_array_of_a_quantised_weight_outlives_its_product() -> None:
    plain, small = (programs("one", kind)["decode"] for kind in ("as-is", "int8"))
    engine = warm_engine(weights_dtype="int8")
    assert engine._params is not None
    weights = [part for layer in engine._params["layers"].values() for name, part in layer.items() if name in INPUTS]
    codes, scales = (
        sum(getattr(weight, part).addressable_shards[0].data.size for weight in weights) for part in ("codes", "scale")
    )
    assert carried(small, "s8") == codes > 0 == carried(plain, "s8")
    assert carried(small, "f32") == carried(plain, "f32") - codes + scales


def test_no_array_of_a_quantised_cache_is_carried_from_token_to_token() -> None:
    plain, small = (programs("tensor", cache_dtype=kind)["decode"] for kind in ("as-is", "int8"))
    cache = warm_engine("tensor", cache_dtype="int8")._state.cache
    pools = [arenas[0] for layer in cache for arenas in layer]  # what the tables of this program cover
    codes = sum(part.addressable_shards[0].data.size for pool in pools for part in (pool.key, pool.value))
    assert carried(small, "s8") == codes > 0 == carried(plain, "s8")
    assert carried(small, "f32") == carried(plain, "f32") - codes + codes // ARCH.head_dim
