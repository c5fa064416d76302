"""A program that trains, evaluates and checks in several configurations and lists the options nobody has read."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rljax.evaluate import evaluate
from rljax.loop import check, train
from rljax.recipe import load, record_reads, unread
from tests.tiny_run import overrides


def main(argv: Sequence[str]) -> int:
    """Run in the folder `argv[0]` and print the list as JSON."""
    folder = Path(argv[0])
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"Say {index}", "answer": str(index)}) + "\n" for index in range(8)))
    rich = [
        "train.steps=4",
        "algorithm.num_iterations=2",
        "train.mini_batch_size=2",
        "checkpoint.every=4",
        "eval.every=4",
        "eval.num_tasks=2",
        "algorithm.beta=0.1",
        "algorithm.kl_target=0.1",
        "algorithm.reference_sync_steps=1",
        "algorithm.rollout_rs=token",
        "algorithm.dynamic_sampling=true",
        "lora.rank=2",
        "optimizer.schedule=cosine",
        "optimizer.decay_steps=4",
        "telemetry.tensorboard=true",
    ]
    from_file = [
        *("train.steps=1", "checkpoint.every=1", "data.source=file", f"data.path={tasks}", f"eval.path={tasks}"),
        *("algorithm.surrogate=sapo", "algorithm.advantage=gae", "optimizer.rule=muon"),
        *(
            "env.name=tests.worlds:Troubled",
            "env.options.share=0.3",
            "env.max_failure_fraction=1.0",
        ),  # something is tried again
    ]
    with record_reads() as reads:
        config = load(None, overrides(folder / "rich", *rich))
        check(config)
        train(config)
        filed = load(None, overrides(folder / "file", *from_file))
        train(filed)
        evaluate(filed, folder / "file" / "model")
    sys.stdout.write(json.dumps(unread(config, reads)) + "\n")
    return 0
