"""Who holds which block of the cache: the host's side of the sampler's memory.

Owns the free blocks of one data shard, the prompts that are stored and their readers, what is parked, and the tables that
tell the device. Refuses to own arrays and the order in which rollouts are served (schedule.py).

    prompt --seat--> blocks, with places for several readers --seat--> further readers --leave--> freed with the last one
    slot   --seat--> blocks for its first tokens --extend--> more blocks             --leave--> freed
           --park--> its place and blocks without a slot --resume--> a slot again, or --drop--> freed
    blocks --compact--> the lowest ones there are, so that the tables of few rollouts need cover few blocks
"""

import bisect
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rljax.pytree import with_fields
from rljax.sampler.cache import BLOCK
from rljax.sampler.paged import Tables
from rljax.sampler.pages import PageTable

_ABSENT = -1  # in the place of a reader that is parked


def blocks_for(tokens: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-tokens // BLOCK)


class Size(NamedTuple):
    """Size of the tables of one data shard, and of the decode steps that they are for.

    Example:
        Size(rows=64, prompts=16, own=128, columns=(2, 4))
    """

    rows: int
    """Slots that are decoded."""
    prompts: int
    """Blocks of the prompt pool that are covered: the lowest ones."""
    own: int
    """Blocks of the own pool that are covered."""
    columns: tuple[int, int]
    """Prompt blocks and own blocks that one slot may read."""

    def holds(self, other: "Size") -> bool:
        """Tell whether it is as large in everything."""
        return all(mine >= its for mine, its in zip((*self[:3], *self.columns), (*other[:3], *other.columns), strict=True))


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

    def __init__(self, size: int):
        self.size = size
        """Number of blocks."""
        self._free = list(range(size))
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
    def used(self) -> int:
        """Number of blocks in use."""
        return len(self._used)

    def least(self, blocks: Sequence[int], ends: Sequence[int]) -> int:
        """Return the first of these numbers of blocks below which there is room for these blocks in use, others staying."""
        others = sorted(self._used.difference(blocks)) if len(self._used) > len(blocks) else []
        return next(end for end in ends if len(blocks) + bisect.bisect_left(others, end) <= end)

    def lower(self, holders: Iterable[list[int]], end: int) -> list[tuple[int, int]]:
        """Give holders free blocks below `end`, of which `least` says that there are enough, in the place of those above.

        Returns:
            Pairs (block, its replacement), whose content is to be copied.
        """
        moves = []
        for blocks in holders:
            above = [index for index, block in enumerate(blocks) if block >= end]
            targets = self.take(len(above))
            assert targets is not None, "as many are given back"
            assert all(target < end for target in targets), "there is room"
            self.give([blocks[index] for index in above])
            for index, target in zip(above, targets, strict=True):
                moves.append((blocks[index], target))
                blocks[index] = target
        return moves


@dataclass(slots=True)
class Ledger:
    """The blocks of one data shard.

    Example:
        ledger = Ledger(shards=1, readers=8, prompts=Pool(24), own=Pool(128))
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

    def need(self, prompt_ends: Sequence[int], own_ends: Sequence[int]) -> Size:
        """Return the size of the tables that name all that slots read, once that lies as low as it can.

        Args:
            prompt_ends: Numbers of blocks of the prompt pool that tables may cover, in ascending order; the last is all.
            own_ends: The same for the own pool.
        """
        read, own = self._read(), [*self._blocks.values()]
        columns = max(map(len, read), default=0), max(map(len, own), default=0)
        covered = self.prompts.least(_joined(read), prompt_ends), self.own.least(_joined(own), own_ends)
        return Size(len(self._place), *covered, columns)

    def compact(self, size: Size) -> list[tuple[int, int]]:
        """Give slots blocks that tables of this size cover, in the place of others; it holds what they `need`.

        Returns:
            Pairs (block, its replacement), whose content is to be copied, own blocks counted on after the prompt pool's.
        """
        first = self.prompts.size
        own = self.own.lower(self._blocks.values(), size.own)
        return [*self.prompts.lower(self._read(), size.prompts), *((first + block, first + new) for block, new in own)]

    def _read(self) -> list[list[int]]:
        """Return the blocks of each prompt that slots read."""
        return list({id(prompt): prompt.blocks for prompt, _ in self._place.values()}.values())

    def rows(self) -> dict[int, int]:
        """Return a row for each slot that holds something: the lowest ones, in the order of slots."""
        return {slot: row for row, slot in enumerate(sorted(self._place))}

    def pages_of(self, slot: int) -> list[int]:
        """Return the blocks that a slot reads as one sequence, own ones counted on after the prompt pool's."""
        stored, own = self._place[slot][0], [self.prompts.size + block for block in self._blocks[slot]]
        return [*stored.blocks[: blocks_for(self._start[slot])], *own]

    def write(self, tables: Tables | PageTable, shard: int, rows: Mapping[int, int]) -> None:
        """Write this shard's part of the tables (numpy arrays, as `empty_tables` and `empty_page_table` return them).

        Args:
            tables: Of all shards.
            shard: Number of this one.
            rows: Row of each slot.
        """
        if isinstance(tables, PageTable):
            own = tables.pages.reshape(self.shards, -1, tables.pages.shape[1])[shard]
            for slot in self._place:
                pages = self.pages_of(slot)
                own[rows[slot], : len(pages)] = pages
            return
        parts = {name: x.reshape(self.shards, -1, *x.shape[1:])[shard] for name, x in vars(tables).items()}
        for slot, (stored, place) in self._place.items():
            row = rows[slot]
            for index, block in enumerate(stored.blocks):
                parts["prompt_slot"][block, place] = row
                parts["prompt_start"][block] = index * BLOCK
                parts["prompt_filled"][block] = min(BLOCK, len(stored.tokens) - index * BLOCK)
                parts["prompt_parts"][row, index] = block * self.readers + place
            for index, block in enumerate(self._blocks[slot]):
                parts["own_slot"][block], parts["own_start"][block] = row, self._start[slot] + index * BLOCK
                parts["own_parts"][row, index] = block


def _joined(lists: Iterable[list[int]]) -> list[int]:
    return [item for items in lists for item in items]


def empty_page_table(slots: int, columns: int) -> PageTable:
    """Return a table in which nobody has a page, as a numpy array over all data shards."""
    return with_fields(PageTable, pages=np.zeros((slots, columns), np.int32))


def empty_tables(shards: int, size: Size, readers: int) -> Tables:
    """Return tables that name nobody, as numpy arrays over all data shards.

    Args:
        shards: Number of data shards.
        size: On each of them.
        readers: Readers per block of the prompt pool.
    """

    def nobody(*shape: int) -> np.ndarray:
        return np.full(shape, -1, np.int32)

    rows, prompts, own = (shards * count for count in size[:3])
    fields = {"prompt_slot": nobody(prompts, readers), "prompt_start": nobody(prompts)}
    fields |= {"prompt_filled": nobody(prompts), "own_slot": nobody(own), "own_start": nobody(own)}
    return with_fields(Tables, **fields, prompt_parts=nobody(rows, size.columns[0]), own_parts=nobody(rows, size.columns[1]))
