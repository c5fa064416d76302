"""Rollouts packed into shared rows, with one copy of their prompt, are scored and trained on as if each had a row alone."""

import jax
import numpy as np

from rljax.algorithms.losses import token_weights
from rljax.data.packing import Batch, loss_lengths, pack
from rljax.mesh import data_shards
from rljax.rollouts.batching import batch_shape, prepare
from tests.tiny_model import first_state, gradient, learner_of, some_groups

LOGP_ATOL = 1e-5
"""The same sums over keys at other places of a row; log-probabilities are of the order 10 (nats)."""
GRADIENT_ATOL = 2e-6
"""Eight float32 gradients added in another order; the largest entries are of the order 1."""


def test_packed_equals_unpacked() -> None:
    learner, groups = learner_of(), some_groups()
    shape = batch_shape(learner.config, data_shards(learner.mesh))
    prepared = prepare(groups, learner.config, shape)
    whole, advantages = prepared.batches[0], prepared.advantages.values
    assert (whole.parents > 0).any()  # prompts are shared
    assert whole.segments.max() >= 4  # rows are shared
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = loss_lengths(rollouts, np.ones(8, bool), mask_truncated=False)
    weights = token_weights(lengths, "token-mean", tokens=int(lengths.sum()), rollouts=8, max_completion_length=16)

    def outcome(batch: Batch) -> tuple[np.ndarray, list[np.ndarray]]:
        state, output = learner.step(first_state(learner), learner.put(batch))
        return np.asarray(output.logp), jax.tree.leaves(gradient(state))

    logp, grads = outcome(whole)
    summed = [np.zeros_like(leaf) for leaf in grads]
    for index, rollout in enumerate(rollouts):
        used = np.ones(1, bool)
        alone = pack([rollout], advantages[[index]], weights[[index]], used, shape, mask_truncated=False)
        assert alone.segments.max() == 1
        own_logp, own_grads = outcome(alone)
        np.testing.assert_allclose(logp[whole.rollout == index], own_logp[alone.mask], rtol=0, atol=LOGP_ATOL)
        summed = [total + leaf for total, leaf in zip(summed, own_grads, strict=True)]
    assert max(np.abs(leaf).max() for leaf in summed) > 0.05
    for packed, separate in zip(grads, summed, strict=True):
        np.testing.assert_allclose(packed, separate, rtol=0, atol=GRADIENT_ATOL)
