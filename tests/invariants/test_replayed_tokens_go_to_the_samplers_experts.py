"""With routing replay a token goes to the same experts in learner and sampler, whatever the learner's routers say."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.data.packing import Batch
from rljax.learner.step import Learner, _decode, _micro
from rljax.models.decoder import merge
from rljax.records import Group
from rljax.sampler.cache import BLOCK
from tests.tiny_model import batch_of, first_state, placed, request, rollouts_of, run
from tests.tiny_moe import ARCH, engine_of, learner_of, params, sampled

GAP = 2e-5
"""Two float32 programs that sum in different orders; log-probabilities are of the order 6 (nats)."""
REPLAY = {"algorithm": {"routing_replay": True}}


@cache
def replaying(mesh: str = "one", dtype: str = "float32") -> Learner:
    return learner_of(mesh, **REPLAY, model={"compute_dtype": dtype})


@cache
def groups(dtype: str = "float32") -> list[Group]:
    return rollouts_of(*sampled("one", dtype))


def own_choices(groups: list[Group]) -> list[np.ndarray]:
    """Return where the routers send each token of each rollout, in a forward pass over whole sequences of their own."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    longest = max(len(rollout.tokens) for rollout in rollouts)
    ids = jnp.array([np.pad(rollout.tokens, (0, longest - len(rollout.tokens))) for rollout in rollouts])
    positions = jnp.broadcast_to(jnp.arange(longest), ids.shape)
    segments = (positions < jnp.array([len(rollout.tokens) for rollout in rollouts])[:, None]).astype(jnp.int32)

    @jax.jit
    def forward(params: Any) -> Any:
        out = merge(ARCH, params).forward(ids, positions, segments, dtype=jnp.dtype("float32"), record_routing=True)
        return out.routing

    choices = np.moveaxis(np.asarray(forward(params()).choices), 0, 2)
    return [found[: len(rollout.tokens)] for found, rollout in zip(choices, rollouts, strict=True)]


def same_experts(left: Any, right: Any) -> bool:
    """Compare sets of experts: two programs may order equal weights differently."""
    return np.array_equal(np.sort(left, -1), np.sort(right, -1))


def test_in_float32_the_record_is_what_a_whole_forward_pass_decides() -> None:
    rollouts = [rollout for group in groups() for rollout in group.rollouts]
    assert {len(group.rollouts[0].tokens) - group.rollouts[0].completion_length for group in groups()} > {1, 24}
    for rollout, expected in zip(rollouts, own_choices(groups()), strict=True):
        assert rollout.choices is not None
        assert rollout.choices.dtype == np.uint8
        # Prompt, first and later tokens; the last one was drawn and went nowhere.
        assert rollout.choices.shape == (len(rollout.tokens) - 1, 2, 2)
        assert same_experts(rollout.choices, expected[:-1])
    every = np.concatenate([rollout.choices for rollout in rollouts if rollout.choices is not None])
    assert len(np.unique(every)) == ARCH.experts.count if ARCH.experts else False


def test_many_devices_record_what_one_does() -> None:
    single, sharded = sampled("one")[1], sampled("expert")[1]
    for ticket, done in single.items():
        assert np.array_equal(sharded[ticket].tokens, done.tokens)
        assert same_experts(sharded[ticket].choices, done.choices)


def test_a_rollout_that_was_sent_back_records_its_second_try() -> None:
    engine = engine_of(cache_tokens=9 * BLOCK)
    longer = [request((f"t{index // 2}", index % 2), range(10, 20 + index // 2), 40) for index in range(8)]
    made = rollouts_of(longer, run(engine, longer))
    assert engine.preempted > 0
    for rollout, expected in zip([rollout for group in made for rollout in group.rollouts], own_choices(made), strict=True):
        assert same_experts(rollout.choices, expected[:-1])


def stood_at(batch: Batch, rollouts: list[Any]) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return, per scored token, where the token before it stands in the batch, and whose token it is."""
    found = {}
    for number, rollout in enumerate(rollouts):
        slots = np.argwhere(batch.rollout == number)
        for (micro, row, slot), place in zip(slots, np.flatnonzero(rollout.mask), strict=True):
            found[int(micro), int(row), int(slot)] = number, int(place) - 1
    return found


@pytest.mark.parametrize("mesh", ["one", "expert"])
def test_in_the_learner_every_token_goes_where_it_went_in_the_sampler(mesh: str) -> None:
    learner, rollouts = replaying(mesh), [rollout for group in groups() for rollout in group.rollouts]
    batch = batch_of(learner, groups())
    assert batch.choices is not None
    assert batch.parents.any()
    others = placed(learner, params(1))  # whose routers would decide otherwise

    @jax.jit
    def choices(params: Any, batch: Any) -> Any:
        micro = jax.tree.map(lambda leaf: _micro(leaf, jnp.int32(0)), batch)
        replayed, free = (_decode(learner, merge(ARCH, params), part) for part in (micro, micro.unrouted()))
        return [jnp.moveaxis(out.routing.choices, 0, 2) for out in (replayed, free) if out.routing is not None]

    with jax.set_mesh(learner.mesh):
        replayed, free = map(np.asarray, choices(others, learner.put(batch)))
    assert batch.num_micro == 1
    checked = stood_at(batch, rollouts)
    assert len(checked) == batch.mask.sum() > 60
    for (micro, row, slot), (number, place) in checked.items():
        position = batch.score_index[micro, row, slot]
        assert np.array_equal(replayed[row, position], rollouts[number].choices[place])
    known = batch.choices[0, ..., 0, 0] >= 0
    assert np.array_equal(replayed[known], batch.choices[0][known])
    assert not same_experts(free[known], replayed[known])
    # What nobody routed in the sampler: padding, and the last token of each rollout.
    padding = (batch.segments[0] == 0).sum()
    assert (~known).sum() == padding + len(rollouts)
    assert ((replayed >= 0) & (replayed < 6)).all()


def gaps(learner: Learner, batch: Batch, replay: bool) -> np.ndarray:
    given = learner.put(batch)
    scores = learner.score(first_state(learner, params()).params, given if replay else given.unrouted())
    return np.abs(np.asarray(scores) - batch.logp_behavior)[batch.mask]


def test_in_float32_replay_changes_no_bit_beyond_rounding() -> None:
    batch = batch_of(replaying(), groups())
    with_replay, without = (gaps(replaying(), batch, replay) for replay in (True, False))
    assert with_replay.max() < GAP
    assert without.max() < GAP


def test_in_bfloat16_replay_makes_the_gap_no_larger() -> None:
    learner = replaying(dtype="bfloat16")
    batch = batch_of(learner, groups("bfloat16"))
    with_replay, without = (gaps(learner, batch, replay) for replay in (True, False))
    print(f"mean {with_replay.mean():.4f} with, {without.mean():.4f} without; max {with_replay.max():.3f}, {without.max():.3f}")  # noqa
    assert with_replay.mean() <= without.mean()
    assert with_replay.max() <= without.max()
    assert without.max() > GAP


def test_a_step_with_replay_follows_the_record_and_not_the_routers() -> None:
    learner = replaying()
    batch = batch_of(learner, groups())
    assert batch.choices is not None

    def outcome(choices: np.ndarray) -> list[bytes]:
        state, output = learner.step(first_state(learner, params()), learner.put(_with(batch, choices)))
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state, output.metrics))]

    plain = outcome(batch.choices)
    assert outcome(np.where(batch.segments[..., None, None] > 0, batch.choices, 3).astype(np.int16)) == plain
    swapped = np.where(batch.choices >= 0, (batch.choices + 1) % 6, batch.choices).astype(np.int16)
    assert outcome(swapped) != plain


def _with(batch: Batch, choices: np.ndarray) -> Batch:
    return Batch(**{name: getattr(batch, name) for name in Batch.__slots__} | {"choices": choices})
