"""The number of micro-batches that an optimizer step is cut into changes neither its loss nor its gradient."""

import jax
import numpy as np

from tests.compilations import compilations
from tests.tiny_model import batch_of, first_state, gradient, learner_of, some_groups, spread

ATOL = 1e-6
"""Float32 sums in another order; loss, gradients and parameters are of the order 1."""


def test_microbatching_changes_nothing() -> None:
    learner = learner_of()
    whole = batch_of(learner, some_groups(((16, 16, 15, 16), (14, 13, 16, 12), (9, 11, 10, 12))))
    assert whole.num_micro == 1
    assert whole.mask.any(2).sum() >= 6  # rows in use
    outcomes = []
    learner.step(first_state(learner), learner.put(whole))
    with compilations() as found:
        for parts in (1, 2, 4):
            batch = spread(whole, parts)
            assert batch.mask.sum() == whole.mask.sum()
            assert (batch.mask.sum((1, 2)) > 0).sum() == parts
            state, output = learner.step(first_state(learner), learner.put(batch))
            outcomes.append((output.metrics["loss"], output.metrics["tokens"], gradient(state), jax.device_get(state.params)))
    assert not found
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(outcomes[0][2])) > 0.05
    for other in outcomes[1:]:
        for one, two in zip(jax.tree.leaves(outcomes[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(one, two, rtol=0, atol=ATOL)
