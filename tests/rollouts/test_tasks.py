"""Where tasks come from, and what is said about those that do not fit."""

import json
from pathlib import Path

import pytest

from rljax.config import Config
from rljax.data.tokenizer import Tokenizer
from rljax.rollouts.tasks import fitting_tasks, task_source
from tests.tiny_run import config, tiny_checkpoint


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(tiny_checkpoint())


def write(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def filed(tmp_path: Path, count: int = 4, *more: str) -> Config:
    train = write(tmp_path / "train.jsonl", *({"prompt": f"Say {index}", "answer": str(index)} for index in range(count)))
    held_out = write(tmp_path / "eval.jsonl", *({"prompt": f"Tell {index}", "answer": str(index)} for index in range(3)))
    return config(tmp_path, "data.source=file", f"data.path={train}", f"eval.path={held_out}", *more)


def test_generated_tasks_of_both_splits(tmp_path: Path) -> None:
    settings = config(tmp_path, "data.num_tasks=5", "eval.num_tasks=3")
    train, held_out = task_source(settings, "train"), task_source(settings, "eval")
    assert [train[index].id for index in range(len(train))] == [f"train/{index}" for index in range(5)]
    assert [held_out[index].id for index in range(len(held_out))] == [f"eval/{index}" for index in range(3)]


def test_tasks_of_files(tmp_path: Path) -> None:
    settings = filed(tmp_path, 4, "eval.num_tasks=2")
    train, held_out = task_source(settings, "train"), task_source(settings, "eval")
    assert [train[index].answer for index in range(len(train))] == ["0", "1", "2", "3"]
    assert [held_out[index].messages[0]["content"] for index in range(len(held_out))] == ["Tell 0", "Tell 1"]


def test_evaluation_needs_a_file_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *({"prompt": f"Say {index}"} for index in range(4)))
    with pytest.raises(ValueError, match=r"needs eval.path, a file of held-out tasks"):
        task_source(config(tmp_path, "data.source=file", f"data.path={path}"), "eval")


def test_what_deserves_a_look_in_a_file_is_a_warning(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *({"id": "same", "prompt": f"Say {index}"} for index in range(2)))
    with pytest.warns(UserWarning, match=r"train.jsonl:2: id 'same' was used before"):
        task_source(config(tmp_path, "data.source=file", f"data.path={path}"), "train")


def test_tasks_that_do_not_fit_are_dropped_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "train.jsonl", *({"prompt": "z" * (30 * index), "id": str(index)} for index in range(1, 6)))
    said: list[str] = []
    settings = config(
        tmp_path, "data.source=file", f"data.path={path}", "sampler.max_prompt_length=110", "train.rollout_batch_size=2"
    )
    tasks = fitting_tasks(settings, "train", tokenizer, said.append)
    assert [tasks[index].id for index in range(len(tasks))] == ["1", "2", "3"]
    assert said[0].startswith("train: 2 of 5 tasks dropped: their prompts are longer than max_prompt_length = 110 tokens")


def test_too_few_tasks_for_a_batch_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"3 tasks are left, fewer than the batch of 4 .*The source has 3"):
        fitting_tasks(filed(tmp_path, 3), "train", tokenizer, lambda text: None)
    evaluated = fitting_tasks(filed(tmp_path, 3), "eval", tokenizer, lambda text: None)
    assert len(evaluated) == 3, "an evaluation needs no whole batch"
