"""Slots lie split over the data axes, heads over `tensor`, and are written in place."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from rljax.sampler.cache import BLOCK, arena_sizes, empty_slots, slots_sharding
from rljax.sampler.paged import InBlocks
from tests.tiny_model import ARCH, mesh_of, some_requests, warm_engine

DATA = ("replica", "fsdp")


@pytest.mark.parametrize(("mesh", "shards"), [("one", 1), ("tensor", 4)])
def test_empty_slots_are_idle_and_laid_out(mesh: str, shards: int) -> None:
    slots = empty_slots(ARCH, InBlocks(), 8, (3,), (2, 5), 16, jnp.dtype("bfloat16"), mesh_of(mesh))
    assert len(slots.cache) == ARCH.num_layers
    for layer in slots.cache:
        for arenas, sizes in ((layer.prompt, (3,)), (layer.own, (2, 5))):
            assert [arena.key.shape for arena in arenas] == [(shards * size, 2, 8, BLOCK) for size in sizes]
            assert [arena.value.shape for arena in arenas] == [(shards * size, 2, BLOCK, 8) for size in sizes]
    for leaf in jax.tree.leaves(slots.cache):
        assert leaf.dtype == jnp.bfloat16
        assert leaf.sharding.spec == PartitionSpec(DATA, "tensor")
    assert slots.progress.out_tokens.shape == (8, 16)
    assert slots.progress.remaining.tolist() == [0] * 8
    assert slots.progress.remaining.sharding.spec == PartitionSpec(DATA)


def test_the_layout_names_every_field() -> None:
    mesh = mesh_of("one")
    slots = jax.eval_shape(lambda: empty_slots(ARCH, InBlocks(), 8, (3,), (2, 5), 16, jnp.dtype("float32"), mesh))
    placed = jax.tree.map(lambda at, part: jax.tree.map(lambda _: at, part), slots_sharding(mesh, InBlocks()), slots)
    assert jax.tree.structure(placed) == jax.tree.structure(slots)


@pytest.mark.parametrize(
    ("blocks", "first", "sizes"),
    [(1, 1, (1,)), (8, 8, (8,)), (8, 20, (8,)), (9, 8, (8, 1)), (100, 10, (10, 20, 60, 10)), (80, 10, (10, 10, 20, 40))],
)
def test_later_arenas_are_larger_and_all_blocks_are_in_one(blocks: int, first: int, sizes: tuple[int, ...]) -> None:
    assert arena_sizes(blocks, first) == sizes


def test_slots_are_donated_to_the_programs_that_write_them() -> None:
    engine = warm_engine()
    engine.submit(some_requests(2))
    before = engine._state
    engine.step()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.cache))
    engine.clear()
