"""Who holds which block of the cache: the host's side of the sampler's memory.

Owns the free blocks of one data shard, the prompts that are stored and their readers, what is parked, and the tables that
tell the device. Refuses to own arrays and the order in which rollouts are served (schedule.py).

    prompt --seat--> blocks, with places for several readers --seat--> further readers --leave--> freed with the last one
    slot   --seat--> blocks for its first tokens --extend--> more blocks             --leave--> freed
           --park--> its place and blocks without a slot --resume--> a slot again, or --drop--> freed
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rljax.pytree import with_fields
from rljax.sampler.cache import BLOCK
from rljax.sampler.paged import Tables
from rljax.sampler.pages import PageTable

_ABSENT = -1  # in the place of a reader that is parked


def blocks_for(tokens: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-tokens // BLOCK)


@dataclass(slots=True, eq=False)
class Prompt:
    """A stored prompt.

    Example:
        Prompt(tokens=(1, 5, 6), blocks=[3], readers=[0, None, None, None])
    """

    tokens: tuple[int, ...]
    """All of its tokens but the last."""
    blocks: list[int]
    """Its blocks, in the order of tokens."""
    readers: list[int | None]
    """Per place, the slot that reads it, -1 for a parked reader, None for nobody."""
    computed: int = 0
    """How many of its tokens have keys and values; written by who computes them."""
    record: list[Any] = field(default_factory=list)
    """To which experts they went, piece by piece, where that is recorded; written by who computes them."""


@dataclass(frozen=True, slots=True)
class Parked:
    """What a rollout without a slot holds.

    Example:
        Parked(prompt=prompt, place=2, blocks=[8, 9], start=3)
    """

    prompt: Prompt
    """The prompt it reads."""
    place: int
    """Its place among the readers."""
    blocks: list[int]
    """Its own blocks, in the order of tokens."""
    start: int
    """Position of the first token in them."""


class Pool:
    """Free blocks; the lowest ones are given out first, so that those in use stay together."""

    def __init__(self, arenas: Sequence[int]):
        self._ends = np.cumsum(arenas).tolist()
        self._free = list(range(self._ends[-1]))
        self._used: set[int] = set()

    def take(self, count: int) -> list[int] | None:
        """Return so many blocks, or None, and nothing is taken, when there are too few."""
        if count > len(self._free):
            return None
        taken = [heapq.heappop(self._free) for _ in range(count)]
        self._used.update(taken)
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Take blocks back."""
        for block in blocks:
            self._used.remove(block)
            heapq.heappush(self._free, block)

    @property
    def size(self) -> int:
        """Number of blocks."""
        return self._ends[-1]

    @property
    def used(self) -> int:
        """Number of blocks in use."""
        return len(self._used)

    def covering(self, block: int) -> int:
        """Return how many blocks the arenas up to the one with this block have."""
        return next(end for end in self._ends if block < end)


@dataclass(slots=True)
class Ledger:
    """The blocks of one data shard.

    Example:
        ledger = Ledger(shards=1, readers=8, prompts=Pool((24,)), own=Pool((128,)))
        ledger.seat(0, prompt=(1, 2, 3), tokens=16)
        ledger.extend(0, tokens=32)
        ledger.leave(0)
    """

    shards: int
    """Number of data shards."""
    readers: int
    """Slots that may read one stored prompt."""
    prompts: Pool
    """Blocks of the prompt pool."""
    own: Pool
    """Blocks of the own pool."""
    aligned: bool = False
    """Whether own blocks begin where a block of the prompt does, with what the prompt's last block holds (pages.py)."""
    _stored: dict[tuple[int, ...], list[Prompt]] = field(default_factory=dict)
    _place: dict[int, tuple[Prompt, int]] = field(default_factory=dict)
    _blocks: dict[int, list[int]] = field(default_factory=dict)
    _start: dict[int, int] = field(default_factory=dict)

    def has_place(self, prompt: tuple[int, ...]) -> bool:
        """Tell whether the prompt is stored with a place for one more reader."""
        return any(None in stored.readers for stored in self._stored.get(prompt, ()))

    def start_of(self, prompt: tuple[int, ...]) -> int:
        """Return the position of the first token in the own blocks of a rollout that reads this prompt."""
        return len(prompt) // BLOCK * BLOCK if self.aligned else len(prompt)

    def seat(self, slot: int, prompt: tuple[int, ...], tokens: int) -> bool:
        """Let the slot read a stored prompt, or one that is to be computed, and give it blocks for so many own tokens.

        Args:
            slot: A slot that holds nothing.
            prompt: All tokens of the prompt but the last, which is the slot's first own token, if its own ones follow them.
            tokens: Own tokens to make room for.

        Returns:
            Whether there was room; if not, nothing is changed.
        """
        own = self.own.take(blocks_for(tokens))
        if own is None:
            return False
        if not self.has_place(prompt):
            blocks = self.prompts.take(blocks_for(len(prompt)))
            if blocks is None:
                self.own.give(own)
                return False
            self._stored.setdefault(prompt, []).append(Prompt(prompt, blocks, [None] * self.readers))
        stored = next(stored for stored in self._stored[prompt] if None in stored.readers)
        place = stored.readers.index(None)
        stored.readers[place] = slot
        self._place[slot], self._blocks[slot], self._start[slot] = (stored, place), own, self.start_of(prompt)
        return True

    def extend(self, slot: int, tokens: int) -> bool:
        """Give the slot blocks for so many own tokens; False when there are too few."""
        more = self.own.take(max(0, blocks_for(tokens) - len(self._blocks[slot])))
        if more is None:
            return False
        self._blocks[slot] += more
        return True

    def leave(self, slot: int) -> None:
        """Free what the slot holds; a prompt is forgotten with its last reader."""
        self.drop(self.park(slot, 0))

    def park(self, slot: int, tokens: int) -> Parked:
        """Take from the slot what it holds; of its own blocks, those of so many tokens are kept."""
        stored, place = self._place.pop(slot)
        blocks, kept = self._blocks.pop(slot), blocks_for(tokens)
        self.own.give(blocks[kept:])
        stored.readers[place] = _ABSENT
        return Parked(stored, place, blocks[:kept], self._start.pop(slot))

    def resume(self, slot: int, parked: Parked, tokens: int) -> bool:
        """Give the slot what was parked, and blocks for so many own tokens; False, and nothing is changed, without room."""
        more = self.own.take(max(0, blocks_for(tokens) - len(parked.blocks)))
        if more is None:
            return False
        parked.prompt.readers[parked.place] = slot
        self._place[slot] = parked.prompt, parked.place
        self._blocks[slot], self._start[slot] = parked.blocks + more, parked.start
        return True

    def drop(self, parked: Parked) -> None:
        """Free what is parked."""
        self.own.give(parked.blocks)
        stored = parked.prompt
        stored.readers[parked.place] = None
        if stored.readers.count(None) == self.readers:
            self.prompts.give(stored.blocks)
            same = [other for other in self._stored.get(stored.tokens, ()) if other is not stored]
            if same:
                self._stored[stored.tokens] = same
            else:
                self._stored.pop(stored.tokens, None)

    def forget(self) -> None:
        """Let nobody join a prompt that is stored now; its readers go on reading it."""
        self._stored.clear()

    def prompt_of(self, slot: int) -> Prompt:
        """Return the prompt that a slot reads."""
        return self._place[slot][0]

    def blocks_of(self, slot: int) -> list[int]:
        """Return a slot's own blocks."""
        return self._blocks[slot]

    def covered(self) -> tuple[int, int]:
        """Return how many blocks of each pool the arenas have that hold what slots read; at least the first arena's."""
        prompt = max((block for stored, _ in self._place.values() for block in stored.blocks), default=0)
        own = max((block for blocks in self._blocks.values() for block in blocks), default=0)
        return self.prompts.covering(prompt), self.own.covering(own)

    def widest(self) -> tuple[int, int]:
        """Return the largest number of prompt blocks and of own blocks that one slot reads."""
        prompt = max((len(stored.blocks) for stored, _ in self._place.values()), default=0)
        return prompt, max(map(len, self._blocks.values()), default=0)

    def pages_of(self, slot: int) -> list[int]:
        """Return the blocks that a slot reads as one sequence, own ones counted on after the prompt pool's."""
        stored, own = self._place[slot][0], [self.prompts.size + block for block in self._blocks[slot]]
        return [*stored.blocks[: blocks_for(self._start[slot])], *own]

    def write(self, tables: Tables | PageTable, shard: int) -> None:
        """Write this shard's part of the tables (numpy arrays, as `empty_tables` and `empty_page_table` return them)."""
        if isinstance(tables, PageTable):
            rows = tables.pages.reshape(self.shards, -1, tables.pages.shape[1])[shard]
            for slot in self._place:
                pages = self.pages_of(slot)
                rows[slot, : len(pages)] = pages
            return
        parts = {name: x.reshape(self.shards, -1, *x.shape[1:])[shard] for name, x in vars(tables).items()}
        for slot, (stored, place) in self._place.items():
            for index, block in enumerate(stored.blocks):
                parts["prompt_slot"][block, place] = slot
                parts["prompt_start"][block] = index * BLOCK
                parts["prompt_filled"][block] = min(BLOCK, len(stored.tokens) - index * BLOCK)
                parts["prompt_parts"][slot, index] = block * self.readers + place
            for index, block in enumerate(self._blocks[slot]):
                parts["own_slot"][block], parts["own_start"][block] = slot, self._start[slot] + index * BLOCK
                parts["own_parts"][slot, index] = block


def empty_page_table(slots: int, columns: int) -> PageTable:
    """Return a table in which nobody has a page, as a numpy array over all data shards."""
    return with_fields(PageTable, pages=np.zeros((slots, columns), np.int32))


def empty_tables(slots: int, prompt_blocks: int, readers: int, own_blocks: int, columns: tuple[int, int]) -> Tables:
    """Return tables that name nobody, as numpy arrays over all data shards.

    Args:
        slots: Number of slots.
        prompt_blocks: Blocks of the prompt pool that the tables cover.
        readers: Readers per block of it.
        own_blocks: Blocks of the own pool that they cover.
        columns: Prompt blocks and own blocks that one slot may read.
    """

    def nobody(*shape: int) -> np.ndarray:
        return np.full(shape, -1, np.int32)

    fields = {"prompt_slot": nobody(prompt_blocks, readers), "prompt_start": nobody(prompt_blocks)}
    fields |= {"prompt_filled": nobody(prompt_blocks), "own_slot": nobody(own_blocks), "own_start": nobody(own_blocks)}
    return with_fields(Tables, **fields, prompt_parts=nobody(slots, columns[0]), own_parts=nobody(slots, columns[1]))
