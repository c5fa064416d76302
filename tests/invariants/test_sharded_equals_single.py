"""On any mesh a model samples the same tokens and takes the same step as on one device."""

from functools import cache
from typing import Any

import jax
import numpy as np
import pytest

from tests.tiny_model import MESHES, batch_of, first_state, gradient, learner_of, run, some_groups, some_requests, warm_engine

ATOL = 2e-6
"""Float32 sums over devices in another order; loss, gradients and parameters are of the order 1."""
LOGP_ATOL = 5e-6
"""The same for log-probabilities of the order 10 (nats)."""
ONE_CODE = 0.01
"""Where a number of a cache in 8 bits stands in the middle between two codes, its last bit decides, and one code is another: a
fraction of what rounding all numbers changes (nats)."""
OTHERS = [name for name in MESHES if name != "one"]


@cache
def step_on(mesh: str) -> tuple[Any, ...]:
    """Return batch, log-probabilities, metrics, loss, gradient and parameters of one step."""
    learner = learner_of(mesh)
    batch = batch_of(learner, some_groups())
    before = first_state(learner)
    state, output = learner.step(before, learner.put(batch))
    return batch, np.asarray(output.logp), output.metrics, output.metrics["loss"], gradient(state), jax.device_get(state.params)


@pytest.mark.parametrize("mesh", OTHERS)
def test_a_step_on_many_devices_is_the_step_on_one(mesh: str) -> None:
    (batch, logp, metrics, *single), (same, other_logp, others, *sharded) = step_on("one"), step_on(mesh)
    assert np.array_equal(batch.tokens, same.tokens)
    np.testing.assert_allclose(logp[batch.mask], other_logp[batch.mask], rtol=0, atol=LOGP_ATOL)
    for name, value in metrics.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-5, atol=ATOL, err_msg=name)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(single[1])) > 0.05
    for one, two in zip(jax.tree.leaves(single), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=ATOL)


@pytest.mark.parametrize("weights_dtype", ["as-is", "int8"])
@pytest.mark.parametrize("mesh", ["fsdp", "tensor"])
def test_many_devices_sample_the_tokens_of_one(mesh: str, weights_dtype: str) -> None:
    requests = some_requests(8)
    single, sharded = (run(warm_engine(name, weights_dtype=weights_dtype), requests) for name in ("one", mesh))
    assert set(single) == set(sharded)
    for ticket, done in single.items():
        assert sharded[ticket].tokens.tolist() == done.tokens.tolist()
        assert sharded[ticket].finish_reason == done.finish_reason
        np.testing.assert_allclose(sharded[ticket].logp, done.logp, rtol=0, atol=LOGP_ATOL)


def test_many_devices_sample_the_tokens_of_one_from_a_cache_in_8_bits() -> None:
    requests = some_requests(8)
    single, sharded = (run(warm_engine(name, cache_dtype="int8"), requests) for name in ("one", "tensor"))
    assert {ticket: done.tokens.tolist() for ticket, done in sharded.items()} == {
        ticket: done.tokens.tolist() for ticket, done in single.items()
    }
    gap = np.concatenate([np.abs(sharded[ticket].logp - done.logp) for ticket, done in single.items()])
    assert gap.max() < ONE_CODE
    assert np.median(gap) < LOGP_ATOL, "most rollouts have no number that stands between two codes"
