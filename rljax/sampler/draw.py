"""Drawing a token: the distribution a request asks for, and one number that picks from it.

Owns the sampling rule on the device: what is added to logits, which tokens are left out, the inverse-CDF draw, and what is
reported of the model's own distribution. Refuses to own what a request may ask for (rules.py) and when a token is drawn
(decode.py).

    logits --bias, mask, min_tokens--> / temperature --top_k--> --top_p--> --min_p--> renormalised --one number--> token

Each row is worked on alone, and a row that asks for nothing keeps the bits of its logits, so what one request asks for
changes no other. Without any such request the program of decode.py has no part of this but `draw`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from rljax.pytree import pytree

_BLOCK = 256  # vocabulary entries per block of the two-level draw


@pytree
class Rules:
    """What requests ask of the draw beyond a temperature, one entry per slot."""

    top_k: Int[Array, " b"]
    """Most likely tokens that are kept; 0 keeps all."""
    top_p: Float[Array, " b"]
    """Probability that the kept tokens come to; 1 keeps all."""
    min_p: Float[Array, " b"]
    """Least probability of a kept token, relative to the most likely one; 0 keeps all."""
    min_tokens: Int[Array, " b"]
    """Tokens before the first that may be an end token."""
    ignore_eos: Bool[Array, " b"]
    """Whether the engine's end tokens are tokens like any other."""
    stop_ids: Int[Array, "b e"]
    """End tokens of the request; -1 for none."""
    bias: Float[Array, "b v"] | None
    """Added to the logits, -inf for what must not be drawn; None when nobody asks."""


class Draw(NamedTuple):
    """A drawn token and its log-probability under the distribution it was drawn from (nats)."""

    token: Int[Array, " b"]
    logp: Float[Array, " b"]


class Likely(NamedTuple):
    """The model's own opinion at one position: temperature 1, nothing added or left out (nats)."""

    chosen: Float[Array, " b"]
    """Log-probability of the drawn token."""
    ids: Int[Array, "b n"]
    """The most likely tokens, most likely first."""
    logp: Float[Array, "b n"]
    """Their log-probabilities."""


def uniforms(draw_key: UInt32[Array, "b 2"], position: Int[Array, " b"]) -> Float[Array, " b"]:
    """Return one number in [0, 1) per slot, a function of its rollout's key and the position of the token to draw."""

    def one(key: Array, at: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), at))

    return jax.vmap(one)(draw_key, position)


def draw(logits: Float[Array, "b v"], temperature: Float[Array, " b"], uniform: Float[Array, " b"]) -> Draw:
    """Draw one token per row from softmax(logits / temperature) by inverting its cumulative distribution.

    One uniform number per row decides, so a row's token depends on nothing but its own logits and number. The
    distribution is summed in blocks; the block that holds the number is found first, then the token inside it: two
    short scans instead of one over the whole vocabulary. At temperature 0 the most likely token is taken, with
    probability 1 (log-probability 0).
    """
    rows, vocab = logits.shape
    greedy = temperature == 0
    scale = jnp.where(greedy, 1.0, temperature)[:, None]
    # Division by a positive number keeps the order, so the maximum may be taken first; scaled logits are never stored.
    top = jnp.max(logits, axis=1, keepdims=True) / scale
    blocks = jnp.pad(logits, ((0, 0), (0, -vocab % _BLOCK)), constant_values=-jnp.inf).reshape(rows, -1, _BLOCK)
    masses = jnp.exp(blocks / scale[:, None] - top[:, None]).sum(axis=2)
    reached = jnp.cumsum(masses, axis=1)
    total = reached[:, -1]
    target = uniform * total
    block = _first_above(reached, target, masses)
    before = jnp.take_along_axis(reached - masses, block[:, None], axis=1)
    inside = jnp.exp(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0] / scale - top)
    within = _first_above(jnp.cumsum(inside, axis=1), target - before[:, 0], inside)
    drawn = (block * _BLOCK + within).astype(jnp.int32)

    def take_likeliest() -> Int[Array, " b"]:
        return jnp.where(greedy, jnp.argmax(logits, axis=1), drawn).astype(jnp.int32)

    # A search of the whole vocabulary, which only a greedy row is worth.
    token = jax.lax.cond(jnp.any(greedy), take_likeliest, lambda: drawn)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=1) / scale
    return Draw(token, jnp.where(greedy, 0.0, (chosen - top)[:, 0] - jnp.log(total)))


def _first_above(reached: Float[Array, "b n"], target: Float[Array, " b"], mass: Float[Array, "b n"]) -> Int[Array, " b"]:
    """Return the first entry whose cumulative mass exceeds the target; never one without mass, whatever the rounding."""
    index = jnp.arange(reached.shape[1])
    last = jnp.max(jnp.where(mass > 0, index, 0), axis=1)
    above = (reached > target[:, None]) & (mass > 0)
    return jnp.minimum(jnp.min(jnp.where(above, index, reached.shape[1]), axis=1), last)


def end_ids(rules: Rules, stop_ids: Int[Array, " e"]) -> Int[Array, "b f"]:
    """Return the ids that end each slot's completion, -1 where there is none."""
    shared = jnp.where(rules.ignore_eos[:, None], -1, stop_ids[None, :])
    return jnp.concatenate([shared, rules.stop_ids], axis=1)


def reshaped(
    logits: Float[Array, "b v"],
    temperature: Float[Array, " b"],
    count: Int[Array, " b"],
    rules: Rules,
    ends: Int[Array, "b f"],
) -> Float[Array, "b v"]:
    """Return logits whose tempered softmax is the distribution that the rules ask for: -inf for what is left out.

    Args:
        logits: Of the model.
        temperature: Per slot; at 0 only bias and masks matter.
        count: Tokens drawn so far.
        rules: What is asked.
        ends: Ids that end the completion, from `end_ids`.
    """
    cuts = (rules.top_k > 0) | (rules.top_p < 1) | (rules.min_p > 0)
    early = count < rules.min_tokens
    biased = jnp.zeros_like(cuts) if rules.bias is None else jnp.any(rules.bias != 0, axis=1)
    asks = cuts | early | biased

    def reshape() -> Float[Array, "b v"]:
        allowed = logits if rules.bias is None else logits + rules.bias
        # An id out of range is dropped; -1 would count from the end.
        forbidden = jnp.where(early[:, None] & (ends >= 0), ends, logits.shape[1])
        rows = jnp.arange(len(logits))[:, None]
        allowed = allowed.at[rows, forbidden].set(-jnp.inf, mode="drop")
        kept = jax.lax.cond(jnp.any(cuts), lambda: _truncated(allowed, temperature, rules), lambda: allowed)
        return jnp.where(asks[:, None], kept, logits)

    # Also a barrier: `draw` then reads logits from memory, as it does without rules, and rounds alike.
    return jax.lax.cond(jnp.any(asks), reshape, lambda: logits)


def _truncated(logits: Float[Array, "b v"], temperature: Float[Array, " b"], rules: Rules) -> Float[Array, "b v"]:
    """Leave out what top_k, then top_p, then min_p leave out; at least the most likely token stays."""
    scaled = logits / jnp.where(temperature == 0, 1.0, temperature)[:, None]
    top = jnp.max(scaled, axis=1, keepdims=True)
    order = _ordered(scaled)
    least = _least_kept(order, jnp.ones_like(scaled), rules.top_k.astype(jnp.float32), rules.top_k > 0)
    kept = order >= least[:, None]
    weight = jnp.where(kept, jnp.exp(scaled - top), 0.0)
    least = _least_kept(order, weight, rules.top_p * weight.sum(axis=1), rules.top_p < 1)
    kept &= order >= least[:, None]
    kept &= scaled - top >= jnp.log(rules.min_p)[:, None]
    return jnp.where(kept, logits, -jnp.inf)


def _least_kept(
    order: UInt32[Array, "b v"], weight: Float[Array, "b v"], goal: Float[Array, " b"], asked: Bool[Array, " b"]
) -> UInt32[Array, " b"]:
    """Return the largest number such that the entries from it on weigh at least the goal; 0 for rows that do not ask.

    It is found bit by bit, in 32 sweeps, and exact: a sum of floats in a fixed order never grows when terms become 0, so
    neither do the sums here. Equal entries are on the same side.
    """

    def bit(index: Int[Array, ""], least: UInt32[Array, " b"]) -> UInt32[Array, " b"]:
        tried = least | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        reached = jnp.where(order >= tried[:, None], weight, 0.0).sum(axis=1) >= goal
        return jnp.where(reached, tried, least)

    def search() -> UInt32[Array, " b"]:
        least = jax.lax.fori_loop(0, 32, bit, jnp.zeros(len(order), jnp.uint32))
        # A goal that rounds to 0 is reached by no entries at all.
        return jnp.where(asked, jnp.minimum(least, jnp.max(order, axis=1)), 0)

    return jax.lax.cond(jnp.any(asked), search, lambda: jnp.zeros(len(order), jnp.uint32))


def _ordered(values: Float[Array, "b v"]) -> UInt32[Array, "b v"]:
    """Return whole numbers in the order of the values: equal for equal values, of which 0 and -0 are two."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def likely(logits: Float[Array, "b v"], token: Int[Array, " b"], count: int) -> Likely:
    """Return the log-probabilities of the drawn token and of the most likely ones under softmax(logits)."""
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    values, ids = jax.lax.top_k(logits, count)
    return Likely((jnp.take_along_axis(logits, token[:, None], axis=1) - total)[:, 0], ids, values - total)
