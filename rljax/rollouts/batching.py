"""From groups to the batches of the optimizer steps: advantages, loss weights, packing.

Owns the order of these steps, the split into mini-batches, and what changes in a batch once it has been scored. Refuses
to own the formulas (algorithms) and the row layout (data/packing.py).

    prepare: rewards -> advantages -> weights -> pack
    revise:  log-probabilities -> costs and rejection -> advantages, mask and weights again; the packing stays
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from rljax.algorithms.advantages import Advantages, estimate_advantages, group_outcomes, overlong_penalties
from rljax.algorithms.correction import kept_tokens
from rljax.algorithms.kl import KL_ESTIMATORS
from rljax.algorithms.losses import token_weights
from rljax.config import Config
from rljax.data.packing import Batch, PackShape, longest_message, loss_lengths, pack, pack_shape
from rljax.records import Group, Rollout


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rollouts of one batch, ready for its optimizer steps.

    Example:
        Prepared(batches=(batch,), advantages=advantages, rejected_fraction=0.0)
    """

    batches: tuple[Batch, ...]
    """One per mini-batch."""
    advantages: Advantages
    """Of all rollouts, group by group."""
    rejected_fraction: float
    """Share of the loss tokens that `rollout_rs` took out."""


def batch_shape(config: Config, data_shards: int, choices: tuple[int, int] | None = None) -> PackShape:
    """Return the static shape into which every mini-batch of the run fits; `choices` is `Learner.replayed`."""
    sampler = config.sampler
    return pack_shape(
        pack_length=config.pack_length,
        longest_rollout=sampler.max_prompt_length + sampler.max_completion_length,
        num_rollouts=config.mini_batch_size * config.algorithm.num_generations,
        rows=config.train.micro_batch_size_per_device * data_shards,
        choices=choices,
    )


def prepare(groups: Sequence[Group], config: Config, shape: PackShape) -> Prepared:
    """Compute advantages over the whole batch of groups and pack each mini-batch of them.

    Denominators of the loss are counted over the mini-batch, which is one optimizer step. Rollouts without a score are
    in no statistics, no denominator and no row.
    """
    mask_truncated = config.algorithm.mask_truncated_completions
    rollouts, owners = _members(groups)
    scored = np.array([rollout.score.value is not None for rollout in rollouts], bool)
    lengths = loss_lengths(rollouts, scored, mask_truncated=mask_truncated)
    advantages = _advantages(groups, config, lengths, None)
    batches = []
    for part in _portions(owners, config):
        members, used = [rollouts[index] for index in part], advantages.used[part]
        weights = _weights(np.where(used, lengths[part], 0), config)
        batches.append(pack(members, advantages.values[part], weights, used, shape, mask_truncated=mask_truncated))
    batches = _with_advantages(batches, advantages.tokens)
    return Prepared(tuple(batches), advantages, 0.0)


def needs_revision(config: Config) -> bool:
    """Say whether advantages or mask depend on log-probabilities, so that a batch is scored before its first update."""
    algorithm = config.algorithm
    return algorithm.rollout_rs != "none" or (algorithm.kl_in_reward and algorithm.beta > 0)


def revise(
    prepared: Prepared,
    groups: Sequence[Group],
    config: Config,
    logp_prox: Sequence[Float[np.ndarray, "m r j"]],
    logp_ref: Sequence[Float[np.ndarray, "m r j"]] | None,
    beta: float,
) -> Prepared:
    """Take the divergence off the rewards (`kl_in_reward`), and tokens far from the sampler out of the loss (`rollout_rs`).

    Rollouts stay where they were packed; advantages, mask and weights are made again. What is rejected leaves the
    denominators too, but its reward stays in the statistics of its group and of the batch, and so do the costs.

    Args:
        prepared: From `prepare`, with the same groups.
        groups: The groups.
        config: The run.
        logp_prox: Per mini-batch, the learner's log-probabilities before the update (nats), on the host.
        logp_ref: The same of the reference policy; None without one.
        beta: Weight of the divergence at this step.
    """
    algorithm, batches = config.algorithm, list(prepared.batches)
    order = [_slots_by_rollout(batch) for batch in batches]
    rollouts, owners = _members(groups)
    lengths = loss_lengths(rollouts, prepared.advantages.used, mask_truncated=algorithm.mask_truncated_completions)
    advantages = prepared.advantages
    if algorithm.kl_in_reward and algorithm.beta > 0:
        assert logp_ref is not None, "a divergence needs the reference's log-probabilities"
        estimate = KL_ESTIMATORS[algorithm.kl_estimator]
        per_token = [
            np.asarray(estimate(jnp.asarray(prox), jnp.asarray(ref), jnp.asarray(prox))).ravel()[slots]
            for prox, ref, slots in zip(logp_prox, logp_ref, order, strict=True)
        ]
        costs = np.split(beta * np.concatenate(per_token).astype(np.float64), np.cumsum(lengths)[:-1])
        advantages = _advantages(groups, config, lengths, costs)
    gaps = [(prox - batch.logp_behavior).ravel()[slots] for prox, batch, slots in zip(logp_prox, batches, order, strict=True)]
    kept = kept_tokens(np.concatenate(gaps), lengths, algorithm)
    batches = _with_advantages(batches, advantages.tokens)
    if algorithm.rollout_rs != "none":
        token_owners = np.repeat(np.arange(len(rollouts)), lengths)
        remaining = np.bincount(token_owners, kept, minlength=len(rollouts)).astype(np.int64)
        kept_of = np.split(kept, np.cumsum([len(slots) for slots in order])[:-1])
        batches = [
            _without(batch, slots, keep, _weights(remaining[part], config), lengths[part])
            for batch, slots, keep, part in zip(batches, order, kept_of, _portions(owners, config), strict=True)
        ]
    return Prepared(tuple(batches), advantages, 1.0 - float(kept.mean()) if len(kept) else 0.0)


def shaped_rewards(rollouts: Sequence[Rollout], config: Config) -> list[float | None]:
    """Return the scores with the penalty on length (`overlong_buffer_len`); None where a rollout was not scored.

    The length is that of the longest message of the rollout, since the limit is one of messages.
    """
    lengths = np.array([longest_message(rollout) for rollout in rollouts], np.int64)
    factor = config.algorithm.overlong_penalty_factor
    added = overlong_penalties(lengths, config.sampler.max_completion_length, config.overlong_buffer_len, factor)
    return [
        None if rollout.score.value is None else rollout.score.value + float(extra)
        for rollout, extra in zip(rollouts, added, strict=True)
    ]


def informative_groups(groups: Sequence[Group], config: Config) -> list[bool]:
    """Say which groups teach something compared with themselves: two rollouts scored, and some reward not equal.

    By the environment's rewards alone: a penalty on length is no reason to keep a group. With named rewards (gdpo),
    one of those that have a weight must differ.
    """
    rollouts, owners = _members(groups)
    scores = [rollout.score for rollout in rollouts]
    columns: list[list[float | None]] = [[score.value for score in scores]]
    if config.algorithm.reward_weights:
        names = config.algorithm.reward_weights
        columns = [[None if s.value is None else s.components.get(name) for s in scores] for name in names]
    verdicts = [[outcome.informative for outcome in group_outcomes(column, owners)] for column in columns]
    return [any(of_group) for of_group in zip(*verdicts, strict=True)]


def _members(groups: Sequence[Group]) -> tuple[list[Rollout], list[int]]:
    """Return all rollouts, group by group, and the number of each one's group."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return rollouts, [index for index, group in enumerate(groups) for _ in group.rollouts]


def _portions(owners: Sequence[int], config: Config) -> list[list[int]]:
    """Return the rollouts of each mini-batch."""
    size = config.mini_batch_size
    count = -(-(max(owners, default=-1) + 1) // size)
    return [[index for index, owner in enumerate(owners) if owner // size == number] for number in range(count)]


def _advantages(groups: Sequence[Group], config: Config, lengths: np.ndarray, costs: Sequence[np.ndarray] | None) -> Advantages:
    rollouts, owners = _members(groups)
    parts = [rollout.score.components for rollout in rollouts]
    return estimate_advantages(
        shaped_rewards(rollouts, config), owners, config.algorithm, lengths=lengths, costs=costs, parts=parts
    )


def _weights(lengths: np.ndarray, config: Config) -> np.ndarray:
    """Return the loss weight of each rollout's tokens, given the loss tokens of all rollouts of the optimizer step."""
    return token_weights(
        lengths,
        config.algorithm.loss_agg_mode,
        tokens=int(lengths.sum()),
        rollouts=int((lengths > 0).sum()),
        max_completion_length=config.sampler.max_completion_length,
    )


def _slots_by_rollout(batch: Batch) -> np.ndarray:
    """Return the slots that hold scored tokens (flat), rollout by rollout, in the order of the tokens."""
    owners = batch.rollout.ravel()
    order = np.argsort(owners, kind="stable")
    return order[owners[order] >= 0]


def _with_advantages(batches: Sequence[Batch], tokens: np.ndarray) -> list[Batch]:
    """Put the advantage of each loss token into its slot."""
    out, first = [], 0
    for batch in batches:
        slots, advantage = _slots_by_rollout(batch), np.zeros(batch.mask.size, np.float32)
        advantage[slots] = tokens[first : first + len(slots)]
        first += len(slots)
        out.append(replace(batch, advantage=advantage.reshape(batch.mask.shape)))
    assert first == len(tokens), "every loss token is packed once"
    return out


def _without(batch: Batch, slots: np.ndarray, keep: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> Batch:
    """Take loss tokens out of a batch, which stays packed as it is."""
    mask, weight = np.zeros(batch.mask.size, bool), np.zeros(batch.mask.size, np.float32)
    mask[slots] = keep
    weight[slots] = np.where(keep, np.repeat(weights, lengths), 0.0)
    return replace(batch, mask=mask.reshape(batch.mask.shape), weight=weight.reshape(batch.mask.shape))
