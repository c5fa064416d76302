"""The compiled critic is that of a page of plain code, however rollouts are packed, cut and spread, and filler is invisible."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.data.packing import Batch
from rljax.learner.critic import Critic
from rljax.learner.state import CriticState
from rljax.pytree import leaf_names
from tests.compilations import compilations
from tests.reference import critic as reference
from tests.reference import decoder, grpo
from tests.tiny_model import ARCH, batch_of, first_state, host_params, learner_of, placed, some_groups, spread

CLIP = 0.5
OPTIONS = {
    "algorithm": {"advantage": "gae", "cliprange_value": CLIP},
    "optimizer": {"critic_learning_rate": 0.25, "learning_rate": 0.5},
}
VALUE_ATOL = 2e-5
"""Float32 rounding of values of the order 1 after two layers."""
ATOL = 3e-6
"""Float32 sums of some fifty tokens in another order; the largest gradients are of the order 1."""
HEAD = np.random.default_rng(5).normal(0.0, 0.3, ARCH.embed_dim).astype(np.float32)


@cache
def critic_of(mesh: str = "one") -> Critic:
    return Critic(learner_of(mesh, **OPTIONS))


@cache
def packed(mesh: str = "one") -> Batch:
    return batch_of(learner_of(mesh, **OPTIONS), some_groups())


def own_params() -> dict[str, Any]:
    """Return random parameters of a critic, as numpy arrays."""
    return {"trunk": {name: leaf for name, leaf in host_params().items() if name != "head"}, "value": HEAD}


def state_of(critic: Critic) -> CriticState:
    layout = critic._layout
    params = jax.tree.map(lambda leaf, at: jax.device_put(jnp.array(leaf), at), own_params(), layout.params)
    return CriticState(params, jax.jit(critic.optimizer.init, out_shardings=layout.optimizer)(params))


def plain_values(params: dict[str, Any], tokens: Any, xp: Any = np) -> Any:
    """Return the value before each token but the first."""
    return decoder.hidden_states(ARCH, params["trunk"], tokens, xp)[:, :-1] @ params["value"]


@cache
def rows() -> tuple[grpo.Rows, np.ndarray, np.ndarray]:
    """Return the rollouts as rows, with old values and returns of each token but the first."""
    found, rng = grpo.rows_of(some_groups()), np.random.default_rng(0)
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), own_params())
    current = plain_values(wide, found.tokens)
    old, returns = (np.float32(current + rng.normal(0, scale, current.shape)) for scale in (0.6, 1.0))
    return found, old, returns


def slots_of(batch: Batch, per_token: np.ndarray, filler: float = np.nan) -> np.ndarray:
    """Bring what is known per rollout and token into the slots of a batch."""
    out = np.full(batch.mask.shape, filler, np.float32)
    for number, by_model in enumerate(rows()[0].by_model):
        out[batch.mask & (batch.rollout == number)] = per_token[number, by_model]
    return out


def step(critic: Critic, batch: Batch, filler: float = np.nan) -> tuple[Any, ...]:
    """Return loss, count of clipped values, gradient and parameters after one step; b1 is 0, so a moment is the gradient."""
    given = [critic.put(slots_of(batch, known, filler)) for known in rows()[1:]]
    state, output = critic.step(state_of(critic), put(critic, batch), *given)
    return jax.device_get((output.metrics, state.optimizer.moments[0].mu, state.params, output.grad_norm))


def put(critic: Critic, batch: Batch) -> Any:
    """Lay a batch on the critic's mesh."""
    return critic.learner.put(batch)


def assert_equal(ours: Any, theirs: Any, atol: float = ATOL) -> None:
    for name, left, right in zip(leaf_names(ours), *map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=atol, err_msg=name)


def test_a_value_is_that_of_the_state_before_its_token_and_zero_elsewhere() -> None:
    critic, batch = critic_of(), packed()
    found = np.asarray(critic.values(state_of(critic).params, put(critic, batch)))
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), own_params())
    want = slots_of(batch, plain_values(wide, rows()[0].tokens))
    np.testing.assert_allclose(found[batch.mask], want[batch.mask], rtol=0, atol=VALUE_ATOL)
    assert (found[~batch.mask] == 0).all()
    assert np.std(found[batch.mask]) > 0.1


@cache
def by_hand() -> tuple[float, int, Any]:
    """Return the loss, the number of clipped values and the gradient, token by token."""
    found, old, returns = rows()
    params = jax.tree.map(jnp.array, own_params())
    values, pull = jax.vjp(jax.jit(lambda params: plain_values(params, found.tokens, jnp)), params)
    known, total, cut = (np.asarray(values), old, returns), 0.0, 0
    slope, count = np.zeros(found.by_model.shape, np.float32), int(found.by_model.sum())
    for place in zip(*np.nonzero(found.by_model), strict=True):
        loss, slope[place] = reference.loss(*(float(numbers[place]) for numbers in known), CLIP)
        total, cut = total + loss, cut + (slope[place] == 0.0)
    return total / count, cut, jax.device_get(pull(jnp.array(slope / count))[0])


def test_a_step_is_the_one_written_out_by_hand() -> None:
    loss, cut, grads = by_hand()
    metrics, gradient, params, norm = step(critic_of(), packed())
    assert float(metrics["value_loss"]) == pytest.approx(loss, abs=ATOL)
    assert (float(metrics["value_clipped"]), cut > 3) == (cut, True)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads)) > 0.02
    assert_equal(gradient, grads)
    # After one update the corrected moments are the gradient and its square; eps is 1.
    assert_equal(params, jax.tree.map(lambda leaf, grad: leaf - 0.25 * grad / (np.abs(grad) + 1.0), own_params(), grads))
    assert float(norm) == pytest.approx(np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(grads))), rel=1e-4)


@pytest.mark.parametrize("way", ["portions", "tensor", "replica"])
def test_neither_portions_nor_devices_change_a_step(way: str) -> None:
    single = step(critic_of(), packed())
    other = step(critic_of(), spread(packed(), 2)) if way == "portions" else step(critic_of(way), packed(way))
    assert_equal(other, single)


def test_the_programs_compile_once_and_equal_steps_give_equal_bits() -> None:
    critic = critic_of()
    outcomes = [step(critic, packed())]
    with compilations() as found:
        outcomes += [step(critic, spread(packed(), 2)), step(critic, packed())]
    assert set(found) <= {"init"}  # of the optimizer, in each `step` here
    first, last = ([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(outcomes[i])] for i in (0, 2))
    assert first == last


def test_filler_changes_no_bit() -> None:
    critic, batch = critic_of(), packed()
    outcomes = []
    for value, token in ((0.0, 0), (np.inf, 5), (np.nan, 299)):
        tokens = np.where(batch.segments > 0, batch.tokens, np.int32(token))
        targets = np.where(batch.mask, batch.targets, np.int32(token))
        filled = dataclasses.replace(batch, tokens=tokens, targets=targets)
        values = critic.values(state_of(critic).params, put(critic, filled))
        outcomes.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((step(critic, filled, value), values))])
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("mesh", ["one", "tensor"])
def test_the_first_critic_is_the_policy_with_values_of_zero_and_lies_like_it(mesh: str) -> None:
    learner = learner_of(mesh, **OPTIONS)
    state, described = first_state(learner), learner.abstract_state
    assert state.critic is not None
    assert leaf_names(state) == leaf_names(described)
    for name, leaf, like in zip(leaf_names(state), *map(jax.tree.leaves, (state, described)), strict=True):
        assert (leaf.shape, leaf.dtype) == (like.shape, like.dtype), name
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim), name
    assert set(state.critic.params["trunk"]) == set(state.params) - {"head"}
    assert not state.critic.params["value"].any()
    policy = placed(learner, host_params())
    for name, trunk in state.critic.params["trunk"].items():
        for leaf, like in zip(jax.tree.leaves(trunk), jax.tree.leaves(policy[name]), strict=True):
            assert np.array_equal(leaf, like)
            assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)


def test_training_the_critic_gives_up_its_old_state_and_leaves_the_policy() -> None:
    critic, batch = critic_of(), packed()
    state = first_state(learner_of(**OPTIONS))
    assert state.critic is not None
    given = [critic.put(slots_of(batch, known, 0.0)) for known in rows()[1:]]
    after, _ = critic.step(state.critic, put(critic, batch), *given)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.critic.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert np.abs(np.asarray(after.params["value"])).max() > 0


def test_a_policy_without_a_critic_keeps_none() -> None:
    assert learner_of().abstract_state.critic is None
    with pytest.raises(AssertionError, match="no state for a critic"):
        Critic(learner_of())


def test_its_rate_follows_the_schedule_of_the_policy_in_proportion() -> None:
    schedule = {"schedule": "linear", "decay_steps": 10, "learning_rate": 0.1, "min_learning_rate": 0.01}
    learner = learner_of(algorithm=OPTIONS["algorithm"], optimizer={**schedule, "critic_learning_rate": 0.4})
    own = Critic(learner).optimizer.config
    assert (own.learning_rate, own.min_learning_rate, own.decay_steps) == (0.4, pytest.approx(0.04), 10)
