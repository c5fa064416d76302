"""The work every system is measured on: two-digit sums, as chat messages, and how an answer is scored."""

import random
import re
from typing import Any


def tasks(count: int, seed: int = 0) -> list[tuple[list[dict[str, Any]], int]]:
    """Return questions as chat messages, each with its answer."""
    rng = random.Random(seed)
    pairs = [(rng.randint(10, 99), rng.randint(10, 99)) for _ in range(count)]
    return [([{"role": "user", "content": f"What is {a} + {b}? Answer with just the number."}], a + b) for a, b in pairs]


def last_number(text: str, answer: int) -> float:
    """Return 1 when the last number in the text is the answer, else 0."""
    found = re.findall(r"\d+", text.replace(",", ""))
    return float(bool(found) and int(found[-1]) == answer)
