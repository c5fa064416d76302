"""A tiny model learns in seconds what its world rewards."""

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.processes import Server
from tests.tiny_run import overrides, step_metrics

STEPS = 40
RISE = 0.3  # of the share of lower-case letters, from about 0.35; what is seen is 0.5 and more
OPTIONS = (
    f"train.steps={STEPS}",
    "optimizer.learning_rate=0.02",
    "checkpoint.every=40",
)


@pytest.mark.parametrize(("seed", "moments"), [(0, "float32"), (1, "float32"), (0, "int8")])
def test_the_reward_rises(server: Server, tmp_path: Path, seed: int, moments: str) -> None:
    run = tmp_path / "run"
    more = (f"run.seed={seed}", f"optimizer.moments_dtype={moments}")
    assert server.run(["train", *overrides(run, *OPTIONS, *more)]) == 0, server.output
    rewards = [row["reward/mean"] for row in step_metrics(run).values()]
    assert len(rewards) == STEPS
    first, last = float(np.mean(rewards[:5])), float(np.mean(rewards[-5:]))
    assert last > first + RISE, rewards
