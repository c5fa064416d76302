"""A mixture of experts: the router, the products grouped by expert, and how they lie on the mesh.

Owns the choice of experts, its record and replay, the losses that keep it balanced, and expert parallelism. Refuses to
own the block around it, and which tokens count how often.

No token is dropped and no expert has a capacity: the rows of all tokens are sorted by expert, and one grouped product
multiplies each run of rows by its expert's weight. On a mesh, tokens stay on their data shard and are whole on every
device of the `expert` and `tensor` axes; each device adds up what its experts, and its part of their width, give them.

    tokens of a data shard ──> sort by expert ──> gate and up ──> activation ──> down ──> back in order ──> sum over devices
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_batching import sequential_vmap
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from rljax.mesh import row_axes
from rljax.models.arch import Arch
from rljax.models.gates import gated
from rljax.models.int8 import Int8Weight, axes_of, grouped_int8_product
from rljax.models.parameters import constant, weight
from rljax.models.remat import keep
from rljax.pytree import with_fields

EXPERT_INPUTS = {"gate_up": (-3,), "down": (-2,)}
"""Which dims of these weights are contracted, counted from the end."""


class Routing(NamedTuple):
    """What the routers of one layer decided, or of several along a leading dim."""

    choices: Int[Array, "*l b s e"]
    """Experts each token went to, e of them."""
    logits: Float[Array, "*l b s x"]
    """The router's scores of all experts."""


class RouterSums(NamedTuple):
    """Sums over tokens of what the routers did, per layer with experts; those of micro-batches and devices add up."""

    z: Float[Array, " l"]
    """Of log(sum(exp(logits)))^2."""
    chosen: Float[Array, "l x"]
    """Of the choices that fell on each expert."""
    probability: Float[Array, "l x"]
    """Of each expert's probability."""


class _Weights(NamedTuple):
    """The parameters of the experts, each with the experts along its first dim; the sampler's weights may be in 8 bits."""

    gate_up: Float[Array, "x d 2 f"] | Int8Weight
    down: Float[Array, "x f d"] | Int8Weight
    gate_up_bias: Float[Array, "x 2 f"] | None
    down_bias: Float[Array, "x d"] | None


class Moe(nnx.Module):
    """The experts of one layer, or of several when `size` gives the leading dims."""

    def __init__(self, arch: Arch, rngs: nnx.Rngs, size: tuple[int, ...] = (), names: tuple[str, ...] = ()):
        experts = arch.experts
        assert experts is not None, "only an architecture with experts has them"
        d, x, f = arch.embed_dim, experts.count, experts.ffn_dim
        self.arch, self.experts = arch, experts
        self.router = weight(rngs, (*size, d, x), (*names, "embed", "router"))
        self.gate_up = weight(rngs, (*size, x, d, 2, f), (*names, "experts", "embed", "gate_up", "ffn"))
        self.down = weight(rngs, (*size, x, f, d), (*names, "experts", "ffn", "embed"))
        if experts.router_bias:
            self.router_bias = constant(0.0, (*size, x), (*names, "router"))
        if experts.bias:
            self.gate_up_bias = constant(0.0, (*size, x, 2, f), (*names, "experts", "gate_up", "ffn"))
            self.down_bias = constant(0.0, (*size, x, d), (*names, "experts", "embed"))

    def __call__(
        self, x: Float[Array, "b s d"], choices: Int[Array, "b s e"] | None = None
    ) -> tuple[Float[Array, "b s d"], Routing]:
        """Return the weighted sum of each token's experts, and how they were chosen.

        With `choices`, tokens go where those say, and only the weights come from the router; those whose entries are
        negative go where the router sends them.
        """
        logits = self._scores(x)
        own = jax.lax.top_k(jax.lax.stop_gradient(logits), self.experts.per_token)[1]
        choices = own if choices is None else jnp.where(choices < 0, own, choices)
        chosen = jnp.take_along_axis(logits, choices, axis=-1)
        if self.experts.normalize:
            shares = jax.nn.softmax(chosen, axis=-1)
        else:
            shares = jnp.exp(chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True))
        biases = (self.gate_up_bias[...], self.down_bias[...]) if self.experts.bias else (None, None)
        weights = _Weights(self.gate_up.get_value(), self.down.get_value(), *biases)  # not `[...]`: an Int8Weight is no array
        return _on_mesh(self.arch, x, shares, choices, weights), Routing(choices, logits)

    def _scores(self, x: Float[Array, "b s d"]) -> Float[Array, "b s x"]:
        # In float32 and exact, whatever the compute dtype: a rounded score sends a token to other experts.
        precision = jax.lax.Precision.HIGHEST
        logits = jnp.einsum("bsd,dx->bsx", x.astype(jnp.float32), self.router[...].astype(jnp.float32), precision=precision)
        return logits + self.router_bias[...].astype(jnp.float32)[None, None] if self.experts.router_bias else logits


def router_sums(routing: Routing, weight: Int[Array, "b s"]) -> RouterSums:
    """Sum over the tokens what the losses below are made of, each token `weight` times; where that is 0, nothing counts.

    Gradients flow to the logits through `z` and `probability`.
    """
    logits = jnp.where((weight > 0)[None, ..., None], routing.logits, 0.0)
    times = weight.astype(jnp.float32)[None]
    z = jnp.sum(jnp.square(jax.nn.logsumexp(logits, axis=-1)) * times, axis=(1, 2))
    probability = jnp.sum(jax.nn.softmax(logits, axis=-1) * times[..., None], axis=(1, 2))
    return RouterSums(z, chosen_sums(routing.choices, weight, logits.shape[-1]), probability)


def chosen_sums(choices: Int[Array, "l b s e"], weight: Int[Array, "b s"], experts: int) -> Float[Array, "l x"]:
    """Count the choices that fell on each expert of each layer, those of each token `weight` times."""
    times = jnp.repeat(weight.reshape(-1), choices.shape[-1])

    def count(layer: Int[Array, "b s e"]) -> Int[Array, " x"]:
        return jnp.zeros(experts, jnp.int32).at[layer.reshape(-1)].add(times)

    return jax.vmap(count)(choices).astype(jnp.float32)


def z_loss(z: Float[Array, " l"], tokens: Float[Array, ""]) -> Float[Array, ""]:
    """Return the mean of log(sum(exp(logits)))^2 over layers and tokens (arXiv:2202.08906 eq. 5).

    `z` is from `router_sums`. The losses of parts of the tokens, each with the count of all `tokens`, add up to the whole.
    """
    return jnp.mean(z) / tokens


def balance_loss(chosen: Float[Array, "l x"], probability: Float[Array, "l x"], tokens: Float[Array, ""]) -> Float[Array, ""]:
    """Return the mean over layers of x * sum over experts of (choices per token) * (mean probability).

    arXiv:2101.03961 eq. 4 to 6, times the choices per token; least, and equal to that number, when both are uniform.
    `chosen` counts the choices of all `tokens`. It has no gradient, so where it is known beforehand the loss is linear
    in `probability`: those of parts of the tokens add up to the whole (arXiv:2501.11873).
    """
    layers, experts = chosen.shape
    return experts / layers * jnp.sum(jax.lax.stop_gradient(chosen) / tokens * (probability / tokens))


def max_load(chosen: Float[Array, "l x"]) -> Float[Array, ""]:
    """Return the largest share of a layer's choices that fell on one expert: 1/x when all are equal; 0 without any."""
    return jnp.max(chosen / jnp.maximum(jnp.sum(chosen, axis=-1, keepdims=True), 1.0))


def _on_mesh(arch: Arch, x: Array, shares: Array, choices: Array, weights: _Weights) -> Float[Array, "b s d"]:
    """Run the experts, each device on its own tokens and experts; without a mesh, on all of them."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _experts(arch, None, x, shares, choices, weights)
    axes = row_axes()
    rows = PartitionSpec(
        axes if x.shape[0] % math.prod(mesh.shape[axis] for axis in axes) == 0 else None,
        "context" if x.shape[1] % mesh.shape["context"] == 0 else None,
    )
    specs: list[Any] = [
        _spec(weights.gate_up, "gate_up", ("expert", None, None, "tensor")),
        _spec(weights.down, "down", ("expert", "tensor", None)),
        None if weights.gate_up_bias is None else PartitionSpec("expert", None, "tensor"),
        None if weights.down_bias is None else PartitionSpec("expert"),
    ]
    layout = _Weights(*specs)
    local = partial(_experts, arch, ("expert", "tensor"))
    # The widths that `fsdp` splits are gathered on entry; the sum over devices makes the result the same on all of them.
    run = jax.shard_map(local, in_specs=(rows, rows, rows, layout), out_specs=rows, check_vma=False)
    return run(x, shares, choices, weights)


def _spec(weight: Array | Int8Weight, name: str, axes: tuple[str | None, ...]) -> Any:
    if not isinstance(weight, Int8Weight):
        return PartitionSpec(*axes)
    parts = axes_of(axes, EXPERT_INPUTS[name])
    return with_fields(Int8Weight, codes=PartitionSpec(*parts.codes), scale=PartitionSpec(*parts.scale))


def _experts(
    arch: Arch, axes: tuple[str, str] | None, x: Array, shares: Array, choices: Array, weights: _Weights
) -> Float[Array, "b s d"]:
    """Add up what this device's experts give to its tokens, and then over the devices that hold the others."""
    b, s, d = x.shape
    per_token, held = choices.shape[-1], jax.tree.leaves(weights)[0].shape[0]
    first = 0 if axes is None else jax.lax.axis_index(axes[0]) * held
    expert = choices.reshape(-1) - first
    mine = (expert >= 0) & (expert < held)
    # Rows of other devices' experts come last, beyond every group: the grouped product leaves them 0.
    order = jnp.argsort(jnp.where(mine, expert, held), stable=True)
    back = jnp.argsort(order, stable=True)
    sizes = jnp.bincount(jnp.where(mine, expert, held), length=held + 1)[:held].astype(jnp.int32)
    local = jnp.clip(expert, 0, held - 1)[order]
    rows = jnp.take(x.reshape(b * s, d), order // per_token, axis=0)

    def times(rows: Float[Array, "n d"], weight: Array | Int8Weight) -> Float[Array, "n f"]:
        inputs = rows.shape[-1]
        if not isinstance(weight, Int8Weight):
            return grouped_matmul(rows, weight.reshape(held, inputs, -1), sizes)
        codes, scale = weight.codes.reshape(held, inputs, -1), weight.scale.reshape(held, -1)
        return grouped_int8_product(rows, codes, scale, sizes, local).astype(rows.dtype)

    gate_up = keep(times(rows, weights.gate_up))
    gate_up = gate_up.reshape(-1, 2, gate_up.shape[-1] // 2)
    if weights.gate_up_bias is not None:
        gate_up = gate_up + jnp.take(weights.gate_up_bias, local, axis=0).astype(x.dtype)
    out = times(gated(gate_up, arch), weights.down)
    if weights.down_bias is not None:
        counted = mine[order] if axes is None else mine[order] & (jax.lax.axis_index(axes[1]) == 0)
        out = out + jnp.where(counted[:, None], jnp.take(weights.down_bias, local, axis=0), 0.0).astype(x.dtype)
    parts = jnp.take(out, back, axis=0).reshape(b, s, per_token, d).astype(jnp.float32)
    # What other devices' experts give is 0 here, except for the biases inside, which the mask takes away.
    shares = jnp.where(mine.reshape(shares.shape), shares, 0.0)
    total = jnp.einsum("bsed,bse->bsd", parts, shares)
    return (total if axes is None else jax.lax.psum(total, axes)).astype(x.dtype)


@jax.custom_vjp
def grouped_matmul(x: Float[Array, "n d"], w: Float[Array, "x d f"], sizes: Int[Array, " x"]) -> Float[Array, "n f"]:
    """Multiply each run of rows by its own weight: the first sizes[0] rows by w[0], and so on; rows beyond give 0.

    Types are those of `matmul.matmul`: products in the dtype of `x` with float32 sums, forward and backward, and a
    gradient of `w` in its own dtype.
    """
    return _grouped(x, w, sizes)


# JAX has no rule for a grouped product along another dim, and needs none: `mesh.by_replica` leaves one replica per device.
@sequential_vmap
def _grouped(x: Array, w: Array, sizes: Array) -> Array:
    return jax.lax.ragged_dot(x, w.astype(x.dtype), sizes, preferred_element_type=jnp.float32).astype(x.dtype)


def _grouped_forward(x: Array, w: Array, sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _grouped(x, w, sizes), (x, w, sizes)


def _grouped_backward(residuals: tuple[Array, Array, Array], g: Array) -> tuple[Array, Array, None]:
    x, w, sizes = residuals
    return _grouped(g, jnp.swapaxes(w, 1, 2), sizes), _outer_sums(x, g, sizes).astype(w.dtype), None


@sequential_vmap
def _outer_sums(x: Array, g: Array, sizes: Array) -> Float[Array, "x d f"]:
    """Sum the outer products of each group's rows."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
    )
    return jax.lax.ragged_dot_general(x, g, sizes, numbers, preferred_element_type=jnp.float32)


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)
