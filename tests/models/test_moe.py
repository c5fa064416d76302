"""Experts: grouped products, routing and its replay, the losses that balance it, and experts on many devices."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rljax.config import MeshConfig
from rljax.mesh import LEARNER_RULES, build_mesh, param_shardings
from rljax.models import decoder
from rljax.models.arch import Arch, Experts, Rope
from rljax.models.moe import Routing, balance_loss, grouped_matmul, max_load, router_sums, z_loss
from rljax.pytree import Params

F32 = jnp.dtype("float32")
RTOL = {"float32": 1e-5, "bfloat16": 2e-2}
"""Rounding of sums of some dozen terms, relative to the largest result."""
SHARDED_ATOL = 1e-5
"""Float32 sums over devices in another order; gradients are of the order 1."""

ARCH = Arch(
    vocab_size=64, num_layers=3, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, ffn_dim=24, rope=Rope(1e4),
    norm_eps=1e-5, tie_embeddings=False, max_position=64, gate="clamped", gate_limit=1.0, dense_layers=(1,),
    experts=Experts(count=8, per_token=3, ffn_dim=12, normalize=True, router_bias=True, bias=True),
)  # fmt: skip


def random_params(seed: int = 0, arch: Arch = ARCH) -> Params:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), decoder.abstract_params(arch))


IDS = np.random.default_rng(7).integers(0, 64, (4, 10)).astype(np.int32)
ROWS = (IDS, np.broadcast_to(np.arange(10, dtype=np.int32), IDS.shape), np.ones_like(IDS))


@partial(jax.jit, static_argnames=("arch", "separate"))
def forward(params: Params, choices: Any = None, *, arch: Arch = ARCH, separate: bool = False) -> decoder.Forward:
    model = decoder.merge(arch, decoder.unstack(arch, params) if separate else params)
    return model.forward(*map(jnp.asarray, ROWS), dtype=F32, choices=choices, record_routing=True)


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize("sizes", [[3, 0, 5, 4], [0, 0, 12, 0], [2, 1, 0, 3]])
def test_each_run_of_rows_meets_its_own_weight(dtype: str, sizes: list[int]) -> None:
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=shape).astype(np.float32) for shape in ((12, 6), (4, 6, 5), (12, 5)))
    x, rounded, g = (np.asarray(jnp.asarray(a, dtype), np.float32) for a in (x, w, g))  # what the products see
    owner = np.repeat(np.arange(5), [*sizes, 12 - sum(sizes)])
    out, d_x, d_w = np.zeros_like(g), np.zeros_like(x), np.zeros_like(w)
    for row, expert in enumerate(owner):
        if expert < 4:
            out[row], d_x[row] = x[row] @ rounded[expert], rounded[expert] @ g[row]
            d_w[expert] += np.outer(x[row], g[row])

    def run(x: Any, w: Any) -> Any:
        return grouped_matmul(x.astype(dtype), w, jnp.array(sizes, jnp.int32))

    found, backward = jax.vjp(run, jnp.asarray(x), jnp.asarray(w))
    assert found.dtype == dtype
    found_x, found_w = backward(jnp.asarray(g, dtype))
    assert found_w.dtype == jnp.float32
    for ours, expected in ((found, out), (found_x, d_x), (found_w, d_w)):
        atol = RTOL[dtype] * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(ours, np.float32), expected, rtol=0, atol=atol)


def test_replayed_choices_send_tokens_to_the_same_experts() -> None:
    first, second = random_params(0), random_params(1)
    recorded, other = forward(first).routing, forward(second).routing
    assert recorded is not None
    assert other is not None
    assert recorded.choices.shape == (2, 4, 10, 3)
    assert (np.sort(recorded.choices, -1) != np.sort(other.choices, -1)).mean() > 0.1
    again = forward(first, recorded.choices)
    assert np.array_equal(again.hidden, forward(first).hidden)
    replayed = forward(second, recorded.choices)
    assert replayed.routing is not None
    assert np.array_equal(replayed.routing.choices, recorded.choices)
    assert np.abs(replayed.hidden - forward(second).hidden).max() > 0.1
    separate = forward(second, recorded.choices, separate=True)
    np.testing.assert_allclose(separate.hidden, replayed.hidden, rtol=0, atol=SHARDED_ATOL)
    assert separate.routing is not None
    np.testing.assert_allclose(separate.routing.logits, replayed.routing.logits, rtol=0, atol=SHARDED_ATOL)


def test_routing_is_recorded_only_when_asked_for() -> None:
    model = decoder.merge(ARCH, jax.tree.map(jnp.asarray, random_params()))
    assert model.forward(*map(jnp.asarray, ROWS), dtype=F32).routing is None


def test_a_replay_of_fewer_experts_leaves_the_others_without_gradient() -> None:
    def loss(params: Params) -> Any:
        return jnp.mean(forward(params, jnp.broadcast_to(jnp.array([1, 4, 6]), (2, 4, 10, 3))).hidden ** 3)

    gradient = jax.grad(loss)(random_params())["layers"]["moe"]
    moved = np.abs(gradient["gate_up"]).max(axis=(0, 2, 3, 4)) > 0
    assert moved.tolist() == [expert in (1, 4, 6) for expert in range(8)]
    assert np.abs(gradient["router"]).max() > 0


def losses(routing: Routing, weight: Any) -> tuple[float, float, float]:
    """Return z-loss, balance loss and largest load of the tokens with a weight."""
    weight = jnp.asarray(weight, jnp.int32)
    sums, tokens = router_sums(routing, weight), jnp.sum(weight).astype(jnp.float32)
    return (
        float(z_loss(sums.z, tokens)),
        float(balance_loss(sums.chosen, sums.probability, tokens)),
        float(max_load(sums.chosen)),
    )


def some_routing(seed: int = 0) -> Routing:
    logits = np.random.default_rng(seed).normal(size=(2, 3, 7, 5)).astype(np.float32)
    return Routing(jnp.asarray(np.argsort(-logits, -1)[..., :2]), jnp.asarray(logits))


def test_the_balance_loss_is_the_mean_of_the_references_for_each_layer() -> None:
    routing, weight = some_routing(), np.random.default_rng(1).integers(0, 3, (3, 7))
    layers = np.asarray(routing.logits).reshape(2, -1, 5)
    # A token that counts twice is given twice.
    repeated = [np.repeat(layer, weight.ravel(), axis=0) for layer in layers]
    theirs = np.mean([float(load_balancing_loss_func((torch.tensor(layer),), 5, 2)) for layer in repeated])
    assert losses(routing, weight)[1] == pytest.approx(theirs, rel=1e-5)
    uniform = routing._replace(logits=jnp.zeros_like(routing.logits))
    assert losses(uniform, weight)[1] == pytest.approx(2, rel=1e-5)


def test_layers_that_favour_different_experts_are_not_balanced_by_each_other() -> None:
    choices = jnp.broadcast_to(jnp.array([0, 1])[:, None, None, None], (2, 3, 7, 1))
    routing = Routing(choices, 100 * jax.nn.one_hot(choices[..., 0], 2))
    _, balance, load = losses(routing, np.ones((3, 7)))
    assert (balance, load) == (pytest.approx(2), 1.0)


def test_the_z_loss_is_the_mean_square_of_the_log_partition_sum() -> None:
    routing, weight = some_routing(), np.random.default_rng(1).integers(0, 3, (3, 7))
    square = np.log(np.exp(np.asarray(routing.logits, np.float64)).sum(-1)) ** 2
    expected = (square * weight).sum() / (2 * weight.sum())
    assert losses(routing, weight)[0] == pytest.approx(expected, rel=1e-5)


def test_tokens_without_weight_count_in_nothing_whatever_their_scores() -> None:
    routing, weight = some_routing(), np.arange(7) < np.array([[7], [3], [0]])

    def gradient(logits: Any) -> Any:
        def total(logits: Any) -> Any:
            sums = router_sums(routing._replace(logits=logits), jnp.asarray(weight, jnp.int32))
            return jnp.sum(sums.z) + jnp.sum(sums.probability**2)

        return jax.grad(total)(logits)

    broken = jnp.where(jnp.asarray(weight)[None, ..., None], routing.logits, jnp.nan)
    assert losses(routing._replace(logits=broken), weight) == losses(routing, weight)
    assert np.array_equal(gradient(broken), gradient(routing.logits))
    assert not np.asarray(gradient(broken))[:, ~weight].any()


def test_the_largest_load_is_that_of_the_worst_layer() -> None:
    choices = jnp.array([[[[0, 1], [0, 2]]], [[[0, 1], [2, 3]]]])
    assert losses(Routing(choices, jnp.zeros((2, 1, 2, 4))), np.ones((1, 2)))[2] == 0.5


def test_tokens_without_a_record_go_where_their_router_sends_them() -> None:
    first, second = random_params(0), random_params(1)
    recorded, own = forward(first).routing, forward(second).routing
    assert recorded is not None
    assert own is not None
    known = np.random.default_rng(0).random(IDS.shape) < 0.5
    partly = np.where(known[None, ..., None], recorded.choices, -1)
    for separate in (False, True):
        mixed = forward(second, jnp.asarray(partly), separate=separate).routing
        assert mixed is not None
        assert np.array_equal(np.asarray(mixed.choices)[:, known], np.asarray(recorded.choices)[:, known])
        # The first layer with experts sees what it would have seen without any record.
        assert np.array_equal(np.asarray(mixed.choices)[0, ~known], np.asarray(own.choices)[0, ~known])
    nothing = forward(second, jnp.full_like(recorded.choices, -1))
    assert np.array_equal(nothing.hidden, forward(second).hidden)


def value_and_gradient(params: Params) -> Any:
    def loss(params: Params) -> Any:
        out = decoder.merge(ARCH, params).forward(*map(jnp.asarray, ROWS), dtype=F32, remat="dots", record_routing=True)
        assert out.routing is not None
        sums, tokens = router_sums(out.routing, jnp.ones(IDS.shape, jnp.int32)), jnp.float32(IDS.size)
        balance = balance_loss(sums.chosen, sums.probability, tokens)
        return jnp.mean(out.hidden**3) + 0.1 * balance + 0.01 * z_loss(sums.z, tokens)

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("axes", [{"fsdp": 2, "expert": 2, "tensor": 2}, {"expert": 4, "context": 2}])
def test_experts_on_many_devices_compute_what_they_do_on_one(axes: dict[str, int]) -> None:
    mesh = build_mesh(MeshConfig(**{"fsdp": 1, **axes}), jax.devices()[:8])
    params, shapes = random_params(), decoder.abstract_params(ARCH)
    layout = param_shardings(mesh, shapes, decoder.logical_axes(ARCH), LEARNER_RULES)
    placed = jax.tree.map(jax.device_put, params, layout)
    held = placed["layers"]["moe"]["gate_up"].addressable_shards[0].data.shape
    assert held[1] == 8 // axes.get("expert", 1)
    with jax.set_mesh(mesh):
        sharded = jax.jit(value_and_gradient)(placed)
    for one, many in zip(jax.tree.leaves(jax.jit(value_and_gradient)(params)), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(many, one, rtol=0, atol=SHARDED_ATOL)


def test_experts_that_do_not_divide_over_the_devices_are_refused() -> None:
    mesh = build_mesh(MeshConfig(fsdp=1, expert=8), jax.devices()[:8])
    arch = dataclasses.replace(ARCH, experts=dataclasses.replace(ARCH.experts, count=6))
    with pytest.raises(ValueError, match=r"mesh\.expert \(8\) must divide the experts dim \(6\)"):
        param_shardings(mesh, decoder.abstract_params(arch), decoder.logical_axes(arch), LEARNER_RULES)
