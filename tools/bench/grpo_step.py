"""Time one GRPO step of SmolLM2-135M-Instruct on two-digit sums: 8 tasks x 8 rollouts x at most 32 tokens.

Runs `rljax train` twice as a user would, first with an empty compilation cache, then with a filled one, and prints one
JSON line: the medians over the steps after the first, the time from process start to the end of the first step, cold
and warm, and the peak memory of the process. Peers do the same work in tools/bench/peers/.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rljax.telemetry.sinks import read_metrics

WORK = (
    "env.options.operations={add=1.0}",
    "env.options.add_digits=2",
    "sampler.slots=64",
    "sampler.max_prompt_length=64",
    "sampler.max_completion_length=32",
    "algorithm.num_generations=8",
    "train.rollout_batch_size=8",
    "optimizer.learning_rate=1e-9",  # the policy stays the one that every system starts from, and so do its lengths
    "train.skip_zero_advantages=false",  # the peers compute every rollout
    "telemetry.live=plain",
    "telemetry.rollouts=false",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/smollm2-135m-instruct"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="products of sampler and learner")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("overrides", nargs="*", metavar="section.option=value", help="further options")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        cold = run(args, Path(scratch), "cold", args.steps)
        warm = run(args, Path(scratch), "warm", 1)
    print(json.dumps({"system": "rljax", "dtype": args.dtype, **cold, "first_step_warm_s": warm["first_step_s"]}))
    return 0


def start_training(args: argparse.Namespace, run_dir: Path, steps: int, *further: str) -> subprocess.Popen[str]:
    """Start `rljax train` on this work, with the compilation cache beside the run; its output can be read line by line."""
    options = (
        *WORK,
        f"model.checkpoint={args.checkpoint}",
        f"model.compute_dtype={args.dtype}",
        f"sampler.dtype={args.dtype}",
        f"train.steps={steps}",
        f"checkpoint.every={steps}",
        f"run.dir={run_dir}",
        *further,
        *args.overrides,
    )
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(run_dir.parent / "cache")}
    command = [sys.executable, "-m", "rljax", "train", *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def run(args: argparse.Namespace, scratch: Path, name: str, steps: int) -> dict[str, float]:
    """Train for some steps in a process of its own and return what was measured."""
    run_dir = scratch / name
    start = time.perf_counter()
    process = start_training(args, run_dir, steps)
    assert process.stdout is not None
    first = 0.0
    for line in process.stdout:
        print(f"  {name}: {line.rstrip()}", file=sys.stderr)
        if line.startswith("step 1/"):
            first = time.perf_counter() - start
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"rljax train failed with status {os.waitstatus_to_exitcode(status)}")
    rows = [row for step, row in read_metrics(run_dir / "metrics.jsonl").items() if step > 1]
    if not rows:
        return {"first_step_s": round(first, 1)}

    def median(*names: str) -> float:
        return round(statistics.median(sum(row[name] for name in names) for row in rows), 2)

    return {
        "sampling_s": median("time/sampling", "time/env_wait"),
        "learning_s": median("time/scoring", "time/update", "time/publish"),
        "step_s": median("time/step"),
        "generated_tokens": median("tokens/generated"),
        "generated_tokens_per_s": median("throughput/generated_tokens_per_s"),
        "first_step_s": round(first, 1),
        "peak_rss_gb": round(usage.ru_maxrss / 1e6, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
