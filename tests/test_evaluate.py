"""Evaluation: what counts, what does not, and that it repeats."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from rljax.evaluate import evaluate, run_eval
from rljax.records import FinishReason, Group, Provenance, Rollout, SamplingParams, Score, Task
from rljax.rollouts.collector import Collector, Job
from tests.tiny_run import compiled_once, config, tiny_checkpoint


class Told(Collector):
    """Returns the groups it was given; remembers what it was asked."""

    def __init__(self, groups: Sequence[Group]) -> None:
        """Take the groups."""
        self._groups = list(groups)
        self.asked: list[object] = []

    def collect(self, jobs: Sequence[Job], num_generations: int, purpose: str, sampling: SamplingParams) -> list[Group]:
        """Return the groups."""
        self.asked.append(([(job.task.id, job.first_attempt) for job in jobs], num_generations, purpose, sampling))
        return self._groups


def group(score: Score, length: int = 3, reason: FinishReason = "stop") -> Group:
    by_model = np.arange(length + 1) > 0
    rollout = Rollout(
        task_id="t",
        attempt=0,
        tokens=np.ones(length + 1, np.int32),
        provenance=np.where(by_model, Provenance.MODEL, Provenance.PROMPT).astype(np.int8),
        logp_behavior=np.zeros(length + 1, np.float32),
        versions=np.zeros(length + 1, np.int32),
        finish_reason=reason,
        score=score,
        turns=1,
        text="",
    )
    return Group(Task("t", ()), (rollout,))


FAILED = group(Score("error", None, detail="broken"), 8, "length")


def test_only_the_full_reward_is_accurate_and_failures_count_in_nothing(tmp_path: Path) -> None:
    groups = [group(Score("score", 1.0)), group(Score("score", 0.5), 5, "length"), group(Score("score", 1.2)), FAILED]
    result = run_eval(Told(groups), (), config(tmp_path))
    assert result.accuracy == pytest.approx(2 / 3)
    assert result.reward_mean == pytest.approx(0.9)
    assert (result.tasks, result.failed) == (4, 1)
    assert result.truncated_fraction == pytest.approx(1 / 3)
    assert result.length_mean == pytest.approx(11 / 3)
    assert result.groups == tuple(groups)


def test_nothing_scored_is_not_a_score_of_zero(tmp_path: Path) -> None:
    result = run_eval(Told([FAILED, FAILED]), (), config(tmp_path))
    assert (result.tasks, result.failed) == (2, 2)
    assert math.isnan(result.accuracy)
    assert math.isnan(result.reward_mean)


def test_every_task_is_attempted_once_with_draws_of_its_own(tmp_path: Path) -> None:
    told = Told([FAILED])
    tasks = [Task("a", ()), Task("b", ())]
    run_eval(
        told,
        tasks,
        config(tmp_path, "eval.temperature=0.3", "eval.top_k=5", "eval.top_p=0.9", "eval.min_p=0.1", "sampler.stop=['x']"),
    )
    expected = SamplingParams(max_tokens=8, temperature=0.3, top_k=5, top_p=0.9, min_p=0.1, stop=("x",))
    assert told.asked == [([("a", 0), ("b", 0)], 1, "eval", expected)]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    with compiled_once():
        yield


def test_an_evaluation_repeats(tmp_path: Path) -> None:
    said: list[str] = []
    settings = config(tmp_path / "run", "eval.num_tasks=6")
    first = evaluate(settings, report=said.append)
    assert said == ["eval: all 6 tasks fit max_prompt_length = 48 (longest: 18 tokens)"]
    assert [found.task.id for found in first.groups] == [f"eval/{index}" for index in range(6)]
    assert (first.failed, first.accuracy) == (0, 0.0)
    again = evaluate(settings, tiny_checkpoint())
    texts = [[found.rollouts[0].text for found in result.groups] for result in (first, again)]
    assert texts[0] == texts[1]
    warm = evaluate(config(tmp_path / "run", "eval.num_tasks=6", "eval.temperature=1.0"))
    assert 0 < warm.reward_mean < 1
    likeliest = evaluate(config(tmp_path / "run", "eval.num_tasks=6", "eval.temperature=1.0", "eval.top_k=1"))
    assert [found.rollouts[0].text for found in likeliest.groups] == texts[0], "which is what temperature 0 takes"
    assert not (tmp_path / "run").exists(), "an evaluation belongs to no run"


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere is no checkpoint of rljax"):
        evaluate(config(tmp_path), tmp_path / "nowhere")
