"""Time sampling completions of very different lengths: slots that refill next to static batches of the same size.

Lengths are log-uniform, so most are short and a few are long. Prints one JSON line for each way: seconds, tokens/s, decode
steps, and the share of the slots' steps that drew a token (occupancy).
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from rljax.config import MeshConfig
from rljax.convert import read_checkpoint
from rljax.mesh import build_mesh
from rljax.records import SamplingParams
from rljax.rollouts.weights import learner_layout, publisher
from rljax.sampler.engine import Engine, Request, draw_key

CHUNK = 8
"""Decode steps between two looks by the host."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/smollm2-135m-instruct"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="rollouts per prompt")
    parser.add_argument("--prompt", type=int, default=46, help="prompt length (tokens)")
    parser.add_argument("--shortest", type=int, default=8, help="completion length (tokens)")
    parser.add_argument("--longest", type=int, default=512, help="completion length (tokens)")
    args = parser.parse_args(argv)
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    loaded = read_checkpoint(args.checkpoint, learner_layout(mesh))
    arch = loaded.arch
    engine = Engine(
        arch,
        mesh,
        (arch.vocab_size,),  # an end token that is never drawn
        slots=args.slots,
        max_prompt_length=args.prompt,
        max_completion_length=args.longest,
        readers=args.group,
        decode_chunk_steps=CHUNK,
        dtype=args.dtype,
    )
    engine.set_weights(publisher(arch, mesh, args.dtype)(loaded.params), 0)
    requests = make_requests(args, arch.vocab_size)
    batches = [requests[first : first + args.slots] for first in range(0, len(requests), args.slots)]
    for batch in batches:  # compiles every shape that either way needs
        run(engine, batch)
    run(engine, requests)
    for way, portions in (("refilled", [requests]), ("static batches", batches)):
        start, steps = time.perf_counter(), 0
        for portion in portions:
            steps += run(engine, portion)
        seconds = time.perf_counter() - start
        tokens = sum(request.params.max_tokens for request in requests)
        print(
            json.dumps(
                {
                    "way": way,
                    "dtype": args.dtype,
                    "tokens": tokens,
                    "seconds": round(seconds, 2),
                    "tokens_per_s": round(tokens / seconds, 1),
                    "steps": steps,
                    "occupancy": round(tokens / (steps * args.slots), 3),
                }
            ),
            flush=True,
        )
    return 0


def make_requests(args: argparse.Namespace, vocab: int) -> list[Request]:
    """Draw the lengths and prompts, the same ones every time."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(args.shortest), np.log(args.longest + 1), args.requests)).astype(int)
    prompts = [tuple(rng.integers(0, vocab, args.prompt).tolist()) for _ in range(-(-args.requests // args.group))]
    return [
        Request(row, prompts[row // args.group], draw_key(0, "bench", str(row), 0), SamplingParams(max_tokens=int(length)))
        for row, length in enumerate(lengths)
    ]


def run(engine: Engine, requests: Sequence[Request]) -> int:
    """Sample the requests to their end; return the decode steps that took (the last chunk may stop early)."""
    engine.submit(requests)
    steps = 0
    while engine.pending:
        engine.step()
        engine.poll()
        steps += CHUNK
    return steps


if __name__ == "__main__":
    sys.exit(main())
