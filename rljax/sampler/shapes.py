"""The shapes that the sampler's programs are compiled for: a small declared set, whatever lengths arrive.

Owns how sizes are rounded up and how the cache is split into pools and arenas. Refuses to own what is in them.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rljax.sampler.blocks import blocks_for
from rljax.sampler.cache import BLOCK, arena_sizes

_PROMPT_LENGTH = 48  # tokens that a prefill has room for, times a power of two
_PIECE_LENGTH = 16  # tokens that a continued prefill has room for, times a power of four
_SEEN_BLOCKS = 8  # blocks that a row of it reads, times a power of four
_COLUMNS = 4  # blocks of each pool per slot that tables have room for, times a power of four
_FIRST_OWN_BLOCKS = 2  # per slot, in the first arena


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of the sampler's arrays on one data shard, each in ascending order.

    Example:
        Shapes(slots=64, prompts=(32,), pieces=(16, 32), seen=(5,), prompt_arenas=(16, 112), own_arenas=(128, 256),
               columns_of_tables=((2, 4), (2, 6)), longest=7)
    """

    slots: int
    """Rollouts that are decoded together."""
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

    def columns(self, covered: tuple[int, int], widest: tuple[int, int]) -> tuple[int, int]:
        """Return the room of the tables when they cover so many blocks of each pool and a slot has at most so many."""
        # Where later arenas are in use, a slot has more than a share of the arenas before; fewer columns are not compiled.
        before = covered[1] - next(size for size, end in _ends(self.own_arenas) if end == covered[1])
        own = max(widest[1], before // self.slots + 1)
        return next(room for room in self.columns_of_tables if room[0] >= widest[0] and room[1] >= own)

    def largest(self) -> "Shapes":
        """Return the shapes with a single one for decode steps, in which every rollout fits."""
        arenas = {"prompt_arenas": (sum(self.prompt_arenas),), "own_arenas": (sum(self.own_arenas),)}
        return replace(self, **arenas, columns_of_tables=self.columns_of_tables[-1:])

    def decode(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Yield all (blocks that the tables cover, columns) that a decode step may have."""
        for (_, prompts), (_, own) in itertools.product(_ends(self.prompt_arenas), _ends(self.own_arenas)):
            for columns in dict.fromkeys(self.columns((prompts, own), room) for room in self.columns_of_tables):
                yield (prompts, own), columns


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
    piece = min(prefill_chunk, max_prompt_length)
    pieces = ladder(_PIECE_LENGTH, 4, piece) if continued or max_prompt_length - 1 > piece else ()
    return Shapes(
        slots=slots,
        prompts=prompt_lengths(piece),
        pieces=pieces,
        # The prompt's last block and the last own one are not full.
        seen=ladder(_SEEN_BLOCKS, 4, prompt + 1),
        prompt_arenas=(shared, prompts - shared) if prompts > shared else (shared,),
        own_arenas=arena_sizes(own, slots * min(completion, _FIRST_OWN_BLOCKS)),
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


def _together(first: Sequence[int], second: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Let two ladders grow together: the product of both would be many shapes for little."""
    steps = max(len(first), len(second))
    return tuple((first[min(step, len(first) - 1)], second[min(step, len(second) - 1)]) for step in range(steps))


def least(sizes: Sequence[int], size: int) -> int:
    """Return the first of the sizes that is at least `size`."""
    return next(found for found in sizes if found >= size)


def _ends(arenas: Sequence[int]) -> list[tuple[int, int]]:
    """Return the size of each arena and where it ends."""
    return list(zip(arenas, itertools.accumulate(arenas), strict=True))
