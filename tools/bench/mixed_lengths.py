"""Time sampling completions of very different lengths: slots that refill next to batches of the same size.

Lengths are log-uniform, so most are short and a few are long. Prints one JSON line for each way: seconds, tokens/s of what was
asked for, decode steps, and the share of their rows that drew such a token (occupancy), also if every step had a row for every
slot. The ways:

    refilled   a slot whose rollout has ended takes the next one
    batches    the next ones wait until all of a batch have ended; those that have ended take no room
    static     the same, and every row is computed until the longest of its batch has ended
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sampling import CHECKPOINT, endless_engine, make_requests, sample, sampler_params

WAYS = ("refilled", "batches", "static")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--group", type=int, default=8, help="rollouts per prompt")
    parser.add_argument("--prompt", type=int, default=46, help="prompt length (tokens)")
    parser.add_argument("--shortest", type=int, default=8, help="completion length (tokens)")
    parser.add_argument("--longest", type=int, default=512, help="completion length (tokens)")
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=WAYS)
    args = parser.parse_args(argv)
    arch, mesh, params = sampler_params(args.checkpoint, args.dtype)
    sizes = {"slots": args.slots, "prompt": args.prompt, "tokens": args.longest, "readers": args.group}
    engine = endless_engine(arch, mesh, params, **sizes)
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(args.shortest), np.log(args.longest + 1), args.requests)).astype(int)
    longest = [max(lengths[first : first + args.slots]) for first in range(0, args.requests, args.slots)]
    asked, padded = (
        make_requests(arch.vocab_size, args.prompt, of_each.tolist(), args.group)
        for of_each in (lengths, np.repeat(longest, args.slots)[: args.requests])
    )
    engine.warm_up()
    tokens = int(lengths.sum())
    for way in args.ways:
        requests, size = padded if way == "static" else asked, args.requests if way == "refilled" else args.slots
        start, steps = time.perf_counter(), 0
        for first in range(0, args.requests, size):
            steps += sample(engine, requests[first : first + size])
        seconds = time.perf_counter() - start
        drawn = sum(request.params.max_tokens for request in requests)
        print(
            json.dumps(
                {
                    "way": way,
                    "dtype": args.dtype,
                    "tokens": tokens,
                    "seconds": round(seconds, 2),
                    "tokens_per_s": round(tokens / seconds, 1),
                    "steps": steps,
                    "occupancy": round(engine.take_metrics()["sampler/occupancy"] * tokens / drawn, 3),
                    "of_all_slots": round(tokens / (steps * args.slots), 3),
                }
            ),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
