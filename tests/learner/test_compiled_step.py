"""What the compiled train step looks like: its size does not grow with depth, and where its devices talk to each other."""

import dataclasses
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import pytest

from rljax.learner.step import Learner
from rljax.mesh import data_shards
from rljax.models.arch import Arch
from tests.tiny_model import ARCH, batch_of, config_of, mesh_of, some_groups


def lowered(arch: Arch, mesh: str) -> Any:
    """Return the train step of a model before XLA has compiled it."""
    devices = mesh_of(mesh)
    learner = Learner(arch, devices, config_of(data_shards(devices)))
    batch = learner.put(batch_of(learner, some_groups()))
    with jax.set_mesh(devices):
        return learner._step.lower(learner.abstract_state, batch, None, None, None)


def test_the_program_does_not_grow_with_depth() -> None:
    shallow, deep = (len(lowered(dataclasses.replace(ARCH, num_layers=layers), "fsdp").as_text()) for layers in (10, 30))
    assert deep < 1.2 * shallow


class Collective(NamedTuple):
    """One exchange between devices in a compiled program."""

    kind: str
    size: int
    """Numbers in its largest result."""
    path: str
    """Where it comes from in the Python code."""


_CALLS = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=\{?%?([\w.\-]+)")
_COLLECTIVE = re.compile(r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def computations(text: str) -> Iterator[tuple[str, list[str]]]:
    """Split a program into its computations; the entry comes as `ENTRY`."""
    for block in re.split(r"\n\n+", text):
        lines = block.strip().splitlines()
        if lines and lines[0].endswith("{"):
            head = lines[0]
            yield "ENTRY" if head.startswith("ENTRY") else head.split()[0].lstrip("%"), lines[1:]


def collectives(text: str, start: str, skip: str | None = None) -> list[Collective]:
    """Return the collectives of a computation and of those it calls, but not of `skip`."""
    known, found, seen, todo = dict(computations(text)), [], {skip}, [start]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in known.get(name, ()):
            if match := _COLLECTIVE.search(line):
                sizes = [_numbers(dims) for dims in re.findall(r"\[([\d,]*)\]", match[1])]
                source = re.search(r'op_name="([^"]*)"', line)
                found.append(Collective(match[2], max(sizes), source[1] if source else ""))
            todo += _CALLS.findall(line)
    return found


def _numbers(dims: str) -> int:
    count = 1
    for dim in filter(None, dims.split(",")):
        count *= int(dim)
    return count


def loop_over_micro_batches(text: str) -> str:
    """Return the name of the body of the program's outermost loop."""
    bodies = [re.search(r"body=%?([\w.\-]+)", line) for line in dict(computations(text))["ENTRY"] if " while(" in line]
    sizes = {body[1]: len(collectives(text, body[1])) for body in bodies if body}
    return max(sizes, key=lambda name: sizes[name])


@cache
def compiled(mesh: str) -> str:
    return lowered(ARCH, mesh).compile().as_text()
