"""An adapter is trained beside a base that stays as it is: gradients, state, meshes, dropout."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.learner.state import TrainState
from rljax.learner.step import Learner
from rljax.models.lora import init_adapter, merged
from rljax.pytree import Params
from tests.models.test_lora import matrices, peft_factors
from tests.reference import grpo
from tests.tiny_model import (
    ARCH,
    batch_of,
    config_of,
    first_state,
    gradient,
    host_adapter,
    host_params,
    learner_of,
    placed,
    some_groups,
    spread,
)

GRADIENT_ATOL = 5e-6
"""Float32 sums of some fifty tokens in another order, through two more products; the largest gradients are of the order 1."""
LORA = {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]}


def lora_learner(mesh: str = "one", **options: Any) -> Learner:
    return learner_of(mesh, lora={**LORA, **options})


@cache
def step_on(mesh: str) -> tuple[Learner, Params, TrainState, Any]:
    """Return a learner, the base it has used, and state and output after one step from a random adapter."""
    learner = lora_learner(mesh)
    assert learner.lora is not None
    base, state = placed(learner, host_params()), first_state(learner, host_adapter(learner.lora))
    return learner, base, *learner.step(state, learner.put(batch_of(learner, some_groups())), base=base)


def test_the_gradient_is_that_of_the_merged_model_by_the_chain_rule() -> None:
    """With W + s B A: dL/dB = s G A^T and dL/dA = s B^T G, where G is the gradient of the merged weight by plain autodiff."""
    learner, _, state, output = step_on("one")
    assert learner.lora is not None
    adapter = host_adapter(learner.lora)
    whole = merged(ARCH, *(jax.tree.map(jnp.asarray, tree) for tree in (host_params(), adapter)), learner.lora)
    value, grads, _ = grpo.step(ARCH, whole, grpo.rows_of(some_groups()), learner.config, None, None)
    assert float(output.metrics["loss"]) == pytest.approx(float(value), abs=GRADIENT_ATOL)
    found = gradient(state)
    largest = []
    for target in learner.lora.targets:
        for layer in ARCH.layers:
            full, (a, b) = matrices(grads, target, layer), peft_factors(adapter, target, layer)
            da, db = peft_factors(found, target, layer)
            scale = learner.lora.scale
            np.testing.assert_allclose(da, scale * b.T @ full, rtol=0, atol=GRADIENT_ATOL, err_msg=f"{target} a")
            np.testing.assert_allclose(db, scale * full @ a.T, rtol=0, atol=GRADIENT_ATOL, err_msg=f"{target} b")
            largest.append(np.abs(db).max())
    assert min(largest) > 1e-3


def test_only_the_adapter_changes_and_only_it_is_kept() -> None:
    learner, base, state, _ = step_on("one")
    assert learner.lora is not None
    assert all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (base, host_params())), strict=True))
    adapter = host_adapter(learner.lora)
    assert all(not np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (state.params, adapter)), strict=True))
    bytes_of = [sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (adapter, state.params, state.optimizer.moments)]
    counter = 4
    assert bytes_of == [bytes_of[0], bytes_of[0], 2 * bytes_of[0] + counter]
    moments = state.optimizer.moments[0].mu
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state.params, moments))} == {"float32"}


def test_the_base_alone_is_the_reference_and_a_merged_model_scores_like_its_parts() -> None:
    learner, base, state, _ = step_on("one")
    plain = learner_of()
    batch = learner.put(batch_of(learner, some_groups()))
    mask = np.asarray(batch.mask)
    with_adapter = np.asarray(learner.score(state.params, batch, base))[mask]
    assert np.array_equal(np.asarray(learner.score(None, batch, base))[mask], np.asarray(plain.score(base, batch))[mask])
    whole = np.asarray(plain.score(learner.merged(state.params, base), batch))[mask]
    np.testing.assert_allclose(with_adapter, whole, rtol=0, atol=2e-5)
    assert np.abs(with_adapter - np.asarray(learner.score(None, batch, base))[mask]).max() > 0.1
    assert all(np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (base, host_params())), strict=True))


@pytest.mark.parametrize("mesh", ["fsdp", "tensor", "mixed"])
def test_a_step_on_many_devices_is_the_step_on_one(mesh: str) -> None:
    (_, _, single, output), (learner, base, sharded, other) = step_on("one"), step_on(mesh)
    assert float(other.metrics["loss"]) == pytest.approx(float(output.metrics["loss"]), abs=GRADIENT_ATOL)
    for one, many in zip(*map(jax.tree.leaves, (gradient(single), gradient(sharded))), strict=True):
        np.testing.assert_allclose(many, one, rtol=0, atol=GRADIENT_ATOL)
    for leaf, like in zip(*map(jax.tree.leaves, (sharded, learner.abstract_state)), strict=True):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    q_proj, o_proj = (sharded.params["layers"][target] for target in ("q_proj", "o_proj"))
    assert [q_proj["a"].sharding.spec[1], o_proj["b"].sharding.spec[2]] == ["fsdp", "fsdp"]
    assert [q_proj["b"].sharding.spec[2], o_proj["a"].sharding.spec[1]] == ["tensor", "tensor"]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(base))


def test_micro_batches_change_nothing() -> None:
    learner, base, together, _ = step_on("one")
    assert learner.lora is not None
    batch = learner.put(spread(batch_of(learner, some_groups()), 2))
    apart, _ = learner.step(first_state(learner, host_adapter(learner.lora)), batch, base=base)
    for one, two in zip(*map(jax.tree.leaves, (gradient(together), gradient(apart))), strict=True):
        np.testing.assert_allclose(two, one, rtol=0, atol=GRADIENT_ATOL)


def test_dropout_is_drawn_anew_at_every_step_and_again_after_a_restart() -> None:
    learner = lora_learner(dropout=0.5)
    assert learner.lora is not None
    base, batch = placed(learner, host_params()), learner.put(batch_of(learner, some_groups()))

    def logps(updates: int) -> np.ndarray:
        state = first_state(learner, host_adapter(learner.lora))
        state = TrainState(state.params, state.optimizer._replace(updates=jnp.int32(updates)), None, None)
        return np.asarray(learner.step(state, batch, base=base)[1].logp)[np.asarray(batch.mask)]

    first, again, later = logps(0), logps(0), logps(1)
    assert np.array_equal(first, again)
    assert np.abs(first - later).max() > 0.01
    scored = np.asarray(learner.score(host_adapter(learner.lora), batch, base))[np.asarray(batch.mask)]
    assert np.abs(first - scored).max() > 0.01, "scoring drops nothing"


def test_what_dropout_draws_does_not_depend_on_the_devices() -> None:
    def logps(mesh: str) -> np.ndarray:
        learner = lora_learner(mesh, dropout=0.5)
        assert learner.lora is not None
        batch, state = batch_of(learner, some_groups()), first_state(learner, host_adapter(learner.lora))
        return np.asarray(learner.step(state, learner.put(batch), base=placed(learner, host_params()))[1].logp)[batch.mask]

    np.testing.assert_allclose(logps("replica"), logps("one"), rtol=0, atol=GRADIENT_ATOL)


def test_the_first_adapter_is_that_of_the_seed_on_any_mesh() -> None:
    learner = lora_learner("tensor")
    assert learner.lora is not None
    expected = init_adapter(ARCH, learner.lora, learner.config.run.seed)
    for leaf, other in zip(*map(jax.tree.leaves, (learner.first_adapter(), expected)), strict=True):
        assert np.array_equal(leaf, other)


def test_weight_decay_is_for_every_factor() -> None:
    learner = Learner(ARCH, learner_of().mesh, config_of(lora=LORA, optimizer={"weight_decay": 0.1}))
    assert learner.lora is not None
    params = jax.tree.map(jnp.asarray, host_adapter(learner.lora))
    still = jax.tree.map(jnp.zeros_like, params)
    after = learner.optimizer.update(still, learner.optimizer.init(params), params).params
    for old, new in zip(*map(jax.tree.leaves, (params, after)), strict=True):
        np.testing.assert_allclose(new, old * 0.95, rtol=1e-6)


def test_a_state_and_a_base_belong_together() -> None:
    learner = learner_of()
    batch = learner.put(batch_of(learner, some_groups()))
    with pytest.raises(AssertionError, match="beside its base"):
        learner.step(first_state(learner), batch, base=placed(learner, host_params()))
