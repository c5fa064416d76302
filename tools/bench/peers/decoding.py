"""What the peers' benchmarks of decoding share: their options, the prompts of tools/bench/decode.py, and what is printed."""

import argparse
import json
import statistics
from collections.abc import Callable

import numpy as np


def parse_options(description: str | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=46)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def make_prompts(rng: np.random.Generator, vocab: int, rows: int, options: argparse.Namespace) -> list[list[int]]:
    """Return one prompt of random tokens per row, the same one for each group of rows."""
    prompts = [rng.integers(0, vocab, options.prompt).tolist() for _ in range(-(-rows // options.group))]
    return [prompts[row // options.group] for row in range(rows)]


def print_rates(system: str, rows: int, call: Callable[[int], float], options: argparse.Namespace) -> None:
    """Time a call that samples so many tokens per row and returns its seconds; print one JSON line.

    The decode phase is the whole call less a call for one token.
    """
    call(options.tokens)
    whole, first = (statistics.median(call(tokens) for _ in range(options.repeats)) for tokens in (options.tokens, 1))
    step = (whole - first) / (options.tokens - 1)
    found = {
        "tokens_per_s": round(rows * options.tokens / whole, 1),
        "decode_tokens_per_s": round(rows / step, 1),
        "first_token_s": round(first, 3),
        "step_ms": round(1e3 * step, 2),
    }
    print(json.dumps({"system": system, "dtype": options.dtype, "rows": rows, **found}), flush=True)
