"""Weights against the sampler and rejection: values by hand, levels, bounds, and no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.algorithm_config import AlgorithmConfig
from rljax.algorithms.correction import importance_weights, kept_tokens
from rljax.algorithms.rollout_sums import rollout_sum

GAP = np.log(np.array([2.0, 0.5, 4.0, 0.25, 3.0], np.float32))
"""Rollout 0 has ratios 2, 1/2 and 4 (product 4, geometric mean 4^(1/3)), rollout 1 has 1/4 and 3 (3/4 and sqrt(3)/2)."""
OWNERS = np.array([0, 0, 0, 1, 1], np.int32)
ROOT = 4 ** (1 / 3)


def weights(**options):
    config = AlgorithmConfig.model_validate(options)
    return importance_weights(jnp.asarray(GAP), jnp.asarray(OWNERS), jnp.ones(5, bool), config)


@pytest.mark.parametrize(
    ("level", "mode", "want", "cut"),
    [
        ("none", "truncate", [1.0] * 5, [False] * 5),
        ("token", "truncate", [2.0, 0.5, 2.5, 0.4, 2.5], [False, False, True, True, True]),
        ("token", "mask", [2.0, 0.5, 0.0, 0.0, 0.0], [False, False, True, True, True]),
        ("sequence", "truncate", [2.5] * 3 + [0.75] * 2, [True] * 3 + [False] * 2),
        ("sequence", "mask", [0.0] * 3 + [0.75] * 2, [True] * 3 + [False] * 2),
        ("geometric", "truncate", [ROOT] * 3 + [0.75**0.5] * 2, [False] * 5),
        ("geometric", "mask", [ROOT] * 3 + [0.75**0.5] * 2, [False] * 5),
    ],
)
def test_weights_by_level_and_mode(level, mode, want, cut):
    bounds = {"rollout_is_threshold": 2.5, "rollout_is_threshold_lower": 0.4}
    got = weights(rollout_is=level, rollout_is_mode=mode, **bounds)
    np.testing.assert_allclose(got.weight, want, rtol=1e-5)
    assert got.truncated.tolist() == cut


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_have_no_gradient(level):
    config = AlgorithmConfig.model_validate({"rollout_is": level})
    gradient = jax.grad(lambda gap: importance_weights(gap, jnp.asarray(OWNERS), jnp.ones(5, bool), config).weight.sum())(
        jnp.asarray(GAP)
    )
    assert (np.asarray(gradient) == 0).all()


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("none", [True] * 5),
        ("token", [True, True, False, False, False]),
        ("sequence", [False] * 3 + [True] * 2),
        ("geometric", [True] * 5),
    ],
)
def test_rejection_by_level(level, kept):
    config = AlgorithmConfig.model_validate(
        {"rollout_rs": level, "rollout_rs_threshold": 2.5, "rollout_rs_threshold_lower": 0.4}
    )
    assert kept_tokens(GAP, np.array([3, 0, 2]), config).tolist() == kept


def test_sums_over_rollouts_and_their_transpose():
    rng = np.random.default_rng(0)
    rows = np.array([[0, 0, 0, 1, 1, 2, -1, -1], [5, 5, 5, 5, 5, 5, 5, 5], [9, 8, 8, 7, 7, 7, 6, -1]], np.int32)
    values, direction = (rng.normal(size=rows.shape).astype(np.float32) for _ in range(2))
    same = rows[:, :, None] == rows[:, None, :]
    got, pull = jax.vjp(lambda x: rollout_sum(x, jnp.asarray(rows)), jnp.asarray(values))
    np.testing.assert_allclose(got, np.einsum("bst,bt->bs", same, values), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pull(jnp.asarray(direction))[0], np.einsum("bst,bs->bt", same, direction), rtol=1e-5, atol=1e-6)
    for row in range(3):
        for owner in np.unique(rows[row]):
            assert len(set(np.asarray(got)[row, rows[row] == owner].tolist())) == 1, "the same at all tokens"
