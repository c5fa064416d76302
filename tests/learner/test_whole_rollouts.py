"""Losses that look at whole rollouts take the same step however these are packed, cut into micro-batches and spread."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.data.packing import Batch
from rljax.learner.step import Learner
from rljax.recipe import load
from tests.reference import decoder, grpo, policy_loss
from tests.tiny_model import ARCH, batch_of, first_state, gradient, host_params, learner_of, some_groups, spread

ALGORITHM = {
    "importance_sampling_level": "sequence",
    "loss_agg_mode": "seq-mean-token-mean",
    "rollout_is": "geometric",
    "epsilon": 0.02,
    "epsilon_high": 0.02,
    "beta": 0.1,
    "kl_estimator": "k3-ratio",
}
OPTIONS = {"algorithm": ALGORITHM, "sampler": {"temperature": 1.0}}
ATOL = 3e-6
"""Float32 sums in another order; the largest gradients are of the order 1."""
LENGTHS = ((3, 9, 5, 1), (5, 12, 2, 7))


def policies() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return log-probabilities of each rollout's tokens: the model's own, and random ones near by."""
    rows, rng = grpo.rows_of(some_groups(LENGTHS)), np.random.default_rng(0)
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), host_params())
    own = decoder.logprobs(ARCH, wide, rows.tokens, 1.0)
    return own, *(np.float32(own + rng.normal(0, 0.1, own.shape)) for _ in range(2))


def slots_of(batch: Batch, rows: np.ndarray) -> Any:
    """Bring what is known per rollout and token into the slots of a batch; NaN in filler."""
    rollouts = [rollout for group in some_groups(LENGTHS) for rollout in group.rollouts]
    out = np.full(batch.mask.shape, np.nan, np.float32)
    for number, rollout in enumerate(rollouts):
        out[batch.mask & (batch.rollout == number)] = rows[number, np.flatnonzero(rollout.mask) - 1]
    return jnp.array(out)


def step(learner: Learner, batch: Batch) -> tuple[Any, ...]:
    _, prox, ref = policies()
    state, output = learner.step(first_state(learner), learner.put(batch), slots_of(batch, prox), slots_of(batch, ref))
    return output.metrics["loss"], gradient(state)


def assert_equal(ours: Any, theirs: Any) -> None:
    for left, right in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=ATOL)


def test_a_step_is_the_one_written_out_by_hand_on_any_mesh_and_in_any_portions() -> None:
    learner = learner_of(**OPTIONS)
    packed = batch_of(learner, some_groups(LENGTHS))
    loss, grads = step(learner, packed)

    own, prox, ref = policies()
    rows, rollouts = grpo.rows_of(some_groups(LENGTHS)), []
    for number, mask in enumerate(rows.by_model):
        columns = (array[number, mask] for array in (own, prox, rows.behavior, ref))
        rollouts.append([policy_loss.Token(*map(float, known)) for known in zip(*columns, strict=True)])
    config = load(None, [f"algorithm.{name}={value}" for name, value in ALGORITHM.items()])
    value, by_token = policy_loss.step_loss(rollouts, rows.advantage.tolist(), config.algorithm, 16)
    slope = np.zeros(rows.by_model.shape, np.float32)
    for number, mask in enumerate(rows.by_model):
        slope[number, mask] = by_token[number]
    want = grpo.pull_back(ARCH, jax.tree.map(jnp.array, host_params()), rows.tokens, 1.0, slope)
    np.testing.assert_allclose(loss, value, atol=1e-5)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(want)) > 0.02
    assert_equal(grads, want)

    assert_equal(step(learner, spread(packed, 2)), (loss, grads))
    other = learner_of("tensor", **OPTIONS)
    assert_equal(step(other, batch_of(other, some_groups(LENGTHS))), (loss, grads))
