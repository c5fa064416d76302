"""The shapes that the sampler's programs are compiled for: a small declared set, whatever lengths arrive.

Owns how sizes are rounded up and how the cache is split into pools and arenas. Refuses to own what is in them.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rljax.sampler.blocks import Size, blocks_for
from rljax.sampler.cache import BLOCK, arena_sizes

_PROMPT_LENGTH = 48  # tokens that a prefill has room for, times a power of two
_PIECE_LENGTH = 16  # tokens that a continued prefill has room for, times a power of four
_SEEN_BLOCKS = 8  # blocks that a row of it reads, times a power of four
_COLUMNS = 4  # blocks of each pool per slot that tables have room for, times a power of four
_FIRST_OWN_BLOCKS = 2  # per slot, in the first arena
_FEW_ROWS = 3 / 8  # of the slots, when the others have nothing to do
_LEAST_SLOTS = 16  # for which that is worth programs of its own


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of the sampler's arrays on one data shard, each in ascending order.

    Example:
        Shapes(rows=(24, 64), prompts=(32,), pieces=(16, 32), seen=(5,), prompt_arenas=(16, 112), own_arenas=(128, 256),
               columns_of_tables=((2, 4), (2, 6)), longest=7)
    """

    rows: tuple[int, ...]
    """Rollouts that are decoded together; the last is all slots."""
    prompts: tuple[int, ...]
    """Padded lengths of prompts that are computed whole (tokens)."""
    pieces: tuple[int, ...]
    """Padded lengths of what continues a cache (tokens)."""
    seen: tuple[int, ...]
    """Blocks that a row of such a piece has room to read."""
    prompt_arenas: tuple[int, ...]
    """Blocks of each arena of the pool of prompts."""
    own_arenas: tuple[int, ...]
    """Blocks of each arena of the pool of the slots' own tokens."""
    columns_of_tables: tuple[tuple[int, int], ...]
    """Prompt blocks and own blocks per slot that the tables have room for."""
    longest: int
    """Blocks of the longest rollout as one sequence."""

    def largest(self) -> "Shapes":
        """Return the shapes with a single one for decode steps, in which every rollout fits."""
        arenas = {"prompt_arenas": (sum(self.prompt_arenas),), "own_arenas": (sum(self.own_arenas),)}
        return replace(self, rows=self.rows[-1:], **arenas, columns_of_tables=self.columns_of_tables[-1:])

    @property
    def ends(self) -> tuple[list[int], list[int]]:
        """How many blocks the first arena of each pool has, the first two, and so on."""
        return list(itertools.accumulate(self.prompt_arenas)), list(itertools.accumulate(self.own_arenas))

    def decode(self) -> list[Size]:
        """Return all sizes that a decode step may have, on one data shard, in the order in which they are preferred.

        Not every combination: many prompts come with a cache that is not small, few rows have few prompts, and the columns
        are for rollouts of at most twice the mean length, or for any.
        """
        (prompts, own), widest, sizes = self.ends, self.columns_of_tables[-1], []
        for rows in self.rows[:-1]:
            most_prompts, most_own = (
                least(ends, min(rows * count, ends[-1])) for ends, count in zip(self.ends, widest, strict=True)
            )
            sizes += [Size(rows, most_prompts, end, widest) for end in own if end <= most_own]
        slots = self.rows[-1]
        for end in own:
            usual = next(room for room in self.columns_of_tables if room[1] >= min(2 * end // slots, widest[1]))
            sizes += [Size(slots, prompts[0], end, usual), Size(slots, prompts[0], end, widest)]
            # Beside a small cache many prompts do not occur, and beside all of it their number matters less.
            if own[0] < end < own[-1]:
                sizes += [Size(slots, count, end, widest) for count in prompts[1:]]
            elif end == own[-1]:
                sizes.append(Size(slots, prompts[-1], end, widest))
        return list(dict.fromkeys(sizes))

    def fitting(self, needs: Iterable[Size]) -> Size:
        """Return the first size that has room for what every data shard needs."""
        needs = list(needs)
        return next(size for size in self.decode() if all(map(size.holds, needs)))


def shapes_of(
    slots: int,
    rows: int,
    max_prompt_length: int,
    max_completion_length: int,
    prefill_chunk: int,
    cache_tokens: int | None,
    continued: bool,
    aligned: bool = False,
) -> Shapes:
    """Return the shapes of one data shard.

    Args:
        slots: Rollouts decoded together.
        rows: Prompts computed together.
        max_prompt_length: Longest prompt, and longest conversation that is continued (tokens).
        max_completion_length: Longest completion (tokens).
        prefill_chunk: Tokens of one sequence that are computed together.
        cache_tokens: Tokens that the cache holds; None for every slot at its longest.
        continued: Whether rollouts are continued on their caches.
        aligned: Whether own blocks begin with what a prompt's last block holds.

    Raises:
        ValueError: the cache is smaller than the longest rollout.
    """
    stored, copied = max_prompt_length - 1, min(max_prompt_length - 1, BLOCK - 1) if aligned else 0
    prompt, completion = blocks_for(stored), blocks_for(max_completion_length + copied)
    # What a continued rollout was fed after its first prompt is its own: all but one token at most.
    longest_own = blocks_for(max_completion_length + (stored if continued else copied))
    prompts, own = slots * prompt, slots * longest_own
    if cache_tokens is not None:
        share = cache_tokens // BLOCK
        if share < prompt + completion:
            raise ValueError(
                f"a prompt of {max_prompt_length} and a completion of {max_completion_length} tokens exceed the cache of "
                f"{cache_tokens} tokens per data shard; raise sampler.cache_tokens"
            )
        own = min(own, max(completion, min(share * own // (prompts + own), share - prompt)))
        prompts = min(prompts, share - own)
    # In the usual case every prompt is shared, and completions are short: the first arenas are made for that.
    # A one-token prompt needs no block, and an array needs a row.
    shared = max(1, min(prompts, rows * prompt))
    first_own = slots * min(completion, _FIRST_OWN_BLOCKS)
    # Products of fewer rows may round otherwise; with short completions, whose tail is short, every step has all rows.
    few = int(_FEW_ROWS * slots) if slots >= _LEAST_SLOTS and completion > _FIRST_OWN_BLOCKS else 0
    piece = min(prefill_chunk, max_prompt_length)
    pieces = ladder(_PIECE_LENGTH, 4, piece) if continued or max_prompt_length - 1 > piece else ()
    return Shapes(
        rows=(few, slots) if few else (slots,),
        prompts=prompt_lengths(piece),
        pieces=pieces,
        # The prompt's last block and the last own one are not full.
        seen=ladder(_SEEN_BLOCKS, 4, prompt + 1),
        prompt_arenas=_split(prompts, (shared, few * prompt)),
        own_arenas=arena_sizes(own, first_own),
        columns_of_tables=_together(ladder(_COLUMNS, 4, prompt), ladder(_COLUMNS, 4, longest_own)),
        longest=blocks_for(stored + max_completion_length),
    )


def prompt_lengths(longest: int) -> tuple[int, ...]:
    """Return the padded lengths of prompts of at most so many tokens."""
    return ladder(_PROMPT_LENGTH, 2, longest)


def ladder(first: int, growth: int, last: int) -> tuple[int, ...]:
    """Return first, first x growth, first x growth^2, ... below `last`, then `last`.

    Where they grow by more than 2, `last` takes the place of a step that is at least half of it.

    Example:
        ladder(16, 2, 100) == (16, 32, 64, 100)
        ladder(16, 4, 100) == (16, 100)
    """
    sizes = []
    while first < last:
        sizes.append(first)
        first *= growth
    if sizes and 2 * sizes[-1] >= last and growth > 2:
        sizes.pop()
    return (*sizes, last)


def _split(whole: int, ends: Sequence[int]) -> tuple[int, ...]:
    """Split so many blocks at these numbers of them, as far as they grow."""
    kept = [0]
    for end in (*ends, whole):
        if kept[-1] < end <= max(whole, 1):
            kept.append(end)
    return tuple(after - before for before, after in itertools.pairwise(kept))


def _together(first: Sequence[int], second: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Let two ladders grow together: the product of both would be many shapes for little."""
    steps = max(len(first), len(second))
    return tuple((first[min(step, len(first) - 1)], second[min(step, len(second) - 1)]) for step in range(steps))


def least(sizes: Sequence[int], size: int) -> int:
    """Return the first of the sizes that is at least `size`."""
    return next(found for found in sizes if found >= size)
