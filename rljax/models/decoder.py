"""The decoder: one forward pass for training, prefill and decode.

Owns the parameters, their logical axes and the forward pass. Refuses to own sharding rules (mesh.py), losses and the
sampler's schedule.

Queries, keys and values of one key-value head are stored next to each other in one array, and so are the two halves of
the gated MLP: one product where there would be three or two, and a tensor-parallel split that never cuts a group.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from rljax.matmul import matmul, product_outputs_first
from rljax.mesh import DATA_AXES, constrain
from rljax.models.arch import Arch
from rljax.models.attention import attend, segment_mask
from rljax.pytree import Params

INIT_STD = 0.02

Remat = Literal["none", "dots", "full"]
"""What the backward pass recomputes."""

_SAVED = "product"  # name of the products that `dots` keeps

_INPUTS = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}
"""How many dims of each weight are contracted."""


class KeyValue(NamedTuple):
    """Keys and values of one layer, or stacked over the layers along a leading dim."""

    key: Float[Array, "*l b k t c"]
    value: Float[Array, "*l b k t c"]


Attention = Callable[[Array, KeyValue, Any], tuple[Array, Any]]
"""From the queries [b, s, k, m, c] and the fresh keys and values of some tokens, and one layer's cache, to what the queries
attended to (the shape of the queries) and the cache with the tokens in it. Without a cache: their keys and values."""


class Block(nnx.Module):
    """One transformer block, or a stack of them when `layers` gives the leading dim."""

    def __init__(self, arch: Arch, rngs: nnx.Rngs, layers: int | None = None):
        d, k, m, c, f = arch.embed_dim, arch.num_kv_heads, arch.queries_per_kv, arch.head_dim, arch.ffn_dim
        size, name = ((), ()) if layers is None else ((layers,), ("layers",))
        self.eps, self.outputs_first = arch.norm_eps, layers is None
        self.attn_norm = _ones((*size, d), (*name, "embed"))
        self.mlp_norm = _ones((*size, d), (*name, "embed"))
        shapes: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
            "qkv": ((d, k, m + 2, c), ("embed", "kv_heads", "qkv", "head_dim")),
            "out": ((k, m, c, d), ("kv_heads", "queries", "head_dim", "embed")),
            "gate_up": ((d, 2, f), ("embed", "gate_up", "ffn")),
            "down": ((f, d), ("ffn", "embed")),
        }
        for weight, (shape, axes) in shapes.items():
            if self.outputs_first:
                shape, axes = (_outputs_first(dims, _INPUTS[weight]) for dims in (shape, axes))
            setattr(self, weight, _normal(rngs, (*size, *shape), (*name, *axes)))

    def __call__(
        self,
        hidden: Float[Array, "b s d"],
        rope: Float[Array, "b s c"],
        attention: Attention,
        cache: Any,
        dtype: jnp.dtype,
    ) -> tuple[Float[Array, "b s d"], Any]:
        """Return the block's output, and what its attention has seen."""
        qkv = keep(self._project("qkv", rms_norm(hidden, self.attn_norm[...], self.eps).astype(dtype)))
        query, key = rotate(qkv[..., :-2, :], rope[:, :, None, None]), rotate(qkv[..., -2, :], rope[:, :, None])
        fresh = KeyValue(jnp.swapaxes(key, 1, 2), jnp.swapaxes(qkv[..., -1, :], 1, 2))
        attended, seen = attention(query, fresh, cache)
        hidden = hidden + keep(self._project("out", keep(attended)))
        gate_up = keep(self._project("gate_up", rms_norm(hidden, self.mlp_norm[...], self.eps).astype(dtype)))
        return hidden + self._project("down", swiglu(gate_up)), seen

    def _project(self, name: str, x: Array) -> Array:
        """Multiply x by a weight of this block."""
        weight = getattr(self, name)[...]
        return (project_outputs_first if self.outputs_first else project)(x, weight, _INPUTS[name])


class Decoder(nnx.Module):
    """Token ids to final hidden states.

    The blocks are stacked and scanned, so that compile time does not grow with depth; or, in the sampler's layout,
    separate, so that a decode step reads each weight where it lies instead of first copying it out of the stack, and with
    the output dims of each weight before its input dims, the order in which products with few rows are fastest.
    """

    def __init__(self, arch: Arch, rngs: nnx.Rngs, stacked: bool = True):
        self.arch = arch
        self.embed = _normal(rngs, (arch.vocab_size, arch.embed_dim), ("vocab", "embed"))
        if stacked:
            self.layers: Block | nnx.List[Block] = Block(arch, rngs, arch.num_layers)
        else:
            self.layers = nnx.List([Block(arch, rngs) for _ in range(arch.num_layers)])
        self.final_norm = _ones((arch.embed_dim,), ("embed",))
        if not arch.tie_embeddings:
            self.head = _normal(rngs, (arch.vocab_size, arch.embed_dim), ("vocab", "embed"))

    @property
    def head_table(self) -> Float[Array, "v d"]:
        """The output head, one row per token; the embedding table itself when they are tied."""
        return (self.embed if self.arch.tie_embeddings else self.head)[...]

    def __call__(
        self,
        tokens: Int[Array, "b s"],
        positions: Int[Array, "b s"],
        attention: Attention,
        cache: Sequence[Any] | None = None,
        *,
        dtype: jnp.dtype,
        remat: Remat = "none",
    ) -> tuple[Float[Array, "b s d"], KeyValue | tuple[Any, ...]]:
        """Return the normalised final hidden states, and per layer what its attention has seen.

        Which tokens see which others is up to `attention`: `within_segments`, or one that reads and writes a cache. A cache
        has one entry per block and needs the separate layout. Products are made in `dtype` with float32 sums,
        everything between them in float32. `remat` is what the backward pass recomputes: nothing, all but the large products
        (`dots`), or every block (`full`).
        """
        rope = rope_table(self.arch, positions)
        hidden = _look_up(self.embed[...], tokens)
        hidden = constrain(hidden, DATA_AXES, "context")
        if isinstance(self.layers, Block):
            graph, stacked = nnx.split(self.layers)

            def block(hidden: Array, state: Any) -> tuple[Array, KeyValue]:
                hidden, seen = nnx.merge(graph, state)(hidden, rope, attention, None, dtype)
                return constrain(hidden, DATA_AXES, "context"), seen

            hidden, seen = jax.lax.scan(_REMAT[remat](block), hidden, stacked)
        else:
            seen = []
            for index, layer in enumerate(self.layers):
                hidden, layer_seen = layer(hidden, rope, attention, None if cache is None else cache[index], dtype)
                seen.append(layer_seen)
            seen = tuple(seen)
        return rms_norm(hidden, self.final_norm[...], self.arch.norm_eps).astype(dtype), seen


def within_segments(
    positions: Int[Array, "b s"], segments: Int[Array, "b s"], parents: Int[Array, "b s"] | None = None
) -> Attention:
    """Return the attention of whole sequences, packed in rows, to themselves.

    A token sees the tokens of its own segment, and of the segment that `parents` names for it (a prompt that several
    continuations share), at its own or an earlier position; segment 0 is padding, whose outputs are finite and mean nothing.
    """
    mask = segment_mask(positions, segments, parents)
    return lambda query, fresh, _: (attend(query, *fresh, mask), fresh)


def logits(decoder: Decoder, hidden: Float[Array, "*b d"]) -> Float[Array, "*b v"]:
    """Return float32 logits of every vocabulary entry."""
    return jnp.einsum("...d,vd->...v", hidden, decoder.head_table, preferred_element_type=jnp.float32)


def _look_up(table: Float[Array, "v d"], tokens: Int[Array, "b s"]) -> Float[Array, "b s d"]:
    """Return the rows of the table in float32."""
    if table.dtype != jnp.bfloat16:
        return jnp.take(table, tokens, axis=0).astype(jnp.float32)
    # XLA:CPU would convert the whole table before it takes rows of bfloat16; rows of integers it takes as they are.
    # The barrier keeps that reinterpretation, which XLA:CPU makes a copy, from being moved out of a loop and away from them.
    table, tokens = jax.lax.optimization_barrier((table, tokens))
    bits = jnp.take(jax.lax.bitcast_convert_type(table, jnp.uint16), tokens, axis=0)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32)


def project(x: Array, weight: Array, inputs: int) -> Array:
    """Contract the last `inputs` dims of x with the first ones of weight, as one matrix product."""
    rows, out = x.shape[: x.ndim - inputs], weight.shape[inputs:]
    return matmul(x.reshape(*rows, -1), weight.reshape(-1, *out))


def project_outputs_first(x: Array, weight: Array, inputs: int) -> Array:
    """Contract the last `inputs` dims of x with the last ones of weight, as one matrix product; not for training."""
    rows, out = x.shape[: x.ndim - inputs], weight.shape[: weight.ndim - inputs]
    return product_outputs_first(x.reshape(*rows, -1), weight.reshape(*out, -1)).astype(x.dtype)


def keep(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Mark a value that the `dots` policy keeps for the backward pass; changes nothing.

    A bfloat16 value is kept as integers: XLA:CPU stacks bfloat16 values of scanned layers by rewriting the whole stack
    for each layer.
    """
    return _keep_bits(x) if x.dtype == jnp.bfloat16 else checkpoint_name(x, _SAVED)


def _named_bits(x: Array) -> Array:
    bits = checkpoint_name(jax.lax.bitcast_convert_type(x, jnp.uint16), _SAVED)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


_keep_bits = jax.custom_jvp(_named_bits)
_keep_bits.defjvp(lambda primals, tangents: (_named_bits(*primals), tangents[0]))


@jax.custom_vjp
def swiglu(gate_up: Float[Array, "*b 2 f"]) -> Float[Array, "*b f"]:
    """Return silu(gate) * up, in float32 inside (arXiv:2002.05202 eq. 6, SwiGLU)."""
    gate, up = _halves(gate_up)
    return (gate * jax.nn.sigmoid(gate) * up).astype(gate_up.dtype)


def _swiglu_forward(gate_up: Array) -> tuple[Array, Array]:
    return swiglu(gate_up), gate_up


def _swiglu_backward(gate_up: Array, cotangent: Array) -> tuple[Array]:
    # Written out, so that both halves are made in one pass instead of being padded and added.
    gate, up = _halves(gate_up)
    share, cotangent = jax.nn.sigmoid(gate), cotangent.astype(jnp.float32)
    d_gate = cotangent * up * share * (1 + gate * (1 - share))
    return (jnp.stack([d_gate, cotangent * gate * share], axis=-2).astype(gate_up.dtype),)


def _halves(gate_up: Array) -> tuple[Array, Array]:
    return gate_up[..., 0, :].astype(jnp.float32), gate_up[..., 1, :].astype(jnp.float32)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)


def rms_norm(x: Float[Array, "*b d"], scale: Float[Array, " d"], eps: float) -> Float[Array, "*b d"]:
    """Return x / rms(x) * scale over the last dim (arXiv:1910.07467 eq. 4)."""
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return normal * scale.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


def rope_table(arch: Arch, positions: Int[Array, "b s"]) -> Float[Array, "b s c"]:
    """Return cosines then sines of each position's angles, half the channels each."""
    angles = positions[..., None].astype(jnp.float32) * arch.rope.inverse_frequencies(arch.head_dim)[None, None]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def rotate(x: Float[Array, "*b c"], table: Float[Array, "*a c"]) -> Float[Array, "*b c"]:
    """Rotate channel i with channel i + c/2 by the table's angles (arXiv:2104.09864 eq. 34, half layout)."""
    cos, sin = jnp.split(table, 2, axis=-1)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@cache
def _blueprint(arch: Arch, stacked: bool = True) -> tuple[Any, Any]:
    """Return the module's graph definition and its abstract parameters with their metadata."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(arch, nnx.Rngs(0), stacked)))


def merge(arch: Arch, params: Params) -> Decoder:
    """Return the decoder made of `params`, a nested dict of arrays; stacked or, as `unstack` returns them, separate."""
    return nnx.merge(_blueprint(arch, "qkv" in params["layers"])[0], params)


def unstack(params: Params) -> Params:
    """Return the parameters in the sampler's layout: one entry per block, output dims first."""
    layers = params["layers"]
    count = len(jax.tree.leaves(layers)[0])
    turned = {
        name: jnp.moveaxis(leaf, range(1, 1 + _INPUTS[name]), range(-_INPUTS[name], 0)) if name in _INPUTS else leaf
        for name, leaf in layers.items()
    }
    return {**params, "layers": {i: {name: leaf[i] for name, leaf in turned.items()} for i in range(count)}}


def abstract_params(arch: Arch, dtype: jnp.dtype = jnp.dtype("float32"), stacked: bool = True) -> Params:
    """Return shapes and types of all parameters, as the nested dict that `merge` takes."""
    leaves = nnx.to_pure_dict(_blueprint(arch, stacked)[1])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), leaves)


def logical_axes(arch: Arch, stacked: bool = True) -> dict[str, Any]:
    """Return the logical axis names of every parameter, in the shape of `abstract_params`."""
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda variable: variable.replace(variable.get_metadata()["axes"]),
            _blueprint(arch, stacked)[1],
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
    )


def init_params(arch: Arch, seed: int) -> Params:
    """Return random float32 parameters: normal weights of standard deviation 0.02, unit norms."""
    return nnx.to_pure_dict(nnx.split(Decoder(arch, nnx.Rngs(seed)))[1])


def count(arch: Arch) -> int:
    """Return the number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(arch)))


def _outputs_first(dims: tuple[Any, ...], inputs: int) -> tuple[Any, ...]:
    return (*dims[inputs:], *dims[:inputs])


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    return nnx.Param(jax.random.normal(rngs.params(), shape) * INIT_STD, axes=axes)


def _ones(shape: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
    return nnx.Param(jnp.ones(shape), axes=axes)


_REMAT: dict[Remat, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "none": lambda block: block,
    # Norms, rotations, softmax and activations cost little to compute again and much to keep.
    "dots": partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_SAVED)),
    "full": jax.checkpoint,
}
