"""From groups to the batches of the optimizer steps: advantages, loss weights, packing.

Owns the order of these steps and the split into mini-batches. Refuses to own their formulas (algorithms) and the row
layout (data/packing.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rljax.algorithms.advantages import Advantages, group_advantages
from rljax.algorithms.losses import token_weights
from rljax.config import Config
from rljax.data.packing import Batch, PackShape, loss_lengths, pack, pack_shape
from rljax.records import Group


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rollouts of one batch, ready for its optimizer steps.

    Example:
        Prepared(batches=(batch,), advantages=advantages)
    """

    batches: tuple[Batch, ...]
    """One per mini-batch."""
    advantages: Advantages
    """Of all rollouts, group by group."""


def batch_shape(config: Config, data_shards: int) -> PackShape:
    """Return the static shape into which every mini-batch of the run fits."""
    sampler = config.sampler
    return pack_shape(
        pack_length=config.pack_length,
        longest_rollout=sampler.max_prompt_length + sampler.max_completion_length,
        num_rollouts=config.mini_batch_size * config.algorithm.num_generations,
        rows=config.train.micro_batch_size_per_device * data_shards,
    )


def prepare(groups: Sequence[Group], config: Config, shape: PackShape) -> Prepared:
    """Compute advantages over the whole batch of groups and pack each mini-batch of them.

    Denominators of the loss are counted over the mini-batch, which is one optimizer step. Rollouts without a score are
    in no statistics, no denominator and no row.
    """
    algorithm, size = config.algorithm, config.mini_batch_size
    mask_truncated = algorithm.mask_truncated_completions
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    owners = [index for index, group in enumerate(groups) for _ in group.rollouts]
    advantages = group_advantages([rollout.score.value for rollout in rollouts], owners, algorithm.scale_rewards)
    batches = []
    for first in range(0, len(groups), size):
        part = [index for index, owner in enumerate(owners) if first <= owner < first + size]
        members, used = [rollouts[index] for index in part], advantages.used[part]
        lengths = loss_lengths(members, used, mask_truncated=mask_truncated)
        weights = token_weights(
            lengths,
            algorithm.loss_agg_mode,
            tokens=int(lengths.sum()),
            rollouts=int((lengths > 0).sum()),
            max_completion_length=config.sampler.max_completion_length,
        )
        batches.append(pack(members, advantages.values[part], weights, used, shape, mask_truncated=mask_truncated))
    return Prepared(tuple(batches), advantages)
