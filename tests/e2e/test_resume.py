"""Kill -9 at any moment, restart, and nothing of what is trained, logged or kept differs from the uninterrupted run."""

import random
import re
import shutil
import signal
from pathlib import Path

import pytest

from rljax.checkpoint import CheckpointStore, save_params
from rljax.conversion.sources import ARCH_FILE
from tests.e2e.processes import Server
from tests.tiny_run import metric_rows, overrides, param_bits, rollout_rows, state_bits, tiny_checkpoint
from tools.make_tiny_checkpoint import tiny_arch, tiny_params, tokenizer_files

STEPS = 12
SAVED = (6, STEPS)
OPTIONS = (
    f"train.steps={STEPS}",
    "checkpoint.keep=9",
    "eval.every=4",
    "eval.num_tasks=6",
    "eval.temperature=1.0",
    "telemetry.live=plain",
)
KILLED = -int(signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train without interruption."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert server.run(["train", *overrides(directory, *OPTIONS)]) == 0, server.output
    return directory


def assert_same(run: Path, whole: Path) -> None:
    for step in SAVED:
        assert state_bits(run, step) == state_bits(whole, step), f"the state after step {step} differs"
    assert param_bits(run / "model") == param_bits(whole / "model")
    assert metric_rows(run) == metric_rows(whole)
    assert rollout_rows(run) == rollout_rows(whole)
    unfinished = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(("saving", "deleting"))]
    assert unfinished == []


def test_a_run_is_equal_to_itself(server: Server, whole: Path, tmp_path: Path) -> None:
    assert server.run(["train", *overrides(tmp_path / "run", *OPTIONS)]) == 0
    assert_same(tmp_path / "run", whole)
    steps = [row["step"] for row in metric_rows(whole) if "loss/total" in row]
    assert steps == list(range(1, STEPS + 1))
    assert [row["step"] for row in metric_rows(whole) if "eval/accuracy" in row] == [0, 4, 8, 12]


def die_in_turn(server: Server, run: Path, points: list[str], **more: str) -> None:
    for point in points:
        assert server.run(["train", *overrides(run, *OPTIONS)], RLJAX_CRASH_AT=point, **more) == KILLED, (point, server.output)


def test_a_run_that_dies_at_every_stage(server: Server, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    before_first_save = ["loop.updating:2", "loop.saving:1"]
    in_save = ["checkpoint.data_written:1", "checkpoint.committed:1"]
    later = ["checkpoint.restored:1", "loop.collecting:2", "loop.collected:3"]
    die_in_turn(server, run, before_first_save + in_save + later)
    assert server.run(["train", *overrides(run, *OPTIONS)]) == 0
    assert "resume: step" in server.output
    assert_same(run, whole)


MOVING = (
    *("env.name=tests.worlds:Choosy", "data.num_tasks=64", "algorithm.preset=dapo", "algorithm.beta=0.1"),
    *("algorithm.kl_target=0.01", "algorithm.reference_sync_steps=1", "algorithm.reference_mixup_alpha=0.25"),
    *("train.steps=6", "checkpoint.keep=9", "telemetry.live=plain"),
)
"""Groups are replaced, and the reference and its weight move."""
CRITIC = ("algorithm.preset=ppo", "algorithm.critic_warmup_steps=1", "train.steps=6", "checkpoint.keep=9")
"""A critic learns, at first alone."""
ADAFACTOR = ("optimizer.rule=adafactor", "train.steps=6", "checkpoint.keep=9")
MUON = ("optimizer.rule=muon", "optimizer.moments_dtype=bfloat16", *CRITIC)
"""Moments of policy and critic are rounded at random."""
INT8 = ("optimizer.moments_dtype=int8", *CRITIC)
"""They have codes of 8 bits, in the matrices of the MLP."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [MOVING, CRITIC, ADAFACTOR, MUON, INT8], ids=["moving", "critic", "adafactor", "muon", "int8"]
)
def test_a_run_with_everything_that_moves_dies_at_many_stages(server: Server, tmp_path: Path, options: tuple[str, ...]) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert server.run(["train", *overrides(whole, *options)]) == 0, server.output
    for point in ("loop.collected:2", "checkpoint.committed:1", "loop.updating:2", "loop.saving:1"):
        assert server.run(["train", *overrides(run, *options)], RLJAX_CRASH_AT=point) == KILLED, (point, server.output)
    assert server.run(["train", *overrides(run, *options)]) == 0, server.output
    assert state_bits(run, 6) == state_bits(whole, 6)
    assert metric_rows(run) == metric_rows(whole)
    assert rollout_rows(run) == rollout_rows(whole)
    assert (max(row["groups/sampled"] for row in metric_rows(whole)) > 4) == (options == MOVING), "some groups were replaced"


def newest_checkpoint(run: Path) -> int:
    return max((int(path.name[5:]) for path in (run / "checkpoints").glob("step-*")), default=0)


def last_logged(run: Path) -> int:
    return max((row["step"] for row in metric_rows(run)), default=0)


def kill_at_random(server: Server, run: Path, seed: int, kills: int) -> None:
    """Kill a run again and again: each time a few steps after its start, and up to 0.1 s into what comes then."""
    rng = random.Random(seed)
    killed = []
    while len(killed) < kills:
        step = min(newest_checkpoint(run) + rng.randint(0, 3), STEPS)
        launches = run / "run.json"
        before = launches.stat().st_mtime_ns if launches.exists() else 0
        pid = server.start(["train", *overrides(run, *OPTIONS)])

        def reached(step: int = step, before: int = before, launches: Path = launches) -> bool:
            started = launches.exists() and launches.stat().st_mtime_ns > before
            return started and (run / "metrics.jsonl").exists() and last_logged(run) >= step

        server.signal_when(pid, signal.SIGKILL, reached, delay=rng.uniform(0.0, 0.1))
        code = server.wait()
        assert code in (KILLED, 0), server.output
        if code == 0:  # it was faster than the kill, which must not happen before there were enough of them
            raise AssertionError(f"finished after {len(killed)} of {kills} kills, at steps {killed}")
        killed.append(last_logged(run))


def test_a_run_killed_at_random_moments(server: Server, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kill_at_random(server, run, seed=0, kills=5)
    assert server.run(["train", *overrides(run, *OPTIONS)]) == 0, server.output
    assert_same(run, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_killed_often(server: Server, whole: Path, tmp_path: Path, seed: int) -> None:
    run = tmp_path / "run"
    kill_at_random(server, run, seed, kills=6)
    assert server.run(["train", *overrides(run, *OPTIONS)]) == 0, server.output
    assert_same(run, whole)


POINTS = [
    *(f"loop.{moment}:{nth}" for moment in ("collecting", "collected", "updating") for nth in (1, 4)),
    *(f"loop.saving:{nth}" for nth in (1, 3)),
    *(
        f"checkpoint.{moment}:2"
        for moment in ("begin", "writing", "data_written", "pre_manifest", "post_manifest", "committed", "pre_gc")
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_dies_at_a_point(server: Server, whole: Path, tmp_path: Path, point: str) -> None:
    run = tmp_path / "run"
    die_in_turn(server, run, [point])
    assert server.run(["train", *overrides(run, *OPTIONS)]) == 0, server.output
    assert_same(run, whole)


@pytest.fixture
def half(server: Server, whole: Path, tmp_path: Path) -> Path:
    """Copy the uninterrupted run as it was killed right after step 8."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for step in (10, 12):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    shutil.rmtree(run / "model")
    return run


def test_a_complete_run_says_so(server: Server, whole: Path, half: Path) -> None:
    assert server.run(["train", *overrides(half, *OPTIONS)]) == 0
    assert "resume: step 8" in server.output
    assert server.run(["train", *overrides(half, *OPTIONS)]) == 0
    assert "is complete (12 steps); raise train.steps to train on" in server.output
    assert_same(half, whole)


def test_a_run_killed_before_its_model_was_written_gets_it(server: Server, whole: Path, half: Path) -> None:
    assert server.run(["train", *overrides(half, *OPTIONS, "train.steps=8")]) == 0
    at_8 = param_bits(half / "model")
    # Extended, and killed between the last checkpoint and the model.
    shutil.copytree(whole / "checkpoints" / "step-00000012", half / "checkpoints" / "step-00000012")
    assert server.run(["train", *overrides(half, *OPTIONS)]) == 0
    assert param_bits(half / "model") == param_bits(whole / "model") != at_8


def test_an_extended_run_equals_a_longer_one(server: Server, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert server.run(["train", *overrides(run, *OPTIONS, "train.steps=4")]) == 0
    assert server.run(["train", *overrides(run, *OPTIONS)]) == 0
    assert_same(run, whole)


REFUSED = {
    "fewer steps than trained": (["train.steps=4"], "train.steps is 4, but .* trained for 8 steps"),
    "another learning rate": (["optimizer.learning_rate=0.02"], r"optimizer.learning_rate: 0.01 -> 0.02\. Change this back"),
    "another type": (["model.param_dtype=bfloat16"], 'model.param_dtype: "float32" -> "bfloat16"'),
    "other tasks": (["data.num_tasks=17"], "data.num_tasks: 16 -> 17"),
    "never resume": (["checkpoint.resume=never"], "holds a run .*step 8.* checkpoint.resume is 'never'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_continue_the_run_is_refused(server: Server, half: Path, case: str) -> None:
    more, message = REFUSED[case]
    before = state_bits(half, 8)
    rows = metric_rows(half)
    assert server.run(["train", *overrides(half, *OPTIONS, *more)]) == 2
    assert re.search(message, server.output), server.output
    assert "train.steps:" not in server.output, "an option that may change is no reason"
    assert state_bits(half, 8) == before
    assert metric_rows(half) == rows


def test_what_may_change_between_restarts_changes_nothing(server: Server, whole: Path, half: Path) -> None:
    free = ["env.workers=1", "env.max_retries=0", "checkpoint.every=3", "eval.every=2", "telemetry.rollouts=true"]
    assert server.run(["train", *overrides(half, *OPTIONS, *free)]) == 0, server.output
    assert state_bits(half, STEPS) == state_bits(whole, STEPS)
    assert rollout_rows(half) == rollout_rows(whole)
    assert [row["step"] for row in metric_rows(half) if "eval/accuracy" in row] == [0, 4, 8, 10, 12]


def test_another_tokenizer_is_refused(server: Server, half: Path, tmp_path: Path) -> None:
    arch, files = tiny_arch(), tokenizer_files()
    files["tokenizer_config.json"] = files["tokenizer_config.json"].replace(b"assistant", b"model")
    save_params(tmp_path / "other", tiny_params(arch, 0), {ARCH_FILE: arch.to_json().encode(), **files})
    assert server.run(["train", *overrides(half, *OPTIONS, f"model.checkpoint={tmp_path / 'other'}")]) == 2
    assert "the model in model.checkpoint" in server.output


def test_a_moved_checkpoint_is_the_same(server: Server, whole: Path, half: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_checkpoint(), tmp_path / "moved")
    assert server.run(["train", *overrides(half, *OPTIONS, f"model.checkpoint={tmp_path / 'moved'}")]) == 0, server.output
    assert_same(half, whole)


def flip_a_bit(folder: Path) -> None:
    path = max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_a_damaged_newest_checkpoint_is_skipped(server: Server, whole: Path, half: Path) -> None:
    flip_a_bit(half / "checkpoints" / "step-00000008")
    assert server.run(["train", *overrides(half, *OPTIONS)]) == 0, server.output
    assert re.search(r"step-00000008 is damaged and skipped: arrays/", server.output)
    assert "resume: step 6" in server.output
    assert [path.name for path in (half / "checkpoints" / "quarantine").iterdir()] == ["step-00000008"]
    shutil.rmtree(half / "checkpoints" / "quarantine")
    assert_same(half, whole)


def test_a_run_never_starts_over_silently(server: Server, half: Path) -> None:
    for folder in (half / "checkpoints").glob("step-*"):
        flip_a_bit(folder)
    assert server.run(["train", *overrides(half, *OPTIONS)]) == 74
    assert "none of the 4 checkpoints" in server.output


def test_two_runs_cannot_share_a_directory(server: Server, half: Path) -> None:
    with CheckpointStore(half / "checkpoints", keep=9):
        assert server.run(["train", *overrides(half, *OPTIONS)]) == 74
    assert "is in use by another run" in server.output


def test_a_failed_save_ends_the_run_and_loses_nothing_before_it(server: Server, whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert server.run(["train", *overrides(run, *OPTIONS)], RLJAX_FAIL_AT="checkpoint.data_written:3") == 74
    assert "the checkpoint of step 6 could not be saved" in server.output
    assert newest_checkpoint(run) == 4
    assert server.run(["train", *overrides(run, *OPTIONS)]) == 0
    assert_same(run, whole)
