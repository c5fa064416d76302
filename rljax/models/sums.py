"""Gradients of stacked layers, added where they lie to the sum over the micro-batches before.

Owns the way of that sum through the backward pass. Refuses to own the loop over micro-batches.

Left to itself, a backward pass over scanned layers writes a stack with the gradients of all of them, which is then added to
the sum: one more copy of the model, read and written once more in every micro-batch. Here the sum is what the backward pass
hands from layer to layer. Each adds its own part in place:

    forward:   hidden, sum  ->  layer 0  ->  layer 1  -> ... ->  `gathered`      the sum passes unused
    backward:  sum + all    <-  + g0     <-  + g1     <- ... <-  the sum, as if it were the gradient of what passed

So to differentiate by the sum gives the sum with this micro-batch in it, and nothing is differentiated by the layers.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.pytree import Params

SUMS = "sums"
"""Name of the sums among the parameters that `decoder.merge` takes."""


def with_sums(params: Params, sums: Params) -> Params:
    """Return a model's parameters to be differentiated by, with the sum of the gradients of its layers among them.

    Args:
        params: Stacked parameters of a model, without an adapter.
        sums: A tree like it, float32.
    """
    return {**params, "layers": jax.lax.stop_gradient(params["layers"]), SUMS: sums["layers"]}


def summed(sums: Params, fresh: Params) -> Params:
    """Return the sums with the gradients that were found by parameters `with_sums`, or by those of an adapter."""
    rest = {name: part for name, part in fresh.items() if name not in ("layers", SUMS)}
    added = jax.tree.map(jnp.add, {name: sums[name] for name in rest}, rest)
    layers = fresh[SUMS] if SUMS in fresh else jax.tree.map(jnp.add, sums["layers"], fresh["layers"])
    return {**added, "layers": layers}


@jax.custom_vjp
def passing(sums: Params, layer: Params, at: Mapping[str, Int[Array, ""]]) -> tuple[Params, Params]:
    """Return sums and a layer as they are; the gradient of the layer is added to that of the sums.

    Args:
        sums: Stacks of all layers, float32.
        layer: Parameters of one, by the same names.
        at: By name, its place in the stack.
    """
    return sums, layer


def _forward(sums: Params, layer: Params, at: Mapping[str, Int[Array, ""]]) -> tuple[Any, Any]:
    return (sums, layer), at


def _backward(at: Mapping[str, Int[Array, ""]], gradients: tuple[Params, Params]) -> tuple[Params, Params, None]:
    sums, layer = gradients

    def add(held: Array, fresh: Array, place: Array) -> Array:
        old = jax.lax.dynamic_index_in_dim(held, place, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(held, old + fresh, place, 0)

    # Nothing is differentiated by the layers themselves: see `with_sums`.
    added = {name: jax.tree.map(partial(add, place=at[name]), sums[name], layer[name]) for name in layer}
    return {**sums, **added}, jax.tree.map(jnp.zeros_like, layer), None


passing.defvjp(_forward, _backward)


@jax.custom_vjp
def gathered(hidden: Float[Array, "b s d"], passed: Any, sums: Any) -> Float[Array, "b s d"]:
    """Return the hidden states; what passed the layers has the sums for its gradient."""
    return hidden


gathered.defvjp(
    lambda hidden, passed, sums: (hidden, sums),
    lambda sums, gradient: (gradient, sums, jax.tree.map(jnp.zeros_like, sums)),
)
