"""Time sampling alone: every rollout runs to its last token, prompts are shared by groups.

Prints one JSON line per number of rows: tokens/s of the whole call and of the decode phase, seconds to the first token, and
milliseconds per decode step.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rljax.config import MeshConfig
from rljax.convert import read_checkpoint
from rljax.mesh import build_mesh
from rljax.models.arch import Arch
from rljax.pytree import Params
from rljax.records import SamplingParams
from rljax.rollouts.weights import learner_layout, publisher
from rljax.sampler.engine import Engine, Request, draw_key


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/smollm2-135m-instruct"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="rollouts decoded together")
    parser.add_argument("--group", type=int, default=8, help="rollouts per prompt, at most as many as rows")
    parser.add_argument("--prompt", type=int, default=46, help="prompt length (tokens)")
    parser.add_argument("--tokens", type=int, default=64, help="completion length (tokens)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    loaded = read_checkpoint(args.checkpoint, learner_layout(mesh))
    params = publisher(loaded.arch, mesh, args.dtype)(loaded.params)
    for rows in args.rows:
        found = measure(args, loaded.arch, mesh, params, rows)
        print(json.dumps({"system": "rljax", "dtype": args.dtype, "rows": rows, **found}), flush=True)
    return 0


def measure(args: argparse.Namespace, arch: Arch, mesh: Mesh, params: Params, rows: int) -> dict[str, float]:
    """Sample some times and return the medians."""
    group = min(args.group, rows)
    engine = Engine(
        arch,
        mesh,
        (arch.vocab_size,),  # an end token that is never drawn
        slots=rows,
        max_prompt_length=args.prompt,
        max_completion_length=args.tokens,
        readers=group,
        decode_chunk_steps=8,
        dtype=args.dtype,
    )
    engine.set_weights(params, 0)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, arch.vocab_size, args.prompt).tolist()) for _ in range(-(-rows // group))]
    sampling = SamplingParams(max_tokens=args.tokens)
    requests = [Request(row, prompts[row // group], draw_key(0, "bench", str(row), 0), sampling) for row in range(rows)]
    one = [replace(request, params=SamplingParams(max_tokens=1)) for request in requests]
    whole, first = (timed(lambda asked=asked: sample(engine, asked), args.repeats) for asked in (requests, one))
    step = (whole - first) / (args.tokens - 1)
    return {
        "tokens_per_s": round(rows * args.tokens / whole, 1),
        "decode_tokens_per_s": round(rows / step, 1),
        "first_token_s": round(first, 3),
        "step_ms": round(1e3 * step, 2),
    }


def sample(engine: Engine, requests: Sequence[Request]) -> None:
    """Sample the requests to their end."""
    engine.submit(requests)
    while engine.pending:
        engine.step()
        engine.poll()


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call, after one that may compile (seconds)."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    sys.exit(main())
