"""Time how long training takes to reach a mean reward, on the two-digit sums of grpo_step.py.

Runs `rljax train` as a user would, once per seed, and stops it when the mean reward of the last five batches reaches the goal.
Prints one JSON line per seed: the steps that took, the seconds of those steps, and the seconds from process start, loading and
compiling among them; null where the goal was not reached.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from grpo_step import start_training

from rljax.telemetry.sinks import read_metrics

_WINDOW = 5
"""Batches whose mean reward counts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/smollm2-135m-instruct"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="products of sampler and learner")
    parser.add_argument("--goal", type=float, default=0.65, help="mean reward to reach")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=25, help="steps after which a run is given up")
    parser.add_argument("overrides", nargs="*", metavar="section.option=value", help="further options")
    args = parser.parse_args(argv)
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps({"dtype": args.dtype, "seed": seed, **run(args, Path(scratch), seed)}), flush=True)
    return 0


def run(args: argparse.Namespace, scratch: Path, seed: int) -> dict[str, float | int | list[float] | None]:
    """Train in a process of its own until the goal is reached."""
    start = time.perf_counter()
    process = start_training(args, scratch / "run", args.steps, f"run.seed={seed}", "train.skip_zero_advantages=true")
    assert process.stdout is not None
    reached, rows = None, []
    for line in process.stdout:
        print(f"  seed {seed}: {line.rstrip()}", file=sys.stderr)
        if not line.startswith("step ") or reached is not None:
            continue
        rows = list(read_metrics(scratch / "run" / "metrics.jsonl").values())
        if len(_rewards(rows)) >= _WINDOW and _latest(rows) >= args.goal:
            reached = time.perf_counter() - start
            process.send_signal(signal.SIGINT)
    if process.wait() and reached is None:
        raise SystemExit(f"rljax train failed with status {process.returncode}")
    return {
        "reward": round(_latest(rows), 3),
        "rewards": [round(reward, 3) for reward in _rewards(rows)],
        "steps": None if reached is None else len(rows),
        "steps_s": None if reached is None else round(sum(row["time/step"] for row in rows), 1),
        "from_start_s": None if reached is None else round(reached, 1),
    }


def _latest(rows: Sequence[dict[str, float]]) -> float:
    return sum(_rewards(rows)[-_WINDOW:]) / _WINDOW


def _rewards(rows: Sequence[dict[str, float]]) -> list[float]:
    """Return the mean reward of each batch, which its first update logs."""
    return [row["reward/mean"] for row in rows if "reward/mean" in row]


if __name__ == "__main__":
    sys.exit(main())
