"""What the learner trains: parameters or an adapter of them, a critic, optimizer states, and how they lie on the mesh.

Owns the state that a checkpoint saves; the base of an adapter is none of it, for it never changes. Refuses to own the update
(step.py) and files.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from rljax.algorithm_config import AlgorithmConfig
from rljax.config import Config
from rljax.learner.moments import Int8Moment, is_int8
from rljax.learner.optimizer import Optimizer, OptimizerState
from rljax.mesh import LEARNER_RULES, param_shardings, sharding
from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params, decaying, logical_axes
from rljax.models.lora import LoraSpec, abstract_adapter, adapter_axes, spec_of
from rljax.pytree import Params, leaf_names, owner_of, pytree, with_fields


@pytree
class CriticState:
    """Everything an update of the critic changes."""

    params: Params
    """Master parameters: the `trunk`, a decoder without output head, and `value`, a weight per dim of its width."""
    optimizer: OptimizerState
    """Moments and counters."""


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
    critic: CriticState | None = None
    """Critic of its own parameters (`advantage` = gae); None where there is none."""


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


def critic_arch(arch: Arch) -> Arch:
    """Return the architecture of the critic's trunk: the policy's, without the table of an output head."""
    return dataclasses.replace(arch, tie_embeddings=True)


def critic_optimizer(arch: Arch, config: Config) -> Optimizer:
    """Return the critic's update rule: the policy's at `critic_learning_rate`, whose schedule keeps the same proportions."""
    own, rate = config.optimizer, config.critic_learning_rate
    changed = {"learning_rate": rate, "min_learning_rate": own.min_learning_rate * rate / own.learning_rate}
    trunk = critic_arch(arch)
    axes = {"trunk": logical_axes(trunk), "value": ("embed",)}
    return Optimizer(own.model_copy(update=changed), lambda _: {"trunk": decaying(trunk), "value": True}, axes)


def first_critic(params: Params, optimizer: Optimizer) -> CriticState:
    """Return the critic before the first step: the policy's trunk, and weights that value everything 0."""
    trunk = {name: leaf for name, leaf in params.items() if name != "head"}
    own = {"trunk": trunk, "value": jnp.zeros_like(params["final_norm"], jnp.float32)}
    return CriticState(own, optimizer.init(own))


def learner_params(arch: Arch, mesh: Mesh, dtype: Any) -> Params:
    """Return shapes, types and learner shardings of the parameters, for loading them onto the mesh."""
    shapes, axes = abstract_params(arch, jnp.dtype(dtype)), logical_axes(arch)
    return with_shardings(shapes, param_shardings(mesh, shapes, axes, LEARNER_RULES))


def adapter_params(arch: Arch, mesh: Mesh, spec: LoraSpec) -> Params:
    """Return shapes, types and learner shardings of the factors of an adapter."""
    shapes = abstract_adapter(arch, spec)
    return with_shardings(shapes, param_shardings(mesh, shapes, adapter_axes(spec), LEARNER_RULES))


def abstract_state(arch: Arch, mesh: Mesh, config: Config, optimizer: Optimizer) -> TrainState:
    """Return shapes, types and shardings of the whole state: moments, reference and critic lie like their parameters."""
    spec = spec_of(arch, config.lora)
    params = learner_params(arch, mesh, config.model.param_dtype) if spec is None else adapter_params(arch, mesh, spec)
    reference, beta = jax.eval_shape(partial(first_reference, config=config.algorithm), params)
    critic = None
    if config.algorithm.advantage == "gae":
        critic = jax.eval_shape(partial(first_critic, optimizer=critic_optimizer(arch, config)), params)
    state = {"optimizer": jax.eval_shape(optimizer.init, params), "reference": reference, "beta": beta, "critic": critic}
    return with_fields(TrainState, params=params, **_placed(state, params, mesh))


def _placed(state: Any, params: Params, mesh: Mesh) -> Any:
    """Lay every leaf like the parameter that its path ends with, but whole along dims of which it holds a mean.

    What belongs to no parameter (counters) is whole everywhere. Raises ValueError where a block of a moment in 8 bits would
    be split.
    """
    owners = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))

    def place(path: Any, leaf: Any) -> Any:
        owner = owner_of(path, owners)
        if is_int8(leaf):
            assert owner is not None, "moments are those of parameters"
            _check_blocks(path, leaf.codes.shape, leaf.scale.shape, owner.sharding.spec, mesh)
            codes, scale = (_on(mesh, part, owner.sharding.spec) for part in (leaf.codes, leaf.scale))
            return with_fields(Int8Moment, codes=codes, scale=scale)
        spec = []
        if owner is not None:
            parts = zip(leaf.shape, owner.shape, owner.sharding.spec, strict=True)
            spec = [axis if size == whole else None for size, whole, axis in parts]
        return _on(mesh, leaf, spec)

    return jax.tree_util.tree_map_with_path(place, state, is_leaf=is_int8)


def _on(mesh: Mesh, leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(mesh, *spec))


def _check_blocks(path: Any, codes: tuple[int, ...], scale: tuple[int, ...], spec: Any, mesh: Mesh) -> None:
    for numbers, blocks, axis in zip(codes, scale, spec, strict=True):
        if axis is not None and blocks % mesh.shape[axis]:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"mesh.{axis} ({mesh.shape[axis]}) must divide the {blocks} blocks of {numbers // blocks} numbers in {name}, "
                f"which optimizer.moments_dtype = 'int8' keeps whole; choose another mesh.{axis}, or moments in 'bfloat16'"
            )


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Attach a tree of shardings to a tree of shapes."""
    return jax.tree.map(lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at), shapes, shardings)
