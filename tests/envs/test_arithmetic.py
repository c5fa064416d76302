import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rljax.envs.arithmetic import Arithmetic, Options
from rljax.envs.base import TaskMaker, parse_options, task_maker
from rljax.records import StepResult, Task

SHARE_TOLERANCE = 0.04  # four standard deviations of a share of 0.25 in 2,000 draws


def question(task: Task) -> str:
    return task.messages[0]["content"]


def operands(task: Task) -> tuple[int, ...]:
    return tuple(int(word) for word in question(task).translate(str.maketrans(",?.", "   ")).split() if word.isdigit())


def score(options: dict[str, Any], task: Task, text: str) -> StepResult:
    env = Arithmetic(Options(**options))
    observation = env.reset(task, seed=0)
    assert observation.messages == task.messages
    return env.step(text)


@pytest.fixture(scope="module")
def make() -> TaskMaker:
    return task_maker("arithmetic", {})


def test_a_task_reads_like_this() -> None:
    assert task_maker("arithmetic", {"operations": {"add": 1.0}})(17, "train") == Task(
        id="arithmetic/train/17",
        messages=({"role": "user", "content": "What is 5 + 5? Answer with just the number."},),
        answer="10",
        metadata={"operation": "add"},
    )


def test_the_default_mix_is_four_kinds_in_equal_shares_with_right_answers(make: TaskMaker) -> None:
    tasks = [make(index, "train") for index in range(2000)]
    kinds = Counter(task.metadata["operation"] for task in tasks)
    assert set(kinds) == {"add", "multiply", "largest", "add_mixed"}
    assert all(abs(count / len(tasks) - 0.25) < SHARE_TOLERANCE for count in kinds.values())
    for task in tasks:
        numbers = operands(task)
        digits = [len(str(number)) for number in numbers]
        right, shape = {
            "add": (sum(numbers), [1, 1]),
            "add_mixed": (sum(numbers), [2, 1]),
            "multiply": (numbers[0] * numbers[1], [1, 1]),
            "largest": (max(numbers), [2, 2, 2, 2]),
        }[task.metadata["operation"]]
        assert (task.answer, digits) == (str(right), shape)


def test_the_default_reward_is_the_last_number_alone(make: TaskMaker) -> None:
    task = make(0, "train")
    wrong = score({}, task, f"{task.answer}, or rather 1000")
    assert (wrong.reward, wrong.done) == (0.0, True)
    right = score({}, task, f"It is {task.answer}.")
    assert (right.reward, right.components) == (1.0, {"last_number": 1.0, "exact": 0.0, "format": 0.0})


def test_the_reward_weights_arrive(make: TaskMaker) -> None:
    task = make(0, "train")
    weights = {"last_number": 0.5, "exact": 0.25, "format": 0.125}
    assert score({"reward": weights}, task, task.answer).reward == 0.875
    assert score({"reward": weights}, task, "1000").reward == 0.125


@pytest.mark.parametrize(
    ("options", "kind", "digits"),
    [
        ({"operations": {"add": 1}, "add_digits": 3}, "add", [3, 3]),
        ({"operations": {"multiply": 1}, "multiply_digits": 2}, "multiply", [2, 2]),
        ({"operations": {"largest": 1}, "largest_digits": 3, "largest_count": 6}, "largest", [3] * 6),
        ({"operations": {"add_mixed": 1}, "mixed_digits": 4}, "add_mixed", [4, 1]),
    ],
)
def test_difficulty_options_arrive(options: dict[str, Any], kind: str, digits: list[int]) -> None:
    make = task_maker("arithmetic", options)
    for split in ("train", "eval"):
        for index in range(30):
            task = make(index, split)
            assert task.metadata["operation"] == kind
            assert [len(str(number)) for number in operands(task)] == digits


@pytest.mark.parametrize("options", [{}, {"add_digits": 2, "mixed_digits": 1, "multiply_digits": 1}])
def test_no_held_out_problem_is_ever_trained_on(options: dict[str, Any]) -> None:
    """Not in another order of its operands, and not as the question of another operation, either."""

    def problems(tasks: list[Task]) -> set[tuple[str, tuple[int, ...]]]:
        sign = {"add": "+", "add_mixed": "+", "multiply": "*", "largest": "max"}
        return {(sign[task.metadata["operation"]], tuple(sorted(operands(task)))) for task in tasks}

    make = task_maker("arithmetic", options)
    trained = problems([make(index, "train") for index in range(4000)])
    held_out = problems([make(index, "eval") for index in range(200)])
    assert len(held_out) > 50
    assert not trained & held_out


@pytest.mark.parametrize("kind", ["add", "multiply"])
def test_about_a_fifth_is_held_out_and_all_of_it_is_asked_before_anything_twice(kind: str) -> None:
    make = task_maker("arithmetic", {"operations": {kind: 1.0}})
    trained = {question(make(index, "train")) for index in range(3000)}
    evaluated = [question(make(index, "eval")) for index in range(60)]
    held_out = set(evaluated)
    assert len(trained) + len(held_out) == 100  # every problem is on one side
    assert 0.1 < len(held_out) / (len(trained) + len(held_out)) < 0.3
    distinct_at_first = len(set(evaluated[: len(held_out)]))
    assert distinct_at_first >= 0.9 * len(held_out)  # a bounded number of draws may miss the last few


def test_a_task_is_a_function_of_options_split_and_index(make: TaskMaker) -> None:
    forward = [make(index, split) for split in ("eval", "train") for index in range(50)]
    again = task_maker("arithmetic", {})
    backward = [again(index, split) for split in ("train", "eval") for index in reversed(range(50))][::-1]
    assert forward == backward


def test_tasks_are_equal_in_another_process(make: TaskMaker) -> None:
    """With other string hashes and after draws from the global generator."""
    program = (
        "import json, random; random.seed(5); random.random()\n"
        "from rljax.envs.base import task_maker\n"
        "make = task_maker('arithmetic', {})\n"
        "tasks = [make(i, s) for s in ('train', 'eval') for i in range(40)]\n"
        "print(json.dumps([[task.messages[0]['content'], task.answer] for task in tasks]))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": "123"}
    theirs = json.loads(
        subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True).stdout
    )
    ours = [[question(make(i, s)), make(i, s).answer] for s in ("train", "eval") for i in range(40)]
    assert ours == theirs


def test_weights_are_shares_whatever_their_order() -> None:
    one = task_maker("arithmetic", {"operations": {"add": 3, "largest": 1}})
    two = task_maker("arithmetic", {"operations": {"largest": 1, "add": 3}})
    tasks = [one(index, "train") for index in range(2000)]
    assert tasks == [two(index, "train") for index in range(2000)]
    share = Counter(task.metadata["operation"] for task in tasks)["add"] / len(tasks)
    assert abs(share - 0.75) < SHARE_TOLERANCE


def test_a_space_too_small_to_split_is_refused() -> None:
    """Comparing all ten digits is a single problem, which is on one side only."""
    make = task_maker("arithmetic", {"operations": {"largest": 1}, "largest_digits": 1, "largest_count": 10})
    assert make(0, "train").answer == "9"
    with pytest.raises(ValueError, match=r"env\.options: 'largest' has too few problems"):
        make(0, "eval")


def test_options_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_options("arithmetic", {}).add_digits = 2  # pyright: ignore[reportAttributeAccessIssue]
