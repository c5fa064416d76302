"""Publishing: the learner's parameters become the sampler's.

Owns the compiled copy from the learner's layout (split over `fsdp`, master type) into the sampler's (whole on every
data shard, one array per block, output dims first, sampling type; large weights in 8 bits where that is asked for), with an
adapter merged into it or beside it, and a quantised base as arrays, and nothing else. It is a copy, made inside the mesh.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.learner.state import with_shardings
from rljax.mesh import LEARNER_RULES, SAMPLER_RULES, param_shardings
from rljax.models.arch import Arch
from rljax.models.block import CONTRACTED
from rljax.models.decoder import abstract_params, logical_axes, unstack
from rljax.models.int8 import Int8Weight, axes_of, to_int8
from rljax.models.lora import LoraSpec, abstract_adapter, adapter_axes, merged, scaled
from rljax.models.quantized import dequantised
from rljax.pytree import Params

Publish = Callable[..., Params]
"""From (trained, base=None) to the sampler's copy of a model: `trained` itself, or `base` with `trained` as its adapter."""


def learner_layout(mesh: Mesh) -> Callable[[Arch, Params], Params]:
    """Return the function from a model and its abstract parameters to the layout they are loaded in before publishing."""
    return lambda arch, shapes: param_shardings(mesh, shapes, logical_axes(arch), LEARNER_RULES)


def published_params(arch: Arch, mesh: Mesh, dtype: Any, weights_dtype: str = "as-is") -> Params:
    """Return shapes, types and shardings of the sampler's parameters; for the arguments see `publisher`.

    Raises:
        ValueError: a dim does not divide over `mesh.tensor`.
    """
    shapes, axes = abstract_params(arch, jnp.dtype(dtype), stacked=False), logical_axes(arch, stacked=False)
    if weights_dtype != "as-is":
        shapes = _large(shapes, lambda shape, dims: jax.eval_shape(partial(to_int8, contracted=dims), shape))
        axes = _large(axes, axes_of)
    return with_shardings(shapes, param_shardings(mesh, shapes, axes, SAMPLER_RULES))


def publisher(
    arch: Arch, mesh: Mesh, dtype: Any, lora: LoraSpec | None = None, separate: bool = False, weights_dtype: str = "as-is"
) -> Publish:
    """Return the compiled function from the learner's parameters to the sampler's.

    Args:
        arch: The model.
        mesh: Devices that both layouts lie on.
        dtype: Type of the sampler's parameters.
        lora: What adapters are, where they are trained.
        separate: Keep one copy of the base and publish the adapter beside it, instead of merging it into a new copy.
        weights_dtype: How projections and experts are kept: `as-is`, in `dtype`, or `int8`.

    Raises:
        ValueError: a dim does not divide over `mesh.tensor`.
    """
    assert weights_dtype in ("as-is", "int8"), weights_dtype
    layout = jax.tree.map(lambda leaf: leaf.sharding, published_params(arch, mesh, dtype, weights_dtype))

    def copied(params: Params) -> Params:
        if weights_dtype == "as-is":
            return unstack(arch, _cast(params, dtype))
        # Codes are the nearest to the master weights, not to a copy of them that was rounded to `dtype` before.
        codes = _large(unstack(arch, _cast(params, "float32")), to_int8)
        return jax.tree.map(lambda leaf: leaf if _is_int8(leaf) else leaf.astype(dtype), codes, is_leaf=_is_int8)

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


def _large(params: Params, change: Callable[[Any, tuple[int, ...]], Any]) -> Params:
    """Apply a function of a weight and its contracted dims to the projections and experts of separate layers."""

    def changed(part: Params, contracted: Mapping[str, Any]) -> Params:
        return {name: one(value, contracted[name]) if name in contracted else value for name, value in part.items()}

    def one(value: Any, contracted: Any) -> Any:
        return changed(value, contracted) if isinstance(contracted, Mapping) else change(value, contracted)

    return {**params, "layers": {number: changed(layer, CONTRACTED) for number, layer in params["layers"].items()}}


def _is_int8(leaf: Any) -> bool:
    return isinstance(leaf, Int8Weight)
