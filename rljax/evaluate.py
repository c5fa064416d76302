"""Evaluation: how a policy does on held-out tasks.

Owns the evaluation pass and its result. Never touches training state or its draws: evaluation has its own random keys,
so evaluating more or less often changes nothing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rljax.config import Config
from rljax.convert import read_checkpoint
from rljax.data.prompts import TaskSource
from rljax.mesh import build_mesh
from rljax.records import Group
from rljax.rollouts.collector import Collector, Job
from rljax.rollouts.sampling import eval_params
from rljax.rollouts.stack import open_stack
from rljax.rollouts.tasks import fitting_tasks
from rljax.rollouts.weights import learner_layout
from rljax.telemetry.profile import Clock

FULL_REWARD = 1.0
"""A task counts as solved when its reward reaches this."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What an evaluation found.

    Example:
        EvalResult(accuracy=0.42, reward_mean=0.45, tasks=200, failed=0, truncated_fraction=0.1, length_mean=14.2, groups=())
    """

    accuracy: float
    """Share of the scored tasks whose reward is at least 1."""
    reward_mean: float
    """Mean reward of the scored tasks."""
    tasks: int
    """Tasks attempted."""
    failed: int
    """Tasks that could not be scored; they count in nothing else."""
    truncated_fraction: float
    """Share of the scored tasks whose completion hit the length limit."""
    length_mean: float
    """Mean completion length of the scored tasks (tokens)."""
    groups: tuple[Group, ...]
    """Every rollout, one group of one per task."""


def run_eval(collector: Collector, tasks: TaskSource, config: Config) -> EvalResult:
    """Attempt every held-out task once with the engine's current weights."""
    jobs = [Job(tasks[index], 0) for index in range(len(tasks))]
    groups = collector.collect(jobs, 1, "eval", eval_params(config))
    rollouts = [group.rollouts[0] for group in groups]
    scored = [rollout for rollout in rollouts if rollout.score.status == "score"]
    rewards = [rollout.score.value for rollout in scored if rollout.score.value is not None]
    return EvalResult(
        accuracy=_mean([reward >= FULL_REWARD for reward in rewards]),
        reward_mean=_mean(rewards),
        tasks=len(groups),
        failed=len(groups) - len(scored),
        truncated_fraction=_mean([rollout.finish_reason == "length" for rollout in scored]),
        length_mean=_mean([rollout.completion_length for rollout in scored]),
        groups=tuple(groups),
    )


def _mean(values: Sequence[float | int]) -> float:
    """Return the mean; NaN when nothing was scored, which is not the same as a score of 0."""
    return float(np.mean(values)) if values else math.nan


def evaluate(config: Config, checkpoint: Path | None = None, report: Callable[[str], None] = lambda text: None) -> EvalResult:
    """Evaluate a checkpoint on the held-out tasks of a recipe.

    Args:
        config: Tasks, environment, sampler and `eval` options.
        checkpoint: Model checkpoint to evaluate; default: `model.checkpoint`.
        report: Receives a sentence about each phase.

    Raises:
        ValueError: the checkpoint, the tasks or the configuration do not fit.
    """
    mesh = build_mesh(config.mesh)
    loaded = read_checkpoint(
        checkpoint or config.model.checkpoint,
        learner_layout(mesh),
        # Codes are those that the run samples with, which are rounded from its master weights.
        config.sampler.dtype if config.sampler.weights_dtype == "as-is" else config.model.param_dtype,
    )
    with open_stack(config, loaded.arch, loaded.tokenizer_dir, Clock()) as stack:
        tasks = fitting_tasks(config, "eval", stack.tokenizer, report)
        stack.engine.set_weights(stack.publish(loaded.params), 0)
        return run_eval(stack.collector, tasks, config)
