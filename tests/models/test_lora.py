"""Adapters: their scale, factors, merging, and the unmerged forward pass, against plain matrices."""

import dataclasses
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.config import LoraConfig
from rljax.models.arch import Arch, Experts
from rljax.models.decoder import abstract_params, logits, merge, unstack
from rljax.models.layout import TRANSFORMS
from rljax.models.lora import (
    TARGETS,
    LoraSpec,
    abstract_adapter,
    adapter_axes,
    attach,
    dropout_key,
    init_adapter,
    low_rank,
    merged,
    spec_of,
)
from rljax.pytree import Params
from tests.tiny_model import ARCH, SPREAD, host_adapter, host_params

F32 = jnp.dtype("float32")
ATOL = 3e-5
"""Merged and unmerged sum in another order; logits are of the order 3."""
ALL = LoraSpec(rank=3, alpha=6.0, rslora=False, targets=TARGETS)
SOME = dataclasses.replace(ALL, targets=("k_proj", "o_proj", "up_proj"))
PLACES = {
    "q_proj": ("qkv", "query"),
    "k_proj": ("qkv", "key"),
    "v_proj": ("qkv", "value"),
    "o_proj": ("out", "out"),
    "gate_proj": ("gate_up", "gate"),
    "up_proj": ("gate_up", "up"),
    "down_proj": ("down", "down"),
}
"""Fused weight, and the view that shows the projection as a Hugging Face model stores it: [out, in], dims still split."""
MIXED = dataclasses.replace(
    ARCH, num_layers=4, window=4, windowed_layers=(0, 2), qkv_bias=True, out_bias=True, qk_norm="head", post_norm=True
)
WITH_EXPERTS = dataclasses.replace(ARCH, experts=Experts(count=4, per_token=2, ffn_dim=16, normalize=True))
TOKENS = np.random.default_rng(0).integers(8, ARCH.vocab_size, (2, 11))


def matrices(params: Params, target: str, layer: int) -> np.ndarray:
    """Return a projection's weight as a model of the Hub has it, [out, in]."""
    name, part = PLACES[target]
    view = TRANSFORMS[part](np.asarray(params["layers"][name][layer]))
    inputs = 3 if target == "o_proj" else 1
    return view.reshape(int(np.prod(view.shape[: view.ndim - inputs])), -1)


def peft_factors(adapter: Params, target: str, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Return lora_A.weight [r, in] and lora_B.weight [out, r] as PEFT has them."""
    a, b = (np.asarray(adapter["layers"][target][side][layer]) for side in "ab")
    return a.reshape(-1, a.shape[-1]).T, b.reshape(b.shape[0], -1).T


@cache
def random_params(arch: Arch) -> Params:
    rng = np.random.default_rng(1)

    def draw(path: Any, leaf: Any) -> jax.Array:
        is_norm = "norm" in jax.tree_util.keystr(path)
        return jnp.asarray(rng.normal(*((1.0, 0.2) if is_norm else (0.0, SPREAD)), leaf.shape), F32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(arch))


@cache
def random_adapter(arch: Arch, spec: LoraSpec) -> Params:
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), F32), abstract_adapter(arch, spec))


@partial(jax.jit, static_argnums=(0, 2))
def compiled(arch: Arch, params: Params, dropout: float) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    model = merge(arch, params)
    return logits(model, model(jnp.asarray(TOKENS), positions, positions * 0 + 1, dtype=F32, dropout=dropout)[0])


def forward(arch: Arch, params: Params, dropout: float = 0.0) -> np.ndarray:
    return np.asarray(compiled(arch, params, dropout))


@pytest.mark.parametrize(("rslora", "scale", "weight"), [(False, 2.0, 2.0), (True, 4.0, 3.0)])
def test_the_scale_is_alpha_over_the_rank_or_its_root(rslora: bool, scale: float, weight: float) -> None:
    """A weight of 1 and factors whose product is 0.5, rank 4 and alpha 8: 1 + 0.5 * scale."""
    spec = LoraSpec(rank=4, alpha=8.0, rslora=rslora, targets=TARGETS)
    assert spec.scale == scale
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, F32), abstract_params(ARCH))
    factors = {target: {"a": 0.25, "b": 0.5} for target in TARGETS}
    adapter = jax.tree.map(lambda value, leaf: jnp.full(leaf.shape, value), {"layers": factors}, abstract_adapter(ARCH, spec))
    found = merged(ARCH, ones, adapter, spec)
    assert {float(value) for name in ("qkv", "out", "gate_up", "down") for value in np.unique(found["layers"][name])} == {
        weight
    }
    assert np.all(np.asarray(found["layers"]["attn_norm"]) == 1)
    assert found["embed"] is ones["embed"]


@pytest.mark.parametrize("spec", [ALL, SOME])
def test_merging_adds_the_product_of_the_matrices(spec: LoraSpec) -> None:
    adapter = host_adapter(spec)
    found = merged(ARCH, jax.tree.map(jnp.asarray, host_params()), jax.tree.map(jnp.asarray, adapter), spec)
    for target in TARGETS:
        for layer in ARCH.layers:
            expected = matrices(host_params(), target, layer)
            if target in spec.targets:
                a, b = peft_factors(adapter, target, layer)
                expected = expected + spec.scale * (b.astype(np.float64) @ a)
            np.testing.assert_allclose(matrices(found, target, layer), expected, rtol=0, atol=1e-6, err_msg=target)


@pytest.mark.parametrize("spec", [ALL, SOME])
@pytest.mark.parametrize("arch", [ARCH, MIXED], ids=["plain", "mixed"])
def test_unmerged_factors_compute_what_merged_weights_do(arch: Arch, spec: LoraSpec) -> None:
    params, adapter = random_params(arch), random_adapter(arch, spec)
    expected = forward(arch, merged(arch, params, adapter, spec))
    assert np.abs(expected - forward(arch, params)).max() > 1, "the factors do something"
    together = attach(params, adapter, spec)
    np.testing.assert_allclose(forward(arch, together), expected, rtol=0, atol=ATOL)
    np.testing.assert_allclose(forward(arch, unstack(arch, together)), expected, rtol=0, atol=ATOL)


def test_attention_of_a_model_with_experts_can_have_factors() -> None:
    spec = spec_of(WITH_EXPERTS, LoraConfig(rank=2, target_modules=("v_proj", "q_proj")))
    assert spec is not None
    assert spec.targets == ("q_proj", "v_proj")
    params, adapter = random_params(WITH_EXPERTS), random_adapter(WITH_EXPERTS, spec)
    expected = forward(WITH_EXPERTS, merged(WITH_EXPERTS, params, adapter, spec))
    np.testing.assert_allclose(forward(WITH_EXPERTS, attach(params, adapter, spec)), expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("names", [("all-linear",), ("q_proj", "down_proj")])
def test_experts_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"down_proj: this model has experts.*lora.target_modules.*q_proj, k_proj"):
        spec_of(WITH_EXPERTS, LoraConfig(rank=2, target_modules=names))


def test_targets_that_match_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lora.target_modules: c_attn, qkv_proj matches no projection; choose of q_proj"):
        spec_of(ARCH, LoraConfig(rank=2, target_modules=("qkv_proj", "q_proj", "c_attn")))
    for targets in ((), ("q_proj", "q_proj"), ("v_proj", "q_proj"), ("query",)):
        with pytest.raises(ValueError, match="q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"):
            LoraSpec(rank=2, alpha=4.0, rslora=False, targets=targets)
    assert spec_of(ARCH, LoraConfig()) is None
    assert spec_of(ARCH, LoraConfig(rank=3, alpha=6.0)) == ALL


def test_a_spec_survives_json() -> None:
    assert LoraSpec.from_json(SOME.to_json()) == SOME
    for fields in ({"rank": 1}, {**SOME.to_json(), "bias": "none"}, {**SOME.to_json(), "targets": 3}):
        with pytest.raises(ValueError, match="describes no adapter"):
            LoraSpec.from_json(fields)


def test_an_adapter_is_not_put_on_twice() -> None:
    params, adapter = random_params(ARCH), random_adapter(ARCH, SOME)
    together = attach(params, adapter, SOME)
    with pytest.raises(AssertionError, match="attached to these parameters already"):
        attach(together, adapter, SOME)
    with pytest.raises(AssertionError, match="attached to these parameters already"):
        merged(ARCH, together, adapter, SOME)


def test_first_factors_are_those_of_peft() -> None:
    """kaiming_uniform_(a=sqrt(5)) over [r, in] is uniform within sqrt(6 / (1 + 5) / in); B is zero."""
    spec = dataclasses.replace(ALL, rank=64)
    adapter = init_adapter(ARCH, spec, seed=0)
    for target in TARGETS:
        a, b = peft_factors(adapter, target, 1)
        bound = a.shape[1] ** -0.5
        assert a.shape[0] == b.shape[1] == 64
        assert not b.any()
        assert 0.97 * bound < np.abs(a).max() <= bound
        assert np.std(a) == pytest.approx(bound / 3**0.5, rel=0.05)
    again, other = init_adapter(ARCH, spec, seed=0), init_adapter(ARCH, spec, seed=1)
    q, k = (adapter["layers"][target]["a"] for target in ("q_proj", "k_proj"))
    assert np.array_equal(q, again["layers"]["q_proj"]["a"])
    assert not np.array_equal(q, other["layers"]["q_proj"]["a"])
    assert not np.array_equal(q, k)
    alone = init_adapter(ARCH, dataclasses.replace(spec, targets=("k_proj",)), seed=0)
    assert np.array_equal(alone["layers"]["k_proj"]["a"], k), "what else is a target decides nothing"


def test_every_factor_has_its_axes() -> None:
    shapes, axes = abstract_adapter(ARCH, ALL), adapter_axes(ALL)
    named = jax.tree.map(lambda leaf, names: len(leaf.shape) == len(names), shapes, axes)
    assert all(jax.tree.leaves(named))


def test_dropout_thins_what_factors_see_and_nothing_else() -> None:
    params, adapter = random_params(ARCH), random_adapter(ARCH, SOME)

    def dropped(step: int, micro: int = 0, rate: float = 0.5) -> np.ndarray:
        key = dropout_key(0, jnp.int32(step), jnp.int32(micro))
        return forward(ARCH, attach(params, adapter, SOME, key), rate)

    plain = forward(ARCH, attach(params, adapter, SOME))
    assert np.array_equal(dropped(3), dropped(3))
    for other in (plain, dropped(4), dropped(3, 1)):
        assert np.abs(dropped(3) - other).max() > 0.1
    assert np.array_equal(dropped(3, rate=0.0), plain)
    zero = jax.tree.map(jnp.zeros_like, adapter)
    base = attach(params, zero, SOME, dropout_key(0, jnp.int32(0), jnp.int32(0)))
    assert np.array_equal(forward(ARCH, base, 0.5), forward(ARCH, params))


def test_dropout_keeps_the_mean() -> None:
    """Ones through factors that are unit matrices: a share of them is gone, and the others make up for it."""
    width = 48
    x = jnp.ones((400, 2, width))
    factors = {"down_proj": {"a": jnp.eye(width), "b": jnp.eye(width)}, "dropout": jax.random.key(0)}
    out = np.asarray(low_rank("down", jnp.zeros(x.shape), x, factors, 0.25))
    assert np.unique(out).tolist() == [0.0, float(np.float32(1 / 0.75))]
    assert (out == 0).mean() == pytest.approx(0.25, abs=0.01)
