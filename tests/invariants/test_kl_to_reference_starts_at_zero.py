"""The divergence to the reference is exactly 0 before the first update and grows after it; the reference never changes."""

import jax
import numpy as np

from tests.tiny_model import WITH_REFERENCE, batch_of, first_state, host_params, learner_of, placed, some_groups


def test_kl_to_reference_starts_at_zero() -> None:
    learner = learner_of(**WITH_REFERENCE)
    reference = placed(learner, host_params())
    state, batch = first_state(learner), learner.put(batch_of(learner, some_groups()))
    before = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(reference)]
    scores = learner.score(reference, batch)
    divergence = []
    for _ in range(4):
        state, output = learner.step(state, batch, learner.score(state.params, batch), scores)
        divergence.append(float(output.metrics["kl_ref"]))
    assert divergence[0] == 0.0
    assert min(divergence[1:]) > 0
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(reference)] == before
    assert np.array_equal(learner.score(reference, batch), scores)
