"""One transformer block: attention, and an MLP or experts, around a residual stream.

Owns the block's parameters, their logical axes, what is fixed at compile time about a layer, and the forward pass of one
layer. Refuses to own the stack of layers (decoder.py) and the inside of attention and experts.

Queries, keys and values of one key-value head are stored next to each other in one array, and so are the two halves of
the gated MLP: one product where there would be three or two, and a tensor-parallel split that never cuts a group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Num

from rljax.matmul import matmul, product_outputs_first
from rljax.models.arch import Arch, Rope
from rljax.models.attention import AttentionOptions, Scales
from rljax.models.gates import gated
from rljax.models.int8 import Int8Weight, int8_product
from rljax.models.lora import low_rank
from rljax.models.moe import EXPERT_INPUTS, Moe, Routing
from rljax.models.parameters import constant, weight
from rljax.models.remat import keep
from rljax.pytree import Params

INPUTS = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}
"""How many dims of each of these weights are contracted."""
CONTRACTED: Mapping[str, Any] = {
    **{name: tuple(range(-inputs, 0)) for name, inputs in INPUTS.items()},
    "moe": EXPERT_INPUTS,
}
"""Which dims of each large weight of the sampler's layout are contracted, counted from the end."""


class KeyValue(NamedTuple):
    """Keys and values of one layer, or stacked over the layers along a leading dim."""

    key: Num[Array, "*l b k t c"]
    value: Num[Array, "*l b k t c"]
    scales: Scales | None = None
    """Of keys and values that are codes."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What is fixed at compile time about a layer, and may differ from the next one."""

    attention: AttentionOptions
    """How it attends."""
    rope: Rope | None
    """How it rotates queries and keys; None leaves them as they are."""
    experts: bool
    """Whether it has experts in the place of the MLP."""


def layer_kinds(arch: Arch) -> tuple[LayerKind, ...]:
    """Return the kind of every layer."""
    scale = (arch.head_dim if arch.query_scalar is None else arch.query_scalar) ** -0.5

    def kind(layer: int) -> LayerKind:
        windowed = layer in arch.windowed_layers
        options = AttentionOptions(scale, arch.window if windowed else None, arch.attention_soft_cap)
        rope = arch.windowed_rope if windowed and arch.windowed_rope is not None else arch.rope
        return LayerKind(options, None if layer in arch.unrotated_layers else rope, arch.has_experts(layer))

    return tuple(kind(layer) for layer in arch.layers)


def windows(arch: Arch) -> list[int | None]:
    """Return the windows that layers have, each once and in the same order in every process, as programs must be."""
    return sorted({kind.attention.window for kind in layer_kinds(arch)}, key=str)


Attention = Callable[[Array, KeyValue, Any, AttentionOptions, Array | None], tuple[Array, Any]]
"""From the queries [b, s, k, m, c] and the fresh keys and values of some tokens, one layer's cache, its options and sinks, to
what the queries attended to (the shape of the queries) and the cache with the tokens in it. Without a cache: their keys and
values."""


class Tables(NamedTuple):
    """What all layers share in one forward pass."""

    ropes: Mapping[Rope, Float[Array, "b s r"]]
    attention: Attention
    dropout: float
    """Probability that a low-rank factor does not see a value; 0 outside of training."""


class Block(nnx.Module):
    """One transformer block, or a stack of several."""

    def __init__(self, arch: Arch, rngs: nnx.Rngs, layers: Sequence[int], *, stacked: bool, outputs_first: bool):
        """Declare the parameters of one layer, or of several along a leading dim.

        In a stack of layers of which some have experts, the MLP and the experts have leading dims of their own. `outputs_first`
        puts the output dims of each of `INPUTS` before its input dims.
        """
        d, k, m, c, f = arch.embed_dim, arch.num_kv_heads, arch.queries_per_kv, arch.head_dim, arch.ffn_dim
        experts = sum(arch.has_experts(layer) for layer in layers)
        assert stacked or len(layers) == 1, "a separate block is one layer"

        def stack(count: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
            return ((count,), ("layers",)) if stacked else ((), ())

        def declare(name: str, count: int, dims: tuple[int, ...], axes: tuple[str, ...]) -> nnx.Param:
            (size, stacked_axes), turn = stack(count), INPUTS[name]
            if outputs_first:
                dims, axes = (*dims[turn:], *dims[:turn]), (*axes[turn:], *axes[:turn])
            return weight(rngs, (*size, *dims), (*stacked_axes, *axes))

        size, name = stack(len(layers))
        norm = partial(constant, 0.0 if arch.norm_offset else 1.0)
        self.arch, self.outputs_first = arch, outputs_first
        if arch.pre_norm:
            self.attn_norm = norm((*size, d), (*name, "embed"))
        self.qkv = declare("qkv", len(layers), (d, k, m + 2, c), ("embed", "kv_heads", "qkv", "head_dim"))
        self.out = declare("out", len(layers), (k, m, c, d), ("kv_heads", "queries", "head_dim", "embed"))
        if arch.qkv_bias:
            self.qkv_bias = constant(0.0, (*size, k, m + 2, c), (*name, "kv_heads", "qkv", "head_dim"))
        if arch.out_bias:
            self.out_bias = constant(0.0, (*size, d), (*name, "embed"))
        if arch.qk_norm is not None:
            heads = arch.qk_norm == "all"
            self.query_norm = norm(
                (*size, *((k, m) if heads else ()), c), (*name, *(("kv_heads", "queries") if heads else ()), "head_dim")
            )
            self.key_norm = norm((*size, *((k,) if heads else ()), c), (*name, *(("kv_heads",) if heads else ()), "head_dim"))
        if arch.sinks:
            self.sinks = constant(0.0, (*size, k, m), (*name, "kv_heads", "queries"))
        if arch.post_norm:
            self.attn_post_norm, self.mlp_post_norm = (norm((*size, d), (*name, "embed")) for _ in range(2))
        if arch.pre_norm:
            self.mlp_norm = norm((*size, d), (*name, "embed"))
        if experts < len(layers):
            self.gate_up = declare("gate_up", len(layers) - experts, (d, 2, f), ("embed", "gate_up", "ffn"))
            self.down = declare("down", len(layers) - experts, (f, d), ("ffn", "embed"))
        if experts:
            self.moe = Moe(arch, rngs, *stack(experts))

    def __call__(
        self,
        hidden: Float[Array, "b s d"],
        kind: LayerKind,
        tables: Tables,
        cache: Any,
        choices: Int[Array, "b s e"] | None,
        factors: Params,
        dtype: jnp.dtype,
    ) -> tuple[Float[Array, "b s d"], Any, Routing | None]:
        """Return the block's output, what its attention has seen, and its routing.

        `factors` are those of an adapter, by projection; there may be none.
        """

        def project(name: str, x: Array) -> Array:
            return low_rank(name, self._project(name, x), x, factors, tables.dropout)

        attended, seen = self._attention(self._before(hidden, "attn_norm", dtype), kind, tables, cache, project)
        hidden = hidden + self._after(attended, "attn_post_norm")
        x = self._before(hidden, "mlp_norm", dtype)
        if kind.experts:
            mixed, routing = self.moe(x, choices)
        else:
            mixed, routing = project("down", gated(keep(project("gate_up", x)), self.arch)), None
        return hidden + self._after(mixed, "mlp_post_norm"), seen, routing

    def _attention(
        self, x: Float[Array, "b s d"], kind: LayerKind, tables: Tables, cache: Any, project: Callable[[str, Array], Array]
    ) -> tuple[Float[Array, "b s d"], Any]:
        qkv = keep(project("qkv", x))
        if self.arch.qkv_bias:
            qkv = qkv + self.qkv_bias[...].astype(qkv.dtype)[None, None]
        query, key = qkv[..., :-2, :], qkv[..., -2, :]
        if self.arch.qk_norm is not None:
            query, key = self._norm(query, self.query_norm[...]), self._norm(key, self.key_norm[...])
        if kind.rope is not None:
            table = tables.ropes[kind.rope]
            query, key = rotate(query, table[:, :, None, None]), rotate(key, table[:, :, None])
        fresh = KeyValue(jnp.swapaxes(key, 1, 2), jnp.swapaxes(qkv[..., -1, :], 1, 2))
        sinks = self.sinks[...] if self.arch.sinks else None
        attended, seen = tables.attention(query, fresh, cache, kind.attention, sinks)
        out = keep(project("out", keep(attended)))
        return (out + self.out_bias[...].astype(out.dtype)[None, None] if self.arch.out_bias else out), seen

    def _project(self, name: str, x: Array) -> Array:
        """Multiply x by a weight of this block."""
        # Not `[...]`: codes and scales are no array.
        return (project_outputs_first if self.outputs_first else project)(x, getattr(self, name).get_value(), INPUTS[name])

    def _before(self, hidden: Float[Array, "b s d"], name: str, dtype: jnp.dtype) -> Float[Array, "b s d"]:
        """Return what goes into attention or MLP."""
        return (self._norm(hidden, getattr(self, name)[...]) if self.arch.pre_norm else hidden).astype(dtype)

    def _after(self, x: Float[Array, "b s d"], name: str) -> Float[Array, "b s d"]:
        """Return what is added to the hidden states."""
        return self._norm(x.astype(jnp.float32), getattr(self, name)[...]) if self.arch.post_norm else x

    def _norm(self, x: Float[Array, "*b"], scale: Float[Array, "*d"]) -> Float[Array, "*b"]:
        return rms_norm(x.astype(jnp.float32), scale, self.arch.norm_eps, self.arch.norm_offset).astype(x.dtype)


def project(x: Array, weight: Array, inputs: int) -> Array:
    """Contract the last `inputs` dims of x with the first ones of weight, as one matrix product."""
    rows, out = x.shape[: x.ndim - inputs], weight.shape[inputs:]
    return matmul(x.reshape(*rows, -1), weight.reshape(-1, *out))


def project_outputs_first(x: Array, weight: Array | Int8Weight, inputs: int) -> Array:
    """Contract the last `inputs` dims of x with the last ones of weight, as one matrix product; not for training."""
    rows = x.reshape(*x.shape[: x.ndim - inputs], -1)
    if isinstance(weight, Int8Weight):
        return int8_product(rows, weight.codes.reshape(*weight.scale.shape, -1), weight.scale).astype(x.dtype)
    return product_outputs_first(rows, weight.reshape(*weight.shape[: weight.ndim - inputs], -1)).astype(x.dtype)


def rms_norm(x: Float[Array, "*b"], scale: Float[Array, "*d"], eps: float, offset: bool = False) -> Float[Array, "*b"]:
    """Return x / rms(x) * scale over the dims of the scale (arXiv:1910.07467 eq. 4); times 1 + scale with `offset`."""
    normal = x * jax.lax.rsqrt(jnp.mean(x * x, axis=tuple(range(-scale.ndim, 0)), keepdims=True) + eps)
    scale = scale.astype(x.dtype).reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
    return normal * (1 + scale if offset else scale)


def rope_table(arch: Arch, rope: Rope, positions: Int[Array, "b s"]) -> Float[Array, "b s r"]:
    """Return cosines then sines of each position's angles, half the rotated channels each."""
    frequencies = rope.inverse_frequencies(arch.head_dim, arch.max_position)
    angles = positions[..., None].astype(jnp.float32) * frequencies[None, None]
    table = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    return table if rope.attention_factor == 1 else table * rope.attention_factor


def rotate(x: Float[Array, "*b c"], table: Float[Array, "*a r"]) -> Float[Array, "*b c"]:
    """Rotate channel i with channel i + r/2 of the first r by the table's angles (arXiv:2104.09864 eq. 34, half layout)."""
    rotated = table.shape[-1]
    cos, sin = jnp.split(table, 2, axis=-1)
    first, second = jnp.split(x[..., :rotated].astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if rotated == x.shape[-1] else jnp.concatenate([turned, x[..., rotated:]], axis=-1)
