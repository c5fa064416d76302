"""The log-probabilities that the sampler reports are those that the learner computes for the same tokens."""

import numpy as np
import pytest

from rljax.models.block import INPUTS
from rljax.pytree import Params
from tests.models.test_int8 import OUTPUTS_FIRST, by_hand
from tests.tiny_model import batch_of, first_state, host_params, learner_of, rollouts_of, run, some_requests, warm_engine

FLOAT32_GAP = 2e-5
"""Two float32 programs that sum in different orders; log-probabilities are of the order 10 (nats)."""
BFLOAT16_MEAN, BFLOAT16_MAX = 0.05, 0.5
"""Products of 8 significant bits over two layers; logits are of the order 10, so their rounding alone is some 0.03 nats."""
BAND = (0.9, 1.1)
"""A ratio outside this band is a visible gap."""


INT8_MEAN = 0.1
"""Eight products whose weights are rounded by 0.5 % each; logits are of the order 3 and log-probabilities of the order 10."""
INT8_CACHE_MEAN = 0.03
"""Keys and values of two layers: the largest of 8 normal numbers is some two standard deviations, so that rounding to its 127th
adds an error of 2 / 127 / sqrt(12) = 0.5 % to each. Four such errors in quadrature are 1 % of logits of the order 3."""


def gaps(
    dtype: str,
    temperature: float,
    learner_temperature: float | None = None,
    weights_dtype: str = "as-is",
    cache_dtype: str = "as-is",
    params: Params | None = None,
) -> np.ndarray:
    requests = some_requests(4, 8, temperature)
    engine = warm_engine(dtype=dtype, weights_dtype=weights_dtype, cache_dtype=cache_dtype)
    groups = rollouts_of(requests, run(engine, requests))
    learner = learner_of(model={"compute_dtype": dtype}, sampler={"temperature": learner_temperature or temperature})
    batch = batch_of(learner, groups)
    assert batch.mask.sum() > 60
    scores = np.asarray(learner.score(first_state(learner, params).params, learner.put(batch)))
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


def dequantised() -> Params:
    """Return the model whose projections are codes times scales."""
    layers = dict(host_params()["layers"])
    for name in INPUTS:
        back = np.argsort(OUTPUTS_FIRST[name])
        found = []
        for weight in layers[name]:
            codes, scale = by_hand(name, weight)
            found.append((codes * scale.reshape(*scale.shape, *(1,) * INPUTS[name])).transpose(back))
        layers[name] = np.stack(found).astype(np.float32)
    return {**host_params(), "layers": layers}


def test_a_sampler_in_int8_is_the_model_that_its_codes_stand_for() -> None:
    assert np.abs(gaps("float32", 1.0, weights_dtype="int8", params=dequantised())).max() < FLOAT32_GAP


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_int8_the_gap_is_seen_and_bounded(dtype: str) -> None:
    found = np.abs(gaps(dtype, 1.0, weights_dtype="int8"))
    assert 1e-3 < found.mean() < INT8_MEAN


def test_with_a_cache_in_int8_the_gap_is_seen_and_bounded() -> None:
    assert 1e-3 < np.abs(gaps("float32", 1.0, cache_dtype="int8")).mean() < INT8_CACHE_MEAN
