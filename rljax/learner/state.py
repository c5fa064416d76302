"""What the learner trains: parameters and optimizer state, and how they lie on the mesh.

Owns the state that a checkpoint saves. Refuses to own the update (step.py) and files.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.learner.optimizer import Optimizer, OptimizerState
from rljax.mesh import LEARNER_RULES, param_shardings, sharding
from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params, logical_axes
from rljax.pytree import Params, pytree


@pytree
class TrainState:
    """Everything an optimizer step changes."""

    params: Params
    """Master parameters."""
    optimizer: OptimizerState
    """Moments and counters."""


def learner_params(arch: Arch, mesh: Mesh, dtype: Any) -> Params:
    """Return shapes, types and learner shardings of the parameters, for loading them onto the mesh."""
    shapes, axes = abstract_params(arch, jnp.dtype(dtype)), logical_axes(arch)
    return with_shardings(shapes, param_shardings(mesh, shapes, axes, LEARNER_RULES))


def abstract_state(arch: Arch, mesh: Mesh, dtype: Any, optimizer: Optimizer) -> TrainState:
    """Return shapes, types and shardings of the whole state: each moment lies like its parameter."""
    params = learner_params(arch, mesh, dtype)
    moments = jax.eval_shape(optimizer.init, params)
    placed = {shape_path(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def place(path: Any, leaf: Any) -> Any:
        # A moment's path ends with its parameter's path; counters match none.
        found = (placed[shape_path(path[start:])] for start in range(len(path)) if shape_path(path[start:]) in placed)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=next(found, sharding(mesh)))

    return TrainState(params, jax.tree_util.tree_map_with_path(place, moments))


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Attach a tree of shardings to a tree of shapes."""
    return jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, shardings)


def shape_path(path: Any) -> str:
    """Return a tree path as text."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")
