"""Publishing: the learner's parameters become the sampler's.

Owns the compiled copy from the learner's layout (split over `fsdp`, master type) into the sampler's (whole on every
data shard, one array per block, output dims first, sampling type), with an adapter merged into it or beside it, and a
quantised base as arrays, and nothing else. It is a copy, made inside the mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.mesh import LEARNER_RULES, SAMPLER_RULES, param_shardings
from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params, logical_axes, unstack
from rljax.models.lora import LoraSpec, abstract_adapter, adapter_axes, merged, scaled
from rljax.models.quantized import dequantised
from rljax.pytree import Params

Publish = Callable[..., Params]
"""From (trained, base=None) to the sampler's copy of a model: `trained` itself, or `base` with `trained` as its adapter."""


def learner_layout(mesh: Mesh) -> Callable[[Arch, Params], Params]:
    """Return the function from a model and its abstract parameters to the layout they are loaded in before publishing."""
    return lambda arch, shapes: param_shardings(mesh, shapes, logical_axes(arch), LEARNER_RULES)


def publisher(arch: Arch, mesh: Mesh, dtype: Any, lora: LoraSpec | None = None, separate: bool = False) -> Publish:
    """Return the compiled function from the learner's parameters to the sampler's.

    Args:
        arch: The model.
        mesh: Devices that both layouts lie on.
        dtype: Type of the sampler's parameters.
        lora: What adapters are, where they are trained.
        separate: Keep one copy of the base and publish the adapter beside it, instead of merging it into a new copy.

    Raises:
        ValueError: a dim does not divide over `mesh.tensor`.
    """
    layout = param_shardings(mesh, abstract_params(arch, stacked=False), logical_axes(arch, stacked=False), SAMPLER_RULES)

    def copied(params: Params) -> Params:
        return unstack(arch, _cast(params, dtype))

    copy = jax.jit(copied, out_shardings=layout)
    if lora is None:
        return _whole_only(copy)
    beside = jax.jit(
        lambda adapter: unstack(arch, _cast(scaled(adapter, lora), dtype)), out_shardings=_adapter_layout(arch, mesh, lora)
    )
    # Merged in float32 and rounded once, whatever the types on both sides.
    inside = jax.jit(lambda adapter, base: copied(merged(arch, _cast(base, "float32"), adapter, lora)), out_shardings=layout)
    copies: list[tuple[Params, Params]] = []  # the base that was copied last, and its copy

    def publish(trained: Params, base: Params | None = None) -> Params:
        if base is None:
            return copy(trained)
        if not separate:
            return inside(trained, base)
        if not copies or copies[0][0] is not base:
            copies[:] = [(base, copy(base))]
        kept, factors = copies[0][1], beside(trained)["layers"]
        return {**kept, "layers": {layer: {**own, **factors[layer]} for layer, own in kept["layers"].items()}}

    return publish


def _whole_only(copy: Callable[[Params], Params]) -> Publish:
    def publish(trained: Params, base: Params | None = None) -> Params:
        assert base is None, "a base needs the spec of its adapters"
        return copy(trained)

    return publish


def _adapter_layout(arch: Arch, mesh: Mesh, spec: LoraSpec) -> Params:
    shapes = jax.eval_shape(lambda adapter: unstack(arch, adapter), abstract_adapter(arch, spec))
    axes = {
        target: {side: names[1:] for side, names in sides.items()} for target, sides in adapter_axes(spec)["layers"].items()
    }
    return param_shardings(mesh, shapes, {"layers": dict.fromkeys(arch.layers, axes)}, SAMPLER_RULES)


def _cast(params: Params, dtype: Any) -> Params:
    """Return parameters or factors in a type; what a quantised base becomes is what the learner computes with."""
    whole = {**params, "layers": dequantised(params["layers"], dtype)}
    return jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), whole)
