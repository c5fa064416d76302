"""Which tokens are drawn from, by sorting one row in float64 and going down the list."""

from typing import Any

import numpy as np


def distribution(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    bias: np.ndarray | float = 0.0,
    forbidden: Any = (),
) -> np.ndarray:
    """Return the probability of each token under the rule, 0 for those that are left out."""
    scores = np.asarray(logits, np.float64) + bias
    scores[list(forbidden)] = -np.inf
    scores = scores / temperature
    if 0 < top_k < len(scores):
        scores[scores < np.sort(scores)[-top_k]] = -np.inf
    if top_p < 1:
        probability = softmax(scores)
        above = 0.0  # probability of the tokens that are more likely than those in hand
        for value in np.unique(scores)[::-1]:
            if above >= top_p:
                scores[scores <= value] = -np.inf
                break
            above += probability[scores == value].sum()
    probability = softmax(scores)
    return softmax(np.where(probability >= min_p * probability.max(), scores, -np.inf))


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return exp(scores), normalised; 0 where the score is -inf."""
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()
