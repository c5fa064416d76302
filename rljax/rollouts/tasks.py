"""Where the tasks of a run come from: the environment or a file, for training or held out.

Owns the choice the configuration makes. Refuses to own reading, shuffling (data/prompts.py) and task making (envs).
"""

import warnings
from collections.abc import Callable

from rljax.config import Config
from rljax.data.prompts import GeneratedTasks, TaskSource, filter_by_length, load_tasks, require_batch
from rljax.data.tokenizer import Tokenizer
from rljax.envs.base import Split, task_maker
from rljax.records import Task


def task_source(config: Config, split: Split) -> TaskSource:
    """Return the tasks of a split, before the length filter.

    Raises:
        ValueError: the file, the environment or its options are wrong, or the file of held-out tasks is not named.
    """
    if config.data.source == "generated":
        make = task_maker(config.env.name, config.env.options)
        count = config.data.num_tasks if split == "train" else config.eval.num_tasks
        return GeneratedTasks(make=lambda index: make(index, split), length=count)
    path = config.data.path if split == "train" else config.eval.path
    if path is None:
        raise ValueError("evaluation needs eval.path, a file of held-out tasks, when data.source = 'file'")
    loaded = load_tasks(path)
    for warning in loaded.warnings:
        warnings.warn(warning, stacklevel=2)
    return loaded.tasks if split == "train" else loaded.tasks[: config.eval.num_tasks]


def fitting_tasks(config: Config, split: Split, tokenizer: Tokenizer, report: Callable[[str], None]) -> TaskSource:
    """Return the tasks whose templated prompts fit `sampler.max_prompt_length`, and report how many were dropped.

    Raises:
        ValueError: too few are left for one batch, or a prompt cannot be templated.
    """

    def length(task: Task) -> int:
        return len(tokenizer.apply_chat_template(task.messages))

    source, dropped = filter_by_length(task_source(config, split), length, config.sampler.max_prompt_length)
    require_batch(dropped, config.train.rollout_batch_size if split == "train" else 1)
    report(f"{split}: {dropped}")
    return source
