"""Grouped-query attention.

Owns the product of queries and keys, its masks, bounds and the softmax. Refuses to own projections, positions and the
cache's bookkeeping. `attend` is the form without conditions, which every backend can run; `attend_in_order` leaves out what
rows in order make needless, and `attend_part` with `join_parts` works on pieces of the keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Num

from rljax.models.int8 import kept_small

_MASKED = -1e30  # finite, so that a row with nothing to attend to stays free of NaN
_TOGETHER = 128  # queries, so that their scores stay in a core's cache
_MOST_PARTS = 16  # each is written out in the program


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What tells the attention of one kind of layer from that of another; fixed at compile time.

    Example:
        AttentionOptions(scale=0.125, window=4096, soft_cap=50.0)
    """

    scale: float
    """Factor of the scores."""
    window: int | None = None
    """Latest positions, its own included, that a query sees (tokens); None for all."""
    soft_cap: float | None = None
    """Bound of the scores: cap * tanh(score / cap)."""


class Scales(NamedTuple):
    """What the codes of keys and values are multiplied with, where they are 8-bit integers: a factor per position and head."""

    key: Float32[Array, "*b t"]
    value: Float32[Array, "*b t"]


class Part(NamedTuple):
    """Attention to some of the keys a query may see, not yet divided by the sum of all weights."""

    out: Float[Array, "n *r c"]
    """Sum of the values, each weighted with exp(score - top)."""
    top: Float[Array, "n *r"]
    """Largest score."""
    total: Float[Array, "n *r"]
    """Sum of exp(score - top)."""


def position_mask(queries: Int[Array, "*b s"], keys: Int[Array, "*a t"], window: int | None = None) -> Bool[Array, "*b s t"]:
    """Return which keys each query may see by position: not later ones, and of those the `window` latest."""
    queries, keys = queries[..., :, None], keys[..., None, :]
    seen = queries >= keys
    return seen if window is None else seen & (queries - keys < window)


def segment_mask(
    positions: Int[Array, "b s"],
    segments: Int[Array, "b s"],
    parents: Int[Array, "b s"] | None = None,
    window: int | None = None,
) -> Bool[Array, "b s s"]:
    """Return which keys each query may see: of its own segment or that segment's parent, by position and by place in the row.

    Segment 0 is padding and sees nothing; parent 0 is no parent. A parent stands before those that continue it, and nothing
    after a token in its row is ever seen.
    """
    own = segments[:, :, None] == segments[:, None, :]
    if parents is not None:
        own |= (parents[:, :, None] == segments[:, None, :]) & (parents > 0)[:, :, None]
    places = jnp.arange(positions.shape[1])[None]
    return own & (segments > 0)[:, :, None] & position_mask(positions, positions, window) & position_mask(places, places)


def attend(
    query: Float[Array, "b s k m c"],
    key: Num[Array, "b k t c"],
    value: Num[Array, "b k t c"],
    mask: Bool[Array, "b s t"],
    options: AttentionOptions,
    sinks: Float[Array, "k m"] | None = None,
    scales: Scales | None = None,
) -> Float[Array, "b s k m c"]:
    """Attend from each query to the keys its mask shows; the mask knows the options' window already.

    softmax(scale q k) v, the softmax in float32 (arXiv:1706.03762 eq. 1, grouped as in arXiv:2305.13245), scores bounded
    by the soft cap if there is one. `sinks` holds one more score per query head, which takes its share of the softmax
    and has no value (arXiv:2309.17453). A query that may see nothing returns something finite that is never used.
    Products are made in the type of the keys, which a cache may hold in a wider type than the queries; with codes and
    `scales`, in the type of the queries.
    """
    b, s, k, m, c = query.shape
    # Queries of one key-value head become rows of one product.
    rows, key, value = _factors(jnp.moveaxis(query, 1, 3).reshape(b, k, m * s, c), key, value, scales)
    products = jnp.einsum("bknc,bktc->bknt", rows, key, preferred_element_type=jnp.float32)
    if scales is not None:
        products = products * scales.key[:, :, None]
    scores = _scores(products, jnp.tile(mask, (1, m, 1))[:, None], options)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = _softmax_with_sink(scores, jnp.repeat(sinks.astype(jnp.float32), s, axis=1)[None, :, :, None])
    if scales is not None:
        weights = weights * scales.value[:, :, None]
    out = jnp.einsum("bknt,bktc->bknc", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return jnp.moveaxis(out.reshape(b, k, m, s, c), 3, 1).astype(query.dtype)


def attend_in_order(
    query: Float[Array, "b s k m c"],
    key: Num[Array, "b k s c"],
    value: Num[Array, "b k s c"],
    mask: Bool[Array, "b s s"],
    options: AttentionOptions,
    sinks: Float[Array, "k m"] | None = None,
    scales: Scales | None = None,
) -> Float[Array, "b s k m c"]:
    """Attend as `attend` does, where no query sees a later place of its row: a few queries at a time, to the keys up to them.

    What is left out is about half of the work. Products of 128 queries at a time are also faster for what they do,
    since their scores need not go through memory.
    """

    def part(start: int, end: int) -> Array:
        factors = None if scales is None else Scales(scales.key[:, :, :end], scales.value[:, :, :end])
        keys, values = key[:, :, :end], value[:, :, :end]
        return attend(query[:, start:end], keys, values, mask[:, start:end, :end], options, sinks, factors)

    return jnp.concatenate([part(start, end) for start, end in queries_together(query.shape[1])], axis=1)


def queries_together(length: int) -> list[tuple[int, int]]:
    """Return first and last place, exclusive, of the queries of a row that `attend_in_order` works on at a time."""
    together = max(_TOGETHER, -(-length // _MOST_PARTS))
    return [(start, min(start + together, length)) for start in range(0, length, together)]


def attend_part(
    query: Float[Array, "n k *g m c"],
    key: Num[Array, "n k c t"],
    value: Num[Array, "n k t c"],
    visible: Bool[Array, "n g t"],
    options: AttentionOptions,
    scales: Scales | None = None,
) -> Part:
    """Attend from the queries of each row to the few keys of the row, and leave the division to `join_parts`.

    Args:
        query: Queries, of one reader of the row's keys, or of several (`g`).
        key: Keys, positions last.
        value: Values.
        visible: Which keys each reader sees; it knows the options' window already.
        options: Scale and bound of the scores.
        scales: Those of keys and values that are codes.
    """
    n, k, *g, m, c = query.shape
    rows, key, value = _factors(query.reshape(n, k, -1, c), key, value, scales)
    products = jnp.einsum("nkrc,nkct->nkrt", rows, key, preferred_element_type=jnp.float32)
    if scales is not None:
        products = products * scales.key[:, :, None]
    scores = _scores(products, jnp.repeat(visible, m, axis=1)[:, None], options)
    top = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - top[..., None])
    shares = weights if scales is None else weights * scales.value[:, :, None]
    out = jnp.einsum("nkrt,nktc->nkrc", shares.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return Part(out.reshape(n, k, *g, m, c), top.reshape(n, k, *g, m), jnp.sum(weights, axis=-1).reshape(n, k, *g, m))


def join_parts(
    parts: Sequence[Part], table: Int[Array, "b q"], sinks: Float[Array, "k m"] | None = None
) -> Float[Array, "b k m c"]:
    """Return each row's attention over the parts that its line of the table names, in that order.

    softmax over a union of keys from softmaxes over its pieces (arXiv:1805.02867 eq. 4, as in flash-decoding). The table
    counts through the parts; the number after the last names an empty part. `sinks` are those of `attend`.
    """
    k, m = parts[0].top.shape[1:]
    ends = Part(jnp.zeros((1, k, m, parts[0].out.shape[-1])), jnp.full((1, k, m), _MASKED), jnp.zeros((1, k, m)))
    out, top, total = (jnp.concatenate(pieces) for pieces in zip(*parts, ends, strict=True))
    tops = top[table]
    highest, share = jnp.max(tops, axis=1, keepdims=True), 0.0
    if sinks is not None:
        sink = sinks.astype(jnp.float32)[None, None]
        highest = jnp.maximum(highest, sink)
        share = jnp.exp(sink - highest)[:, 0]
    scale = jnp.exp(tops - highest)
    weights = jnp.sum(total[table] * scale, axis=1) + share
    joined = jnp.sum(out[table] * scale[..., None], axis=1)
    return joined / jnp.maximum(weights, 1e-30)[..., None]  # an idle slot has no part at all


def soft_cap(x: Float[Array, "*b"], cap: float) -> Float[Array, "*b"]:
    """Return cap * tanh(x / cap) (arXiv:2408.00118 section 2)."""
    return cap * jnp.tanh(x / cap)


def _factors(
    rows: Float[Array, "b k n c"], key: Num[Array, "b k *x"], value: Num[Array, "b k *y"], scales: Scales | None
) -> tuple[Float[Array, "b k n c"], Float[Array, "b k *x"], Float[Array, "b k *y"]]:
    """Return queries, keys and values in the type of their products; codes as they are, for the scales come after the sum.

    One scale belongs to one score, or to one weight, so neither keys nor values are ever multiplied with theirs.
    """
    if scales is None:
        return rows.astype(key.dtype), key, value
    # Else the codes of prompts, which no decode step changes, would become arrays before the loop, and be carried through it.
    (key, value), rows = kept_small((key, value), rows)
    return rows, key.astype(rows.dtype), value.astype(rows.dtype)


def _scores(
    products: Float[Array, "b k n t"], seen: Bool[Array, "b 1 n t"], options: AttentionOptions
) -> Float[Array, "b k n t"]:
    """Return the scores of the products of queries and keys; the lowest where a key is not seen."""
    scores = products * options.scale
    if options.soft_cap is not None:
        scores = soft_cap(scores, options.soft_cap)
    return jnp.where(seen, scores, _MASKED)


def _softmax_with_sink(scores: Float[Array, "b k n t"], sink: Float[Array, "1 k n 1"]) -> Float[Array, "b k n t"]:
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), sink))
    weights = jnp.exp(scores - top)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sink - top))
