"""What a run directory says about its run."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rljax import __version__
from rljax.config import Config
from rljax.recipe import load
from rljax.run_dir import RunDir

DEVICES = ["TFRT_CPU_0"]


def changed(*overrides: str) -> Config:
    return load(None, overrides)


def test_naming_the_places_creates_nothing(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    assert run_dir.metrics == tmp_path / "run" / "metrics.jsonl"
    assert not run_dir.path.exists()


def test_a_launch_leaves_the_resolved_options_and_how_it_was_made(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    began = run_dir.began()
    run_dir.record_launch(changed("train.steps=7"), DEVICES, began)
    assert Config.model_validate_json(run_dir.config.read_text()) == changed("train.steps=7")
    record = json.loads(run_dir.launches.read_text())
    (launch,) = record["launches"]
    assert datetime.fromisoformat(record["began"]) == began
    assert (launch["command"], launch["devices"]) == (sys.argv, DEVICES)
    assert launch["packages"]["rljax"] == __version__
    assert launch["packages"]["jax"]
    assert {"git", "host", "python", "directory", "time", "environment"} <= set(launch)
    assert sorted(path.name for path in run_dir.path.iterdir()) == ["config.json", "run.json"], "no temporary file is left"


def test_restarts_are_added_and_the_beginning_stays(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    began = datetime(2026, 1, 31, 23, 59, 59, tzinfo=UTC)
    run_dir.record_launch(changed(), DEVICES, began)
    assert run_dir.began() == began
    run_dir.record_launch(changed("train.steps=7"), DEVICES, run_dir.began())
    assert run_dir.began() == began
    assert len(json.loads(run_dir.launches.read_text())["launches"]) == 2


def test_a_run_that_never_began_begins_now(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    assert before <= RunDir(tmp_path).began() <= datetime.now(UTC)


def test_only_options_that_decide_the_result_count_as_differences(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    assert run_dir.differences(changed()) == [], "nothing was launched"
    run_dir.record_launch(changed(), DEVICES, run_dir.began())
    assert run_dir.differences(changed()) == []
    free = ("train.steps=7", "run.dir=elsewhere", "env.workers=9", "eval.every=5", "checkpoint.keep=3", "sampler.slots=8")
    assert run_dir.differences(changed(*free)) == []
    assert run_dir.differences(changed("optimizer.learning_rate=0.5", "algorithm.beta=0.1", *free)) == [
        "algorithm.beta: 0.0 -> 0.1",
        "optimizer.learning_rate: 1e-06 -> 0.5",
    ]


@pytest.mark.parametrize("overrides", [("run.seed=1",), ("env.options.add_digits=2",), ("data.shuffle=false",)])
def test_a_difference_and_another_hash_are_the_same_thing(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.record_launch(changed(), DEVICES, run_dir.began())
    assert changed(*overrides).hash() != changed().hash()
    assert len(run_dir.differences(changed(*overrides))) == 1
