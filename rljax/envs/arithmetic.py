"""Arithmetic questions with known answers: one turn, made on the fly, as hard as the options say.

Owns the questions, their split into tasks to train on and tasks held out, and the episode. How a text is scored is in
`rewards.py`.

The split is by problem, not by task number: a hash of the problem (operands in sorted order, so 3 + 4 and 4 + 3 are one
problem) puts about one in five aside for evaluation, and train tasks are drawn from the others. No held-out problem is
ever trained on, whatever the number of tasks and whichever operation asks it.
"""

import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from rljax.envs.base import Split, nearest
from rljax.envs.rewards import COMPONENTS, judge
from rljax.records import Observation, StepResult, Task
from rljax.section import Section

EVAL_ONE_IN = 5
"""One problem in this many is held out."""

MAX_DRAWS = 1000
"""Draws until one falls into the wanted split; all failing has probability 0.8 ** 1000 unless the space is tiny."""

DISTINCT_DRAWS = 100
"""Further draws that an eval task spends on being a new question before it accepts a repetition."""

_Weights = dict[str, Annotated[float, Field(ge=0)]]


class Options(Section):
    """What is asked, how hard it is, and what is rewarded."""

    operations: _Weights = Field(
        default={"add": 1.0, "multiply": 1.0, "largest": 1.0, "add_mixed": 1.0},
        description="Share of each kind of question, as weights; a kind that is left out is not asked.",
    )
    add_digits: int = Field(1, ge=1, le=18, description="Digits of both operands of `add`.")
    multiply_digits: int = Field(1, ge=1, le=18, description="Digits of both factors of `multiply`.")
    largest_digits: int = Field(2, ge=1, le=18, description="Digits of the numbers of `largest`.")
    largest_count: int = Field(4, ge=2, le=64, description="How many different numbers `largest` compares.")
    mixed_digits: int = Field(2, ge=1, le=18, description="Digits of the first operand of `add_mixed`; the second has one.")
    reward: _Weights = Field(
        default={"last_number": 1.0},
        description="Weight of each reward component: `last_number`, `exact`, `format` (the text is a bare number).",
    )

    def _broken_rules(self) -> Iterator[str]:
        for key, weights, known in (("operations", self.operations, OPERATIONS), ("reward", self.reward, COMPONENTS)):
            for name in weights:
                if name not in known:
                    yield f"env.options.{key}.{name} is unknown{nearest(name, known)} Known are {', '.join(known)}"
            if not any(weights.values()):
                yield f"env.options.{key} has no weight above 0; known names are {', '.join(known)}"
        if self.largest_count > 10**self.largest_digits - _smallest(self.largest_digits):
            yield (
                f"env.options.largest_count ({self.largest_count}) is more than there are numbers of "
                f"env.options.largest_digits ({self.largest_digits}); lower it or raise largest_digits"
            )


@dataclass(frozen=True, slots=True)
class Problem:
    """One question.

    Example:
        Problem(operation="add", key="+ 3 4", question="What is 4 + 3?", answer=7)
    """

    operation: str
    """Which entry of `OPERATIONS` asks it."""
    key: str
    """What is computed from what, operands sorted; decides the split."""
    question: str
    """What the model reads."""
    answer: int
    """The right number."""

    @property
    def split(self) -> Split:
        """The split this problem belongs to, the same in every process and version of Python."""
        digest = hashlib.sha256(self.key.encode()).digest()
        return "eval" if int.from_bytes(digest[:8]) % EVAL_ONE_IN == 0 else "train"


class Arithmetic:
    """Single-turn arithmetic questions."""

    Options = Options

    def __init__(self, options: Options) -> None:
        """Take the checked options."""
        self._weights = options.reward
        self._answer: Any = None

    @classmethod
    def make_task(cls, options: Options, index: int, split: Split) -> Task:
        """Return task number `index` of a split; a pure function of its arguments.

        Eval tasks are different questions as far as there are enough: of the one-digit sums only about 20 of 100 are held
        out, so a larger evaluation repeats some. Train tasks are independent draws.

        Raises ValueError when the options leave this split without a problem.
        """
        problem = _eval_problem(options, index) if split == "eval" else _draw(options, index, split, seen=())
        return Task(
            id=f"arithmetic/{split}/{index}",
            messages=({"role": "user", "content": f"{problem.question} Answer with just the number."},),
            answer=str(problem.answer),
            metadata={"operation": problem.operation},
        )

    def reset(self, task: Task, seed: int) -> Observation:
        """Show the question; there is nothing to draw."""
        del seed
        self._answer = task.answer
        return Observation(messages=task.messages)

    def step(self, text: str) -> StepResult:
        """Score the answer and end the episode."""
        reward, components = judge(gold=self._answer, prediction=text, weights=self._weights)
        return StepResult(messages=(), reward=reward, done=True, components=components)

    def close(self) -> None:
        """Hold nothing, so let go of nothing."""


def _draw(options: Options, index: int, split: Split, seen: Collection[str]) -> Problem:
    """Draw problems of one operation until one is of this split and, if that can be had, not among the questions seen."""
    rng = random.Random(f"arithmetic/{split}/{index}")  # a string seed is hashed with SHA-512: equal in every process
    operation = _pick(rng, options.operations)
    repeated = None
    for draw in range(MAX_DRAWS):
        problem = OPERATIONS[operation](rng, options)
        if problem.split == split:
            if problem.question not in seen:
                return problem
            repeated = problem
        if repeated and draw >= DISTINCT_DRAWS:
            return repeated
    raise ValueError(
        f"env.options: {operation!r} has too few problems to hold some out (no {split} problem in {MAX_DRAWS} draws); "
        "raise its digits or leave it out of env.options.operations"
    )


def _eval_problem(options: Options, index: int) -> Problem:
    """Return the eval problem of this index: it depends on those before it, which are made once per process."""
    problems, seen = _eval_problems(options.model_dump_json())
    while len(problems) <= index:
        problem = _draw(options, len(problems), "eval", seen)
        problems.append(problem)
        seen.add(problem.question)
    return problems[index]


@lru_cache(maxsize=16)
def _eval_problems(options: str) -> tuple[list[Problem], set[str]]:
    """Return the eval problems made so far for these options, as JSON, and their questions; `_eval_problem` extends both."""
    return [], set()


def _smallest(digits: int) -> int:
    return 0 if digits == 1 else 10 ** (digits - 1)


def _number(rng: random.Random, digits: int) -> int:
    """Draw a number with exactly this many digits; 0 has one."""
    smallest = _smallest(digits)
    # random() is the one draw whose sequence Python promises to keep; 53 bits leave the low digits of 18 uneven, harmless here.
    return smallest + int(rng.random() * (10**digits - smallest))


def _pick(rng: random.Random, weights: Mapping[str, float]) -> str:
    """Draw a name in proportion to its weight, whatever the order they were written in."""
    names = sorted(name for name, weight in weights.items() if weight > 0)
    mark = rng.random() * sum(weights[name] for name in names)
    for name in names:
        mark -= weights[name]
        if mark < 0:
            return name
    return names[-1]  # only rounding leads here


def _sum(operation: str, a: int, b: int) -> Problem:
    return Problem(operation, f"+ {min(a, b)} {max(a, b)}", f"What is {a} + {b}?", a + b)


def _add(rng: random.Random, options: Options) -> Problem:
    return _sum("add", _number(rng, options.add_digits), _number(rng, options.add_digits))


def _add_mixed(rng: random.Random, options: Options) -> Problem:
    return _sum("add_mixed", _number(rng, options.mixed_digits), _number(rng, 1))


def _multiply(rng: random.Random, options: Options) -> Problem:
    a, b = _number(rng, options.multiply_digits), _number(rng, options.multiply_digits)
    return Problem("multiply", f"* {min(a, b)} {max(a, b)}", f"What is {a} * {b}?", a * b)


def _largest(rng: random.Random, options: Options) -> Problem:
    numbers: list[int] = []
    while len(numbers) < options.largest_count:
        number = _number(rng, options.largest_digits)
        if number not in numbers:
            numbers.append(number)
    listed = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    key = " ".join(["max", *map(str, sorted(numbers))])
    return Problem("largest", key, f"Which is the largest of {listed}?", max(numbers))


OPERATIONS: Mapping[str, Callable[[random.Random, Options], Problem]] = {
    "add": _add,
    "multiply": _multiply,
    "largest": _largest,
    "add_mixed": _add_mixed,
}
"""How each kind of question is drawn."""
