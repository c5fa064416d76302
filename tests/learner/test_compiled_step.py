"""What the train step is made of: its size does not grow with depth, and replicas reduce their gradients once."""

import dataclasses
import math
import re
from collections import Counter
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from rljax.learner.critic import Critic
from rljax.learner.step import Learner
from rljax.mesh import data_shards
from tests.tiny_model import ARCH, batch_of, config_of, learner_of, mesh_of, some_groups


def lowered(learner: Learner) -> Any:
    """Return the train step before XLA has compiled it."""
    batch = learner.put(batch_of(learner, some_groups()))
    with jax.set_mesh(learner.mesh):
        return learner._step.lower(learner.abstract_state, batch, None, None, None)


def size_of_program(layers: int) -> int:
    """Return the length of the text of a train step of so many layers."""
    mesh = mesh_of("fsdp")
    learner = Learner(dataclasses.replace(ARCH, num_layers=layers), mesh, config_of(data_shards(mesh)))
    return len(lowered(learner).as_text())


def test_the_program_does_not_grow_with_depth() -> None:
    assert size_of_program(30) < 1.2 * size_of_program(10)


class Reduction(NamedTuple):
    """One sum over devices in a compiled program, of several arrays perhaps."""

    sizes: list[int]
    """Numbers in each of its results."""
    groups: list[list[int]]
    """The devices that are summed over."""

    def crosses(self, replica: int) -> bool:
        """Return whether it is over replicas of so many devices, each replica's next to each other."""
        return any(device // replica != group[0] // replica for group in self.groups for device in group)


_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=\{?%?([\w.\-]+)")
_REDUCTION = re.compile(r"= (.*?) (?:all-reduce|reduce-scatter)(?:-start)?\(")


def reductions(text: str) -> tuple[list[Reduction], list[Reduction]]:
    """Return the reductions of a compiled program that are in its loops, and those that happen once."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[1]
            entry = name if line.startswith("ENTRY") else entry
        bodies.setdefault(name, []).append(line)
    found: tuple[list[Reduction], list[Reduction]] = ([], [])
    todo, seen = [(entry, False)], set()
    while todo:
        if (place := todo.pop()) in seen:
            continue
        seen.add(place)
        for line in bodies[place[0]][1:]:
            if match := _REDUCTION.search(line):
                sizes = [math.prod(_numbers(dims)) for dims in re.findall(r"\[([\d,]*)\]", match[1])]
                found[0 if place[1] else 1].append(Reduction(sizes, _groups(line)))
            todo += [(called, place[1] or " while(" in line) for called in _CALLED.findall(line)]
    return found


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _groups(line: str) -> list[list[int]]:
    """Read the groups of devices in the notations of XLA: a list, a tiling of all devices, or axes of a mesh."""
    if match := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return [_numbers(group) for group in match[1].split("},{")]
    if match := re.search(r"replica_groups=(\[[\d,]+\]<=\S+)", line):
        return _tiled(match[1].removesuffix(",")).tolist()
    match = re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\))\))? \{(.*?)\}", line)
    assert match, f"groups in a notation that this test does not know: {line}"
    sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
    shape = list(sizes.values())
    devices = (_tiled(f"[{math.prod(shape)}]<={match[2]}") if match[2] else np.arange(math.prod(shape))).reshape(shape)
    summed = [list(sizes).index(axis) for axis in re.findall(r"'(\w+)'", match[3])]
    together = np.moveaxis(devices, summed, range(-len(summed), 0))
    return together.reshape(-1, math.prod(shape[axis] for axis in summed)).tolist()


def _tiled(text: str) -> np.ndarray:
    """Read [shape]<=[dims]T(order): all devices in the shape of `dims`, transposed, in the shape of `shape`."""
    shape, _, rest = text.partition("<=")
    dims, _, order = rest.partition("T")
    devices = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return devices.transpose(_numbers(order) or None).reshape(_numbers(shape))


def lowered_critic(learner: Learner) -> Any:
    """Return the critic's step before XLA has compiled it."""
    batch, state = learner.put(batch_of(learner, some_groups())).unrouted(), learner.abstract_state.critic
    with jax.set_mesh(learner.mesh):
        return Critic(learner)._step.lower(state, batch, batch.advantage, batch.advantage)


def assert_reduced_once(program: Any, params: Any, replica: int) -> None:
    """Check that gradients are summed over replicas (of so many devices) once, after the last micro-batch."""
    parts = Counter(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(params))
    in_loops, once = (
        [one for one in found if one.crosses(replica) and max(one.sizes) >= min(parts)]
        for found in reductions(program.compile().as_text())
    )
    assert in_loops == []
    (of_gradients,) = once
    assert parts <= Counter(of_gradients.sizes)


@pytest.mark.parametrize("mesh", ["replica", "mixed"])
def test_replicas_reduce_their_gradients_once(mesh: str) -> None:
    learner = learner_of(mesh)
    assert_reduced_once(lowered(learner), learner.abstract_state.params, learner.mesh.shape["fsdp"])


def test_replicas_reduce_the_critics_gradients_once() -> None:
    learner = learner_of("replica", algorithm={"advantage": "gae"})
    critic = learner.abstract_state.critic
    assert critic is not None
    assert_reduced_once(lowered_critic(learner), critic.params, 1)
