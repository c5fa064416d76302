"""The routers' part of an optimizer step: which tokens count, what is added to the loss, and what is reported.

Owns the counts over the whole step that the losses are divided by. Refuses to own the formulas (models/moe.py) and the
forward pass.

Every token of every packed rollout counts once, those that the model wrote and those it read; a prompt that is stored
once for several rollouts counts for each of them, so packing changes nothing. Padding counts never.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.algorithm_config import AlgorithmConfig
from rljax.models.arch import Arch
from rljax.models.moe import RouterSums, balance_loss, max_load, z_loss


def token_copies(segments: Int[Array, "b s"], parents: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Return how many rollouts each position of packed rows is a token of: 0 for padding, several in a shared prompt."""

    def of_row(segment: Int[Array, " s"], parent: Int[Array, " s"]) -> Int[Array, " s"]:
        starts = segment != jnp.concatenate([jnp.zeros(1, segment.dtype), segment[:-1]])
        continued = jnp.zeros(len(segment) + 1, jnp.int32).at[parent].add(starts.astype(jnp.int32))
        return jnp.where(segment > 0, jnp.maximum(continued[segment], 1), 0)

    return jax.vmap(of_row)(segments, parents)


def count_tokens(segments: Int[Array, "m r s"], parents: Int[Array, "m r s"]) -> Float[Array, ""]:
    """Return the number of tokens of all rollouts of a batch, the denominator of the routers' losses; at least 1."""
    return jnp.maximum(jnp.sum(jax.vmap(token_copies)(segments, parents)), 1).astype(jnp.float32)


def no_sums(arch: Arch) -> RouterSums | None:
    """Return the sums over no token; None for a model without experts."""
    if arch.experts is None or arch.choices_per_token is None:
        return None
    layers = arch.choices_per_token[0]
    per_expert = jnp.zeros((layers, arch.experts.count))
    return RouterSums(jnp.zeros(layers), per_expert, per_expert)


def router_loss(
    sums: RouterSums, tokens: Float[Array, ""], chosen: Float[Array, "l x"] | None, config: AlgorithmConfig
) -> Float[Array, ""]:
    """Return what a micro-batch adds to the loss: its parts of z-loss and balance loss, times their weights.

    Args:
        sums: Of the micro-batch.
        tokens: Tokens of the whole step, from `count_tokens`.
        chosen: Choices of each expert in the whole step; None when `router_balance_loss_coef` is 0.
        config: The weights.
    """
    loss = jnp.zeros(())
    if config.router_z_loss_coef > 0:
        loss = loss + config.router_z_loss_coef * z_loss(sums.z, tokens)
    if chosen is not None:
        loss = loss + config.router_balance_loss_coef * balance_loss(chosen, sums.probability, tokens)
    return loss


def router_metrics(sums: RouterSums | None, tokens: Float[Array, ""]) -> dict[str, Float[Array, ""]]:
    """Return what is reported of a step, from the sums over all of its micro-batches; nothing without experts."""
    if sums is None:
        return {}
    return {
        "z_loss": z_loss(sums.z, tokens),
        "balance_loss": balance_loss(sums.chosen, sums.probability, tokens),
        "max_load": max_load(sums.chosen),
    }
