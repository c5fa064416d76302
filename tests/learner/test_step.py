"""The compiled step is one GRPO update: that of a page of plain code, compiled once, in place, without whole logits."""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.config import Config
from rljax.data.packing import Batch
from rljax.learner.step import DeviceBatch, Learner, StepOutput, logit_positions
from rljax.pytree import Params, leaf_names
from rljax.records import Group, Score
from rljax.rollouts.batching import batch_shape, prepare
from tests.compilations import compilations
from tests.reference import decoder, grpo
from tests.tiny_model import (
    ARCH,
    WITH_REFERENCE,
    batch_of,
    config_of,
    first_state,
    gradient,
    host_params,
    learner_of,
    mesh_of,
    some_groups,
    spread,
)

GRADIENT_ATOL = 2e-6
"""Float32 sums of some fifty tokens in another order; the largest gradients are of the order 1."""
LOGP_ATOL = 2e-5
"""The same for log-probabilities of the order 10 after two layers."""


def reference_step(groups: list[Group], config: Config, prox: Any = None, ref: Any = None) -> tuple[float, Params, Params]:
    params = jax.tree.map(jnp.array, host_params())
    value, grads, after = grpo.step(ARCH, params, grpo.rows_of(groups), config, prox, ref)
    return float(value), grads, after


def assert_equal(ours: Params, theirs: Params, atol: float) -> None:
    for name, mine, other in zip(leaf_names(ours), *map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_step_is_the_one_written_out_by_hand(mode: str) -> None:
    learner, groups = learner_of(), some_groups()
    config = config_of(algorithm={"loss_agg_mode": mode})  # decides the weights of the batch; the program is the same
    batch = prepare(groups, config, batch_shape(config, 1)).batches[0]
    value, grads, after = reference_step(groups, config)
    state, output = learner.step(first_state(learner), learner.put(batch))
    assert float(output.metrics["loss"]) == pytest.approx(value, abs=GRADIENT_ATOL)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    assert largest > 0.01  # else small differences prove nothing
    assert_equal(gradient(state), grads, GRADIENT_ATOL * max(1.0, largest))
    assert_equal(state.params, after, GRADIENT_ATOL)
    norm = math.sqrt(sum(float(jnp.square(leaf).sum()) for leaf in jax.tree.leaves(grads)))
    assert float(output.grad_norm) == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("surrogate", ["clip", "cispo", "sapo", "reinforce"])
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_rollouts_without_an_advantage_are_counted_but_not_computed(surrogate: str, mode: str) -> None:
    learner, groups = learner_of(algorithm={"surrogate": surrogate}), equal_rewards(some_groups())
    config = config_of(algorithm={"surrogate": surrogate, "loss_agg_mode": mode})
    found = {}
    for skip in (True, False):
        settings = config.model_copy(update={"train": config.train.model_copy(update={"skip_zero_advantages": skip})})
        batch = prepare(groups, settings, batch_shape(settings, 1)).batches[0]
        state, output = learner.step(first_state(learner), learner.put(batch))
        found[skip] = batch, output, gradient(state)
    (few, output, ours), (every, whole, theirs) = found[True], found[False]
    left_out = groups[0].rollouts
    assert every.mask.sum() - few.mask.sum() == sum(rollout.completion_length for rollout in left_out)
    assert few.skipped_fraction == pytest.approx(1 - few.mask.sum() / every.mask.sum())
    assert (every.skipped_fraction, every.num_rollouts - few.num_rollouts) == (0, len(left_out))
    assert float(output.metrics["loss"]) == pytest.approx(float(whole.metrics["loss"]), abs=GRADIENT_ATOL)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(ours)) > 0.01
    assert_equal(ours, theirs, GRADIENT_ATOL)
    if surrogate == "clip":
        value, grads, _ = reference_step(groups, config)
        assert float(output.metrics["loss"]) == pytest.approx(value, abs=GRADIENT_ATOL)
        assert_equal(ours, grads, GRADIENT_ATOL)


def test_a_step_in_which_nothing_is_left_has_no_gradient_and_moves_nothing() -> None:
    learner, groups = learner_of(), [group for one in some_groups() for group in equal_rewards([one])]
    batch = batch_of(learner, groups)
    assert (batch.num_micro, batch.skipped_fraction, batch.padding_fraction) == (0, 1.0, 0.0)
    state, output = learner.step(first_state(learner), learner.put(batch))
    assert (float(output.metrics["tokens"]), float(output.grad_norm)) == (0, 0)
    assert_equal(state.params, jax.tree.map(jnp.array, host_params()), 0)
    assert int(state.optimizer.updates) == 1


def equal_rewards(groups: list[Group]) -> list[Group]:
    """Return the groups, the first with the same reward for all of its rollouts."""
    same = tuple(dataclasses.replace(rollout, score=Score("score", 0.3)) for rollout in groups[0].rollouts)
    return [dataclasses.replace(groups[0], rollouts=same), *groups[1:]]


def slots_of(batch: Batch, rows: np.ndarray, groups: list[Group]) -> np.ndarray:
    """Bring what is known per rollout and token into the slots of a batch; NaN in filler."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    out = np.full(batch.mask.shape, np.nan, np.float32)
    for number, rollout in enumerate(rollouts):
        out[batch.rollout == number] = rows[number, np.flatnonzero(rollout.mask) - 1]
    return out


def test_a_step_with_proximal_and_reference_policies_is_the_one_written_out_by_hand() -> None:
    learner, groups = learner_of(**WITH_REFERENCE), some_groups()
    config, batch, rows = learner.config, batch_of(learner, groups), grpo.rows_of(groups)
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), host_params())
    current = decoder.logprobs(ARCH, wide, rows.tokens, 1.0)
    rng = np.random.default_rng(0)
    prox, ref = (np.float32(current + rng.normal(0, 0.4, current.shape)) for _ in range(2))
    value, grads, _ = reference_step(groups, config, prox, ref)
    given = (jnp.array(slots_of(batch, policy, groups)) for policy in (prox, ref))
    state, output = learner.step(first_state(learner), learner.put(batch), *given)
    assert float(output.metrics["loss"]) == pytest.approx(value, abs=1e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    assert_equal(gradient(state), grads, GRADIENT_ATOL * max(1.0, largest))
    assert float(output.metrics["clipped_low"]) > 0
    assert float(output.metrics["clipped_high"]) > 0


def test_scores_are_the_log_probabilities_of_the_scored_tokens_and_zero_elsewhere() -> None:
    learner, groups = learner_of(), some_groups()
    batch = batch_of(learner, groups)
    scores = np.asarray(learner.score(first_state(learner).params, learner.put(batch)))
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), host_params())
    expected = slots_of(
        batch, decoder.logprobs(ARCH, wide, grpo.rows_of(groups).tokens, learner.config.sampler.temperature), groups
    )
    np.testing.assert_allclose(scores[batch.mask], expected[batch.mask], rtol=0, atol=LOGP_ATOL)
    assert (scores[~batch.mask] == 0).all()


def test_the_programs_compile_once_whatever_the_rollouts() -> None:
    learner = learner_of()
    state = first_state(learner)
    short, long = some_groups(((1, 2), (2, 1))), some_groups(((16, 12, 14, 16), (15, 9, 13, 16), (1, 1, 1, 2)), seed=1)
    seen, packed = set(), learner.put(batch_of(learner, some_groups()))
    learner.score(state.params, packed)
    state, _ = learner.step(state, packed)
    with compilations() as found:
        for groups in (short, long, some_groups()):
            packed = batch_of(learner, groups)
            for batch in (packed, spread(packed, 2)):
                seen.add((batch.num_micro, int(batch.scored[0])))
                learner.score(state.params, learner.put(batch))
                state, _ = learner.step(state, learner.put(batch))
    assert {number for number, _ in seen} == {1, 2}
    assert len({scored for _, scored in seen}) >= 3
    assert not found
    assert int(state.optimizer.updates) == 7


def test_the_old_state_is_given_up_and_the_batch_is_not() -> None:
    learner = learner_of()
    before, batch = first_state(learner), learner.put(batch_of(learner, some_groups()))
    after, _ = learner.step(before, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.optimizer.moments[0].mu))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(batch))
    for name, leaf, like in zip(leaf_names(after), *map(jax.tree.leaves, (after, learner.abstract_state)), strict=True):
        assert leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim), name


def test_equal_steps_give_equal_bits() -> None:
    learner = learner_of()

    def outcome() -> list[bytes]:
        state, output = learner.step(first_state(learner), learner.put(batch_of(learner, some_groups())))
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state, output))]

    assert outcome() == outcome()


def test_beta_needs_a_reference() -> None:
    learner = learner_of(**WITH_REFERENCE)
    batch = learner.put(batch_of(learner, some_groups()))
    with pytest.raises(ValueError, match="needs logp_ref"):
        learner.step(first_state(learner), batch)


def abstract_batch(learner: Learner) -> DeviceBatch:
    """Return the shapes of the learner's batches."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), learner.put(batch_of(learner, some_groups()))
    )


@pytest.mark.parametrize("remat", ["none", "dots", "offload", "full"])
def test_no_array_of_rows_positions_and_vocabulary_exists(remat: str) -> None:
    at_once = logit_positions(ARCH.vocab_size)
    length, rows = 4 * at_once // 8, 8
    config = config_of(
        model={"remat": remat}, train={"pack_length": length, "rollout_batch_size": 1, "micro_batch_size_per_device": rows}
    )
    learner = Learner(dataclasses.replace(ARCH, num_layers=1), mesh_of("one"), config)
    with jax.set_mesh(learner.mesh):
        text = learner._step.lower(learner.abstract_state, abstract_batch(learner), None, None).as_text()
    with_vocabulary = {
        shape
        for found in re.findall(r"tensor<([\dx]+)x[a-z]+\d+>", text)
        if ARCH.vocab_size in (shape := tuple(int(size) for size in found.split("x")))
    }
    most = at_once * ARCH.vocab_size
    assert (rows, at_once // rows, ARCH.vocab_size) in with_vocabulary
    assert [shape for shape in with_vocabulary if math.prod(shape) > most] == []
    assert rows * length * ARCH.vocab_size > most


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_offload_sends_what_dots_keeps_to_the_host(compute_dtype: str) -> None:
    moved = {}
    for remat in ("dots", "offload"):
        learner = Learner(ARCH, mesh_of("one"), config_of(model={"remat": remat, "compute_dtype": compute_dtype}))
        with jax.set_mesh(learner.mesh):
            traced = learner._step.trace(learner.abstract_state, abstract_batch(learner), None, None)
        # A CPU's memory is the host's, so that it does not appear in a program for CPUs.
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        moved[remat] = len(re.findall(r'annotate_device_placement\(.*_xla_buffer_placement = "pinned_host"', text))
    # Queries, keys and values; attention's output, and its projection; gate and up.
    assert moved == {"dots": 0, "offload": 4}


def test_a_larger_vocabulary_has_logits_of_fewer_positions() -> None:
    assert [logit_positions(vocab) for vocab in (128, 49_152, 262_144, 10**9)] == [1024, 1024, 256, 1]


def test_an_update_reports_what_it_did() -> None:
    learner = learner_of()
    batch = batch_of(learner, some_groups())
    _, output = learner.step(first_state(learner), learner.put(batch))
    assert isinstance(output, StepOutput)
    assert float(output.metrics["tokens"]) == batch.mask.sum()
    assert float(output.learning_rate) == pytest.approx(learner.config.optimizer.learning_rate)
    assert float(output.metrics["entropy"]) / batch.mask.sum() == pytest.approx(5.3, abs=0.5)  # of at most log 300 = 5.7
