"""SIGTERM and Ctrl-C at any moment: the run saves what it has, says so, and the same command continues it exactly."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.processes import Server
from tests.tiny_run import metric_rows, overrides, param_bits, rollout_rows, state_bits

STEPS = 6
SLOW = 0.05  # seconds per reward: most of a run's time is spent waiting for them
OPTIONS = (
    f"train.steps={STEPS}",
    "checkpoint.every=6",
    "checkpoint.keep=9",
    "eval.every=3",
    "eval.num_tasks=8",
    "telemetry.live=plain",
    "env.name=tests.worlds:Slow",
    f"env.options.seconds={SLOW}",
)
RETRY, INTERRUPTED = 75, 130


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train without interruption."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert server.run(["train", *overrides(directory, *OPTIONS)]) == 0, server.output
    return directory


def logged(run: Path, step: int, name: str) -> Callable[[], bool]:
    """Tell when a step has been logged."""
    metrics = run / "metrics.jsonl"
    return lambda: metrics.exists() and any(row["step"] == step and name in row for row in metric_rows(run))


MOMENTS = {
    # SIGTERM in the first compilation or evaluation, before anything was trained
    "starting": (signal.SIGTERM, lambda run: (run / "run.json").exists, 0.0),
    # the second step's rewards are awaited, or its tokens sampled
    "sampling": (signal.SIGTERM, lambda run: logged(run, 1, "loss/total"), SLOW),
    # rollouts are there, the update is made
    "update": (signal.SIGTERM, lambda run: (run / "rollouts" / "step_00000002.jsonl").exists, 0.0),
    # the evaluation of step 3 is under way
    "evaluation": (signal.SIGTERM, lambda run: logged(run, 3, "loss/total"), SLOW),
    "keyboard": (signal.SIGINT, lambda run: logged(run, 4, "loss/total"), SLOW / 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stopped_run_continues_exactly(server: Server, whole: Path, tmp_path: Path, moment: str) -> None:
    run = tmp_path / "run"
    number, ready, delay = MOMENTS[moment]
    pid = server.start(["train", *overrides(run, *OPTIONS)])
    server.signal_when(pid, number, ready(run), delay)
    assert server.wait() == RETRY, server.output
    assert f"{number.name}: saving and stopping" in server.output
    stopped = max(row["step"] for row in metric_rows(run)) if metric_rows(run) else 0
    assert f"stopped at step {stopped} of {STEPS}; the same command continues" in server.output
    assert stopped < STEPS
    if stopped:
        assert state_bits(run, stopped), "no trained step is lost"
    assert not (run / "model").exists()

    assert server.run(["train", *overrides(run, *OPTIONS)]) == 0, server.output
    assert state_bits(run, STEPS) == state_bits(whole, STEPS)
    assert param_bits(run / "model") == param_bits(whole / "model")
    assert metric_rows(run) == metric_rows(whole)
    assert rollout_rows(run) == rollout_rows(whole)


def test_a_second_signal_corrupts_nothing(server: Server, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for first, second, code in (
        (signal.SIGTERM, signal.SIGTERM, RETRY),
        (signal.SIGINT, signal.SIGINT, INTERRUPTED),
        (signal.SIGTERM, signal.SIGKILL, -signal.SIGKILL),
    ):
        pid = server.start(["train", *overrides(run, *OPTIONS)])
        server.signal_when(pid, first, lambda: "\nstep " in server.shown())
        server.signal_when(pid, second, lambda: "saving and stopping" in server.shown())
        assert server.wait() in (code, RETRY), server.output
    assert server.run(["train", *overrides(run, *OPTIONS)]) == 0, server.output
    assert state_bits(run, STEPS) == state_bits(whole, STEPS)
    assert metric_rows(run) == metric_rows(whole)
