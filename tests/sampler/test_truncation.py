"""What a request takes out of the distribution is what the rule says, and what transformers take out."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from rljax.records import SamplingParams
from rljax.sampler.draw import draw, end_ids, reshaped, uniforms
from rljax.sampler.engine import draw_key
from rljax.sampler.rules import build_rules
from tests.reference.truncation import distribution

LOGP_ATOL = 6e-6
"""Rounding of a float32 log-probability of the order 10, and of float32 sums of 256 terms."""
VOCAB = 300  # more than one block of the draw
STOPS = (2, 7)


@jax.jit
def _rows(logits: Any, temperature: Any, count: Any, rules: Any, uniform: Any) -> Any:
    left = reshaped(logits, temperature, count, rules, end_ids(rules, jnp.array(STOPS)))
    return left, draw(left, temperature, uniform)


def reshape(logits: Any, asked: Mapping[int, SamplingParams], count: Any = 0, uniform: Any = 0.5) -> tuple[Any, Any, Any]:
    """Return logits, drawn tokens and log-probabilities of rows, of which some ask for something."""
    rows = len(logits)
    rules = build_rules(asked, rows, np.shape(logits)[1])
    temperature = np.array([asked[row].temperature if row in asked else 1.0 for row in range(rows)], np.float32)
    counts, numbers = np.broadcast_to(np.int32(count), rows), np.broadcast_to(np.float32(uniform), rows)
    left, drawn = _rows(jnp.asarray(logits, jnp.float32), temperature, counts, jax.tree.map(jnp.asarray, rules), numbers)
    return np.asarray(left), np.asarray(drawn.token), np.asarray(drawn.logp)


def asking(**sampling: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 16, **sampling})


def kept(logits: list[float], **sampling: Any) -> list[int]:
    """Return which tokens of one row are left."""
    return np.flatnonzero(np.isfinite(reshape(np.array([logits]), {0: asking(**sampling)})[0][0])).tolist()


def some_logits(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2.5, (rows, VOCAB)).astype(np.float32)


RULES: tuple[dict[str, Any], ...] = (
    {"top_k": 5},
    {"top_k": 1},
    {"top_k": VOCAB + 9},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 60, "top_p": 0.95, "min_p": 0.02},
    {"top_p": 0.7, "min_p": 0.1},
)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_the_kept_tokens_are_those_of_the_oracle_and_of_transformers(temperature: float) -> None:
    logits = np.repeat(some_logits(12), len(RULES), axis=0)
    rules = RULES * 12
    asked = {row: asking(temperature=temperature, **rule) for row, rule in enumerate(rules)}
    uniform = np.random.default_rng(1).random(len(rules), np.float32)
    left, tokens, logps = reshape(logits, asked, uniform=uniform)
    for row, rule in enumerate(rules):
        probability = distribution(logits[row], temperature=temperature, **rule)
        assert np.isfinite(left[row]).tolist() == (probability > 0).tolist(), rule
        assert (np.isfinite(left[row])).tolist() == by_transformers(logits[row], temperature, **rule).tolist(), rule
        np.testing.assert_allclose(logps[row], np.log(probability[tokens[row]]), rtol=0, atol=LOGP_ATOL)
    np.testing.assert_array_equal(left[np.isfinite(left)], logits[np.isfinite(left)])


def by_transformers(logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    """Return which tokens the processors of transformers keep, in the order in which it applies them."""
    warpers: list[Any] = [transformers.TemperatureLogitsWarper(temperature)]
    warpers += [transformers.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [transformers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [transformers.MinPLogitsWarper(min_p)] if min_p else []
    scores = torch.tensor(logits)[None]
    for warper in warpers:
        scores = warper(torch.zeros((1, 1), dtype=torch.long), scores)
    return np.isfinite(scores[0].numpy())


def test_distributions_done_by_hand() -> None:
    logits = np.log([0.6, 0.3, 0.1]).tolist()
    assert kept(logits, top_p=0.85) == [0, 1]
    assert kept(logits, top_p=0.59) == [0]
    assert kept(logits, top_p=0.95) == kept(logits, top_p=1.0) == [0, 1, 2]
    assert kept(logits, min_p=0.4) == [0, 1]
    assert kept(logits, top_k=2, top_p=0.65) == [0], "of what top_k keeps, the first has 2/3"
    assert kept(logits, top_k=-1, min_p=0.0) == [0, 1, 2]
    _, token, logp = reshape(np.array([logits]), {0: asking(top_p=0.85)}, uniform=0.1)
    assert token.tolist() == [0]
    np.testing.assert_allclose(logp, [-0.405465], atol=1e-6)  # log(0.6 / 0.9), not log(0.6)


def test_equal_tokens_are_kept_or_left_together() -> None:
    tied = [1.0, 3.0, 2.0, 3.0, 2.0, 2.0]
    assert kept(tied, top_k=1) == [1, 3]
    assert kept(tied, top_k=3) == [1, 2, 3, 4, 5]
    assert kept(tied, top_p=0.1) == [1, 3]
    assert kept([0.0, -0.0, -1.0], top_k=1) == [0, 1]
    assert kept([-5.0, 5.0, -5.0], top_k=2) == [0, 1, 2]


@pytest.mark.parametrize("rule", [{"top_p": 1e-30}, {"top_p": 1e-45}, {"top_k": 1}, {"min_p": 1.0}])
def test_at_least_the_most_likely_token_stays(rule: dict[str, Any]) -> None:
    logits = some_logits(1)[0].tolist()
    assert kept(logits, **rule) == [int(np.argmax(logits))]
    assert kept([0.0] * VOCAB, **rule) == list(range(VOCAB))


def test_bias_and_masks_come_before_the_temperature() -> None:
    logits = some_logits(3)
    asked = {0: asking(temperature=0.5, logit_bias={4: 3.0, 9: -np.inf}), 1: asking(allowed_token_ids=(3, 8, 250), top_k=2)}
    left, tokens, logps = reshape(logits, asked, uniform=0.3)
    bias = np.zeros(VOCAB)
    bias[[4, 9]] = 3.0, -np.inf
    biased = distribution(logits[0], temperature=0.5, bias=bias)
    np.testing.assert_allclose(logps[0], np.log(biased[tokens[0]]), rtol=0, atol=LOGP_ATOL)
    assert biased[9] == 0
    assert np.isneginf(left[0][9])
    allowed = np.array([3, 8, 250])
    assert np.flatnonzero(np.isfinite(left[1])).tolist() == sorted(allowed[np.argsort(-logits[1][allowed])[:2]].tolist())
    assert left[2].tobytes() == logits[2].tobytes()


def test_end_tokens_are_taken_out_until_they_are_allowed() -> None:
    asked = {0: asking(min_tokens=2, stop_token_ids=(11, 12)), 1: asking(min_tokens=2, stop_token_ids=(13,), ignore_eos=True)}
    for count, out in ((0, True), (1, True), (2, False)):
        left = reshape(some_logits(3), asked, count=count)[0]
        assert [np.flatnonzero(np.isneginf(row)).tolist() for row in left] == (
            [[2, 7, 11, 12], [13], []] if out else [[], [], []]
        )


def test_a_row_that_asks_for_nothing_keeps_its_bits_whoever_stands_beside_it() -> None:
    logits = some_logits(8)
    logits[:, 5] = -0.0
    uniform = np.random.default_rng(2).random(8, np.float32)
    plain = jax.jit(draw)(jnp.asarray(logits), jnp.ones(8), jnp.asarray(uniform))
    asked = {1: asking(top_k=3), 4: asking(top_p=0.5), 6: asking(allowed_token_ids=(1,), min_tokens=1)}
    left, tokens, logps = reshape(logits, asked, uniform=uniform)
    for row in (0, 2, 3, 5, 7):
        assert left[row].tobytes() == logits[row].tobytes()
        assert (tokens[row], logps[row].tobytes()) == (plain.token[row], np.asarray(plain.logp)[row].tobytes())
    for row, params in asked.items():
        alone = reshape(np.roll(logits, 3, axis=0), {(row + 3) % 8: params}, uniform=np.roll(uniform, 3))
        moved = (row + 3) % 8
        assert (alone[1][moved], alone[2][moved].tobytes()) == (tokens[row], logps[row].tobytes())


def test_frequencies_fit_what_is_left() -> None:
    count, logits = 20_000, np.random.default_rng(3).normal(0, 0.6, 30).astype(np.float32)
    keys = np.array([draw_key(0, "eval", "task", attempt) for attempt in range(count)], np.uint32)
    uniform = np.asarray(jax.jit(uniforms)(jnp.asarray(keys), jnp.full(count, 17)))
    rule = {"top_k": 25, "top_p": 0.9, "min_p": 0.08}
    tokens = reshape(
        np.broadcast_to(logits, (count, 30)), dict.fromkeys(range(count), asking(temperature=0.8, **rule)), 0, uniform
    )[1]

    def statistic(**changes: Any) -> float:
        probability = distribution(logits, **{"temperature": 0.8, **rule, **changes})
        left = probability > 0
        assert not np.isin(tokens, np.flatnonzero(~left)).any() or changes
        expected = count * probability[left]
        return float(((np.bincount(tokens, minlength=30)[left] - expected) ** 2 / expected).sum())

    most = 38.0  # one in ten thousand with 11 degrees of freedom
    assert (distribution(logits, temperature=0.8, **rule) > 0).sum() == 12
    assert statistic() < most
    assert statistic(top_k=0, top_p=1.0, min_p=0.0) > most  # the test would notice
    assert statistic(temperature=0.9) > most


def test_rules_keep_the_room_of_those_before_them_so_that_nothing_compiles_again() -> None:
    wide = build_rules({0: asking(logit_bias={3: 1.0}, stop_token_ids=(4, 5, 6))}, 2, VOCAB)
    narrow = build_rules({1: asking(top_k=3, stop_token_ids=(9,))}, 2, VOCAB, wide)
    assert jax.tree.map(np.shape, narrow) == jax.tree.map(np.shape, wide)
    assert narrow.stop_ids.tolist() == [[-1] * 4, [9, -1, -1, -1]]
    assert not np.any(narrow.bias)
    assert build_rules({1: asking(top_k=3)}, 2, VOCAB).bias is None
