"""Tasks of the real library: the split, the scores, and what a wrong option is told."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rljax.envs.base import Split, parse_options, task_maker
from rljax.envs.pool import LocalPool
from rljax.envs.reasoning_gym import Options, ReasoningGym
from rljax.records import StepResult, Task

ROOT = Path(__file__).parents[2]
SUMS = {"task": "chain_sum", "parameters": {"max_terms": 2, "max_digits": 1}, "size": 2000}
"""One-digit sums and differences: only 200 questions, so the dataset asks each many times."""


def tasks(options: dict[str, Any], split: Split, count: int) -> list[Task]:
    make = task_maker("reasoning_gym", options)
    return [make(index, split) for index in range(count)]


def questions(made: list[Task]) -> list[str]:
    return [task.messages[-1]["content"] for task in made]


def judged(options: dict[str, Any], task: Task, text: str) -> StepResult:
    env = ReasoningGym(Options(**options))
    assert env.reset(task, seed=0).messages == task.messages
    result = env.step(text)
    assert result.done
    assert not result.messages
    return result


def test_a_task_is_a_problem_of_the_library() -> None:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset("chain_sum", seed=7, size=100, max_terms=2)
    known = {entry["question"]: entry["answer"] for entry in dataset}
    options = {
        "task": "chain_sum",
        "parameters": {"max_terms": 2},
        "seed": 7,
        "size": 100,
        "instruction": "Now!",
        "system": "Be brief.",
    }
    for split in ("train", "eval"):
        for task in tasks(options, split, 5):
            assert task.messages[0] == {"role": "system", "content": "Be brief."}
            assert task.answer == known[task.messages[1]["content"].removesuffix(" Now!")]
            assert task.messages[1]["content"].endswith(" Now!")
            assert task.id.startswith(f"reasoning_gym/chain_sum/{split}/")


def test_no_question_is_on_both_sides_however_often_it_is_asked() -> None:
    train, held_out = questions(tasks(SUMS, "train", 1500)), questions(tasks(SUMS, "eval", 25))
    assert len(set(train)) < len(train), "the dataset repeats questions, so a split by position would leak"
    assert not set(train) & set(held_out)
    assert len(set(held_out)) == len(held_out)


def test_another_seed_asks_nothing_that_was_held_out() -> None:
    held_out = questions(tasks(SUMS, "eval", 25))
    assert not set(questions(tasks({**SUMS, "seed": 12345}, "train", 1500))) & set(held_out)


def test_tasks_are_the_same_in_another_process_whatever_was_made_before() -> None:
    program = (
        "import json, sys; from rljax.envs.base import task_maker; make = task_maker('reasoning_gym', json.loads(sys.argv[1]));"
        "print(json.dumps([[make(i, s).id, make(i, s).messages, make(i, s).answer] for i, s in [(9, 'eval'), (3, 'train')]]));"
        "assert 'jax' not in sys.modules"
    )
    there = subprocess.run(
        [sys.executable, "-c", program, json.dumps(SUMS)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    made = [tasks(SUMS, "eval", 10)[9], tasks(SUMS, "train", 4)[3]]
    assert json.loads(there) == json.loads(json.dumps([[task.id, task.messages, task.answer] for task in made]))


def test_the_reward_is_the_score_of_the_library() -> None:
    task = tasks(SUMS, "train", 1)[0]
    right = task.answer
    assert judged(SUMS, task, f" {right}\n").reward == 1.0
    assert judged(SUMS, task, f"+{int(right)}.0" if int(right) >= 0 else f"{right}.0").reward == 1.0
    assert judged(SUMS, task, f"It is {right}").reward == len(right) / len(f"It is {right}"), "part of it, as the library says"
    assert judged(SUMS, task, "no number").reward == 0.0
    assert judged(SUMS, task, "").reward == 0.0


def test_only_what_is_in_the_last_tag_is_scored_when_tags_are_asked_for() -> None:
    options = {**SUMS, "answer": "tag"}
    task = tasks(options, "train", 1)[0]
    right = task.answer
    for text, reward in {
        f"So <answer> {right} </answer>.": 1.0,
        f"<answer>no</answer> or <answer>{right}</answer>": 1.0,
        f"<answer>{right}</answer> or <answer>no</answer>": 0.0,
        f"<answer>{right}": 0.0,
        f"{right}</answer>": 0.0,
        right: 0.0,
    }.items():
        assert judged(options, task, text).reward == reward, text


def test_the_last_number_is_scored_when_numbers_are_asked_for() -> None:
    options = {**SUMS, "answer": "number"}
    task = tasks(options, "train", 1)[0]
    assert judged(options, task, f"2 numbers give {task.answer}, I think.").reward == 1.0
    assert judged(options, task, f"{task.answer} or 1234567").reward == 0.0
    assert judged(options, task, "I do not know").reward == 0.0


def test_an_answer_that_the_scorer_cannot_read_is_the_models_mistake() -> None:
    options = {"task": "prime_factorization"}
    task = tasks(options, "train", 1)[0]
    assert judged(options, task, "nonsense").components == {"score": 0.0, "unreadable": 1.0}
    assert judged(options, task, task.answer).components == {"score": 1.0, "unreadable": 0.0}
    broken = Task(task.id, task.messages, task.answer, {"entry": {**task.metadata["entry"], "answer": "nonsense"}})
    env = ReasoningGym(Options(**options))
    env.reset(broken, seed=0)
    with pytest.raises(ValueError, match="nonsense"):
        env.step("nonsense")


def test_a_task_from_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match=r"data\.source = 'generated'"):
        ReasoningGym(Options()).reset(Task("t", ({"role": "user", "content": "2 + 2?"},), "4"), seed=0)


def test_it_runs_in_the_pool() -> None:
    task = tasks(SUMS, "train", 1)[0]
    with LocalPool("reasoning_gym", SUMS, workers=1, step_timeout=60.0, reset_timeout=60.0) as pool:
        pool.reset("episode", task, seed=0)
        rewards = []
        while pool.pending:
            for reply in pool.poll(timeout=1.0):
                assert reply.outcome == "ok", reply.detail
                if isinstance(reply.value, StepResult):
                    rewards.append(reply.value.reward)
                else:
                    pool.step("episode", task.answer)
    assert rewards == [1.0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"task": "chain_sums"}, ["env.options.task = 'chain_sums' is unknown; did you mean 'chain_sum'?", "spell_backward"]),
        (
            {"parameters": {"max_term": 3}},
            ["env.options.parameters.max_term is unknown; did you mean 'max_terms'?", "max_digits, max_terms, min_digits"],
        ),
        ({"parameters": {"seed": 3}}, ["env.options.parameters.seed", "set env.options.seed"]),
        ({"parameters": {"max_terms": 1}}, ["'chain_sum' cannot be made", "max_terms must be >= min_terms"]),
        ({"answer": "boxed"}, ["env.options.answer: Input should be 'text', 'tag' or 'number'"]),
        ({"size": 0}, ["env.options.size"]),
    ],
)
def test_a_wrong_option_is_told_what_there_is(options: dict[str, Any], told: list[str]) -> None:
    with pytest.raises(ValueError, match=r"env\.options") as caught:
        parse_options("reasoning_gym", options)
    assert all(part in str(caught.value) for part in told)


@pytest.mark.parametrize(("split", "count", "option"), [("eval", 60, "eval.num_tasks"), ("train", 2000, "data.num_tasks")])
def test_too_few_problems_say_what_to_change(split: Split, count: int, option: str) -> None:
    with pytest.raises(ValueError, match=r"env\.options\.size") as caught:
        tasks(SUMS, split, count)
    assert option in str(caught.value)


def test_without_the_library_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'rljax\[envs\]'"):
        parse_options("reasoning_gym", {})
