"""Low-rank adapters (LoRA, arXiv:2106.09685): small trained factors beside frozen weights.

Owns which projections can have factors, their shapes, logical axes and first values, the low-rank product inside a block,
and merging into the weights. Refuses to own the base model's parameters, what is trained (the learner) and files.

A projection has the name PEFT's users know; its factors have the dims of the fused weight it is a part of:

    q_proj     a [l, d, r]         b [l, r, k, m, c]     part of qkv
    k_proj     a [l, d, r]         b [l, r, k, c]        part of qkv, like v_proj
    o_proj     a [l, k, m, c, r]   b [l, r, d]           out
    gate_proj  a [l, d, r]         b [l, r, f]           part of gate_up, like up_proj
    down_proj  a [l, f, r]         b [l, r, d]           down

PEFT's lora_A.weight [r, in] and lora_B.weight [out, r] are these with input and output dims merged, transposed.
"""

import dataclasses
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.config import LoraConfig
from rljax.matmul import matmul
from rljax.models.arch import Arch
from rljax.models.remat import keep
from rljax.pytree import Params

ALL_LINEAR = "all-linear"
"""In the place of a list of targets: every projection."""

PARTS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Fused weight -> the projections it consists of, in order along its last dim but one."""

TARGETS = tuple(target for parts in PARTS.values() for target in parts)
"""All projections, in canonical order."""

_ATTENTION = (*PARTS["qkv"], *PARTS["out"])
_INIT, _DROPOUT = 0x10A0, 0x10A1  # purposes of random draws

DROPOUT = "dropout"
"""Name of the random keys among the factors of a layer."""

_ATTACHED = {*TARGETS, DROPOUT}


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """What an adapter is, whatever model it belongs to.

    Example:
        LoraSpec(rank=16, alpha=32.0, rslora=False, targets=("q_proj", "v_proj"))
    """

    rank: int
    """Inner dim of the factors."""
    alpha: float
    """Numerator of the scale."""
    rslora: bool
    """Whether the scale is rank-stabilised."""
    targets: tuple[str, ...]
    """Projections with factors, in the order of `TARGETS`."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < math.inf:
            raise ValueError(f"an adapter needs a rank of at least 1 and an alpha above 0, not {self.rank} and {self.alpha}")
        if unknown := sorted(set(self.targets) - set(TARGETS)):
            raise ValueError(f"{', '.join(unknown)}: no projection that can have an adapter; choose of {', '.join(TARGETS)}")
        if not self.targets:
            raise ValueError(f"an adapter without targets trains nothing; choose of {', '.join(TARGETS)}")
        if self.targets != tuple(target for target in TARGETS if target in self.targets):
            raise ValueError(f"the targets of an adapter are listed once and in the order {', '.join(TARGETS)}")

    @property
    def scale(self) -> float:
        """Factor of the low-rank product: alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "LoraSpec":
        """Read what `to_json` returned.

        Raises:
            ValueError: a field is missing, unknown or out of range.
        """
        try:
            return cls(**{**fields, "targets": tuple(fields["targets"])})
        except (KeyError, TypeError) as err:
            raise ValueError(f"this describes no adapter ({err})") from err


def spec_of(arch: Arch, config: LoraConfig) -> LoraSpec | None:
    """Return the adapter that a configuration asks for; None when it asks for none.

    Raises:
        ValueError: a name in `lora.target_modules` is no projection of this model, or means experts.
    """
    if not config.rank:
        return None
    names = config.target_modules
    if unknown := sorted(set(names) - {*TARGETS, ALL_LINEAR}):
        raise ValueError(
            f"lora.target_modules: {', '.join(unknown)} matches no projection; choose of {', '.join(TARGETS)}, or "
            f"'{ALL_LINEAR}' alone for all of them"
        )
    chosen = tuple(target for target in TARGETS if target in names or names == (ALL_LINEAR,))
    _check_targets(arch, chosen)
    return LoraSpec(config.rank, config.alpha, config.rslora, chosen)


def _check_targets(arch: Arch, targets: tuple[str, ...]) -> None:
    refused = [target for target in targets if target not in _ATTENTION]
    if arch.experts is not None and refused:
        raise ValueError(
            f"{', '.join(refused)}: this model has experts, and those can have no adapter; let the targets "
            f"(lora.target_modules) be of {', '.join(_ATTENTION)}"
        )


class _Dims(NamedTuple):
    """Names of the input and output dims of a projection."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


_WIDTH, _HEADS, _KV = ("embed",), ("kv_heads", "queries", "head_dim"), ("kv_heads", "head_dim")
_DIMS = {
    "q_proj": _Dims(_WIDTH, _HEADS),
    "k_proj": _Dims(_WIDTH, _KV),
    "v_proj": _Dims(_WIDTH, _KV),
    "o_proj": _Dims(_HEADS, _WIDTH),
    "gate_proj": _Dims(_WIDTH, ("ffn",)),
    "up_proj": _Dims(_WIDTH, ("ffn",)),
    "down_proj": _Dims(("ffn",), _WIDTH),
}


def adapter_axes(spec: LoraSpec) -> Params:
    """Return the logical axis names of every factor, in the shape of `abstract_adapter`."""
    return {
        "layers": {
            target: {"a": ("layers", *_DIMS[target].inputs, "rank"), "b": ("layers", "rank", *_DIMS[target].outputs)}
            for target in spec.targets
        }
    }


def abstract_adapter(arch: Arch, spec: LoraSpec) -> Params:
    """Return shapes and types (float32) of the factors of an adapter for a model.

    Raises:
        ValueError: a target is not in the model, or means experts.
    """
    _check_targets(arch, spec.targets)
    sizes = {
        "layers": arch.num_layers,
        "embed": arch.embed_dim,
        "kv_heads": arch.num_kv_heads,
        "queries": arch.queries_per_kv,
        "head_dim": arch.head_dim,
        "ffn": arch.ffn_dim,
        "rank": spec.rank,
    }

    def shape(names: tuple[str, ...]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(sizes[name] for name in names), jnp.float32)

    return jax.tree.map(shape, adapter_axes(spec), is_leaf=lambda leaf: isinstance(leaf, tuple))


def init_adapter(arch: Arch, spec: LoraSpec, seed: int) -> Params:
    """Return the first factors: `a` uniform within 1 / sqrt(inputs), as PEFT draws it, and `b` zero: nothing changes yet."""
    root = jax.random.fold_in(jax.random.key(seed), _INIT)

    def draw(target: str, shapes: Mapping[str, Any]) -> dict[str, Array]:
        a, b = shapes["a"].shape, shapes["b"].shape
        bound = 1 / math.sqrt(math.prod(a[1:-1]))
        key = jax.random.fold_in(root, zlib.crc32(target.encode()))
        return {"a": jax.random.uniform(key, a, jnp.float32, -bound, bound), "b": jnp.zeros(b, jnp.float32)}

    return {"layers": {target: draw(target, shapes) for target, shapes in abstract_adapter(arch, spec)["layers"].items()}}


def merged(arch: Arch, params: Params, adapter: Params, spec: LoraSpec) -> Params:
    """Return the stacked parameters with scale * a b added to the weights, in their own types; sums are float32.

    Parameters without factors are returned as they are, and `params` itself is not changed.
    """
    layers, factors = dict(params["layers"]), adapter["layers"]
    assert not set(layers) & set(TARGETS), "an adapter is attached to these parameters already"
    assert set(factors) == set(spec.targets), "the factors are not those of the spec"
    _check_targets(arch, spec.targets)
    for name in PARTS:
        if any(part in factors for part in PARTS[name]):
            weight = layers[name].astype(jnp.float32)
            products = {part: _product(factors[part], spec.scale) for part in PARTS[name] if part in factors}
            layers[name] = (weight + _fused(name, products, weight)).astype(layers[name].dtype)
    return {**params, "layers": layers}


def _product(factors: Mapping[str, Array], scale: float) -> Array:
    a, b = (factors[side].astype(jnp.float32) for side in "ab")
    rank = a.ndim - 1
    dims = (((rank,), (1,)), ((0,), (0,)))
    return scale * jax.lax.dot_general(a, b, dims, precision=jax.lax.Precision.HIGHEST)


def _fused(name: str, products: Mapping[str, Array], like: Array) -> Array:
    """Put what the parts of a fused weight give next to each other, as they lie in it; zeros for parts without factors."""
    parts = PARTS[name]
    if len(parts) == 1:
        return products[parts[0]]
    # Queries are the only part with a dim of their own where the parts lie.
    grouped = parts[0] == "q_proj"
    widths = (like.shape[-2] - len(parts) + 1, *(1,) * (len(parts) - 1))
    pieces = []
    for part, width in zip(parts, widths, strict=True):
        if part not in products:
            pieces.append(jnp.zeros((*like.shape[:-2], width, like.shape[-1]), like.dtype))
        else:
            whole = grouped and part == "q_proj"
            pieces.append(products[part] if whole else jnp.expand_dims(products[part], -2))
    return jnp.concatenate(pieces, axis=-2)


def attach(params: Params, adapter: Params, spec: LoraSpec, key: Array | None = None) -> Params:
    """Return stacked parameters with the factors among the layers' own, as the decoder takes them; `b` times the scale.

    With a random key also one key per layer, for dropout. `decoder.unstack` takes factors apart with the rest.
    """
    assert not set(params["layers"]) & set(TARGETS), "an adapter is attached to these parameters already"
    found = {**params["layers"], **scaled(adapter, spec)["layers"]}
    if key is not None:
        layers = adapter["layers"][spec.targets[0]]["a"].shape[0]
        found[DROPOUT] = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(layers))
    return {**params, "layers": found}


def scaled(adapter: Params, spec: LoraSpec) -> Params:
    """Return the factors with each `b` multiplied by the scale, so that their product is what is added."""
    assert set(adapter["layers"]) == set(spec.targets), "the factors are not those of the spec"
    return {"layers": {target: {"a": part["a"], "b": part["b"] * spec.scale} for target, part in adapter["layers"].items()}}


def detach(layer: Mapping[Any, Any]) -> tuple[Params, Params]:
    """Split what `attach` joined, in a layer or a stack of them: its own parameters, and the factors."""
    own = {name: part for name, part in layer.items() if name not in _ATTACHED}
    return own, {name: part for name, part in layer.items() if name in _ATTACHED}


def dropout_key(seed: int, step: Int[Array, ""], micro: Int[Array, ""]) -> Array:
    """Return the random key of dropout in one micro-batch of one optimizer step."""
    purpose = jax.random.fold_in(jax.random.key(seed), _DROPOUT)
    return jax.random.fold_in(jax.random.fold_in(purpose, step), micro)


def low_rank(name: str, product: Array, x: Array, factors: Mapping[str, Any], dropout: float) -> Array:
    """Add to the product of x with a fused weight what the factors of its parts give.

    Args:
        name: The fused weight, a key of `PARTS`.
        product: x times the weight.
        x: What the weight was multiplied with, its contracted dims last.
        factors: One layer's factors, as `detach` returns them.
        dropout: Probability that a projection's factors do not see a value of x; needs a key among the factors.
    """
    found = [part for part in PARTS[name] if part in factors]
    if not found:
        return product

    def times(part: str) -> Array:
        a, b = factors[part]["a"], factors[part]["b"]
        seen = x if dropout == 0 else _dropped(x, jax.random.fold_in(factors[DROPOUT], TARGETS.index(part)), dropout)
        inner = keep(matmul(seen.reshape(*x.shape[: x.ndim - a.ndim + 1], -1), a.reshape(-1, a.shape[-1])))
        return matmul(inner, b)

    return product + _fused(name, {part: times(part) for part in found}, product)


def _dropped(x: Float[Array, "*b"], key: Array, rate: float) -> Float[Array, "*b"]:
    """Return x with a share of its values zero, the others divided by the share that stays."""
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), jnp.zeros_like(x))
