"""From groups to the batches of the optimizer steps: advantages, loss weights, packing.

Owns the order of these steps, the split into mini-batches, and what changes in a batch once it has been scored. Refuses
to own the formulas (algorithms) and the row layout (data/packing.py).

    prepare: rewards -> advantages -> weights -> pack what has a gradient
    revise:  log-probabilities -> costs and rejection; the critic's values -> returns
             -> advantages, mask and weights again; the packing stays
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from rljax.algorithms.advantages import Advantages, estimate_advantages, group_outcomes, overlong_penalties
from rljax.algorithms.correction import kept_tokens
from rljax.algorithms.credit import Turn
from rljax.algorithms.kl import KL_ESTIMATORS
from rljax.algorithms.losses import token_weights
from rljax.config import Config
from rljax.data.packing import Batch, PackShape, loss_lengths, message_lengths, pack, pack_shape
from rljax.records import Group, Rollout


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rollouts of one batch, ready for its optimizer steps.

    Example:
        Prepared(batches=(batch,), advantages=advantages, rejected_fraction=0.0, returns=())
    """

    batches: tuple[Batch, ...]
    """One per mini-batch."""
    advantages: Advantages
    """Of all rollouts, group by group."""
    rejected_fraction: float
    """Share of the loss tokens that `rollout_rs` took out."""
    returns: tuple[Float[np.ndarray, "m r j"], ...]
    """Per mini-batch, what the critic's value of each scored token should be; empty without a critic's values."""


def batch_shape(config: Config, data_shards: int, choices: tuple[int, int] | None = None) -> PackShape:
    """Return the static shape into which every mini-batch of the run fits; `choices` is `Learner.replayed`."""
    sampler = config.sampler
    return pack_shape(
        pack_length=config.pack_length,
        longest_rollout=sampler.max_prompt_length + sampler.max_completion_length,
        num_rollouts=config.mini_batch_size * config.algorithm.num_generations,
        rows=config.micro_batch_size_per_device * data_shards,
        choices=choices,
    )


def prepare(groups: Sequence[Group], config: Config, shape: PackShape) -> Prepared:
    """Compute advantages over the whole batch of groups and pack each mini-batch of them.

    Denominators of the loss are counted over the mini-batch, which is one optimizer step. Rollouts without a score are
    in no statistics, no denominator and no row. Rollouts that teach nothing, because every advantage of theirs is 0, are in
    the denominators; they have no row where that changes no gradient (`only_advantages_teach`).
    """
    mask_truncated = config.algorithm.mask_truncated_completions
    rollouts, owners = _members(groups)
    scored = np.array([rollout.score.value is not None for rollout in rollouts], bool)
    lengths = loss_lengths(rollouts, scored, mask_truncated=mask_truncated)
    advantages = _advantages(groups, config, lengths, None, None)
    counted = np.where(advantages.used, lengths, 0)
    skips = config.train.skip_zero_advantages and only_advantages_teach(config)
    teaches = _sums_by(advantages.tokens != 0, counted) > 0 if skips else advantages.used
    batches = []
    for part in _portions(owners, config):
        members, weights = [rollouts[index] for index in part], _weights(counted[part], config)
        batch = pack(members, advantages.values[part], weights, teaches[part], shape, mask_truncated=mask_truncated)
        tokens = int(counted[part].sum())
        batches.append(replace(batch, skipped_fraction=(tokens - int(batch.mask.sum())) / max(tokens, 1)))
    packed = advantages.tokens[np.repeat(teaches, counted)]
    return Prepared(_with_advantages(batches, packed), advantages, 0.0, ())


def only_advantages_teach(config: Config) -> bool:
    """Say whether a rollout whose advantages are all 0 has no part in any gradient, and nothing that is scored is needed of it.

    Every row of `SURROGATES` is a multiple of the advantage. A divergence, an entropy bonus and the losses of routers are not;
    a critic learns from every rollout; what is scored may change advantages and denominators (`revise`); and what dropout draws
    goes by the place in the rows, so that another packing is another draw.
    """
    algorithm = config.algorithm
    others = (algorithm.beta, algorithm.entropy_coef, algorithm.router_z_loss_coef, algorithm.router_balance_loss_coef)
    return not any((*others, config.lora.dropout)) and algorithm.advantage != "gae" and not needs_logprobs(config)


def needs_logprobs(config: Config) -> bool:
    """Say whether advantages or mask depend on log-probabilities, so that a batch is scored before its first update."""
    algorithm = config.algorithm
    return algorithm.rollout_rs != "none" or (algorithm.kl_in_reward and algorithm.beta > 0)


def revise(
    prepared: Prepared,
    groups: Sequence[Group],
    config: Config,
    logp_prox: Sequence[Float[np.ndarray, "m r j"]] | None,
    logp_ref: Sequence[Float[np.ndarray, "m r j"]] | None,
    values: Sequence[Float[np.ndarray, "m r j"]] | None,
    beta: float,
) -> Prepared:
    """Bring what was scored into advantages, mask and weights.

    Takes the divergence off the rewards (`kl_in_reward`), tokens far from the sampler out of the loss (`rollout_rs`), and
    the critic's values off the returns (`gae`). Rollouts stay where they were packed. What is rejected leaves the
    denominators too, but its reward stays in the statistics of its group and of the batch, and so do the costs.

    Args:
        prepared: From `prepare`, with the same groups.
        groups: The groups.
        config: The run.
        logp_prox: Per mini-batch, the learner's log-probabilities before the update (nats), on the host; None where they
            are not needed.
        logp_ref: The same of the reference policy; None without one.
        values: The same of the critic's values; None without one.
        beta: Weight of the divergence at this step.
    """
    algorithm, batches = config.algorithm, prepared.batches
    order = [_slots_by_rollout(batch) for batch in batches]
    rollouts, owners = _members(groups)
    lengths = loss_lengths(rollouts, prepared.advantages.used, mask_truncated=algorithm.mask_truncated_completions)
    advantages = prepared.advantages

    def by_rollout(per_token: Sequence[np.ndarray]) -> list[np.ndarray]:
        flat = [numbers.ravel()[slots] for numbers, slots in zip(per_token, order, strict=True)]
        return np.split(np.concatenate(flat).astype(np.float64), np.cumsum(lengths)[:-1])

    costs = None
    if algorithm.kl_in_reward and algorithm.beta > 0:
        assert logp_prox is not None, "a divergence needs the learner's log-probabilities"
        assert logp_ref is not None, "a divergence needs the reference's log-probabilities"
        estimate = KL_ESTIMATORS[algorithm.kl_estimator]
        pairs = [tuple(map(jnp.asarray, pair)) for pair in zip(logp_prox, logp_ref, strict=True)]
        costs = [beta * own for own in by_rollout([np.asarray(estimate(prox, ref, prox)) for prox, ref in pairs])]
    if costs is not None or values is not None:
        advantages = _advantages(groups, config, lengths, costs, None if values is None else by_rollout(values))
    batches, rejected = _with_advantages(batches, advantages.tokens), 0.0
    if algorithm.rollout_rs != "none":
        assert logp_prox is not None, "a distance from the sampler needs the learner's log-probabilities"
        gaps = by_rollout([prox - batch.logp_behavior for prox, batch in zip(logp_prox, batches, strict=True)])
        kept = kept_tokens(np.concatenate(gaps), lengths, algorithm)
        remaining = _sums_by(kept, lengths).astype(np.int64)
        kept_of = np.split(kept, np.cumsum([len(slots) for slots in order])[:-1])
        batches = tuple(
            _without(batch, slots, keep, _weights(remaining[part], config), lengths[part])
            for batch, slots, keep, part in zip(batches, order, kept_of, _portions(owners, config), strict=True)
        )
        rejected = 1.0 - float(kept.mean()) if len(kept) else 0.0
    known = () if values is None or advantages.returns is None else _in_slots(batches, advantages.returns)
    return Prepared(batches, advantages, rejected, known)


def shaped_rewards(rollouts: Sequence[Rollout], config: Config) -> list[float | None]:
    """Return the scores with the penalty on length (`overlong_buffer_len`); None where a rollout was not scored.

    The length is that of the longest message of the rollout, since the limit is one of messages.
    """
    lengths = np.array([message_lengths(rollout).max(initial=0) for rollout in rollouts], np.int64)
    factor = config.algorithm.overlong_penalty_factor
    added = overlong_penalties(lengths, config.sampler.max_completion_length, config.overlong_buffer_len, factor)
    return [
        None if rollout.score.value is None else rollout.score.value + float(extra)
        for rollout, extra in zip(rollouts, added, strict=True)
    ]


def informative_groups(groups: Sequence[Group], config: Config) -> list[bool]:
    """Say which groups teach something compared with themselves: two rollouts scored, and some reward not equal.

    By the environment's rewards alone: a penalty on length is no reason to keep a group. With named rewards (gdpo),
    one of those that have a weight must differ; with credit by turn, the rewards of a turn may differ where the sums do not.
    """
    rollouts, owners = _members(groups)
    scores = [rollout.score for rollout in rollouts]
    columns: list[list[float | None]] = [[score.value for score in scores]]
    if config.algorithm.reward_weights:
        names = config.algorithm.reward_weights
        columns = [[None if s.value is None else s.components.get(name) for s in scores] for name in names]
    if config.algorithm.credit == "turn":
        judged = [() if rollout.score.value is None else rollout.turn_rewards for rollout in rollouts]
        turns = max(map(len, judged), default=0)
        columns += [[own[turn] if turn < len(own) else None for own in judged] for turn in range(turns)]
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


def _advantages(
    groups: Sequence[Group],
    config: Config,
    lengths: np.ndarray,
    costs: Sequence[np.ndarray] | None,
    values: Sequence[np.ndarray] | None,
) -> Advantages:
    rollouts, owners = _members(groups)
    parts = [rollout.score.components for rollout in rollouts]
    turns = [_turns(rollout, int(length)) for rollout, length in zip(rollouts, lengths, strict=True)]
    return estimate_advantages(
        shaped_rewards(rollouts, config),
        owners,
        config.algorithm,
        lengths=lengths,
        costs=costs,
        parts=parts,
        turns=turns,
        values=values,
    )


def _turns(rollout: Rollout, loss_length: int) -> list[Turn]:
    """Return the turns of a scored rollout; where single turns were not judged, the whole score is that of the last one."""
    if rollout.score.value is None:
        return []
    tokens = message_lengths(rollout)
    rewards = rollout.turn_rewards or (*[None] * (len(tokens) - 1), rollout.score.value)[: len(tokens)]
    return [Turn(reward, int(n) if loss_length else 0) for reward, n in zip(rewards, tokens, strict=True)]


def _weights(lengths: np.ndarray, config: Config) -> np.ndarray:
    """Return the loss weight of each rollout's tokens, given the loss tokens of all rollouts of the optimizer step."""
    return token_weights(
        lengths,
        config.algorithm.loss_agg_mode,
        tokens=int(lengths.sum()),
        rollouts=int((lengths > 0).sum()),
        max_completion_length=config.sampler.max_completion_length,
    )


def _sums_by(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the sum over each rollout's tokens, given those of one rollout after the other."""
    return np.bincount(np.repeat(np.arange(len(lengths)), lengths), tokens, minlength=len(lengths))


def _slots_by_rollout(batch: Batch) -> np.ndarray:
    """Return the slots that hold scored tokens (flat), rollout by rollout, in the order of the tokens."""
    owners = batch.rollout.ravel()
    order = np.argsort(owners, kind="stable")
    return order[owners[order] >= 0]


def _in_slots(batches: Sequence[Batch], tokens: np.ndarray) -> tuple[np.ndarray, ...]:
    """Bring what is known of each loss token into the slots of its mini-batch; 0 in filler."""
    out, first = [], 0
    for batch in batches:
        slots, found = _slots_by_rollout(batch), np.zeros(batch.mask.size, np.float32)
        found[slots] = tokens[first : first + len(slots)]
        first += len(slots)
        out.append(found.reshape(batch.mask.shape))
    assert first == len(tokens), "every loss token is packed once"
    return tuple(out)


def _with_advantages(batches: Sequence[Batch], tokens: np.ndarray) -> tuple[Batch, ...]:
    """Put the advantage of each loss token into its slot."""
    found = _in_slots(batches, tokens)
    return tuple(replace(batch, advantage=advantage) for batch, advantage in zip(batches, found, strict=True))


def _without(batch: Batch, slots: np.ndarray, keep: np.ndarray, weights: np.ndarray, lengths: np.ndarray) -> Batch:
    """Take loss tokens out of a batch, which stays packed as it is."""
    mask, weight = np.zeros(batch.mask.size, bool), np.zeros(batch.mask.size, np.float32)
    mask[slots] = keep
    weight[slots] = np.where(keep, np.repeat(weights, lengths), 0.0)
    return replace(batch, mask=mask.reshape(batch.mask.shape), weight=weight.reshape(batch.mask.shape))
