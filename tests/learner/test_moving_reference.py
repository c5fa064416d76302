"""The reference policy and the weight of the divergence from it change as the options say, inside the compiled step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithm_config import AlgorithmConfig
from rljax.learner.state import first_reference, next_reference
from tests.tiny_model import batch_of, first_state, host_params, learner_of, some_groups

MOVING = {
    "algorithm": {"beta": 0.1, "reference_sync_steps": 2, "reference_mixup_alpha": 0.25, "kl_target": 0.01, "kl_gain": 0.5},
    "sampler": {"temperature": 1.0},
}


def test_a_step_moves_reference_and_weight() -> None:
    learner = learner_of(**MOVING)
    state, batch = first_state(learner), learner.put(batch_of(learner, some_groups()))
    weights, params, references = [float(state.beta)], [], []
    for _ in range(3):
        ref = learner.score(state.reference, batch)
        state, output = learner.step(state, batch, None, ref)
        params.append(jax.device_get(state.params))
        references.append(jax.device_get(state.reference))
        measured = float(output.metrics["kl_ref"]) / float(output.metrics["tokens"])
        weights.append(weights[-1] * (1 + 0.5 * np.clip(measured / 0.01 - 1, -0.2, 0.2)))
        assert float(state.beta) == pytest.approx(weights[-1], rel=1e-5)
    assert weights[1] == pytest.approx(0.09), "no divergence at the first step, so the weight falls as fast as it may"
    assert weights[3] > weights[2], "and rises once there is too much"
    start = jax.tree.map(np.asarray, host_params())
    assert_equal(references[0], start)
    assert_equal(references[1], jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, start, params[1]))
    assert_equal(references[2], references[1])
    moved = max(np.abs(new - old).max() for new, old in zip(*map(jax.tree.leaves, (params[1], start)), strict=True))
    assert moved > 1e-2, "else an unmoved reference would pass"


def assert_equal(ours: Any, theirs: Any) -> None:
    for left, right in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-6)


def test_a_refresh_takes_the_policy_as_it_is() -> None:
    config = AlgorithmConfig(beta=0.1, reference_sync_steps=3)
    old, new = {"w": jnp.zeros(2)}, {"w": jnp.ones(2, jnp.bfloat16)}
    assert next_reference(old, new, jnp.asarray(2), config) is not None
    kept, refreshed = (next_reference(old, new, jnp.asarray(step), config) for step in (2, 3))
    assert kept is not None
    assert refreshed is not None
    assert (kept["w"].tolist(), refreshed["w"].tolist()) == ([0.0, 0.0], [1.0, 1.0])
    assert refreshed["w"].dtype == jnp.float32, "small shares of a change must not be lost"


def test_nothing_is_kept_where_nothing_changes() -> None:
    assert first_reference({"w": jnp.ones(2)}, AlgorithmConfig(beta=0.1)) == (None, None)
