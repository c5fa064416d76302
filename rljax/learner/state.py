"""What the learner trains: parameters or an adapter of them, and optimizer state, and how they lie on the mesh.

Owns the state that a checkpoint saves; the base of an adapter is none of it, for it never changes. Refuses to own the update
(step.py) and files.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from rljax.config import AlgorithmConfig, Config
from rljax.learner.optimizer import Optimizer, OptimizerState
from rljax.mesh import LEARNER_RULES, param_shardings, sharding
from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params, logical_axes
from rljax.models.lora import LoraSpec, abstract_adapter, adapter_axes, spec_of
from rljax.pytree import Params, pytree, with_fields


@pytree
class TrainState:
    """Everything an optimizer step changes."""

    params: Params
    """What is trained: the model's master parameters, or the factors of an adapter in float32."""
    optimizer: OptimizerState
    """Moments and counters."""
    reference: Params | None
    """Reference policy, or its adapter, float32, where it moves (`reference_sync_steps`); None where it stays the first."""
    beta: Float[Array, ""] | None
    """Weight of the divergence from it, float32, where it adapts (`kl_target`); None where it is that of the recipe."""


def first_reference(params: Params, config: AlgorithmConfig) -> tuple[Params | None, Any]:
    """Return the reference policy and its weight before the first step, as far as they change."""
    reference = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params) if config.reference_sync_steps else None
    return reference, None if config.kl_target is None else jnp.asarray(config.beta, jnp.float32)


def next_reference(reference: Params | None, params: Params, updates: Int[Array, ""], config: AlgorithmConfig) -> Params | None:
    """Return the reference policy after an update: every `reference_sync_steps`, (1 - alpha) * reference + alpha * params.

    alpha = 1 refreshes it; a small alpha at every step is an exponential average (TR-DPO, arXiv:2404.09656).
    """
    if reference is None:
        return None
    alpha = config.reference_mixup_alpha

    def mixed() -> Params:
        return jax.tree.map(lambda old, new: (1 - alpha) * old + alpha * new.astype(jnp.float32), reference, params)

    return jax.lax.cond(updates % config.reference_sync_steps == 0, mixed, lambda: reference)


def learner_params(arch: Arch, mesh: Mesh, dtype: Any) -> Params:
    """Return shapes, types and learner shardings of the parameters, for loading them onto the mesh."""
    shapes, axes = abstract_params(arch, jnp.dtype(dtype)), logical_axes(arch)
    return with_shardings(shapes, param_shardings(mesh, shapes, axes, LEARNER_RULES))


def adapter_params(arch: Arch, mesh: Mesh, spec: LoraSpec) -> Params:
    """Return shapes, types and learner shardings of the factors of an adapter."""
    shapes = abstract_adapter(arch, spec)
    return with_shardings(shapes, param_shardings(mesh, shapes, adapter_axes(spec), LEARNER_RULES))


def abstract_state(arch: Arch, mesh: Mesh, config: Config, optimizer: Optimizer) -> TrainState:
    """Return shapes, types and shardings of the whole state: moments and reference lie like their parameters."""
    spec = spec_of(arch, config.lora)
    params = learner_params(arch, mesh, config.model.param_dtype) if spec is None else adapter_params(arch, mesh, spec)
    moments = jax.eval_shape(optimizer.init, params)
    placed = {shape_path(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(params)}

    def place(path: Any, leaf: Any) -> Any:
        # A moment's path ends with its parameter's path; counters match none.
        found = (placed[shape_path(path[start:])] for start in range(len(path)) if shape_path(path[start:]) in placed)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=next(found, sharding(mesh)))

    reference, beta = jax.eval_shape(partial(first_reference, config=config.algorithm), params)
    return with_fields(
        TrainState,
        params=params,
        optimizer=jax.tree_util.tree_map_with_path(place, moments),
        reference=jax.tree_util.tree_map_with_path(place, reference),
        beta=jax.tree_util.tree_map_with_path(place, beta),
    )


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Attach a tree of shardings to a tree of shapes."""
    return jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, shardings)


def shape_path(path: Any) -> str:
    """Return a tree path as text."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".")
