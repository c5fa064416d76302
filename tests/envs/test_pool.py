import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rljax.envs.base import task_maker
from rljax.envs.pool import LocalPool, Reply
from rljax.envs.replies import score_from, turn_rewards
from rljax.records import Observation, StepResult, Task

FAULTY = "tests.envs.faulty:Faulty"
TIMEOUT = 1.0  # seconds; long against a step here (microseconds), short against a test
SLACK = 2.0  # seconds a kill and a restart may take on a loaded machine
PATIENCE = 60.0  # seconds until a test gives up waiting; only a broken pool gets there

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc or prctl")


def a_task(name: str = "t", **metadata: Any) -> Task:
    return Task(id=name, messages=({"role": "user", "content": "say yes"},), answer="yes", metadata=metadata)


def replies(pool: LocalPool, count: int) -> list[Reply]:
    """Wait for this many replies."""
    found: list[Reply] = []
    give_up = time.monotonic() + PATIENCE
    while len(found) < count:
        assert time.monotonic() < give_up, f"only {len(found)} of {count} replies: {found}"
        found += pool.poll(0.5)
    assert len(found) == count
    return found


def open_all(pool: LocalPool, names: Sequence[str], **metadata: Any) -> None:
    for name in names:
        pool.reset(name, a_task(name, **metadata), seed=0)
    assert [reply.outcome for reply in replies(pool, len(names))] == ["ok"] * len(names)


def say(pool: LocalPool, name: str, text: str) -> Reply:
    """Open an episode, take one step and return its reply."""
    open_all(pool, [name])
    pool.step(name, text)
    (reply,) = replies(pool, 1)
    pool.close_episode(name)
    return reply


def runs(pid: int) -> bool:
    """Tell whether a process exists and is more than a zombie nobody has reaped."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def children() -> list[int]:
    """Return the child processes of this one, zombies included (Linux)."""
    return [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.01)
    return true()


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(FAULTY, {}, workers=2, reset_timeout=TIMEOUT, step_timeout=TIMEOUT) as pool:
        pool.reset("warm", a_task(), seed=0)
        replies(pool, 1)
        pool.close_episode("warm")
        yield pool


def test_an_episode_runs_from_reset_to_reward(pool: LocalPool) -> None:
    pool.reset(("task", 3), a_task(), seed=0)
    (reply,) = replies(pool, 1)
    assert reply == Reply(("task", 3), "reset", "ok", Observation(({"role": "user", "content": "say yes"},)), "")
    pool.step(("task", 3), "go on")
    (reply,) = replies(pool, 1)
    assert reply.value == StepResult((), 0.0, False, {"answer": 1.0})
    pool.step(("task", 3), "yes")
    (reply,) = replies(pool, 1)
    assert reply == Reply(("task", 3), "step", "ok", StepResult((), 1.0, True, {"answer": 1.0}), "")
    assert pool.pending == 0
    assert pool.poll(PATIENCE) == []  # at once, with nothing pending


@pytest.mark.parametrize(
    ("text", "outcome", "cause"),
    [
        ("hang", "timeout", "killed after 1 s"),
        ("spin", "timeout", "killed after 1 s"),
        ("hold the interpreter", "timeout", "killed after 1 s"),
        ("stop", "timeout", "killed after 1 s"),
        ("segfault", "error", "SIGSEGV"),
        ("kill", "error", "SIGKILL"),
        ("exit", "error", "status 3"),
        ("sys.exit", "error", "SystemExit: leaving"),
        ("raise", "error", "RuntimeError: the judge is out (faulty.py:"),
        ("nan", "error", "reward = nan"),
        ("infinity", "error", "reward = inf"),
        ("too much", "error", "reward = 1e+30"),
        ("huge integer", "error", "reward = 1000"),
        ("reward is text", "error", "reward = 1.0"),
        ("return a string", "error", "not str"),
        ("return nothing", "error", "not NoneType"),
        ("messages are text", "error", "messages"),
        ("done is text", "error", "done = 'yes'"),
        ("component is nan", "error", "component 'answer' = nan"),
        ("unserialisable", "error", "not object"),
    ],
)
def test_a_fault_ends_its_own_episode_and_no_other(pool: LocalPool, text: str, outcome: str, cause: str) -> None:
    neighbours = ["n0", "n1", "n2"]
    open_all(pool, neighbours)
    started = time.monotonic()
    reply = say(pool, "bad", text)
    took = time.monotonic() - started
    assert (reply.outcome, reply.value) == (outcome, None)
    assert cause in reply.detail
    assert took < (TIMEOUT if outcome == "timeout" else 0.0) + SLACK
    assert score_from([reply]).status == outcome
    for name in neighbours:
        pool.step(name, "yes")
    assert [reply.value.reward for reply in replies(pool, 3) if isinstance(reply.value, StepResult)] == [1.0] * 3


@pytest.mark.parametrize("text", ["print", "close output", "alarm", "forget an alarm", "fork and return", "nested"])
def test_odd_but_legal_behaviour_is_survived(pool: LocalPool, text: str) -> None:
    reply = say(pool, "odd", text)
    assert reply.outcome == "ok", reply.detail
    time.sleep(0.25)  # a forgotten alarm would strike now
    reply = say(pool, "next", "yes")
    assert isinstance(reply.value, StepResult)
    assert reply.value.reward == 1.0


@pytest.mark.parametrize("text", ["\ud800", "nul \0", "\U0001f600", "x" * (5 * 2**20), "large reply"])
def test_any_text_and_five_megabytes_pass(pool: LocalPool, text: str) -> None:
    reply = say(pool, "text", text)
    assert reply.outcome == "ok", reply.detail


def test_a_reply_of_a_hundred_megabytes_is_refused() -> None:
    with LocalPool(FAULTY, {}, workers=1) as pool:
        reply = say(pool, "huge", "huge reply")
        assert (reply.outcome, reply.value) == ("error", None)
        assert "more than the 104857600 allowed" in reply.detail
        assert score_from([say(pool, "next", "yes")]).value == 1.0


def test_numpy_rewards_become_floats(pool: LocalPool) -> None:
    reply = say(pool, "numpy", "numpy reward")
    assert isinstance(reply.value, StepResult)
    assert type(reply.value.reward) is float
    assert reply.value.reward == 0.5


def test_workers_import_no_device_library(pool: LocalPool) -> None:
    reply = say(pool, "modules", "modules")
    assert isinstance(reply.value, StepResult)
    assert reply.value.messages[0]["content"] == "[]"


def test_a_hanging_reset_times_out(pool: LocalPool) -> None:
    pool.reset("hangs", a_task(reset="hang"), seed=0)
    (reply,) = replies(pool, 1)
    assert (reply.kind, reply.outcome) == ("reset", "timeout")
    with pytest.raises(ValueError, match="is not open"):
        pool.step("hangs", "yes")


def test_one_of_eight_hangs_three_times_over() -> None:
    with LocalPool(FAULTY, {}, workers=2, reset_timeout=TIMEOUT, step_timeout=TIMEOUT) as pool:
        for text in ("spin", "hang", "hold the interpreter"):
            names = [f"{text} {i}" for i in range(8)]
            open_all(pool, names)
            started = time.monotonic()
            for i, name in enumerate(names):
                pool.step(name, text if i == 3 else "yes" if i % 2 else "no")
            outcomes = {reply.episode: score_from([reply]) for reply in replies(pool, 8)}
            assert time.monotonic() - started < TIMEOUT + SLACK
            assert [outcomes[name].value for name in names] == [0.0, 1.0, 0.0, None, 0.0, 1.0, 0.0, 1.0]
            assert outcomes[names[3]].status == "timeout"
            assert sum(runs(worker.process.pid) for worker in pool._workers) == 2


def test_a_killed_worker_is_noticed_and_only_episodes_with_a_past_are_lost() -> None:
    with LocalPool(FAULTY, {}, workers=1) as pool:
        open_all(pool, ["fresh", "stepped", "working"])
        pool.step("stepped", "go on")
        replies(pool, 1)
        pool.step("working", "sleep 30")
        pool.poll(0.2)
        (worker,) = pool._workers
        killed = time.monotonic()
        os.kill(worker.process.pid, signal.SIGKILL)
        (reply,) = replies(pool, 1)
        assert time.monotonic() - killed < 1.0
        assert (reply.episode, reply.outcome) == ("working", "error")
        assert "SIGKILL while running the step of 'working'" in reply.detail
        pool.step("stepped", "yes")
        pool.step("fresh", "yes")
        found = {reply.episode: reply for reply in replies(pool, 2)}
        assert "lost" in found["stepped"].detail
        assert "'working'" in found["stepped"].detail
        assert found["stepped"].outcome == "error"
        assert score_from([found["fresh"]]).value == 1.0


def test_queueing_is_not_charged_to_the_deadline() -> None:
    with LocalPool(FAULTY, {}, workers=1, step_timeout=TIMEOUT) as pool:
        names = [f"q{i}" for i in range(5)]
        open_all(pool, names)
        for name in names:
            pool.step(name, "sleep 0.4")
        assert [reply.outcome for reply in replies(pool, 5)] == ["ok"] * 5


def test_a_driver_that_is_away_costs_no_episode_its_life() -> None:
    with LocalPool(FAULTY, {}, workers=1, step_timeout=TIMEOUT) as pool:
        open_all(pool, ["a", "b"])
        pool.step("a", "yes")
        pool.step("b", "yes")
        found = pool.poll(0.0)  # on a loaded machine the first answer may be there already
        time.sleep(TIMEOUT + 0.3)
        found += replies(pool, 2 - len(found))
        assert [reply.outcome for reply in found] == ["ok", "ok"]


def test_workers_stay_busy_between_two_polls() -> None:
    make = task_maker("arithmetic", {})
    tasks = [make(i, "train") for i in range(64)]
    with LocalPool("arithmetic", {}, workers=2) as pool:
        for task in tasks[:2]:
            pool.reset(task.id, task, 0)
        replies(pool, 2)
        for task in tasks[2:]:
            pool.reset(task.id, task, 0)
        polls = 0
        while pool.pending:
            time.sleep(0.05)  # the device works
            pool.poll(0.0)
            polls += 1
        assert polls <= 10  # one request per worker and poll would take 31


def test_draws_do_not_depend_on_neighbours(pool: LocalPool) -> None:
    def draws(names: list[str]) -> dict[Any, list[str]]:
        open_all(pool, names)
        found: dict[Any, list[str]] = {name: [] for name in names}
        for _ in range(2):
            for name in names:
                pool.step(name, "draw")
            for reply in replies(pool, len(names)):
                assert isinstance(reply.value, StepResult)
                found[reply.episode].append(reply.value.messages[0]["content"])
        for name in names:
            pool.close_episode(name)
        return found

    alone, together = draws(["a"]), draws(["c", "a", "b"])
    assert alone["a"] == together["a"]
    assert len({*together["a"], *together["b"], *together["c"]}) == 6


def test_every_episode_is_closed_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with LocalPool(FAULTY, {"trace": str(trace)}, workers=1) as pool:
        say(pool, "done", "yes")
        say(pool, "raises", "raise")
        say(pool, "nan", "nan")
        open_all(pool, ["given up", "left open"])
        pool.close_episode("given up")
        pool.step("left open", "go on")
        replies(pool, 1)
        pool.reset("in flight", a_task("in flight"), 0)
        pool.poll(0.0)
        pool.close_episode("in flight")
        assert pool.pending == 0
        open_all(pool, ["last"])
    lines = trace.read_text().splitlines()
    opened = [line.split(" ")[1:-1] for line in lines if line.startswith("reset")]
    closed = [line.split(" ")[1:] for line in lines if line.startswith("close")]
    assert sorted(closed) == sorted(opened)


def test_misuse_is_refused(pool: LocalPool) -> None:
    pool.reset("twice", a_task(), 0)
    with pytest.raises(ValueError, match="open already"):
        pool.reset("twice", a_task(), 0)
    with pytest.raises(ValueError, match="waits for a reply"):
        pool.step("twice", "yes")
    replies(pool, 1)
    pool.close_episode("twice")
    pool.close_episode("twice")
    with pytest.raises(ValueError, match="is not open"):
        pool.step("twice", "yes")
    with pytest.raises(ValueError, match=r"env\.options\.trac "):
        LocalPool(FAULTY, {"trac": ""})
    with pytest.raises(ValueError, match="at least one worker"):
        LocalPool(FAULTY, {}, workers=0)


def test_workers_that_cannot_start_end_the_pool_with_their_own_words() -> None:
    pool = LocalPool("tests.envs.fails_in_worker:Unlicensed", {}, workers=2)
    pool.reset("a", a_task(), 0)
    with pytest.raises(RuntimeError, match="this machine has no licence") as caught:
        replies(pool, 1)
    assert "Traceback" in str(caught.value)
    assert not any(runs(worker.process.pid) for worker in pool._workers)
    with pytest.raises(ValueError, match="closed"):
        pool.poll(0.0)


@linux_only
@pytest.mark.parametrize("text", ["grow", "go on and grow"])
def test_a_leaking_environment_stays_below_twice_the_cap(text: str) -> None:
    """Each step leaks 20 MiB; without replacement 25 of them would take 500 MiB and more."""
    cap = 128
    pids, largest, lost = set(), 0, 0
    with LocalPool(FAULTY, {}, workers=1, max_worker_rss_mb=cap) as pool:
        open_all(pool, ["e"])
        for i in range(25):
            pool.step("e", text)
            (reply,) = replies(pool, 1)
            time.sleep(0.03)
            largest = max(largest, pool._workers[0].process.resident_bytes())
            pids.add(pool._workers[0].process.pid)
            lost += reply.outcome != "ok"
            if text == "grow" or reply.outcome != "ok":
                pool.close_episode("e")
                pool.reset("e", a_task(f"task {i}"), 0)
                replies(pool, 1)
    assert len(pids) > 1
    assert largest < 2.8 * cap * 2**20  # looked at every 0.1 s, in which a few more steps pass
    assert lost == 0 if text == "grow" else lost <= 2


@linux_only
def test_daemons_of_an_environment_die_with_its_worker(pool: LocalPool) -> None:
    def daemons() -> list[str]:
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):  # it has just ended
                found += [file.parent.name] if b"faulty-daemon\0" in file.read_bytes() else []
        return found

    open_all(pool, ["d"])
    pool.step("d", "daemon")
    assert pool.poll(0.5) == []
    assert len(daemons()) == 1
    assert replies(pool, 1)[0].outcome == "timeout"
    assert wait_until(lambda: not daemons(), SLACK)


@linux_only
def test_closing_leaves_no_process_descriptor_thread_or_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def held() -> tuple[int, int, int, int]:
        temporary = len(list(tmp_path.iterdir()))
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children()), temporary

    before = held()
    for _ in range(3):
        with LocalPool(FAULTY, {}, workers=2, step_timeout=0.2) as pool:
            open_all(pool, ["a", "b", "c"])
            pool.step("a", "hang")
            pool.step("b", "exit")
            replies(pool, 2)
            pool.step("c", "hang")
            pool.poll(0.0)
            assert held() != before
        assert held() == before
        pool.close()


DRIVER = """
import os, signal, sys
from rljax.envs.pool import LocalPool
from rljax.records import Task
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
with LocalPool("tests.envs.faulty:Faulty", {}, workers=2) as pool:
    for name, text in (("a", "spin"), ("b", "hang")):
        pool.reset(name, Task(name, ()), 0)
    for _ in range(2):
        while not (found := pool.poll(1.0)):
            pass
        for reply in found:
            pool.step(reply.episode, "spin")
    pool.poll(0.2)
    print("pids", *[worker.process.pid for worker in pool._workers], flush=True)
    while True:
        pool.poll(1.0)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=linux_only)])
def test_no_worker_outlives_its_parent(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C reaches the whole terminal group; a kill reaches the parent alone."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=root
    ) as driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()[1:]]
        assert len(pids) == 2
        driver.send_signal(number)
        for pid in pids if number == signal.SIGINT else ():
            os.kill(pid, number)
        _, errors = driver.communicate(timeout=PATIENCE)
        assert "KeyboardInterrupt" in errors if number == signal.SIGINT else driver.returncode == -number
    assert wait_until(lambda: not any(map(runs, pids)), SLACK)


def test_scores_sum_rewards_and_keep_failures_apart() -> None:
    def step(reward: float | None, done: bool = False) -> Reply:
        return Reply("e", "step", "ok", StepResult((), reward, done, {"part": 0.5}), "")

    score = score_from([step(0.25), step(None), step(0.5, True)])
    assert (score.status, score.value, score.components) == ("score", 0.75, {"part": 1.5})
    failed = score_from([step(1.0), Reply("e", "step", "timeout", None, "too late")])
    assert (failed.status, failed.value, failed.detail) == ("timeout", None, "too late")
    assert score_from([step(None, True)]).status == "error"
    assert score_from([]).status == "error"
    late = Reply("e", "step", "timeout", None, "too late")
    assert turn_rewards([step(0.25), step(None), step(0.0, True)], 3) == (0.25, None, 0.0)
    assert turn_rewards([step(0.25), late], 2) == (0.25, None), "what was not judged is no reward of 0"
    assert turn_rewards([], 0) == ()


def test_single_turn_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    make = task_maker("arithmetic", {})
    tasks = [make(i, "train") for i in range(1000)]
    with LocalPool("arithmetic", {}, workers=2) as pool:
        pool.reset("warm", tasks[0], 0)
        replies(pool, 1)
        started = time.perf_counter()
        for task in tasks:
            pool.reset(task.id, task, 0)
        judged = 0
        while pool.pending:
            for reply in pool.poll(1.0):
                if reply.kind == "reset":
                    pool.step(reply.episode, "It is 7.")
                else:
                    judged += 1
        rate = judged / (time.perf_counter() - started)
    with capsys.disabled():
        sys.stdout.write(f"\n  arithmetic episodes through 2 workers: {rate:.0f}/s\n")
    assert judged == 1000
    assert rate > 200  # thousands on an idle machine; one request per look at the workers would give less than 100
