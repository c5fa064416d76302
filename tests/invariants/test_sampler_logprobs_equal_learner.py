"""The log-probabilities that the sampler reports are those that the learner computes for the same tokens."""

import numpy as np
import pytest

from tests.tiny_model import batch_of, first_state, learner_of, rollouts_of, run, some_requests, warm_engine

FLOAT32_GAP = 2e-5
"""Two float32 programs that sum in different orders; log-probabilities are of the order 10 (nats)."""
BFLOAT16_MEAN, BFLOAT16_MAX = 0.05, 0.5
"""Products of 8 significant bits over two layers; logits are of the order 10, so their rounding alone is some 0.03 nats."""
BAND = (0.9, 1.1)
"""A ratio outside this band is a visible gap."""


def gaps(dtype: str, temperature: float, learner_temperature: float | None = None) -> np.ndarray:
    requests = some_requests(4, 8, temperature)
    groups = rollouts_of(requests, run(warm_engine(dtype=dtype), requests))
    learner = learner_of(model={"compute_dtype": dtype}, sampler={"temperature": learner_temperature or temperature})
    batch = batch_of(learner, groups)
    assert batch.mask.sum() > 60
    scores = np.asarray(learner.score(first_state(learner).params, learner.put(batch)))
    return (scores - batch.logp_behavior)[batch.mask]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_in_float32_they_agree_to_rounding(temperature: float) -> None:
    found = np.abs(gaps("float32", temperature))
    assert found.max() < FLOAT32_GAP
    ratio = np.exp(found)
    assert ((ratio < BAND[0]) | (ratio > BAND[1])).mean() == 0


def test_in_bfloat16_the_gap_is_bounded() -> None:
    found = np.abs(gaps("bfloat16", 1.0))
    assert found.mean() < BFLOAT16_MEAN
    assert found.max() < BFLOAT16_MAX
    assert found.max() > FLOAT32_GAP  # bfloat16 was at work


def test_another_temperature_would_show() -> None:
    assert np.abs(gaps("float32", 1.0, learner_temperature=0.7)).mean() > 0.1
