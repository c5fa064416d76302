"""A draw inverts the cumulative distribution of its row, and nothing else decides it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.sampler.draw import Draw, draw, uniforms
from rljax.sampler.engine import draw_key
from tests.reference.generate import inverse_cdf, uniform_at

EDGE = 2e-6
"""A uniform number this close to a step of the float64 distribution may fall on either side of the float32 one."""
LOGP_ATOL = 6e-6
"""Rounding of a float32 log-probability of the order 10, and of float32 sums of 256 terms."""
LARGEST_UNIFORM = float(np.nextafter(np.float32(1), np.float32(0)))

jitted = jax.jit(draw)


def drawn(logits: np.ndarray, temperature: float | np.ndarray, uniform: float | np.ndarray) -> Draw:
    rows = len(logits)
    columns = (np.broadcast_to(np.float32(value), rows) for value in (temperature, uniform))
    return Draw(*map(np.asarray, jitted(jnp.asarray(logits, jnp.float32), *map(jnp.asarray, columns))))


def random_logits(rows: int, vocab: int, masked: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    return np.where(rng.random(logits.shape) < masked, -np.inf, logits)


@pytest.mark.parametrize("vocab", [1, 5, 256, 300, 1030])
def test_the_token_is_where_the_cumulative_distribution_passes_the_number(vocab: int) -> None:
    logits = random_logits(400, vocab, masked=0.3)
    logits[:, vocab // 2] = 0.0  # at least one entry has mass
    rng = np.random.default_rng(0)
    temperature, uniform = rng.uniform(0.3, 2.0, 400).astype(np.float32), rng.random(400, np.float32)
    out = drawn(logits, temperature, uniform)
    scaled = logits.astype(np.float64) / temperature[:, None]
    probability = np.exp(scaled - scaled.max(1, keepdims=True))
    probability /= probability.sum(1, keepdims=True)
    upto = np.cumsum(probability, axis=1)
    rows = np.arange(400)
    assert (probability[rows, out.token] > 0).all()
    assert (upto[rows, out.token] > uniform - EDGE).all()
    assert (upto[rows, out.token] - probability[rows, out.token] <= uniform + EDGE).all()
    np.testing.assert_allclose(out.logp, np.log(probability[rows, out.token]), rtol=0, atol=LOGP_ATOL)


def test_the_least_and_the_largest_number_draw_the_outermost_tokens_with_mass() -> None:
    logits = np.full((2, 700), -np.inf, np.float32)
    logits[0, [260, 300, 511]] = 0.0  # only the middle block has mass, and not at its start
    logits[1, [3, 699]] = [0.0, -10.0]
    assert drawn(logits, 1.0, 0.0).token.tolist() == [260, 3]
    assert drawn(logits, 1.0, LARGEST_UNIFORM).token.tolist() == [511, 699]


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST_UNIFORM])
def test_a_token_without_mass_is_never_drawn_whatever_the_rounding(uniform: float) -> None:
    logits = np.random.default_rng(1).normal(0, 0.01, (64, 1030)).astype(np.float32)
    logits[:, -300:] = -np.inf  # the sum over many like terms rounds, and the number is near the end
    logits[:, 5] = -np.inf
    out = drawn(logits, 1.0, uniform)
    assert (out.token < 730).all()
    assert (out.token != 5).all()
    assert np.isfinite(out.logp).all()


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, -0.018150), (1.0, -0.126928)])
def test_the_log_probability_is_that_of_the_tempered_distribution(temperature: float, expected: float) -> None:
    out = drawn(np.array([[2.0, 0.0]]), temperature, 0.1)
    assert out.token.tolist() == [0]
    np.testing.assert_allclose(out.logp, [expected], atol=1e-6)


def test_temperature_zero_takes_the_likeliest_with_probability_one() -> None:
    logits = random_logits(16, 300)
    out = drawn(logits, 0.0, LARGEST_UNIFORM)
    assert out.token.tolist() == logits.argmax(1).tolist()
    assert out.logp.tolist() == [0.0] * 16


def test_greedy_rows_do_not_disturb_the_others() -> None:
    logits = random_logits(16, 300)
    uniform = np.random.default_rng(2).random(16, np.float32)
    plain, mixed = drawn(logits, 0.7, uniform), drawn(logits, np.where(np.arange(16) % 2, 0.7, 0.0), uniform)
    assert mixed.token[1::2].tolist() == plain.token[1::2].tolist()
    assert mixed.logp[1::2].tobytes() == plain.logp[1::2].tobytes()
    assert mixed.token[::2].tolist() == logits[::2].argmax(1).tolist()


def test_frequencies_fit_the_distribution() -> None:
    count, logits = 20_000, np.random.default_rng(3).normal(0, 1, 20)
    keys = np.array([draw_key(0, "train", "task", attempt) for attempt in range(count)], np.uint32)
    uniform = np.asarray(jax.jit(uniforms)(jnp.asarray(keys), jnp.full(count, 17)))
    tokens = drawn(np.broadcast_to(logits, (count, 20)), 0.8, uniform).token

    def statistic(temperature: float) -> float:
        weights = np.exp(logits / temperature)
        expected = count * weights / weights.sum()
        return float(((np.bincount(tokens, minlength=20) - expected) ** 2 / expected).sum())

    assert statistic(0.8) < 50.8  # one in ten thousand with 19 degrees of freedom
    assert statistic(0.85) > 50.8  # the test would notice


def test_numbers_depend_on_key_and_position_alone() -> None:
    keys = np.array([draw_key(0, "train", "task", attempt) for attempt in range(4)], np.uint32)
    numbers = {
        (row, position): float(value)
        for position in (0, 1, 400)
        for row, value in enumerate(uniforms(jnp.asarray(keys), jnp.full(4, position)))
    }
    assert len(set(numbers.values())) == 12
    assert all(0 <= value < 1 for value in numbers.values())
    alone = uniforms(jnp.asarray(keys[2:3]), jnp.array([400]))
    assert float(alone[0]) == numbers[2, 400] == uniform_at(draw_key(0, "train", "task", 2), 400)


def test_a_rollouts_key_differs_by_seed_purpose_task_and_attempt() -> None:
    first = draw_key(0, "train", "task", 0)
    assert first == draw_key(0, "train", "task", 0)
    others = [draw_key(1, "train", "task", 0), draw_key(0, "eval", "task", 0), draw_key(0, "train", "task 0", 0)]
    assert len({first, *others, draw_key(0, "train", "task", 1), draw_key(0, "train", "task", 11)}) == 6


def test_the_oracle_agrees_on_a_distribution_done_by_hand() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.25]))
    assert [inverse_cdf(logits, 1.0, number)[0] for number in (0.0, 0.49, 0.51, 0.74, 0.76)] == [0, 0, 1, 1, 2]
