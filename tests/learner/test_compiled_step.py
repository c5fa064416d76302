"""The lowered train step does not grow with depth."""

import dataclasses

import jax

from rljax.learner.step import Learner
from rljax.mesh import data_shards
from tests.tiny_model import ARCH, batch_of, config_of, mesh_of, some_groups


def size_of_program(layers: int) -> int:
    """Return the length of the text of a train step of so many layers, before XLA has compiled it."""
    mesh = mesh_of("fsdp")
    learner = Learner(dataclasses.replace(ARCH, num_layers=layers), mesh, config_of(data_shards(mesh)))
    batch = learner.put(batch_of(learner, some_groups()))
    with jax.set_mesh(mesh):
        return len(learner._step.lower(learner.abstract_state, batch, None, None, None).as_text())


def test_the_program_does_not_grow_with_depth() -> None:
    assert size_of_program(30) < 1.2 * size_of_program(10)
