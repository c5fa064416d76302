"""The compiled programs of the sampler: fill the cache from prompts, extend it, and decode a chunk of tokens in all slots.

Owns what runs on the device. Refuses to own the queue and the choice of what runs next (engine.py).

A prompt's last token is not prefilled: it is the first token the decode loop feeds, so that every draw, the first one
included, is made by the same code.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

from rljax.algorithms.logprobs import token_logprobs
from rljax.mesh import DATA_AXES
from rljax.models.arch import Arch
from rljax.models.block import KeyValue
from rljax.models.decoder import logits, merge
from rljax.models.moe import Routing
from rljax.pytree import Params, pytree
from rljax.sampler.cache import Form, Progress, Report, Slots, stored_form
from rljax.sampler.draw import Rules, draw, end_ids, likely, reshaped, uniforms
from rljax.sampler.paged import Pieces, Tables
from rljax.sampler.pages import PageTable

_SCORED_POSITIONS = 64  # positions of a prompt whose logits exist at the same time
_ROWS = PartitionSpec(DATA_AXES)


@pytree
class Prompts:
    """Prompts to compute, as rows, and the blocks they go to."""

    tokens: Int[Array, "a s"]
    """Prompt tokens but the last, padded at the end."""
    lengths: Int[Array, " a"]
    """How many of them are real."""
    blocks: Int[Array, "a i"]
    """Blocks of the prompt pool (counted within the row's data shard) that receive them; -1 for none."""


@pytree
class Starts:
    """New rollouts, one per slot that starts."""

    starts: Bool[Array, " b"]
    """Which slots start; the others are left alone."""
    token: Int[Array, " b"]
    """Last token of the prompt."""
    position: Int[Array, " b"]
    """Position of that token."""
    origin: Int[Array, " b"]
    """Position of the first token in the slot's own blocks."""
    limit: Int[Array, " b"]
    """How many tokens may be drawn."""
    draw_key: UInt32[Array, "b 2"]
    """Random key of the rollout."""
    temperature: Float[Array, " b"]
    """Sampling temperature."""


def fill(
    arch: Arch, mesh: Mesh, form: Form, params: Params, slots: Slots, new: Prompts
) -> tuple[Slots, UInt[Array, "a s l e"] | None]:
    """Compute the prompts' keys and values and store them in their blocks; return the experts of their tokens, too.

    The experts are None where `slots` has no room for such records. Tokens see keys and values as they are stored, as those
    of a continued prompt and of decode steps do.
    """
    record, dtype = slots.progress.out_choices is not None, params["embed"].dtype
    rows = (new.tokens, *_places(new.tokens, new.lengths))
    out = merge(arch, params).forward(*rows, dtype=dtype, record_routing=record, stored=stored_form(slots.cache))
    assert not isinstance(out.seen, KeyValue), "the sampler's parameters are in the separate layout"
    store = jax.jit(partial(form.with_prompts, mesh))  # traced once rather than once per layer
    cache = tuple(store(layer, prompts, new.blocks) for layer, prompts in zip(slots.cache, out.seen, strict=True))
    return Slots(cache, slots.progress), _choices(arch, out.routing)


def _places(tokens: Int[Array, "a s"], lengths: Int[Array, " a"]) -> tuple[Int[Array, "a s"], Int[Array, "a s"]]:
    """Return the position of every token of whole prompts, and its segment: 1, or 0 in the padding."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return positions, (positions < lengths[:, None]).astype(jnp.int32)


def _choices(arch: Arch, routing: Routing | None) -> UInt[Array, "a s l e"] | None:
    """Return the experts of each token in the type they are kept in."""
    if routing is None:
        return None
    assert arch.experts is not None, "routing is that of experts"
    return jnp.moveaxis(routing.choices, 0, 2).astype(arch.experts.choice_dtype)


def score_prompts(
    arch: Arch,
    stored: Callable[[KeyValue], KeyValue] | None,
    params: Params,
    tokens: Int[Array, "a s"],
    lengths: Int[Array, " a"],
) -> Float[Array, "a s"]:
    """Return each token's log-probability given those before it, under the model itself (nats); NaN for a row's first.

    Entries beyond a row's length mean nothing. `stored` is the form of the cache: see `cache.stored_form`.
    """
    decoder, rows = merge(arch, params), (tokens, *_places(tokens, lengths))
    logp, _ = token_logprobs(
        decoder.forward(*rows, dtype=params["embed"].dtype, stored=stored).hidden[:, :-1],
        decoder.head_table,
        tokens[:, 1:],
        temperature=1.0,
        valid_vocab=arch.valid_vocab,
        soft_cap=arch.final_soft_cap,
        chunk=_SCORED_POSITIONS,
        length=jnp.max(lengths) - 1,
    )
    return jnp.pad(logp, ((0, 0), (1, 0)), constant_values=jnp.nan)


def extend(
    arch: Arch, mesh: Mesh, form: Form, params: Params, slots: Slots, new: Pieces
) -> tuple[Slots, UInt[Array, "a s l e"] | None]:
    """Compute the keys and values of tokens that continue what the cache holds, as `fill` does those of whole prompts."""
    positions = new.first[:, None] + jnp.arange(new.tokens.shape[1])[None]
    attention, dtype = form.continued(arch, mesh, new), params["embed"].dtype
    decoder, record = merge(arch, params), slots.progress.out_choices is not None
    _, cache, routing = decoder.continued(new.tokens, positions, attention, slots.cache, dtype=dtype, record_routing=record)
    return Slots(cache, slots.progress), _choices(arch, routing)


def start(progress: Progress, new: Starts) -> Progress:
    """Begin new rollouts whose prompts are stored."""
    fresh = {"token": new.token, "position": new.position, "origin": new.origin, "remaining": new.limit}
    fresh |= {"temperature": new.temperature, "count": jnp.zeros_like(progress.count)}
    changed = {name: jnp.where(new.starts, value, getattr(progress, name)) for name, value in fresh.items()}
    changed["draw_key"] = jnp.where(new.starts[:, None], new.draw_key, progress.draw_key)
    return dataclasses.replace(progress, **changed)


def decode_chunk(
    arch: Arch,
    mesh: Mesh,
    form: Form,
    steps: int,
    params: Params,
    slots: Slots,
    tables: Tables | PageTable,
    chosen: Int[Array, " r"] | None,
    stop_ids: Int[Array, " e"],
    rules: Rules | None,
) -> Slots:
    """Draw up to `steps` tokens in every slot that has any left; stop early when none has.

    Without rules all slots draw from their tempered distributions until a stop id. Where slots are chosen, one per row of the
    tables, counted within their data shard and none where the number is out of range, only those are decoded: the others must
    have nothing left to draw.
    """
    if chosen is not None:
        rows = jax.shard_map(_taken, mesh=mesh, in_specs=_ROWS, out_specs=_ROWS)
        few = Slots(slots.cache, rows(slots.progress, chosen))
        after = decode_chunk(
            arch, mesh, form, steps, params, few, tables, None, stop_ids, None if rules is None else rows(rules, chosen)
        )
        put = jax.shard_map(_put, mesh=mesh, in_specs=_ROWS, out_specs=_ROWS)
        return Slots(after.cache, put(slots.progress, after.progress, chosen))

    def unfinished(carry: tuple[Array, Slots]) -> Array:
        step, state = carry
        return (step < steps) & jnp.any(state.progress.remaining > 0)

    def advance(carry: tuple[Array, Slots]) -> tuple[Array, Slots]:
        step, state = carry
        return step + 1, _decode_step(arch, mesh, form, params, state, tables, stop_ids, rules)

    return jax.lax.while_loop(unfinished, advance, (jnp.int32(0), slots))[1]


def _taken(slots: Any, chosen: Int[Array, " r"]) -> Any:
    """Return the entries of the chosen slots, on one data shard; zeros, that is nothing to draw, where there is no slot."""
    return jax.tree.map(lambda leaf: leaf.at[chosen].get(mode="fill", fill_value=0), slots)


def _put(slots: Any, rows: Any, chosen: Int[Array, " r"]) -> Any:
    """Return the slots with the entries of the chosen ones replaced."""
    return jax.tree.map(lambda leaf, row: leaf.at[chosen].set(row, mode="drop"), slots, rows)


def _decode_step(
    arch: Arch,
    mesh: Mesh,
    form: Form,
    params: Params,
    state: Slots,
    tables: Tables | PageTable,
    stop_ids: Int[Array, " e"],
    rules: Rules | None,
) -> Slots:
    """Feed each slot's token and draw the next one."""
    decoder, dtype, now = merge(arch, params), params["embed"].dtype, state.progress
    active = now.remaining > 0
    attention = form.decode(arch, mesh, tables, now.position, now.origin, active)
    fed, record = (now.token[:, None], now.position[:, None]), now.out_choices is not None
    hidden, cache, routing = decoder.continued(*fed, attention, state.cache, dtype=dtype, record_routing=record)
    scores = logits(decoder, hidden[:, 0])
    ends, allowed = stop_ids[None, :], scores
    if rules is not None:
        ends = end_ids(rules, stop_ids)
        allowed = reshaped(scores, now.temperature, now.count, rules, ends)
    drawn = draw(allowed, now.temperature, uniforms(now.draw_key, now.position + 1))
    ended = jnp.any(drawn.token[:, None] == ends, axis=1)
    written = jnp.arange(now.out_tokens.shape[1])[None, :] == jnp.where(active, now.count, -1)[:, None]
    progress = dataclasses.replace(
        now,
        token=jnp.where(active, drawn.token, now.token),
        position=jnp.where(active, now.position + 1, now.position),
        remaining=jnp.where(active & ~ended, now.remaining - 1, 0),
        out_tokens=jnp.where(written, drawn.token[:, None], now.out_tokens),
        out_logp=jnp.where(written, drawn.logp[:, None], now.out_logp),
        count=jnp.where(active, now.count + 1, now.count),
        out_choices=_with_choices(now, active, _choices(arch, routing)),
        report=None if now.report is None else _reported(now.report, written, scores, drawn.token),
    )
    return Slots(cache, progress)


def _with_choices(now: Progress, active: Bool[Array, " b"], choices: UInt[Array, "b 1 l e"] | None) -> Array | None:
    """Record the experts of the token that each active slot was fed."""
    if now.out_choices is None or choices is None:
        return None

    def write(record: Array, at: Array, fed: Array) -> Array:
        return record.at[at].set(fed[0], mode="drop")

    # In place, unlike a selection over the whole record, which is large.
    return jax.vmap(write)(now.out_choices, jnp.where(active, now.count, now.out_choices.shape[1]), choices)


def _reported(report: Report, written: Bool[Array, "b o"], scores: Float[Array, "b v"], token: Int[Array, " b"]) -> Report:
    """Write what the model itself thinks of the position into the report."""
    found = likely(scores, token, report.ids.shape[2])
    return Report(
        jnp.where(written, found.chosen[:, None], report.chosen),
        jnp.where(written[..., None], found.ids[:, None], report.ids),
        jnp.where(written[..., None], found.logp[:, None], report.logp),
    )
