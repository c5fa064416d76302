"""Slots lie split over the data axes, heads over `tensor`, and are written in place."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from rljax.sampler.cache import empty_slots, slots_sharding
from tests.tiny_model import ARCH, mesh_of, some_requests, warm_engine

DATA = ("replica", "fsdp")


@pytest.mark.parametrize("mesh", ["one", "tensor"])
def test_empty_slots_are_idle_and_laid_out(mesh: str) -> None:
    slots = empty_slots(ARCH, 8, 40, 16, jnp.dtype("bfloat16"), mesh_of(mesh))
    assert len(slots.cache) == ARCH.num_layers
    for leaf in jax.tree.leaves(slots.cache):
        assert (leaf.shape, leaf.dtype) == ((8, 2, 40, 8), jnp.bfloat16)
        assert leaf.sharding.spec == PartitionSpec(DATA, "tensor")
    assert slots.out_tokens.shape == (8, 16)
    assert slots.remaining.tolist() == [0] * 8
    assert slots.remaining.sharding.spec == PartitionSpec(DATA)


def test_the_layout_names_every_field() -> None:
    mesh = mesh_of("one")
    slots = jax.eval_shape(lambda: empty_slots(ARCH, 8, 40, 16, jnp.dtype("float32"), mesh))
    placed = jax.tree.map(lambda at, part: jax.tree.map(lambda _: at, part), slots_sharding(mesh), slots)
    assert jax.tree.structure(placed) == jax.tree.structure(slots)


def test_slots_are_donated_to_the_programs_that_write_them() -> None:
    engine = warm_engine()
    engine.submit(some_requests(2))
    before = engine._state
    engine.step()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.cache))
    engine.abort()
