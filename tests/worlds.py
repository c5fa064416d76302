"""Small worlds for tests: words to say, conversations of two turns, and worlds in trouble."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rljax.records import Observation, StepResult, Task
from rljax.section import Section


def letter_share(text: str) -> float:
    """Return the share of lower-case Latin letters in a text."""
    return sum("a" <= character <= "z" for character in text) / max(len(text), 1)


def fraction(seed: int) -> float:
    """Turn the seed of an episode into a number in [0, 1)."""
    return seed / 2**32


class Letters:
    """Rewards the share of lower-case letters: random text of a byte-level model has some, never all."""

    class Options(Section):
        """Has none."""

    def __init__(self, options: Section) -> None:
        """Take the options."""

    @classmethod
    def make_task(cls, options: Section, index: int, split: str) -> Task:
        """Make a task; prompts have different lengths."""
        question = f"{'What ' * (index % 8)}is {index}?"
        return Task(f"{split}/{index}", ({"role": "user", "content": question},), answer=str(index))

    def reset(self, task: Task, seed: int) -> Observation:
        """Show the question."""
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        """Score the text."""
        return StepResult((), letter_share(text), True, {"letters": letter_share(text), "characters": float(len(text))})

    def close(self) -> None:
        """Hold nothing."""


class Constant(Letters):
    """Rewards everything alike."""

    def step(self, text: str) -> StepResult:
        """Score the text."""
        return StepResult((), 0.5, True)


class Choosy(Letters):
    """Rewards texts with enough lower-case letters by 1 and others by 0, so that some groups are all alike."""

    class Options(Section):
        """How many."""

        share: float = 0.4

    def __init__(self, options: "Choosy.Options") -> None:
        """Take the options."""
        self._share = options.share

    def step(self, text: str) -> StepResult:
        """Score the text."""
        return StepResult((), float(letter_share(text) >= self._share), True)


class Slow(Letters):
    """Takes its time to score."""

    class Options(Section):
        """How long."""

        seconds: float = 0.02

    def __init__(self, options: "Slow.Options") -> None:
        """Take the options."""
        self._seconds = options.seconds

    def step(self, text: str) -> StepResult:
        """Score the text, later."""
        time.sleep(self._seconds)
        return super().step(text)


class Dialogue(Letters):
    """Answers `turns - 1` times, then scores the last message; or each of them."""

    class Options(Section):
        """The conversation."""

        turns: int = 2
        answer: str = "You said {text!r}. Again?"
        silent: float = 0.0  # share of episodes that go on without a word, which is an error
        judged: bool = False  # whether the earlier messages are scored, too

    def __init__(self, options: "Dialogue.Options") -> None:
        """Take the options."""
        self._options, self._turn = options, 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Show the question."""
        self._silent = fraction(seed) < self._options.silent
        return Observation(task.messages)

    def step(self, text: str) -> StepResult:
        """Answer, or score the last message."""
        self._turn += 1
        if self._turn == self._options.turns:
            return super().step(text)
        messages = () if self._silent else ({"role": "user", "content": self._options.answer.format(text=text)},)
        return StepResult(messages, letter_share(text) if self._options.judged else None, False)


class Troubled(Letters):
    """Fails in a share of the episodes, chosen by seed, at every try or only at the first one."""

    class Options(Section):
        """What goes wrong, when, and how often."""

        kind: Literal["error", "hang", "exit"] = "error"
        at: Literal["reset", "step"] = "step"
        share: float = 1.0
        trace: str = ""  # folder with a file per episode, to which every try adds a line
        tries: int = 1_000_000  # how many tries of an episode fail

    def __init__(self, options: "Troubled.Options") -> None:
        """Take the options."""
        self._options = options

    def reset(self, task: Task, seed: int) -> Observation:
        """Show the question, or fail."""
        self._name, self._chosen = f"{task.id.replace('/', '-')}-{seed}", fraction(seed) < self._options.share
        self._maybe_fail("reset", "")
        return super().reset(task, seed)

    def step(self, text: str) -> StepResult:
        """Score the text, or fail."""
        self._maybe_fail("step", text)
        return super().step(text)

    def _maybe_fail(self, at: str, text: str) -> None:
        if at != self._options.at:
            return
        tries = 1
        if self._options.trace:
            trace = Path(self._options.trace) / self._name
            with trace.open("a") as file:
                file.write(f"{text!r}\n")
            tries = len(trace.read_text().splitlines())
        if self._chosen and tries <= self._options.tries:
            TROUBLES[self._options.kind]()


class Forgetful(Dialogue):
    """A conversation whose world fails once after the first turn; retold, it may answer otherwise."""

    class Options(Dialogue.Options):
        """How the second telling differs."""

        trace: str = ""
        otherwise: bool = False

    def __init__(self, options: "Forgetful.Options") -> None:
        """Take the options."""
        super().__init__(options)
        self._trace, self._otherwise = Path(options.trace), options.otherwise

    def reset(self, task: Task, seed: int) -> Observation:
        """Show the question."""
        trace = self._trace / f"{task.id.replace('/', '-')}-{seed}"
        self._again = trace.exists()
        trace.touch()
        return super().reset(task, seed)

    def step(self, text: str) -> StepResult:
        """Answer; fail in the second turn of the first telling."""
        if not self._again and self._turn == 1:
            raise RuntimeError("the world ended")
        result = super().step(text)
        if self._again and self._otherwise and not result.done:
            return StepResult(({"role": "user", "content": "Who are you?"},), None, False)
        return result


def _raise() -> None:
    raise ConnectionError("the judge is out")


TROUBLES: dict[str, Callable[[], object]] = {"error": _raise, "hang": lambda: time.sleep(1e6), "exit": lambda: os._exit(3)}
