"""Generation without a cache: the whole sequence is computed again for every token, in float64."""

from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from rljax.models.arch import Arch
from rljax.pytree import Params
from tests.reference import decoder


def inverse_cdf(logits: np.ndarray, temperature: float, uniform: float) -> tuple[int, float]:
    """Return the first token whose cumulative probability exceeds `uniform`, and its log-probability."""
    if temperature == 0:
        return int(np.argmax(logits)), 0.0
    scaled = np.asarray(logits, np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    probability = weights / weights.sum()
    token = int(np.argmax(np.cumsum(probability) > uniform * probability.sum()))
    return token, float(np.log(probability[token]))


def generate(
    arch: Arch,
    params: Params,
    prompt: Collection[int],
    key: tuple[int, int],
    *,
    max_tokens: int,
    temperature: float,
    stop_ids: Collection[int],
    kept: decoder.Kept = decoder.as_is,
) -> tuple[list[int], list[float]]:
    """Return the tokens that continue the prompt and their log-probabilities."""
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    tokens, logps = list(prompt), []
    while len(logps) < max_tokens:
        after = decoder.logits(arch, wide, np.array([tokens]), kept=kept)[0, -1]
        token, logp = inverse_cdf(after, temperature, uniform_at(key, len(tokens)))
        tokens.append(token)
        logps.append(logp)
        if token in stop_ids:
            break
    return tokens[len(prompt) :], logps


def uniform_at(key: tuple[int, int], position: int) -> float:
    """Return the number that decides the token at a position of the rollout with this key."""
    words: Any = np.array(key, np.uint32)
    return float(jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(words), position)))
