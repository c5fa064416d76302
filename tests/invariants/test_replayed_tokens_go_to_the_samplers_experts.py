"""With routing replay a token goes to the same experts in learner and sampler, whatever the learner's routers say."""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.data.packing import Batch
from rljax.learner.step import Learner, _decode, micro_batch
from rljax.models.decoder import merge
from rljax.records import Group, Rollout
from tests.tiny_model import batch_of, first_state, placed, rollouts_of
from tests.tiny_moe import ARCH, learner_of, params, sampled

GAP = 2e-5
"""Two float32 programs that sum in different orders; log-probabilities are of the order 6 (nats)."""


@cache
def replaying(dtype: str = "float32") -> Learner:
    return learner_of(algorithm={"routing_replay": "true"}, model={"compute_dtype": dtype, "remat": "none"})


@cache
def groups(mesh: str = "one", dtype: str = "float32") -> list[Group]:
    return rollouts_of(*sampled(mesh, dtype)[:2])


def rollouts(mesh: str = "one") -> list[Rollout]:
    return [rollout for group in groups(mesh) for rollout in group.rollouts]


@cache
def own_choices(mesh: str) -> list[np.ndarray]:
    """Return where the routers send each token of each rollout, in a forward pass over whole sequences of their own."""
    longest = 64
    ids = jnp.array([np.pad(rollout.tokens, (0, longest - len(rollout.tokens))) for rollout in rollouts(mesh)])
    positions = jnp.broadcast_to(jnp.arange(longest), ids.shape)
    segments = (positions < jnp.array([len(rollout.tokens) for rollout in rollouts(mesh)])[:, None]).astype(jnp.int32)
    choices = np.moveaxis(np.asarray(whole_forward(params(), ids, positions, segments)), 0, 2)
    return [found[: len(rollout.tokens)] for found, rollout in zip(choices, rollouts(mesh), strict=True)]


@jax.jit
def whole_forward(params: Any, *rows: Any) -> Any:
    routing = merge(ARCH, params).forward(*rows, dtype=jnp.dtype("float32"), record_routing=True).routing
    return None if routing is None else routing.choices


def same_experts(left: Any, right: Any) -> bool:
    """Compare sets of experts: two programs may order equal weights differently."""
    return np.array_equal(np.sort(left, -1), np.sort(right, -1))


@pytest.mark.parametrize("mesh", ["one", pytest.param("expert", marks=pytest.mark.slow)])
def test_in_float32_the_record_is_what_a_whole_forward_pass_decides(mesh: str) -> None:
    _, _, preempted = sampled(mesh)
    assert (preempted > 0) == (mesh == "one")  # a rollout that was sent back records its second try
    prompts = {len(rollout.tokens) - rollout.completion_length for rollout in rollouts(mesh)}
    assert {1, 24} < prompts
    for rollout, expected in zip(rollouts(mesh), own_choices(mesh), strict=True):
        assert rollout.choices is not None
        assert rollout.choices.dtype == np.uint8
        # Prompt, first and later tokens; the last one was drawn and went nowhere.
        assert rollout.choices.shape == (len(rollout.tokens) - 1, 2, 2)
        assert same_experts(rollout.choices, expected[:-1])
    assert {
        int(expert) for rollout in rollouts(mesh) if rollout.choices is not None for expert in rollout.choices.ravel()
    } == set(range(6))


def stood_at(batch: Batch, rollouts: list[Rollout]) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return, per scored token, where the token before it stands in the batch, and whose token it is."""
    found = {}
    for number, rollout in enumerate(rollouts):
        slots = np.argwhere(batch.rollout == number)
        for (micro, row, slot), place in zip(slots, np.flatnonzero(rollout.mask), strict=True):
            found[int(micro), int(row), int(slot)] = number, int(place) - 1
    return found


def test_in_the_learner_every_token_goes_where_it_went_in_the_sampler() -> None:
    learner = learner_of("expert", algorithm={"routing_replay": "true"})
    batch = batch_of(learner, groups())
    assert batch.choices is not None
    assert batch.parents.any()

    @jax.jit
    def choices(params: Any, batch: Any, micro: Any) -> Any:
        part = jax.tree.map(lambda leaf: micro_batch(leaf, micro), batch)
        routing = _decode(merge(ARCH, params), part, learner.config).routing
        return None if routing is None else jnp.moveaxis(routing.choices, 0, 2)

    others = placed(learner, params(1))  # whose routers would decide otherwise
    with jax.set_mesh(learner.mesh):
        found = [np.asarray(choices(others, learner.put(batch), jnp.int32(micro))) for micro in range(batch.num_micro)]
    checked = stood_at(batch, rollouts())
    assert len(checked) == batch.mask.sum() > 60
    for (micro, row, slot), (number, place) in checked.items():
        record = rollouts()[number].choices
        assert record is not None
        assert np.array_equal(found[micro][row, batch.score_index[micro, row, slot]], record[place])
    replayed, recorded = np.stack(found), batch.choices[: batch.num_micro]
    known = recorded[..., 0, 0] >= 0
    assert np.array_equal(replayed[known], recorded[known])
    # Nobody routed padding in the sampler, nor the last token of each rollout: there the router decides.
    assert (~known).sum() == (batch.segments[: batch.num_micro] == 0).sum() + len(rollouts())
    assert ((replayed >= 0) & (replayed < 6)).all()


def scores(learner: Learner, batch: Batch, *, replay: bool = True) -> np.ndarray:
    """Return what a step finds with replay, and what scoring finds without."""
    given = learner.put(batch)
    state = first_state(learner, params())
    return np.asarray(learner.step(state, given)[1].logp if replay else learner.score(state.params, given.unrouted()))


def test_a_step_follows_the_record_and_in_float32_that_changes_nothing() -> None:
    learner, batch = replaying(), batch_of(replaying(), groups())
    assert batch.choices is not None
    plain, free = scores(learner, batch), scores(learner, batch, replay=False)
    for found in (plain, free):
        assert np.abs(found - batch.logp_behavior)[batch.mask].max() < GAP
    swapped = np.where(batch.choices >= 0, (batch.choices + 1) % 6, batch.choices).astype(np.int16)
    assert np.abs(scores(learner, dataclasses.replace(batch, choices=swapped)) - plain)[batch.mask].mean() > 100 * GAP
