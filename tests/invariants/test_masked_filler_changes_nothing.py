"""What stands where no token is scored, be it NaN, changes no bit of an optimizer step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.data.packing import Batch
from tests.tiny_model import WITH_REFERENCE, batch_of, first_state, learner_of, some_groups


def with_filler(batch: Batch, value: float, token: int) -> Batch:
    """Put something else into filler slots and padding, and into the micro-batches that hold no rollout."""
    floats = {
        name: np.where(batch.mask, getattr(batch, name), np.float32(value)) for name in ("logp_behavior", "advantage", "weight")
    }
    targets = np.where(batch.mask, batch.targets, np.int32(token))
    tokens = np.where(batch.segments > 0, batch.tokens, np.int32(token))
    return dataclasses.replace(batch, **floats, targets=targets, tokens=tokens)


@pytest.mark.parametrize("mesh", ["one", "mixed"])
def test_masked_filler_changes_nothing(mesh: str) -> None:
    learner = learner_of(mesh, **WITH_REFERENCE)
    plain = batch_of(learner, some_groups())
    assert 0 < plain.mask.mean() < 0.5  # much of it is filler
    rng = np.random.default_rng(0)
    policies = [rng.normal(-5, 1, plain.mask.shape).astype(np.float32) for _ in range(2)]

    def outcome(value: float, token: int) -> list[bytes]:
        given: list[Any] = [jnp.array(np.where(plain.mask, policy, value)) for policy in policies]
        batch = learner.put(with_filler(plain, value, token))
        state, output = learner.step(first_state(learner), batch, *given)
        logp = np.asarray(output.logp)[plain.mask]
        scores = learner.score(state.params, batch)
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state, output.metrics, output.grad_norm, logp, scores))]

    expected = outcome(0.0, 0)
    for value, token in ((1.0, 5), (-np.inf, 0), (np.nan, 299)):
        assert outcome(value, token) == expected
