"""One GRPO step on one page: group advantages, whole logits, the loss as the paper writes it, autodiff, AdamW.

Rollouts are rows of one padded array; what follows a rollout is never seen by it. Nothing is packed, chunked or split
into micro-batches. The arithmetic of the loss is that of `policy_loss.py`, in arrays.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rljax.config import Config
from rljax.models.arch import Arch
from rljax.pytree import Params
from rljax.records import Group, Provenance
from tests.reference import decoder


class Rows(NamedTuple):
    """Rollouts as rows. The last four say what is known of each token but the first, which nothing predicts."""

    tokens: Any
    advantage: Any
    by_model: Any
    behavior: Any


def rows_of(groups: Sequence[Group]) -> Rows:
    """Pad the rollouts to one length."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    width = max(len(rollout.tokens) for rollout in rollouts)
    tokens = np.zeros((len(rollouts), width), np.int32)
    by_model, behavior = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, np.float32)
    for row, rollout in enumerate(rollouts):
        tokens[row, : len(rollout.tokens)] = rollout.tokens
        by_model[row, : len(rollout.tokens)] = rollout.provenance == Provenance.MODEL
        behavior[row, : len(rollout.tokens)] = rollout.logp_behavior
    advantage = []
    for group in groups:
        rewards = np.array([rollout.score.value for rollout in group.rollouts])
        spread = rewards.std(ddof=1)
        advantage += list((rewards - rewards.mean()) / spread if spread else np.zeros(len(rewards)))
    return Rows(tokens, np.array(advantage, np.float32), by_model[:, 1:], behavior[:, 1:])


def loss(logp: Any, rows: Rows, config: Config, prox: Any = None, ref: Any = None) -> Any:
    """Return the loss; all log-probabilities are shaped like `rows.behavior`, and `prox` None is the current ones."""
    algorithm, mask = config.algorithm, rows.by_model
    prox = jax.lax.stop_gradient(logp) if prox is None else prox
    advantage = rows.advantage[:, None]
    ratio = jnp.exp(logp - prox)
    clipped = jnp.clip(ratio, 1 - algorithm.epsilon, 1 + algorithm.epsilon_high)
    correction = jnp.minimum(jnp.exp(prox - rows.behavior), algorithm.rollout_is_threshold)
    per_token = -correction * jnp.minimum(ratio * advantage, clipped * advantage)
    if algorithm.beta > 0:
        per_token += algorithm.beta * (jnp.exp(ref - logp) - (ref - logp) - 1)
    sums, lengths = jnp.where(mask, per_token, 0).sum(1), mask.sum(1)
    if algorithm.loss_agg_mode == "token-mean":
        return sums.sum() / lengths.sum()
    if algorithm.loss_agg_mode == "seq-mean-token-sum":
        return sums.mean()
    if algorithm.loss_agg_mode == "seq-mean-token-mean":
        return (sums / lengths).mean()
    return (sums / config.sampler.max_completion_length).mean()


@partial(jax.jit, static_argnums=0)
def logprobs(arch: Arch, params: Params, tokens: Any, temperature: float) -> Any:
    """Return the log-probability of each token but the first, from whole logits."""
    return decoder.logprobs(arch, params, tokens, temperature, jnp)


@partial(jax.jit, static_argnums=0)
def pull_back(arch: Arch, params: Params, tokens: Any, temperature: float, slope: Any) -> Params:
    """Return the gradient with respect to the parameters, given that with respect to the log-probabilities."""
    return jax.vjp(lambda params: decoder.logprobs(arch, params, tokens, temperature, jnp), params)[1](slope)[0]


def step(
    arch: Arch, params: Params, rows: Rows, config: Config, prox: Any = None, ref: Any = None
) -> tuple[Any, Params, Params]:
    """Return the loss, its gradient, and the parameters after AdamW's first update without weight decay and clipping."""
    temperature = config.sampler.temperature
    logp = logprobs(arch, params, rows.tokens, temperature)
    value, slope = jax.value_and_grad(loss)(logp, rows, config, prox, ref)
    grads = pull_back(arch, params, rows.tokens, temperature, slope)
    # After one update the corrected moments are the gradient and its square.
    rate, eps = config.optimizer.learning_rate, config.optimizer.eps
    return value, grads, jax.tree.map(lambda leaf, grad: leaf - rate * grad / (jnp.abs(grad) + eps), params, grads)
