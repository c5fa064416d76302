"""The decoder computes what the reference library computes, however the tokens are laid out."""

from pathlib import Path

import numpy as np
import pytest

from tests.models.oracle import (
    VARIANTS,
    load_hf,
    our_completions,
    our_logits,
    random_ids,
    save_llama,
    their_greedy,
    their_logits,
)

LOGITS_ATOL = 2e-4  # two float32 programs that sum in different orders; logits are of the order 10
SAME_PROGRAM_ATOL = 2e-5  # our own decoder under another layout of the same tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_greedy_tokens_equal_the_references(variant: str, tmp_path: Path) -> None:
    model = save_llama(tmp_path, **VARIANTS[variant])
    arch, params = load_hf(tmp_path)
    ids = random_ids(4, 96)
    ours, theirs = our_logits(arch, params, ids), their_logits(model, ids)
    assert np.abs(theirs).max() > 1  # else small differences prove nothing
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=LOGITS_ATOL)
    prompts = [ids[0, :4].tolist(), ids[1, :31].tolist()]
    tokens, _ = our_completions(arch, params, prompts, 64)
    assert tokens.tolist() == their_greedy(model, prompts, 64)


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("grouped")
    save_llama(folder)
    return load_hf(folder)


def test_decoding_with_a_cache_equals_the_full_forward(grouped) -> None:
    arch, params = grouped
    prompts = [random_ids(5).tolist(), random_ids(17, seed=1).tolist()]
    tokens, logp = our_completions(arch, params, prompts, 24, temperature=1.0)
    for row, prompt in enumerate(prompts):
        whole = np.array([[*prompt, *tokens[row]]])
        full = our_logits(arch, params, whole)[0, len(prompt) - 1 : -1].astype(np.float64)
        expected = full[np.arange(24), tokens[row]] - np.log(np.exp(full).sum(1))
        np.testing.assert_allclose(logp[row], expected, rtol=0, atol=SAME_PROGRAM_ATOL)


def test_padding_on_either_side_changes_nothing(grouped) -> None:
    arch, params = grouped
    ids = random_ids(1, 20)
    plain = our_logits(arch, params, ids)
    for left, right in ((0, 11), (11, 0), (4, 7)):
        padded = np.pad(ids, ((0, 0), (left, right)), constant_values=5)
        positions = np.pad(np.arange(20)[None], ((0, 0), (left, right)))
        segments = np.pad(np.ones_like(ids), ((0, 0), (left, right)))
        out = our_logits(arch, params, padded, positions, segments)
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out[:, left : left + 20], plain, rtol=0, atol=SAME_PROGRAM_ATOL)


def test_packed_segments_equal_separate_sequences(grouped) -> None:
    arch, params = grouped
    parts = [random_ids(1, length, seed=length) for length in (7, 1, 13)]
    packed = np.concatenate(parts, axis=1)
    positions = np.concatenate([np.arange(part.shape[1])[None] for part in parts], axis=1)
    segments = np.concatenate([np.full_like(part, number) for number, part in enumerate(parts, 1)], axis=1)
    out = our_logits(arch, params, packed, positions, segments)
    separate = np.concatenate([our_logits(arch, params, part) for part in parts], axis=1)
    np.testing.assert_allclose(out, separate, rtol=0, atol=SAME_PROGRAM_ATOL)
    merged = our_logits(arch, params, packed)
    assert np.abs(merged - separate).max() > 0.1  # the segments did keep something apart
