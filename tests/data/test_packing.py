import dataclasses
import math

import numpy as np
import pytest

from rljax.data.packing import length_metrics, loss_lengths, loss_tokens, pack, pack_shape
from rljax.records import FinishReason, Provenance, Rollout, Score

P, M, E = Provenance.PROMPT, Provenance.MODEL, Provenance.ENVIRONMENT


def rollout(tokens, provenance, *, logp=None, finish: FinishReason = "stop", attempt=0):
    provenance = np.array(provenance, np.int8)
    written = provenance == M
    return Rollout(
        task_id="t",
        attempt=attempt,
        tokens=np.array(tokens, np.int32),
        provenance=provenance,
        logp_behavior=np.where(written, -0.5, 0.0).astype(np.float32) if logp is None else np.array(logp, np.float32),
        versions=np.where(written, 0, -1).astype(np.int32),
        finish_reason=finish,
        score=Score("score", 1.0),
        turns=1,
        text="",
    )


def random_rollouts(count, longest, seed):
    rng = np.random.default_rng(seed)
    made = []
    for attempt in range(count):
        n = int(rng.integers(2, longest + 1))
        provenance = np.concatenate([[P], rng.choice([P, M, E], n - 1)])
        tokens = np.concatenate([[attempt], rng.integers(0, 9, n - 1)])  # no two prompts are equal
        made.append(rollout(tokens, provenance, logp=np.where(provenance == M, rng.normal(size=n), 0), attempt=attempt))
    return made


def packed(rollouts, *, length=8, rows=2, mask_truncated=False, used=None, weights=None):
    n = len(rollouts)
    longest = max((len(r.tokens) for r in rollouts), default=1)
    return pack(
        rollouts,
        np.arange(1, n + 1, dtype=np.float32),
        np.arange(1, n + 1, dtype=np.float32) / 10 if weights is None else weights,
        np.ones(n, bool) if used is None else np.array(used),
        pack_shape(pack_length=length, longest_rollout=longest, num_rollouts=n, rows=rows),
        mask_truncated=mask_truncated,
    )


def sequences_of(batch, micro, row):
    """Where each rollout's tokens stand in the row: its shared prompt, if it has one, and its own segment."""
    segments, parents, owners = batch.segments[micro, row], batch.parents[micro, row], batch.rollout[micro, row]
    found, taken = {}, set()
    for source in sorted(set(owners.tolist()) - {-1}):
        index, targets = batch.score_index[micro, row][owners == source], batch.targets[micro, row][owners == source]
        for segment in set(segments.tolist()) - {0} - taken:
            own = np.flatnonzero(segments == segment)
            prompt = np.flatnonzero(segments == parents[own[0]]) if parents[own[0]] else own[:0]
            whole = np.concatenate([prompt, own])
            after = dict(zip(whole[:-1], batch.tokens[micro, row, whole[1:]], strict=True))
            if all(after.get(i) == t for i, t in zip(index, targets, strict=True)) and whole[-1] >= index.max():
                found[source] = whole
                taken.add(segment)
                assert (np.diff(own) == 1).all()  # never split
                break
    return found


def test_one_row_is_laid_out_as_documented():
    first = rollout([7, 7, 7, 1, 2, 3, 4, 9], [P, P, P, M, M, M, M, M])
    second = rollout([8, 8, 5, 6, 9], [P, P, M, E, M], logp=[0, 0, -0.1, 0, -0.2])
    batch = packed([second, first], length=14, rows=1)
    assert batch.num_micro == 1
    np.testing.assert_array_equal(batch.tokens[0, 0], [7, 7, 7, 1, 2, 3, 4, 9, 8, 8, 5, 6, 9, 0])
    np.testing.assert_array_equal(batch.positions[0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 0])
    np.testing.assert_array_equal(batch.segments[0, 0], [1] * 8 + [2] * 5 + [0])
    np.testing.assert_array_equal(batch.score_index[0, 0], [2, 3, 4, 5, 6, 9, 11] + [0] * 7)
    np.testing.assert_array_equal(batch.targets[0, 0], [1, 2, 3, 4, 9, 5, 9] + [0] * 7)
    np.testing.assert_array_equal(batch.mask[0, 0], [True] * 7 + [False] * 7)
    np.testing.assert_array_equal(batch.rollout[0, 0], [1] * 5 + [0] * 2 + [-1] * 7)
    np.testing.assert_array_equal(batch.advantage[0, 0], [2] * 5 + [1] * 2 + [0] * 7)
    np.testing.assert_allclose(batch.weight[0, 0], [0.2] * 5 + [0.1] * 2 + [0] * 7)
    np.testing.assert_allclose(batch.logp_behavior[0, 0], [-0.5] * 5 + [-0.1, -0.2] + [0] * 7)
    assert batch.scored.tolist() == [7, 0]  # two rows might have been needed, were the second as long as the first
    assert batch.padding_fraction == pytest.approx(1 / 14)


def test_the_first_response_token_is_scored_and_aligned_with_its_logprob():
    prob = {(13, 14): 0.5, (14, 15): 0.25}  # a bigram model: p(R1 | P3), p(R2 | R1)
    logp = [0, 0, 0, math.log(0.5), math.log(0.25)]
    batch = packed([rollout([11, 12, 13, 14, 15], [P, P, P, M, M], logp=logp)], rows=1)
    tokens, index, mask = batch.tokens[0, 0], batch.score_index[0, 0], batch.mask[0, 0]
    scored = [math.log(prob[tokens[i], t]) for i, t in zip(index[mask], batch.targets[0, 0][mask], strict=True)]
    np.testing.assert_allclose(scored, [-0.693147, -1.386294], atol=1e-6)
    np.testing.assert_allclose(batch.logp_behavior[0, 0][mask], scored, atol=1e-6)
    assert mask.sum() == 2


@pytest.mark.parametrize("seed", range(20))
def test_every_used_token_is_packed_once_and_nothing_else_is_scored(seed):
    rollouts = random_rollouts(12, 10, seed)
    used = np.random.default_rng(seed).random(12) < 0.8
    batch = packed(rollouts, length=10 + seed, rows=3, used=used)
    expected = [i for i in range(12) if used[i] and rollouts[i].mask.any()]
    assert batch.num_rollouts == len(expected)
    assert sorted(set(batch.rollout[batch.mask].tolist())) == expected
    assert (batch.rollout[~batch.mask] == -1).all()
    for micro, row in np.ndindex(batch.tokens.shape[:2]):
        for source, where in sequences_of(batch, micro, row).items():
            original, mine = rollouts[source], batch.rollout[micro, row] == source
            np.testing.assert_array_equal(batch.tokens[micro, row, where], original.tokens)
            np.testing.assert_array_equal(batch.positions[micro, row, where], np.arange(len(original.tokens)))
            before = where[np.flatnonzero(original.provenance == M) - 1]
            np.testing.assert_array_equal(batch.score_index[micro, row][mine], before)
            np.testing.assert_array_equal(batch.targets[micro, row][mine], original.tokens[original.mask])
            np.testing.assert_array_equal(batch.logp_behavior[micro, row][mine], original.logp_behavior[original.mask])
            expected.remove(source)
    assert not expected
    assert batch.scored.tolist() == batch.mask.sum(axis=2).max(axis=1).tolist()
    assert (batch.scored[batch.num_micro :] == 0).all()
    real = batch.segments[: batch.num_micro]
    assert batch.padding_fraction == pytest.approx(1 - (real > 0).sum() / real.size)


def test_a_prompt_is_stored_once_and_its_continuations_follow_it():
    first = rollout([7, 8, 9, 1, 2, 0], [P, P, P, M, M, M], logp=[0, 0, 0, -0.1, -0.2, -0.3])
    second = rollout([7, 8, 9, 3, 4, 5, 0], [P, P, P, M, E, M, M], attempt=1)
    other = rollout([7, 8, 6, 0], [P, P, P, M], attempt=2)
    batch = packed([first, second, other], length=14, rows=1)
    np.testing.assert_array_equal(batch.tokens[0, 0], [7, 8, 9, 3, 4, 5, 0, 1, 2, 0, 7, 8, 6, 0])
    np.testing.assert_array_equal(batch.positions[0, 0], [0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 0, 1, 2, 3])
    np.testing.assert_array_equal(batch.segments[0, 0], [1] * 3 + [2] * 4 + [3] * 3 + [4] * 4)
    np.testing.assert_array_equal(batch.parents[0, 0], [0] * 3 + [1] * 7 + [0] * 4)
    np.testing.assert_array_equal(batch.score_index[0, 0, :7], [2, 4, 5, 2, 7, 8, 12])
    np.testing.assert_array_equal(batch.targets[0, 0, :7], [3, 5, 0, 1, 2, 0, 0])
    np.testing.assert_allclose(batch.logp_behavior[0, 0, 3:6], [-0.1, -0.2, -0.3])
    assert batch.num_micro == 1
    assert batch.padding_fraction == 0


def test_a_group_too_large_for_a_row_gets_its_prompt_once_per_row():
    group = [rollout([7, 7, i, i, i, i], [P, P, M, M, M, M], attempt=i) for i in range(5)]
    batch = packed(group, length=10, rows=1)
    held = [(row > 0).sum() for row in batch.segments[:, 0]]
    assert sorted(held, reverse=True)[:3] == [10, 10, 6]


def test_rollouts_stand_alone_where_shared_prompts_would_leave_gaps():
    # Two of 4 tokens, sharing 2, and two of 8: the latter fill a row and a part of another however they share; alone, one of
    # each fills a row.
    group = [rollout([family] * (2 + rest), [P, P] + [M] * rest) for family, rest in enumerate((2, 6)) for _ in range(2)]
    batch = packed(group, length=12, rows=1)
    assert (batch.num_micro, batch.padding_fraction) == (2, 0.0)
    assert not batch.parents.any()


def test_a_family_goes_on_in_another_row_where_that_fills_a_gap():
    # With its prompt shared, a family of five fills a row with three and 7 of the 12 places of another with two; no two
    # such pairs fit together, so whole families need six rows.
    group = [rollout([i // 5, 1, 1, 1], [P, M, M, M], attempt=i) for i in range(15)]
    batch = packed(group, length=12, rows=1)
    assert batch.num_micro == 5
    assert batch.mask.sum() == 45
    assert batch.parents.any()
    assert len(np.unique(batch.rollout[batch.mask])) == 15


@pytest.mark.parametrize("seed", range(4))
def test_a_long_tail_of_lengths_leaves_little_padding(seed: int):
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(8), np.log(513), 256)).astype(int)  # 32 prompts of 46 tokens, 8 answers to each
    group = [rollout([i // 8] * (46 + n), [P] * 46 + [M] * n) for i, n in enumerate(lengths)]
    batch = packed(group, length=1536, rows=1)
    assert batch.mask.sum() == lengths.sum()
    assert batch.padding_fraction < 0.05


def test_packing_is_deterministic_and_dense():
    rollouts = [rollout([n] * size, [P] + [M] * (size - 1)) for n, size in enumerate((3, 5, 4, 4, 2, 6))]
    batch, again = packed(rollouts, length=8), packed(rollouts, length=8)
    for name in ("tokens", "segments", "rollout"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(again, name))
    assert (batch.num_micro, batch.padding_fraction) == (2, 0.25)  # 24 tokens in 3 full rows of 8, and an empty row


def test_the_worst_case_fits_the_static_shape():
    for longest, length, count in [(8, 8, 7), (4, 8, 9), (3, 8, 10), (5, 16, 11)]:
        rollouts = [rollout([1] * longest, [P] + [M] * (longest - 1)) for _ in range(count)]
        batch = packed(rollouts, length=length, rows=2)
        assert batch.num_micro <= batch.tokens.shape[0]
        assert batch.num_rollouts == count
    shape = pack_shape(pack_length=16, longest_rollout=5, num_rollouts=11, rows=2)
    assert (shape.micro_batches, shape.rows, shape.length) == (2, 2, 16)


def test_masks_come_from_provenance_when_pad_and_end_are_one_token():
    prompt = rollout([2, 5, 2, 6, 7, 8, 2], [P, P, P, P, M, M, M])
    batch = packed([prompt], length=9, rows=1)
    np.testing.assert_array_equal(batch.segments[0, 0], [1] * 7 + [0, 0])
    np.testing.assert_array_equal(batch.targets[0, 0][batch.mask[0, 0]], [7, 8, 2])


def test_an_unfinished_rollout_gets_no_invented_end():
    cut = rollout([9, 5, 6, 7], [P, M, M, M], finish="length")
    batch = packed([cut], rows=1)
    np.testing.assert_array_equal(batch.targets[batch.mask], [5, 6, 7])
    assert (batch.logp_behavior[batch.mask] < 0).all()


def test_truncated_rollouts_can_be_left_out_of_the_loss_but_not_of_the_length_metrics():
    stopped = rollout([9, 1, 2, 3], [P, M, M, M])
    cut = rollout([9, 1, 2, 3, 4, 5], [P, M, M, M, M, M], finish="length")
    used = np.ones(2, bool)
    assert loss_lengths([stopped, cut], used, mask_truncated=True).tolist() == [3, 0]
    assert loss_lengths([stopped, cut], used, mask_truncated=False).tolist() == [3, 5]
    assert loss_lengths([stopped, cut], np.array([False, True]), mask_truncated=False).tolist() == [0, 5]
    assert packed([stopped, cut], mask_truncated=True).mask.sum() == 3
    assert length_metrics([stopped, cut]) == {
        "completion_length_mean": 4.0,
        "completion_length_min": 3.0,
        "completion_length_max": 5.0,
        "truncated_fraction": 0.5,
    }
    assert length_metrics([]) == {}


def test_loss_tokens_are_the_models_across_turns():
    for seed in range(50):
        (made,) = random_rollouts(1, 30, seed)
        mask = loss_tokens(made, mask_truncated=False)
        assert len(mask) == len(made.tokens)
        np.testing.assert_array_equal(mask, made.provenance == M)


def test_nothing_to_train_on_packs_to_nothing():
    silent = rollout([1, 2], [P, P])
    batch = packed([silent, rollout([1, 2], [P, M])], used=[True, False])
    assert (batch.num_micro, batch.num_rollouts, batch.padding_fraction) == (0, 0, 0.0)
    assert not batch.mask.any()
    assert not batch.segments.any()


def test_rollouts_that_cannot_be_packed_are_named():
    with pytest.raises(ValueError, match=r"train\.pack_length \(8\)"):
        pack_shape(pack_length=8, longest_rollout=9, num_rollouts=4, rows=2)
    shape = pack_shape(pack_length=3, longest_rollout=3, num_rollouts=1, rows=1)
    one = np.ones(1, np.float32), np.ones(1, np.float32), np.ones(1, bool)
    with pytest.raises(ValueError, match="attempt 5 of task 't' has 4 tokens"):
        pack([rollout([1, 2, 3, 4], [P, M, M, M], attempt=5)], *one, shape, mask_truncated=False)
    with pytest.raises(ValueError, match="starts with a model token"):
        pack([rollout([1, 2], [M, M])], *one, shape, mask_truncated=False)


def test_experts_stand_with_their_tokens_and_what_nobody_recorded_is_marked():
    first = rollout([5, 6, 1, 2, 3], [P, P, M, M, M])
    second = rollout([5, 6, 4, 8], [P, P, M, E], attempt=1)  # ends with a token of the environment
    choices = [np.arange(n * 4, dtype=np.uint8).reshape(n, 2, 2) + start for n, start in ((4, 0), (2, 100))]
    rollouts = [dataclasses.replace(r, choices=c) for r, c in zip((first, second), choices, strict=True)]
    shape = pack_shape(pack_length=9, longest_rollout=5, num_rollouts=2, rows=1, choices=(2, 2))
    ones = np.ones(2, np.float32)
    batch = pack(rollouts, ones, ones, np.ones(2, bool), shape, mask_truncated=False)
    assert batch.choices is not None
    assert batch.choices.shape == (2, 1, 9, 2, 2)
    assert batch.tokens[0, 0].tolist() == [5, 6, 1, 2, 3, 4, 8, 0, 0]
    # The prompt is the first one's, the last tokens of both went nowhere, and the second's draw has none either.
    assert batch.choices[0, 0, :, 0, 0].tolist() == [0, 4, 8, 12, -1, -1, -1, -1, -1]
    assert (batch.choices[1] == -1).all()
    assert packed([first, second]).choices is None
