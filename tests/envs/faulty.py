"""An environment that misbehaves on command: the model's text says how."""

import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from rljax.records import Observation, StepResult, Task
from rljax.section import Section

_leak: list[bytearray] = []


class Options(Section):
    """Where traces are left for the test to see."""

    trace: str = ""


class Faulty:
    """Scores 1.0 for its own answer; any text in `TRICKS` does something unpleasant first."""

    Options = Options

    def __init__(self, options: Options) -> None:
        """Take the options."""
        self._trace = options.trace

    def reset(self, task: Task, seed: int) -> Observation:
        """Show the task, or misbehave as the task's metadata says."""
        self._task = task
        TRICKS.get(task.metadata.get("reset", ""), _behave)()
        self._note(f"reset {task.id} {seed}")
        return Observation(messages=task.messages)

    def step(self, text: str) -> StepResult:
        """Do what the text says, then score it; texts that start with "go on" do not end the episode."""
        self._note(f"step {self._task.id} {text[:20]!r}")
        if text.startswith("sleep "):
            time.sleep(float(text.split()[1]))
        reward: Any = TRICKS.get(text, _behave)()
        if isinstance(reward, StepResult) or text in ("return a string", "return nothing"):
            return reward
        if reward is None:
            reward = float(text == self._task.answer)
        done = not text.startswith("go on")
        return StepResult(messages=(), reward=reward, done=done, components={"answer": 1.0})

    def close(self) -> None:
        """Leave a trace."""
        self._note(f"close {self._task.id}")

    def _note(self, line: str) -> None:
        if self._trace:
            with Path(self._trace).open("a") as file:
                file.write(line + "\n")


def _behave() -> None:
    pass


def _spin() -> None:
    while True:
        pass


def _hold_the_interpreter() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # one C call that takes years and lets no other thread run


def _raise() -> None:
    raise RuntimeError("the judge is out")


def _print() -> None:
    os.write(1, b"\xff\xfe\x00 not a frame\n" * 1000)
    sys.stdout.write('{"episode": 1, "seconds": 0.0, "value": null}\n')
    subprocess.run(["/bin/echo", "from a child"], check=True)


def _close_output() -> None:
    os.close(1)
    os.close(2)


def _alarm() -> float:
    """Use a signal-based timeout the way verifiers of mathematical answers do."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(5)
    except TimeoutError:
        return 1.0
    return 0.0


def _forgotten_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.2)


def _fork_and_return() -> None:
    os.fork()


def _daemon() -> None:
    """Leave a grandchild in a session of its own, as daemons do, and hang."""
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "faulty-daemon"])
    time.sleep(600)


def _grow() -> None:
    _leak.append(bytearray(b"x") * (20 * 2**20))


def _draws() -> StepResult:
    draws = (random.random(), float(np.random.random()))  # noqa: NPY002 - the shared state is what is tested
    return StepResult(({"role": "user", "content": repr(draws)},), None, False)


def _modules() -> StepResult:
    heavy = [name for name in ("jax", "jaxlib", "flax", "torch") if name in sys.modules]
    return StepResult(({"role": "user", "content": repr(heavy)},), 1.0, True)


def _long_reply(megabytes: int) -> StepResult:
    return StepResult(({"role": "user", "content": "x" * (megabytes * 2**20)},), 1.0, False)


def _step(**fields: Any) -> Callable[[], StepResult]:
    return lambda: StepResult(**({"messages": (), "reward": 1.0, "done": True} | fields))


TRICKS: dict[str, Callable[[], Any]] = {
    "hang": lambda: time.sleep(1e6),
    "spin": _spin,
    "hold the interpreter": _hold_the_interpreter,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "segfault": lambda: ctypes.string_at(0),
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit("leaving"),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "raise": _raise,
    "nan": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "too much": lambda: 1e30,
    "huge integer": lambda: 10**400,
    "reward is text": lambda: "1.0",
    "numpy reward": lambda: np.float32(0.5),
    "return a string": lambda: "1.0",
    "return nothing": _behave,
    "messages are text": _step(messages="hello"),
    "done is text": _step(done="yes"),
    "component is nan": _step(components={"answer": float("nan")}),
    "unserialisable": _step(messages=({"role": "user", "content": object()},)),
    "nested": _step(messages=({"role": "user", "content": eval("[" * 90 + "]" * 90)},)),
    "huge reply": lambda: _long_reply(101),
    "large reply": lambda: _long_reply(5),
    "print": _print,
    "close output": _close_output,
    "alarm": _alarm,
    "forget an alarm": _forgotten_alarm,
    "fork and return": _fork_and_return,
    "daemon": _daemon,
    "grow": _grow,
    "go on and grow": _grow,
    "go on": _behave,
    "draw": _draws,
    "modules": _modules,
}
