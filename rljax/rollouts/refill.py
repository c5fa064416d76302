"""A batch of groups, filled up until enough of them teach something (dynamic sampling).

Owns which groups of a batch are kept and how many tasks were used up for it. Refuses to own sampling, the position in the
prompt stream, and what is done with the groups. What is kept depends on tasks, draws and weights alone, and nothing
is left over for the next batch, so the position after it is all that a checkpoint has to remember.

    round 1: sample n tasks -> keep informative groups, k of them
    round 2: sample n - k of the tasks that follow -> ...     until n are kept, or the rounds are used up
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rljax.config import Config
from rljax.records import Group
from rljax.rollouts.batching import informative_groups


class NothingToLearn(ValueError):
    """So few groups have rewards that differ that a batch could not be filled."""


@dataclass(frozen=True, slots=True)
class Collected:
    """The groups of one batch.

    Example:
        Collected(kept=(group,), sampled=(group, other), tasks=2)
    """

    kept: tuple[Group, ...]
    """Those to train on, `train.rollout_batch_size` of them, in the order of their tasks."""
    sampled: tuple[Group, ...]
    """All that were sampled, in the order of their tasks."""
    tasks: int
    """Tasks taken from the prompt stream."""


def fill_batch(sample: Callable[[int, int], list[Group]], config: Config) -> Collected:
    """Sample groups until the batch is full; a single round without `dynamic_sampling`.

    DAPO, arXiv:2503.14476, section 3.2: a group whose rewards are all equal has no policy gradient, and is replaced as a
    whole by the group of another task. Each round samples as many tasks as groups are missing.

    Args:
        sample: From (tasks taken before in this batch, tasks to sample) to their groups.
        config: The run.

    Raises:
        NothingToLearn: `dynamic_sampling_max_rounds` rounds did not fill it; names the rewards that were seen.
    """
    algorithm, size = config.algorithm, config.train.rollout_batch_size
    if not algorithm.dynamic_sampling:
        groups = sample(0, size)
        return Collected(tuple(groups), tuple(groups), size)
    kept: list[Group] = []
    sampled: list[Group] = []
    for _ in range(algorithm.dynamic_sampling_max_rounds):
        groups = sample(len(sampled), size - len(kept))
        sampled += groups
        kept += [group for group, useful in zip(groups, informative_groups(groups, config), strict=True) if useful]
        if len(kept) == size:
            return Collected(tuple(kept), tuple(sampled), len(sampled))
    raise NothingToLearn(_explain(kept, sampled, config))


def _explain(kept: Sequence[Group], sampled: Sequence[Group], config: Config) -> str:
    rounds = config.algorithm.dynamic_sampling_max_rounds
    means: Counter[str] = Counter()
    for group, useful in zip(sampled, informative_groups(sampled, config), strict=True):
        rewards = [rollout.score.value for rollout in group.rollouts if rollout.score.value is not None]
        if not useful:
            means[f"reward {math.fsum(rewards) / len(rewards):g}" if len(rewards) > 1 else "too few scores"] += 1
    seen = ", ".join(f"{count} of {what}" for what, count in means.most_common(3))
    return (
        f"dynamic sampling found {len(kept)} of {config.train.rollout_batch_size} groups with different rewards in "
        f"{len(sampled)} groups and {rounds} rounds (algorithm.dynamic_sampling_max_rounds); the others had equal rewards "
        f"({seen}). Nothing was trained on them. Use tasks that are sometimes solved and sometimes not, or raise the number of "
        "rounds: the same command then continues"
    )
