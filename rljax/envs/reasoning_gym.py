"""Tasks of the library reasoning-gym (arXiv:2505.24760): about a hundred generators of problems, each with its own scorer.

Owns how one of its datasets becomes tasks to train on and tasks held out, and the episode. Refuses to own problems and
scores: both are the library's, which is imported nowhere else and only when it is used.

The split is by problem, not by position: a hash of the question puts about one in five aside for evaluation. The library
draws every position on its own, so small datasets ask some questions many times; whichever position asks it, a question
is on one side only.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from rljax.envs.base import Split, nearest
from rljax.envs.rewards import numbers_in
from rljax.records import Message, Observation, StepResult, Task
from rljax.section import Section

EVAL_ONE_IN = 5
"""One question in this many is held out."""

_OWN_OPTIONS = ("seed", "size")
"""Parameters of every dataset that are options here."""


class Options(Section):
    """Which dataset, how hard it is, and what of the model's text is its answer."""

    task: str = Field("chain_sum", description="Name of the dataset.")
    parameters: dict[str, Any] = Field(default={}, description="Parameters of that dataset; the others keep its defaults.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the dataset.")
    size: int = Field(10000, ge=1, description="Problems in the dataset, those held out included (positions).")
    system: str = Field("", description="System message before every question; empty for none.")
    instruction: str = Field("", description="Text after every question, such as how to answer; empty for none.")
    answer: Literal["text", "tag", "number"] = Field(
        "text",
        description="What is scored: the whole text, what is between the last <answer> and </answer>, or the last number.",
    )

    def _broken_rules(self) -> Iterator[str]:
        datasets = _datasets()
        if self.task not in datasets:
            yield f"env.options.task = {self.task!r} is unknown{nearest(self.task, datasets)} Known are {_listed(datasets)}"
            return
        known = [field.name for field in dataclasses.fields(datasets[self.task][1]) if field.name not in _OWN_OPTIONS]
        wrong = [name for name in self.parameters if name not in known]
        for name in wrong:
            if name in _OWN_OPTIONS:
                yield f"env.options.parameters.{name} is an option of its own; set env.options.{name}"
            else:
                remedy = f"{nearest(name, known)} Known for {self.task!r} are {_listed(known)}"
                yield f"env.options.parameters.{name} is unknown{remedy}"
        if not wrong:
            try:
                _dataset(self)
            except Exception as error:  # whatever a dataset says of its parameters; most use assert
                yield f"env.options: the dataset {self.task!r} cannot be made ({type(error).__name__}: {error})"


class ReasoningGym:
    """Single-turn problems of one dataset, judged by its `score_answer`."""

    Options = Options

    def __init__(self, options: Options) -> None:
        """Take the checked options."""
        self._options = options
        self._entry: Mapping[str, Any] = {}

    @classmethod
    def make_task(cls, options: Options, index: int, split: Split) -> Task:
        """Return task number `index` of a split, in the order of the dataset; a pure function of its arguments.

        Eval tasks are different questions. Train tasks may repeat one, as the dataset does.

        Raises ValueError when the dataset is used up.
        """
        problems = _problems(options.model_dump_json())
        problems.extend_to(index, split)
        entry = problems.found[split][index]
        asked = f"{entry['question']} {options.instruction}".strip()
        question: Message = {"role": "user", "content": asked}
        return Task(
            id=f"reasoning_gym/{options.task}/{split}/{index}",
            messages=({"role": "system", "content": options.system}, question) if options.system else (question,),
            answer=entry["answer"],
            metadata={"entry": entry},
        )

    def reset(self, task: Task, seed: int) -> Observation:
        """Show the question; there is nothing to draw.

        Raises ValueError for a task that this environment has not made.
        """
        del seed
        if "entry" not in task.metadata:
            raise ValueError(f"task {task.id!r} has no entry of reasoning-gym; set data.source = 'generated'")
        self._entry = task.metadata["entry"]
        return Observation(messages=task.messages)

    def step(self, text: str) -> StepResult:
        """Score the answer and end the episode.

        Some scorers raise for an answer that they cannot read. That is the model's mistake, a reward of 0 with the component
        `unreadable` at 1, unless they cannot read the dataset's own answer either: then their exception is raised.
        """
        answer, unreadable = self._answer(text), 0.0
        try:
            reward = self._score(answer)
        except Exception:
            self._score(self._entry["answer"])
            reward, unreadable = 0.0, 1.0
        components = {"score": reward, "unreadable": unreadable}
        return StepResult(messages=(), reward=reward, done=True, components=components)

    def close(self) -> None:
        """Hold nothing, so let go of nothing."""

    def _answer(self, text: str) -> str | None:
        if self._options.answer == "text":
            return text.strip()
        if self._options.answer == "number":
            return (numbers_in(text) or [None])[-1]
        _, opened, rest = text.rpartition("<answer>")
        inside, closed, _ = rest.partition("</answer>")
        return inside.strip() if opened and closed else None

    def _score(self, answer: str | None) -> float:
        score = float(_dataset(self._options).score_answer(answer=answer, entry=self._entry))
        if not math.isfinite(score):
            raise ValueError(f"reasoning-gym scored an answer of {self._options.task!r} as {score}")
        return score


class _Problems:
    """The problems of one dataset found so far, by split, in the order of its positions."""

    def __init__(self, options: Options) -> None:
        self.found: dict[Split, list[Mapping[str, Any]]] = {"train": [], "eval": []}
        self._options = options
        self._dataset = _dataset(options)
        self._position = 0
        self._held_out: set[str] = set()

    def extend_to(self, index: int, split: Split) -> None:
        """Look at further positions until there is a problem of this index.

        Raises ValueError when there are too few.
        """
        while len(self.found[split]) <= index:
            if self._position == self._options.size:
                raise ValueError(
                    f"env.options: the {self._options.size} problems of {self._options.task!r} hold only "
                    f"{len(self.found[split])} {'different ' if split == 'eval' else ''}{split} tasks; raise env.options.size, "
                    f"or lower {'eval' if split == 'eval' else 'data'}.num_tasks"
                )
            self._add(self._dataset[self._position])
            self._position += 1

    def _add(self, entry: Mapping[str, Any]) -> None:
        question = entry["question"]
        if not _is_held_out(question):
            self.found["train"].append(entry)
        elif question not in self._held_out:
            self._held_out.add(question)
            self.found["eval"].append(entry)


@lru_cache(maxsize=8)
def _problems(options: str) -> _Problems:
    """Return the problems of these options, as JSON; made once per process."""
    return _Problems(Options.model_validate_json(options))


def _is_held_out(question: str) -> bool:
    return int.from_bytes(hashlib.sha256(question.encode()).digest()[:8]) % EVAL_ONE_IN == 0


def _dataset(options: Options) -> Any:
    """Return the library's dataset, made once per process: some read files or draw all their problems at the start."""
    return _made(options.task, options.seed, options.size, json.dumps(options.parameters, sort_keys=True))


@lru_cache(maxsize=8)
def _made(task: str, seed: int, size: int, parameters: str) -> Any:
    return _library().create_dataset(task, seed=seed, size=size, **json.loads(parameters))


def _datasets() -> Mapping[str, tuple[type, type]]:
    """Return the classes of dataset and parameters by name."""
    return _library().factory.DATASETS


def _library() -> Any:
    try:
        import reasoning_gym  # optional, and slow to import: only this environment needs it
    except ModuleNotFoundError as error:
        raise ValueError(
            "env.name = 'reasoning_gym' needs the package reasoning-gym; install it with `pip install 'rljax[envs]'`"
        ) from error
    return reasoning_gym


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "no parameters at all"
