"""Time what comes before decoding: computing prompts, alone and for groups, and compiling the sampler's programs.

Prints one JSON line per prompt length: milliseconds until the first token of one rollout, of a group that shares its prompt and
of as many rollouts with prompts of their own, and tokens/s of the last. Then one line for the programs: how many there are, and
how long a warm-up takes in a new process with an empty and with a filled compilation cache.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sampling import CHECKPOINT, endless_engine, make_requests, sample, sampler_params, timed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--prompt", type=int, nargs="+", default=[46, 512], help="prompt lengths (tokens)")
    parser.add_argument("--group", type=int, default=8, help="rollouts per prompt")
    parser.add_argument("--slots", type=int, default=64, help="of the engine that is warmed up")
    parser.add_argument("--longest", type=int, nargs=2, default=[128, 128], help="its longest prompt, and completion (tokens)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--turns", action="store_true", help="warm up what conversations of several turns need, too")
    parser.add_argument("--warm-up", action="store_true", help="only warm up, once, and say how long it took")
    args = parser.parse_args(argv)
    for dtype in args.dtype:
        if args.warm_up:
            print(json.dumps(warm_up(args, dtype)), flush=True)
            continue
        for prompt in args.prompt:
            print(json.dumps({"dtype": dtype, "prompt": prompt, **measure(args, dtype, prompt)}), flush=True)
        with tempfile.TemporaryDirectory() as cache:
            cold, warm = (in_new_process(args, dtype, cache) for _ in range(2))
        found = {"programs": cold["programs"], "cold_s": cold["seconds"], "warm_s": warm["seconds"]}
        print(json.dumps({"dtype": dtype, **found}), flush=True)
    return 0


def measure(args: argparse.Namespace, dtype: str, prompt: int) -> dict[str, Any]:
    """Time the first token of one rollout, of a group, and of rollouts that share nothing."""
    arch, mesh, params = sampler_params(args.checkpoint, dtype)
    engine = endless_engine(arch, mesh, params, slots=args.group, prompt=prompt, tokens=1, readers=args.group)
    group = make_requests(arch.vocab_size, prompt, [1] * args.group, args.group)
    apart = endless_engine(arch, mesh, params, slots=args.group, prompt=prompt, tokens=1, readers=1)
    strangers = make_requests(arch.vocab_size, prompt, [1] * args.group, 1)
    cases = ((engine, group[:1]), (engine, group), (apart, strangers))
    one, shared, own = (timed(lambda at=at, asked=asked: sample(at, asked), args.repeats) for at, asked in cases)
    return {
        "one_ms": round(1e3 * one, 1),
        "group_ms": round(1e3 * shared, 1),
        "group_over_one": round(shared / one, 2),
        "apart_ms": round(1e3 * own, 1),
        "tokens_per_s": round(args.group * prompt / own),
    }


def warm_up(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Compile all programs of an engine as a run has it."""
    arch, mesh, params = sampler_params(args.checkpoint, dtype)
    sizes = {"slots": args.slots, "prompt": args.longest[0], "tokens": args.longest[1], "readers": args.group}
    turns = {"reuse_cache": True, "prefill_chunk": 256} if args.turns else {}
    engine = endless_engine(arch, mesh, params, **sizes, **turns)
    start = time.perf_counter()
    programs = engine.warm_up()
    return {"programs": programs, "seconds": round(time.perf_counter() - start, 1)}


def in_new_process(args: argparse.Namespace, dtype: str, cache: str) -> dict[str, Any]:
    """Warm up in a process of its own, with compiled programs kept in a folder."""
    options = ("checkpoint", "group", "slots")
    given = [part for name in options for part in (f"--{name}", str(getattr(args, name)))]
    given += ["--longest", *map(str, args.longest)]
    settings = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, __file__, "--warm-up", "--dtype", dtype, *given, *(("--turns",) if args.turns else ())]
    return json.loads(subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    sys.exit(main())
