"""Muon and Adafactor update each projection, layer and expert as a matrix of its own; averages in bfloat16 do not stall."""

import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from rljax.checkpoint import CheckpointStore
from rljax.config import OptimizerConfig
from rljax.learner.moments import kept
from rljax.learner.optimizer import Optimizer
from rljax.models.arch import Experts
from rljax.models.decoder import abstract_params, decaying, logical_axes
from rljax.models.lora import LoraSpec, adapter_axes
from rljax.pytree import leaf_names
from rljax.records import RunMeta
from tests.tiny_model import ARCH, batch_of, first_state, host_adapter, learner_of, some_groups

FLOAT32 = 2e-5
"""Relative rounding of four updates in float32."""
BFLOAT16_NEWTON_SCHULZ = 3e-2
"""torch's Muon iterates in bfloat16: entries of a matrix of root mean square 0.2 may be off by so much."""
SMALL = dataclasses.replace(
    ARCH, vocab_size=20, embed_dim=12, num_heads=6, head_dim=4, num_layers=3, ffn_dim=10, qkv_bias=True, dense_layers=(0,),
    experts=Experts(count=3, per_token=2, ffn_dim=7, normalize=True),
)  # fmt: skip
RULES = ("adamw", "adafactor", "muon")
DECAY = 0.1


def separate(tree) -> Iterator[tuple[str, np.ndarray]]:
    """Take a tree of parameters apart into the tensors of a checkpoint, by hand: matrices are [inputs, outputs]."""
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        leaf, part = np.asarray(leaf), name.removeprefix("layers.")
        if part == name:
            yield name, leaf
            continue
        for number, layer in enumerate(leaf):
            for expert, own in enumerate(layer) if part in ("moe.gate_up", "moe.down") else [(0, layer)]:
                where = f"{part}.{number}.{expert}"
                if part == "qkv":
                    width, heads, _, channels = own.shape
                    yield f"{where}.q", own[:, :, :-2].reshape(width, -1)
                    yield f"{where}.k", own[:, :, -2].reshape(width, heads * channels)
                    yield f"{where}.v", own[:, :, -1].reshape(width, heads * channels)
                elif part == "qkv_bias":
                    yield from (
                        (f"{where}.{n}", x.ravel()) for n, x in zip("qkv", (own[:, :-2], own[:, -2], own[:, -1]), strict=True)
                    )
                elif part in ("gate_up", "moe.gate_up"):
                    yield from ((f"{where}.{n}", own[:, n]) for n in range(2))
                elif part == "out":
                    yield where, own.reshape(-1, own.shape[-1])
                else:
                    yield where, own


@cache
def trained(**options) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Return the separate tensors before four updates, their gradients and the tensors after them."""
    rng = np.random.default_rng(0)
    shapes = abstract_params(SMALL)

    def draw(scale):
        return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0.0, scale, leaf.shape), jnp.float32), shapes)

    optimizer = Optimizer(OptimizerConfig(max_grad_norm=None, **options), lambda _: decaying(SMALL), logical_axes(SMALL))
    params, gradients = draw(0.5), [draw(scale) for scale in (1e-3, 1.0, 1e-5, 0.1)]
    before, state, update = dict(separate(params)), optimizer.init(params), jax.jit(optimizer.update)
    for grads in gradients:
        params, state, _, _ = update(grads, state, params)
    return before, [dict(separate(grads)) for grads in gradients], dict(separate(params))


def test_every_tensor_is_updated_by_itself_as_torch_adafactor_does() -> None:
    before, gradients, after = trained(rule="adafactor", learning_rate=0.01, weight_decay=DECAY)
    for name, first in before.items():
        tensor = torch.nn.Parameter(torch.tensor(first))
        oracle = torch.optim.Adafactor(
            [tensor], lr=0.01, eps=(1e-30, 1e-3), d=1.0, weight_decay=DECAY if first.ndim == 2 else 0.0
        )
        for grads in gradients:
            tensor.grad = torch.tensor(grads[name])
            oracle.step()
        np.testing.assert_allclose(after[name], tensor.detach().numpy(), rtol=FLOAT32, atol=1e-6, err_msg=name)


def hidden(name: str, tensor: np.ndarray) -> bool:
    return tensor.ndim == 2 and name not in ("embed", "head")


def numpy_muon(first, gradients, rate, momentum=0.95):
    """Muon of arXiv:2502.16982 in float64."""
    x, average = np.float64(first), np.zeros(first.shape)
    for g in gradients:
        average = momentum * average + (1 - momentum) * g
        step = momentum * average + (1 - momentum) * np.float64(g)
        step = step / np.linalg.norm(step)
        for _ in range(5):
            gram = step @ step.T
            step = 3.4445 * step + (-4.7750 * gram + 2.0315 * gram @ gram) @ step
        x = (1 - rate * DECAY) * x - rate * 0.2 * np.sqrt(max(first.shape)) * step
    return x


def test_every_matrix_is_orthogonalised_by_itself() -> None:
    before, gradients, after = trained(rule="muon", learning_rate=0.1, weight_decay=DECAY, b1=0.8)
    matrices = [name for name, tensor in before.items() if hidden(name, tensor)]
    assert len(matrices) == 3 * 4 + 3 + 2 * (1 + 3 * 3), "projections of all layers, one MLP, routers and experts"
    for name in matrices:
        want = numpy_muon(before[name], [grads[name] for grads in gradients], 0.1)
        np.testing.assert_allclose(after[name], want, rtol=1e-3, atol=1e-4, err_msg=name)


def test_muon_is_that_of_torch() -> None:
    before, gradients, after = trained(rule="muon", learning_rate=0.1, weight_decay=DECAY, b1=0.8)
    for name in ("qkv.1.0.q", "moe.gate_up.1.2.0", "down.0.0"):
        tensor = torch.nn.Parameter(torch.tensor(before[name]))
        oracle = torch.optim.Muon([tensor], lr=0.1, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
        for grads in gradients:
            tensor.grad = torch.tensor(grads[name])
            oracle.step()
        np.testing.assert_allclose(after[name], tensor.detach().numpy(), atol=BFLOAT16_NEWTON_SCHULZ, err_msg=name)


def test_what_is_no_hidden_matrix_is_updated_by_adamw() -> None:
    before, gradients, after = trained(rule="muon", learning_rate=0.1, weight_decay=DECAY, b1=0.8)
    rest = [name for name, tensor in before.items() if not hidden(name, tensor)]
    assert {"embed", "head", "final_norm", "attn_norm.2.0", "qkv_bias.0.0.k"} < set(rest)
    for name in rest:
        tensor = torch.nn.Parameter(torch.tensor(before[name]))
        oracle = torch.optim.AdamW([tensor], lr=0.1, betas=(0.8, 0.999), weight_decay=DECAY if before[name].ndim == 2 else 0.0)
        for grads in gradients:
            tensor.grad = torch.tensor(grads[name])
            oracle.step()
        np.testing.assert_allclose(after[name], tensor.detach().numpy(), rtol=FLOAT32, atol=FLOAT32, err_msg=name)


@pytest.mark.parametrize("rule", RULES)
def test_a_gradient_of_zero_moves_nothing(rule: Any) -> None:
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.3), abstract_params(SMALL))
    optimizer = Optimizer(OptimizerConfig(rule=rule), lambda _: decaying(SMALL), logical_axes(SMALL))
    update = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    for old, new in zip(*map(jax.tree.leaves, (params, update.params)), strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-3), ("bfloat16", 0.06)])
def test_a_second_moment_reaches_the_mean_of_the_squares(dtype: Any, error: float) -> None:
    optimizer = Optimizer(
        OptimizerConfig(moments_dtype=dtype, max_grad_norm=None), lambda _: {"w": True}, {"w": ("embed", "ffn")}
    )
    params, grads = {"w": jnp.zeros((32, 32))}, {"w": jnp.ones((32, 32))}

    def body(_, carry):
        update = optimizer.update(grads, carry[1], carry[0])
        return update.params, update.state

    _, state = jax.jit(lambda start: jax.lax.fori_loop(0, 3000, body, start))((params, optimizer.init(params)))
    second = np.float64(state.moments[0].nu["w"])
    # Rounded to nearest it would stop at 0.25: there 0.001 * (1 - v) is below half of the distance 2^-9 between two numbers.
    assert second.mean() == pytest.approx(1 - 0.999**3000, rel=error / 10)
    assert np.abs(second - (1 - 0.999**3000)).max() < error


def test_rounding_is_to_a_neighbour_right_on_average_and_keyed_by_the_update() -> None:
    x = jnp.float32([1.001, -0.3337, 1e-20, 3.0, 0.0, jnp.inf, -jnp.inf, jnp.nan])
    draws = jax.jit(jax.vmap(lambda n: kept([x], "bfloat16", n, [("embed",)])[0]))
    found = np.asarray(draws(jnp.arange(2000, dtype=jnp.int32))).astype(np.float64)
    near = np.spacing(np.abs(np.float32(x[:5]))).astype(np.float64) * 2**16
    assert (np.abs(found[:, :5] - np.float64(x[:5])) <= near).all()
    assert (np.abs(found[:, :5].mean(0) - np.float64(x[:5])) <= near / 20).all(), "four standard errors of the mean"
    np.testing.assert_array_equal(found[:, 5:], np.broadcast_to(np.float64(x[5:]), (2000, 3)))
    assert (found[:, 3] == 3.0).all()
    assert len(np.unique(found[:, 0])) == 2
    again = np.asarray(kept([x], "bfloat16", jnp.int32(7), [("embed",)])[0], np.float64)
    np.testing.assert_array_equal(again, found[7])


CASES = (
    ({"rule": "adafactor"}, 2e-5),
    # A twentieth of an update: where a gradient is small, the last bits of its sum turn a moment's rounding to bfloat16.
    ({"rule": "muon", "moments_dtype": "bfloat16"}, 5e-4),
)


@pytest.mark.slow
@pytest.mark.parametrize(("options", "atol"), CASES, ids=[options["rule"] for options, _ in CASES])
def test_a_mesh_changes_nothing_and_a_checkpoint_restores_on_another(
    tmp_path: Path, options: dict[str, Any], atol: float
) -> None:
    defaults = {"b1": 0.9, "eps": 1e-8, "learning_rate": 0.01}
    after = {}
    for mesh in ("one", "tensor"):
        learner = learner_of(mesh, optimizer={**defaults, **options})
        state, _ = learner.step(first_state(learner), learner.put(batch_of(learner, some_groups())))
        for name, leaf, like in zip(leaf_names(state), *map(jax.tree.leaves, (state, learner.abstract_state)), strict=True):
            assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype), name
            assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim), name
        after[mesh] = state
    for name, one, many in zip(
        leaf_names(after["one"].params), *(jax.tree.leaves(after[mesh].params) for mesh in after), strict=True
    ):
        np.testing.assert_allclose(many, one, rtol=1e-3, atol=atol, err_msg=name)
    with CheckpointStore(tmp_path, 1) as store:
        store.save(1, after["tensor"], RunMeta(1, 1, 0, 0, "hash", "tasks"))
        store.wait()
        restored = store.restore(learner_of("fsdp", optimizer={**defaults, **options}).abstract_state)
    assert restored is not None
    for name, old, new in zip(
        leaf_names(after["tensor"]), *map(jax.tree.leaves, (after["tensor"], restored.arrays)), strict=True
    ):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes(), name


def test_what_adafactor_remembers_is_split_like_its_parameters() -> None:
    state = learner_of("tensor", optimizer={"rule": "adafactor", "b1": 0.9, "eps": 1e-8}).abstract_state
    moments = state.optimizer.moments[0]
    rows, columns = moments.rows["layers"], moments.columns["layers"]
    assert rows["down"].sharding.spec == jax.sharding.PartitionSpec(None, "tensor", None)
    assert columns["down"].sharding.spec == jax.sharding.PartitionSpec(None, None, "fsdp")
    size = sum(leaf.size for leaf in jax.tree.leaves(moments))
    assert size < 0.2 * sum(leaf.size for leaf in jax.tree.leaves(state.params))


@pytest.mark.parametrize("rule", ["adafactor", "muon"])
def test_factors_of_an_adapter_are_matrices(rule: Any) -> None:
    spec = LoraSpec(2, 32.0, False, ("q_proj", "o_proj"))
    adapter = jax.tree.map(jnp.asarray, host_adapter(spec))
    optimizer = Optimizer(OptimizerConfig(rule=rule, learning_rate=0.1), lambda _: False, adapter_axes(spec))
    update = jax.jit(optimizer.update)(adapter, optimizer.init(adapter), adapter)
    for target, inputs in (("q_proj", 1), ("o_proj", 3)):
        for factor, split in (("a", inputs), ("b", 1)):
            old, new = (np.asarray(tree["layers"][target][factor]) for tree in (adapter, update.params))
            for moved in (new - old) / -0.1:
                matrix = moved.reshape(np.prod(moved.shape[:split]), -1)
                values, size = np.linalg.svd(matrix, compute_uv=False), 0.2 * np.sqrt(max(matrix.shape))
                # Newton-Schulz brings singular values into (0.68, 1.13), as its coefficients are made to.
                assert rule == "adafactor" or (0.6 * size < values.min() and values.max() < 1.2 * size), (target, factor)
                assert np.isfinite(values).all()
                assert values.max() > 0
