"""The quickstart does its steps in order, keeps what is there, and reports what happened; here with a tiny random model."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from rich.console import Console

import rljax
from rljax.config import Config
from rljax.telemetry.sinks import read_metrics
from tests.house.repository import ROOT
from tools.make_tiny_checkpoint import make_tiny_checkpoint
from tools.quickstart import RECIPE, Teller, is_whole, learn, plot, types_for_this_host

OPTIONS = [
    "train.rollout_batch_size=2",
    "train.micro_batch_size_per_device=1",
    "sampler.slots=8",
    "sampler.max_prompt_length=96",
    "sampler.max_completion_length=4",
    "train.pack_length=none",
    "algorithm.num_generations=4",
    "checkpoint.every=1",
    "eval.num_tasks=8",
    "telemetry.live=plain",
    "model.compute_dtype=float32",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def compilation_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile each program once for all tests of this file: they run the same few programs again and again."""
    changes = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: getattr(jax.config, name) for name in changes}
    try:
        for name, value in changes.items():
            jax.config.update(name, value)
        reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()


@pytest.fixture
def make_config(checkpoint: Path, tmp_path: Path) -> Callable[..., Config]:
    """The quickstart's recipe, made small."""

    def make(*overrides: str) -> Config:
        places = [f"run.dir={tmp_path / 'run'}", f"model.checkpoint={checkpoint}"]
        return rljax.load_config(RECIPE, [*places, *OPTIONS, *overrides])

    return make


def start(config: Config, told: io.StringIO) -> int:
    return learn(config, Teller(Console(file=told, width=80)))


@pytest.mark.slow
def test_the_run_is_evaluated_trained_evaluated_and_reported(make_config: Callable[..., Config]) -> None:
    config, told = make_config("train.steps=2"), io.StringIO()
    assert start(config, told) == 0
    record = json.loads((config.run.dir / "quickstart.json").read_text())
    metrics = read_metrics(config.run.dir / "metrics.jsonl")
    assert record["rewards"] == [metrics[1]["reward/mean"], metrics[2]["reward/mean"]]
    assert record["reward_start"] == pytest.approx(sum(record["rewards"]) / 2)
    assert record["before"]["tasks"] == record["after"]["tasks"] == 8
    assert record["seconds"].keys() == {"ask", "evaluate_before", "train", "evaluate_after"}
    assert math.fsum(record["time"].values()) == pytest.approx(sum(m["time/step"] for m in metrics.values()))
    assert is_whole(config.run.dir / "model")
    text = told.getvalue()
    for part in ("question: ", f"{record['before']['accuracy']:.3f} -> {record['after']['accuracy']:.3f}", "rljax sample"):
        assert part in text
    assert "  1.00 |" in text
    if record["after"]["accuracy"] <= record["before"]["accuracy"]:
        assert "did not get better" in text


@pytest.mark.slow
def test_a_stopped_run_is_continued_and_other_options_are_refused(make_config: Callable[..., Config]) -> None:
    config = make_config("train.steps=3")

    class Interrupting(io.StringIO):
        """Ctrl-C, as soon as training says that it begins."""

        def write(self, text: str) -> int:
            if "start: " in text:
                os.kill(os.getpid(), signal.SIGINT)
            return super().write(text)

    assert start(config, Interrupting()) == 75
    summary = config.run.dir / "quickstart.json"
    first = json.loads(summary.read_text())
    assert first["seconds"]["train"] > 0
    assert "after" not in first
    # A number no evaluation could find, to see that it is taken from the file.
    summary.write_text(json.dumps(first | {"before": first["before"] | {"accuracy": 0.625}}))
    told = io.StringIO()
    assert start(config, told) == 0
    record = json.loads(summary.read_text())
    assert record["before"]["accuracy"] == 0.625
    assert record["seconds"]["train"] > first["seconds"]["train"]
    assert len(record["rewards"]) == 3
    assert "done already" in told.getvalue()
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate: 1e-05 -> 1\.0"):
        start(make_config("train.steps=4", "optimizer.learning_rate=1"), io.StringIO())


@pytest.mark.parametrize("able", [True, False, None])
def test_a_cpu_without_bfloat16_computes_in_float32(able: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.quickstart.multiplies_bfloat16", lambda: able)
    told = io.StringIO()
    config = rljax.load_config(RECIPE, types_for_this_host(Teller(Console(file=told, width=80))))
    expected = "float32" if able is False else "bfloat16"
    assert (config.model.compute_dtype, config.sampler.dtype) == (expected, expected)
    assert ("float32" in told.getvalue()) == (able is False)


def test_only_a_whole_checkpoint_is_kept(checkpoint: Path, tmp_path: Path) -> None:
    assert is_whole(checkpoint)
    assert not is_whole(tmp_path / "nothing")
    assert not is_whole(tmp_path)
    damaged = tmp_path / "damaged"
    subprocess.run(["cp", "-r", str(checkpoint), str(damaged)], check=True)
    assert is_whole(damaged)
    file = max((damaged / "params").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert not is_whole(damaged)


def test_the_plot_shows_each_value_on_an_axis_from_0_to_1() -> None:
    lines = plot([0.0, 0.5, 1.0], width=6, height=3, blocks=" -#")
    assert lines == [
        "  1.00 |     ##",
        "  0.50 |   --##",
        "  0.00 |   ####",
    ]


def test_the_plot_goes_where_the_values_go() -> None:
    lines = plot([-1.0, 3.0], width=2, height=2, blocks=" #")
    assert lines == ["  3.00 |  #", " -1.00 |  #"]


def test_more_values_than_columns_are_averaged() -> None:
    assert plot([0.0, 1.0, 1.0, 1.0], width=2, height=2, blocks=" #") == plot([0.5, 1.0], width=2, height=2, blocks=" #")
    assert plot([], 10, 3) == []


def test_what_starts_it_does_not_bring_jax() -> None:
    program = f"import runpy, sys; runpy.run_path({str(ROOT / 'tools' / 'quickstart.py')!r}); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("arguments", [["--steps", "x"], ["--seed", "-1"]])
def test_wrong_arguments_are_told(arguments: list[str]) -> None:
    script = str(ROOT / "tools" / "quickstart.py")
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert arguments[0].lstrip("-") in done.stderr
