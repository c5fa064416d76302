"""At the first update on a batch the policy is the proximal one: every ratio is 1, to the last bit, and nothing is clipped."""

from typing import Any

import jax
import numpy as np
import pytest

from tests.tiny_model import WITH_REFERENCE, batch_of, first_state, learner_of, some_groups


def ratios(metrics: Any) -> tuple[float, float, float]:
    """Return mean and largest ratio, and the clipped fraction."""
    sums = {name: float(value) for name, value in jax.device_get(metrics).items()}
    clipped = sums["clipped_low"] + sums["clipped_high"]
    return sums["ratio"] / sums["tokens"], sums["ratio_max"], clipped / sums["tokens"]


BFLOAT16 = {"model": {"compute_dtype": "bfloat16"}, "sampler": {"temperature": 1.0}}
LOGP_ATOL = 5e-6
"""Float32 rounding of log-probabilities of the order 10 (nats): at another temperature than 1 the two programs differ by it."""


@pytest.mark.parametrize("options", [WITH_REFERENCE, BFLOAT16], ids=["float32", "bfloat16"])
def test_against_the_learners_own_scores_the_ratio_is_one_at_first_and_moves_later(options: Any) -> None:
    learner = learner_of(**options)
    state, batch = first_state(learner), learner.put(batch_of(learner, some_groups()))
    proximal = learner.score(state.params, batch)
    reference = proximal if learner.config.algorithm.beta > 0 else None
    state, output = learner.step(state, batch, proximal, reference)
    assert ratios(output.metrics) == (1.0, 1.0, 0.0)
    for _ in range(2):
        state, output = learner.step(state, batch, proximal, reference)
        mean, largest, clipped = ratios(output.metrics)
        assert mean != 1.0
        assert largest > 1.1
        assert clipped > 0


def test_with_a_single_update_it_is_one_by_construction() -> None:
    learner = learner_of()
    packed = batch_of(learner, some_groups())
    state, batch = first_state(learner), learner.put(packed)
    for _ in range(2):
        scores = np.asarray(learner.score(state.params, batch))
        state, output = learner.step(state, batch)
        assert ratios(output.metrics) == (1.0, 1.0, 0.0)
        np.testing.assert_allclose(np.asarray(output.logp)[packed.mask], scores[packed.mask], rtol=0, atol=LOGP_ATOL)
