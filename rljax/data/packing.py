"""Packing: rollouts of any length into micro-batches of full rows, the prompt of a group stored once.

Owns the layout of a training batch: which rollout stands in which row, positions, segments, the label shift, the loss
mask and the padding. Refuses to own advantages, weights and devices; it runs on the host, in numpy.

    row      tokens    p p p A A e | B B B e | q q C C e |  0     p q: prompts, A B C: model tokens, e: end tokens
             positions 0 1 2 3 4 5 | 3 4 5 6 | 0 1 2 3 4 |  0     A and B continue the same prompt p
             segments  1 1 1 2 2 2 | 3 3 3 3 | 4 4 4 4 4 |  0
             parents   0 0 0 1 1 1 | 1 1 1 1 | 0 0 0 0 0 |  0     A and B see p, not each other
    scored   index     2 3 4  2 6 7 8  11 12 13   0 ...           the hidden state at `index` predicts `target`
             target    A A e  B B B e  C  C  e    0 ...           shifted here, once; no one shifts again
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from rljax.records import Provenance, Rollout


@dataclass(frozen=True, slots=True)
class PackShape:
    """The static shape of packed batches: what the compiled programs depend on.

    Example:
        PackShape(micro_batches=4, rows=8, length=256)
    """

    micro_batches: int
    """Most micro-batches one optimizer step can need."""
    rows: int
    """Rows of a micro-batch, over all devices."""
    length: int
    """Tokens of a row."""
    choices: tuple[int, int] | None = None
    """Layers with experts, and choices in each of them, of the records to pack (`algorithm.routing_replay`); None for none."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The packed arrays of one optimizer step, on the host.

    Dims: `m` micro-batches, `r` rows of a micro-batch, `s` positions of a row, `j` scored tokens of a row (as many
    slots as positions, so any mix of rollouts fits). Micro-batches from `num_micro` on, rows without rollouts and slots
    without a scored token are zeros with `mask` False; `segments` 0 is padding.

    Example:
        Batch(tokens=np.zeros((4, 8, 256), np.int32), ..., scored=np.array([180, 120, 0, 0], np.int32), num_micro=2, ...)
    """

    tokens: Int[np.ndarray, "m r s"]
    """Token ids, int32."""
    positions: Int[np.ndarray, "m r s"]
    """Position of each token in its rollout, int32."""
    segments: Int[np.ndarray, "m r s"]
    """Stretch of the row that a token belongs to, from 1: a rollout, a shared prompt, or what follows one; 0 is padding."""
    parents: Int[np.ndarray, "m r s"]
    """Segment of the shared prompt that a token also sees; 0 where its own segment is all; int32."""
    score_index: Int[np.ndarray, "m r j"]
    """Position in the row whose hidden state predicts the scored token, int32; filler slots point at 0."""
    targets: Int[np.ndarray, "m r j"]
    """Id of the scored token, int32."""
    mask: Bool[np.ndarray, "m r j"]
    """Whether the slot holds a scored token."""
    logp_behavior: Float[np.ndarray, "m r j"]
    """Log-probability it was sampled with, float32, nats."""
    advantage: Float[np.ndarray, "m r j"]
    """Advantage of its rollout, float32."""
    weight: Float[np.ndarray, "m r j"]
    """Share of the token in the loss, float32; the denominator is in it."""
    choices: Int[np.ndarray, "m r s l e"] | None
    """Experts each token went to in the sampler, per layer with experts, int16; -1 where nothing was recorded, as in padding.
    None unless records are packed."""
    rollout: Int[np.ndarray, "m r j"]
    """Index of its rollout in the list that was packed, int32; -1 in filler slots."""
    scored: Int[np.ndarray, " m"]
    """Most scored tokens in any row of the micro-batch, int32: slots from there on are filler in all of its rows."""
    num_micro: int
    """Micro-batches that hold rollouts."""
    num_rollouts: int
    """Rollouts packed."""
    padding_fraction: float
    """Share of the positions of the first `num_micro` micro-batches that hold no token; 0 when there are none."""
    skipped_fraction: float
    """Share of the optimizer step's loss tokens that were not packed because no gradient comes from them."""


def pack_shape(
    *, pack_length: int, longest_rollout: int, num_rollouts: int, rows: int, choices: tuple[int, int] | None = None
) -> PackShape:
    """Return the shape into which any `num_rollouts` rollouts of at most `longest_rollout` tokens fit.

    First-fit opens a row only when no row has room, so every earlier row holds at least
    pack_length // longest_rollout rollouts. `rows` is micro_batch_size_per_device x the devices that split the batch.
    Raises ValueError when a rollout may be longer than a row.
    """
    if longest_rollout > pack_length:
        raise ValueError(
            f"train.pack_length ({pack_length}) is shorter than the longest rollout ({longest_rollout} tokens); "
            "raise it, or lower sampler.max_prompt_length or sampler.max_completion_length"
        )
    worst_rows = -(-num_rollouts // (pack_length // longest_rollout))
    return PackShape(micro_batches=max(1, -(-worst_rows // rows)), rows=rows, length=pack_length, choices=choices)


def loss_tokens(rollout: Rollout, *, mask_truncated: bool) -> Bool[np.ndarray, " n"]:
    """Return which tokens of a rollout enter the loss: those the model wrote, by provenance.

    With `mask_truncated`, a rollout cut by the length limit has none; it then counts in no denominator either.
    """
    if mask_truncated and rollout.finish_reason == "length":
        return np.zeros(len(rollout.tokens), bool)
    return rollout.mask


def loss_lengths(rollouts: Sequence[Rollout], used: Bool[np.ndarray, " n"], *, mask_truncated: bool) -> Int[np.ndarray, " n"]:
    """Return the number of loss tokens of each rollout, 0 where `used` is False; denominators are made from these."""
    counts = [
        int(loss_tokens(r, mask_truncated=mask_truncated).sum()) if use else 0 for r, use in zip(rollouts, used, strict=True)
    ]
    return np.array(counts, np.int64)


def length_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return mean, min and max completion length (tokens) and the share of truncated rollouts.

    Counts what the model wrote, whatever the loss leaves out. Empty without rollouts.
    """
    if not rollouts:
        return {}
    lengths = [rollout.completion_length for rollout in rollouts]
    return {
        "completion_length_mean": float(np.mean(lengths)),
        "completion_length_min": float(min(lengths)),
        "completion_length_max": float(max(lengths)),
        "truncated_fraction": float(np.mean([rollout.finish_reason == "length" for rollout in rollouts])),
    }


def pack(
    rollouts: Sequence[Rollout],
    advantages: Float[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"],
    used: Bool[np.ndarray, " n"],
    shape: PackShape,
    *,
    mask_truncated: bool,
) -> Batch:
    """Pack the used rollouts that have loss tokens, first-fit by decreasing length; none is ever split over rows.

    Rollouts that start with the same prompt stand together and share one copy of it, as many as fit a row.
    `advantages` and `weights` (the loss weight of each of its tokens) are per rollout. The result depends on the
    inputs alone. Rows are ordered by their number of scored tokens, so that micro-batches waste few slots.
    A shared prompt's experts are those that the first rollout recorded.
    Raises ValueError for a rollout that is longer than a row or whose first token is the model's (nothing predicts it).
    """
    masks = [loss_tokens(rollout, mask_truncated=mask_truncated) for rollout in rollouts]
    chosen = [index for index in range(len(rollouts)) if used[index] and masks[index].any()]
    for index in chosen:
        _check(rollouts[index], masks[index], shape.length)
    rows = _fill_rows(rollouts, chosen, shape)
    rows.sort(key=lambda row: -sum(int(masks[index].sum()) for bundle in row for index in bundle))  # stable: deterministic

    size = (shape.micro_batches * shape.rows, shape.length)
    integers = {name: np.zeros(size, np.int32) for name in _INTEGERS}
    floats = {name: np.zeros(size, np.float32) for name in ("logp_behavior", "advantage", "weight")}
    mask, owner = np.zeros(size, bool), np.full(size, -1, np.int32)
    choices = None if shape.choices is None else np.full((*size, *shape.choices), -1, np.int16)
    for row, bundles in enumerate(rows):
        slot = 0
        for stretch in _stretches(rollouts, bundles):
            rollout, here = rollouts[stretch.rollout], slice(stretch.start, stretch.start + stretch.stop - stretch.first)
            integers["tokens"][row, here] = rollout.tokens[stretch.first : stretch.stop]
            integers["positions"][row, here] = np.arange(stretch.first, stretch.stop)
            integers["segments"][row, here] = stretch.segment
            integers["parents"][row, here] = stretch.parent
            if choices is not None:
                known = _recorded(rollout)[stretch.first : stretch.stop]
                choices[row, stretch.start : stretch.start + len(known)] = known
            where = np.flatnonzero(masks[stretch.rollout][stretch.first : stretch.stop])
            slots = slice(slot, slot + len(where))
            # The token before predicts it; before the first of a continuation stands the end of the shared prompt.
            before = np.where(where == 0, stretch.prompt_end, stretch.start + where - 1)
            integers["score_index"][row, slots] = before
            integers["targets"][row, slots] = rollout.tokens[stretch.first + where]
            floats["logp_behavior"][row, slots] = rollout.logp_behavior[stretch.first + where]
            floats["advantage"][row, slots] = advantages[stretch.rollout]
            floats["weight"][row, slots] = weights[stretch.rollout]
            mask[row, slots], owner[row, slots] = True, stretch.rollout
            slot = slots.stop

    def micro(array: np.ndarray) -> np.ndarray:
        return array.reshape(shape.micro_batches, shape.rows, *array.shape[1:])

    num_micro = -(-len(rows) // shape.rows)
    held = int((integers["segments"] > 0).sum())
    positions = num_micro * shape.rows * shape.length
    return Batch(
        **{name: micro(array) for name, array in (integers | floats).items()},
        mask=micro(mask),
        choices=None if choices is None else micro(choices),
        rollout=micro(owner),
        scored=micro(mask).sum(axis=2).max(axis=1).astype(np.int32),
        num_micro=num_micro,
        num_rollouts=len(chosen),
        padding_fraction=1.0 - held / positions if positions else 0.0,
        skipped_fraction=0.0,
    )


def _recorded(rollout: Rollout) -> np.ndarray:
    assert rollout.choices is not None, "the sampler records the experts of every rollout, or none"
    return rollout.choices


def _check(rollout: Rollout, mask: np.ndarray, length: int) -> None:
    name = f"attempt {rollout.attempt} of task {rollout.task_id!r}"
    if len(rollout.tokens) > length:
        raise ValueError(f"{name} has {len(rollout.tokens)} tokens; raise train.pack_length ({length}) to at least that")
    if mask[0]:
        raise ValueError(f"{name} starts with a model token, which nothing predicts; give its prompt at least one token")


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Consecutive tokens of one rollout and where they stand in a row."""

    rollout: int
    first: int
    stop: int
    start: int
    segment: int
    parent: int
    prompt_end: int  # position in the row of the token before `first`, when it stands in another segment


def _stretches(rollouts: Sequence[Rollout], bundles: Sequence[Sequence[int]]) -> Iterator[_Stretch]:
    """Lay out the bundles of one row: whole rollouts, or a shared prompt and what each of its rollouts adds."""
    start, segment = 0, 1
    for bundle in bundles:
        prompt = prompt_length(rollouts[bundle[0]]) if len(bundle) > 1 else 0
        parent, prompt_end = 0, start
        if prompt:
            yield _Stretch(bundle[0], 0, prompt, start, segment, 0, start)
            parent, prompt_end = segment, start + prompt - 1
            start, segment = start + prompt, segment + 1
        for index in bundle:
            stop = len(rollouts[index].tokens)
            yield _Stretch(index, prompt, stop, start, segment, parent, prompt_end)
            start, segment = start + stop - prompt, segment + 1


def prompt_length(rollout: Rollout) -> int:
    """Return how many tokens come before the first that the model or the environment wrote."""
    return int(np.argmax(np.append(rollout.provenance, -1) != Provenance.PROMPT))


def message_lengths(rollout: Rollout) -> Int[np.ndarray, " k"]:
    """Return the length of each stretch that the model wrote without a break: its messages, one per turn (tokens)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rollout.mask.astype(np.int8), [0]])))
    return edges[1::2] - edges[::2]


def _fill_rows(rollouts: Sequence[Rollout], chosen: Sequence[int], shape: PackShape) -> list[list[tuple[int, ...]]]:
    """Return, per row, its bundles: rollouts that share a prompt."""
    families: dict[bytes, list[int]] = {}
    for index in chosen:
        families.setdefault(rollouts[index].tokens[: prompt_length(rollouts[index])].tobytes(), []).append(index)
    lengths = {index: len(rollouts[index].tokens) for index in chosen}
    bundles: list[tuple[tuple[int, ...], int]] = []
    rests: list[tuple[int, dict[int, int]]] = []
    for family in families.values():
        prompt = prompt_length(rollouts[family[0]])
        rest = {index: lengths[index] - prompt for index in family}
        rests.append((prompt, rest))
        for members in _first_fit([((index,), size) for index, size in rest.items()], shape.length - prompt):
            bundle = tuple(index for (index,) in members)
            bundles.append((bundle, prompt + sum(rest[index] for index in bundle)))
    ways = (
        _first_fit(bundles, shape.length),
        _spread(rests, shape.length),
        # What is promised to fit: sharing may leave gaps that single rollouts do not.
        _first_fit([((index,), length) for index, length in lengths.items()], shape.length),
    )
    rows = min(ways, key=lambda rows: -(-len(rows) // shape.rows))
    assert len(rows) <= shape.micro_batches * shape.rows, f"{len(rows)} rows do not fit {shape}"
    return rows


def _spread(families: Sequence[tuple[int, Mapping[int, int]]], length: int) -> list[list[tuple[int, ...]]]:
    """Fill rows with families, largest first, each continued wherever most room is left.

    A family is the length of its prompt, and of what each of its rollouts has after it. The prompt is repeated in every row
    that the family is in, so a row gets a part of it only when that is more than the prompt.
    """
    rows: list[list[tuple[int, ...]]] = []
    room: list[int] = []
    for prompt, rests in sorted(families, key=lambda family: (-sum(family[1].values()), list(family[1]))):
        left = dict(sorted(rests.items(), key=lambda item: (-item[1], item[0])))
        while left:
            row = max(range(len(rows)), key=room.__getitem__, default=-1)
            part = _taken(left, room[row] - prompt) if rows else ()
            if sum(left[index] for index in part) <= prompt and len(part) < len(left):
                row, part = len(rows), _taken(left, length - prompt)
                rows.append([])
                room.append(length)
            rows[row].append(part)
            room[row] -= prompt + sum(left.pop(index) for index in part)
    return rows


def _taken(sizes: Mapping[int, int], room: int) -> tuple[int, ...]:
    """Return the items that find room, each taken in turn if it still fits."""
    part = []
    for item, size in sizes.items():
        if size <= room:
            part.append(item)
            room -= size
    return tuple(part)


def _first_fit(sizes: Sequence[tuple[tuple[int, ...], int]], length: int) -> list[list[tuple[int, ...]]]:
    """Put (item, size) pairs into rows of `length`, largest first, each into the first row with room."""
    rows: list[list[tuple[int, ...]]] = []
    room = np.zeros(len(sizes), np.int64)
    for item, size in sorted(sizes, key=lambda pair: (-pair[1], pair[0])):
        fits = room[: len(rows)] >= size
        row = int(np.argmax(fits)) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            room[row] = length
        rows[row].append(item)
        room[row] -= size
    return rows


_INTEGERS = ("tokens", "positions", "segments", "parents", "score_index", "targets")
