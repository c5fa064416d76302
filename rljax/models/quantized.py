"""A frozen base in few bits (QLoRA, arXiv:2305.14314): its large weights as integers and scales, and the way back.

Owns which weights of the blocks are quantised and along which dims, how the results lie on a mesh, and how a layer becomes
arrays again. Refuses to own the arithmetic (qwix, which is imported nowhere else), files, and what is trained.

    weight [l, inputs, outputs]    int8: one scale per output     nf4: one scale per tile of inputs and output
        -> QArray(qvalue, scale), each with the layers as first dim: a scan takes it like an array
        -> one layer at a time, inside the recomputed part of the forward pass: qvalue * scale

Embeddings, head, norms, biases, routers and experts stay as they are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from rljax.mesh import LEARNER_RULES, param_shardings
from rljax.models.block import INPUTS
from rljax.pytree import Params, leaf_names

TILE = 64
"""Most inputs that share a scale in nf4, as in the paper; fewer where 64 does not divide the dim."""

_SMALLEST_TILE = 8  # with fewer, codes and float32 scales take more than int8 does


def _qwix() -> Any:
    try:
        import qwix  # optional: only a quantised base needs it
    except ModuleNotFoundError as err:
        raise ValueError(
            "lora.base_dtype: a quantised base needs the package qwix; install it with `pip install 'rljax[qlora]'`, or set "
            "lora.base_dtype = 'as-is'"
        ) from err
    return qwix


def quantised(name: str, weight: Float[Array, "l *w"], kind: str) -> Any:
    """Return a stacked weight of a block as a QArray of qwix, with float32 scales.

    One layer is worked on at a time, so that what is in between takes the room of one layer.

    Args:
        name: The weight, a key of `INPUTS`.
        weight: It, stacked over the layers.
        kind: `int8` or `nf4`.

    Raises:
        ValueError: qwix is not installed, or no tile fits the weight.
    """
    qwix, inputs = _qwix(), INPUTS[name]

    def layer(weight: Array) -> Any:
        weight = weight.astype(jnp.float32)
        if kind == "int8":
            return qwix.quantize(weight, jnp.int8, channelwise_axes=range(inputs, weight.ndim))
        tile = _tile(name, weight.shape[inputs - 1])
        return _along(inputs - 1, weight.ndim, partial(qwix.quantize, qtype="nf4", tiled_axes={0: tile}))(weight)

    assert kind in ("int8", "nf4"), kind
    return jax.lax.map(layer, weight)


def _tile(name: str, size: int) -> int:
    tile = max(length for length in range(1, TILE + 1) if size % length == 0)
    if tile < _SMALLEST_TILE:
        raise ValueError(
            f"lora.base_dtype = 'nf4': no tile of {_SMALLEST_TILE} to {TILE} inputs divides the {size} inputs of {name}; "
            "set it to 'int8'"
        )
    return tile


def _along(dim: int, ndim: int, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function of whole arrays from one of vectors along a dim.

    Qwix flattens what it turns into codes and back, and a flattened array cannot stay split over a mesh. A vector is flat.
    """
    for _ in range(ndim - dim - 1):
        function = jax.vmap(function, in_axes=1, out_axes=1)
    for _ in range(dim):
        function = jax.vmap(function)
    return function


def dequantised(layer: Params, dtype: Any) -> Params:
    """Return the parameters of a layer, or of a stack of them, with arrays of a type where something is quantised.

    Products of code and scale are float32 and rounded once. What is not quantised is returned as it is.
    """
    return {name: _restored(part).astype(dtype) if _is_quantised(part) else part for name, part in layer.items()}


def _is_quantised(part: Any) -> bool:
    return hasattr(part, "qvalue")  # its type can only be named where qwix is installed


def _restored(part: Any) -> Array:
    qwix, shapes = _qwix(), zip(part.qvalue.shape, part.scale.shape, strict=True)
    if part.qtype != "nf4":
        return qwix.dequantize(part)
    tiled = next(dim for dim, (codes, scales) in enumerate(shapes) if codes != scales)
    return _along(tiled, part.qvalue.ndim, qwix.dequantize)(part)


def abstract_base(mesh: Mesh, model: Params, axes: Params, kind: str) -> Params:
    """Return shapes, types and learner shardings of a quantised base.

    Args:
        mesh: Devices of the learner.
        model: Shapes, types and shardings of the model, stacked.
        axes: Logical axis names of its parameters.
        kind: `as-is`, `int8` or `nf4`.

    Raises:
        ValueError: qwix is not installed, no tile fits a weight, or its tiles do not divide over the mesh.
    """
    if kind == "as-is":
        return model
    layers = dict(model["layers"])
    for name in sorted(INPUTS.keys() & layers.keys()):
        whole = jax.eval_shape(partial(quantised, name, kind=kind), layers[name])
        parts, structure = jax.tree.flatten(whole)
        shapes = {"layers": {name: dict(zip(leaf_names(whole), parts, strict=True))}}
        # What is shared by a whole dim is on every device; a scale of tiles is split as the tiles are.
        split = partial(_split, axes["layers"][name])
        try:
            placed = param_shardings(mesh, shapes, jax.tree.map(split, shapes), LEARNER_RULES)["layers"][name]
        except ValueError as err:
            raise ValueError(f"lora.base_dtype = '{kind}': {err}") from err
        both = zip(parts, placed.values(), strict=True)
        found = [jax.ShapeDtypeStruct(part.shape, part.dtype, sharding=at) for part, at in both]
        layers[name] = jax.tree.unflatten(structure, found)
    return {**model, "layers": layers}


def _split(names: tuple[str, ...], part: Any) -> tuple[str, ...]:
    return tuple("shared" if size == 1 else name for name, size in zip(names, part.shape, strict=True))


def num_bytes(params: Any) -> int:
    """Return how much memory a tree of arrays or shapes takes (bytes); two 4-bit codes share a byte, which `nbytes` denies."""

    def bits(dtype: Any) -> int:
        return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits

    return sum(leaf.size * bits(leaf.dtype) for leaf in jax.tree.leaves(params)) // 8
