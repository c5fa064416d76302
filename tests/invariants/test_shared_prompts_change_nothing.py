"""A prompt stored once for its group gives the loss, gradients and log-probabilities of separate copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.config import Config, MeshConfig, ModelConfig, OptimizerConfig, SamplerConfig, TrainConfig
from rljax.data.packing import Batch, pack, pack_shape
from rljax.learner.step import Learner
from rljax.mesh import build_mesh
from rljax.models.arch import Arch, Rope
from rljax.models.decoder import init_params
from rljax.records import Provenance, Rollout, Score

ROUNDING = 1e-5  # float32 sums in another order, relative to values of about 1
PROMPT, PACK_LENGTH = 7, 40
ARCH = Arch(96, 2, 32, 4, 2, 8, 64, Rope(1e4), 1e-5, True, 64)


def group(task: int, rng: np.random.Generator) -> list[Rollout]:
    prompt = rng.integers(0, 96, PROMPT)
    made = []
    for attempt in range(4):
        n = int(rng.integers(1, 9))
        provenance = np.array([Provenance.PROMPT] * PROMPT + [Provenance.MODEL] * n, np.int8)
        made.append(
            Rollout(
                task_id=f"t{task}",
                attempt=attempt,
                tokens=np.concatenate([prompt, rng.integers(0, 96, n)]).astype(np.int32),
                provenance=provenance,
                logp_behavior=np.where(provenance == Provenance.MODEL, -4.0, 0.0).astype(np.float32),
                versions=np.zeros(PROMPT + n, np.int32),
                finish_reason="stop",
                score=Score("score", 1.0),
                turns=1,
                text="",
            )
        )
    return made


def unshared(rollouts: list[Rollout], advantages: np.ndarray, weights: np.ndarray) -> Batch:
    """Pack with a first token that differs per rollout, so that nothing is shared, and put the real one back."""
    marked = [
        Rollout(**{name: getattr(r, name) for name in Rollout.__slots__} | {"tokens": np.concatenate([[i], r.tokens[1:]])})
        for i, r in enumerate(rollouts)
    ]
    batch = packed(marked, advantages, weights)
    starts = (batch.positions == 0) & (batch.segments > 0)
    assert starts.sum() == len(rollouts)
    batch.tokens[starts] = [rollouts[i].tokens[0] for i in batch.tokens[starts]]
    return batch


def packed(rollouts: list[Rollout], advantages: np.ndarray, weights: np.ndarray) -> Batch:
    shape = pack_shape(pack_length=PACK_LENGTH, longest_rollout=16, num_rollouts=len(rollouts), rows=2)
    return pack(rollouts, advantages, weights, np.ones(len(rollouts), bool), shape, mask_truncated=False)


@pytest.mark.parametrize("remat", ["none", "dots", "offload", "full"])
def test_shared_prompts_change_nothing(remat) -> None:
    rng = np.random.default_rng(0)
    rollouts = [rollout for task in range(3) for rollout in group(task, rng)]
    advantages, weights = rng.normal(size=12).astype(np.float32), np.full(12, 0.02, np.float32)
    config = Config(
        model=ModelConfig(remat=remat),
        mesh=MeshConfig(fsdp=1),
        sampler=SamplerConfig(max_prompt_length=8, max_completion_length=8, slots=8),
        train=TrainConfig(pack_length=PACK_LENGTH, micro_batch_size_per_device=2),
        optimizer=OptimizerConfig(max_grad_norm=None, learning_rate=1.0, eps=1.0),  # eps 1: the update follows the gradient
    )
    learner = Learner(ARCH, build_mesh(config.mesh, jax.devices()[:1]), config)
    params = jax.tree.map(lambda leaf: leaf * 3 if leaf.ndim > 1 else leaf, init_params(ARCH, 0))
    found = []
    for batch in (packed(rollouts, advantages, weights), unshared(rollouts, advantages, weights)):
        state, output = learner.step(learner.init(jax.tree.map(jnp.copy, params)), learner.put(batch))
        logps = {i: np.asarray(output.logp)[batch.rollout == i] for i in range(12)}
        found.append((batch, state.params, output, logps))
    (shared, ours, our_output, our_logps), (alone, theirs, their_output, their_logps) = found
    assert shared.parents.any()
    assert not alone.parents.any()
    assert (shared.segments > 0).sum() < 0.7 * (alone.segments > 0).sum()
    np.testing.assert_allclose(our_output.metrics["loss"], their_output.metrics["loss"], atol=ROUNDING)
    np.testing.assert_allclose(our_output.grad_norm, their_output.grad_norm, rtol=ROUNDING)
    for mine, other in zip(our_logps.values(), their_logps.values(), strict=True):
        np.testing.assert_allclose(mine, other, atol=ROUNDING)
    jax.tree.map(lambda mine, other: np.testing.assert_allclose(mine, other, atol=ROUNDING), ours, theirs)
