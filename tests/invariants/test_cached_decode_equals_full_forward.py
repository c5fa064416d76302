"""Decoding with a cache draws the tokens that computing the whole sequence anew for every token draws."""

import numpy as np
import pytest

from tests.reference.generate import generate
from tests.tiny_model import ARCH, STOP_IDS, host_params, run, some_requests, warm_engine

LOGP_ATOL = 2e-5
"""Float32 against float64 over two layers; log-probabilities are of the order 10 (nats)."""


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_cached_decode_equals_full_forward(temperature: float) -> None:
    requests = some_requests(8, 2, temperature)
    done = run(warm_engine(), requests)
    for asked in requests:
        limits = {"max_tokens": asked.params.max_tokens, "temperature": temperature, "stop_ids": STOP_IDS}
        tokens, logp = generate(ARCH, host_params(), asked.prompt, asked.key, **limits)
        assert done[asked.ticket].tokens.tolist() == tokens
        np.testing.assert_allclose(done[asked.ticket].logp, logp, rtol=0, atol=LOGP_ATOL)
