"""Router losses: those of separate sequences, whatever the packing, the micro-batches and the devices; never of padding."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.data.packing import Batch
from rljax.learner.routers import token_copies
from rljax.learner.step import Learner, StepOutput
from rljax.models.decoder import merge
from rljax.pytree import Params
from rljax.records import Group, Score
from rljax.sampler.engine import Engine
from tests.tiny_model import ARCH as PLAIN
from tests.tiny_model import STOP_IDS, batch_of, config_of, first_state, gradient, some_groups, spread
from tests.tiny_model import mesh_of as plain_mesh
from tests.tiny_moe import ARCH, learner_of, params

Z, BALANCE = 0.02, 0.3
ATOL = 2e-6
"""Float32 sums in another order; loss and gradients are of the order 1."""


@cache
def learner(mesh: str = "one") -> Learner:
    weights = {"router_z_loss_coef": Z, "router_balance_loss_coef": BALANCE}
    return learner_of(mesh, algorithm=weights, sampler={"temperature": 1.0})


def equal_groups() -> list[Group]:
    """Return groups whose advantages are all 0, so that the routers' losses are the whole loss."""
    lengths = ((16, 16, 15, 16), (14, 13, 16, 12), (9, 11, 10, 12))
    return [
        dataclasses.replace(
            group, rollouts=tuple(dataclasses.replace(rollout, score=Score("score", 1.0)) for rollout in group.rollouts)
        )
        for group in some_groups(lengths)
    ]


def step(batch: Batch, mesh: str = "one") -> tuple[Params, StepOutput]:
    state, output = learner(mesh).step(first_state(learner(mesh), params()), learner(mesh).put(batch))
    return gradient(state), output


@cache
def unpacked() -> tuple[dict[str, float], Params]:
    """Return losses and gradient of the rollouts as separate rows, in a single pass, written out from the formulas."""
    rollouts = [rollout for group in equal_groups() for rollout in group.rollouts]
    longest = max(len(rollout.tokens) for rollout in rollouts)
    ids = jnp.array([np.pad(rollout.tokens, (0, longest - len(rollout.tokens))) for rollout in rollouts])
    positions = jnp.broadcast_to(jnp.arange(longest), ids.shape)
    known = np.array([np.arange(longest) < len(rollout.tokens) for rollout in rollouts])

    def losses(params: Params) -> tuple[Any, Any]:
        segments = jnp.asarray(known, jnp.int32)
        out = merge(ARCH, params).forward(ids, positions, segments, dtype=jnp.dtype("float32"), record_routing=True)
        assert out.routing is not None
        z, balance, loads = [], [], []
        for logits, choices in zip(out.routing.logits, out.routing.choices, strict=True):
            logits, choices = logits[known], choices[known]
            z.append(jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), -1)) ** 2))
            share = jnp.array([(choices == expert).sum() for expert in range(6)]) / len(logits)
            balance.append(6 * jnp.sum(share * jnp.mean(jax.nn.softmax(logits, -1), 0)))
            loads.append(jnp.max(share) / 2)
        z, balance = sum(z) / len(z), sum(balance) / len(balance)
        return Z * z + BALANCE * balance, {"z_loss": z, "balance_loss": balance, "max_load": jnp.max(jnp.stack(loads))}

    (_, found), grads = jax.jit(jax.value_and_grad(losses, has_aux=True))(params())
    return {name: float(value) for name, value in found.items()}, jax.device_get(grads)


def assert_is_unpacked(grads: Params, output: StepOutput) -> None:
    expected, expected_grads = unpacked()
    assert {name: float(value) for name, value in output.router.items()} == pytest.approx(expected, rel=1e-5)
    loss = Z * expected["z_loss"] + BALANCE * expected["balance_loss"]
    assert float(output.metrics["loss"]) == pytest.approx(loss, rel=1e-5)
    assert float(output.metrics["policy_loss"]) == 0
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected_grads)) > 0.01
    for ours, theirs in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=ATOL)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_packing_and_micro_batches_change_no_router_loss(parts: int) -> None:
    batch = batch_of(learner(), equal_groups())
    assert batch.parents.any()
    assert_is_unpacked(*step(spread(batch, parts)))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["expert", "replica"])
def test_devices_change_no_router_loss(mesh: str) -> None:
    assert_is_unpacked(*step(batch_of(learner(mesh), equal_groups()), mesh))


def test_padding_counts_in_no_router_loss() -> None:
    batch = batch_of(learner(), equal_groups())
    other = dataclasses.replace(batch, tokens=np.where(batch.segments > 0, batch.tokens, np.int32(77)))
    assert (other.tokens != batch.tokens).any()
    (grads, output), (other_grads, other_output) = step(batch), step(other)
    assert jax.device_get(output.router) == jax.device_get(other_output.router)
    assert output.metrics["loss"] == other_output.metrics["loss"]
    # Rows of the grouped products move with the padding between them, and with them the order of the sums.
    for one, two in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=ATOL)


def test_a_shared_prompt_counts_for_each_of_its_rollouts() -> None:
    segments = np.array([[1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 0], [1, 1, 2, 3, 3, 4, 5, 5, 5, 5, 0, 0, 0, 0]])
    parents = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]])
    expected = [[2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0], [3, 3, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]]
    assert token_copies(jnp.asarray(segments), jnp.asarray(parents)).tolist() == expected


@pytest.mark.parametrize("option", ["routing_replay", "router_z_loss_coef", "router_balance_loss_coef"])
def test_options_of_experts_are_refused_for_a_model_without_them(option: str) -> None:
    value = "true" if option == "routing_replay" else 0.1
    with pytest.raises(ValueError, match=f"algorithm.{option} is for models with experts, and this model has none"):
        Learner(PLAIN, plain_mesh("one"), config_of(algorithm={option: value}))


def test_a_sampler_without_experts_records_none() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.routing_replay is for models with experts, and this model has none"):
        Engine(
            PLAIN, plain_mesh("one"), STOP_IDS, slots=8, max_prompt_length=8, max_completion_length=8, readers=2,
            decode_chunk_steps=4, dtype="float32", record_routing=True,
        )  # fmt: skip


def test_without_experts_nothing_is_reported_of_routers() -> None:
    plain = Learner(PLAIN, plain_mesh("one"), config_of())
    assert plain.replayed is None
    with jax.set_mesh(plain.mesh):
        batch = plain.put(batch_of(plain, some_groups()))
        _, output = jax.eval_shape(plain._step, plain.abstract_state, batch, None, None)
    assert output.router == {}
