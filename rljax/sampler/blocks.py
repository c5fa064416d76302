"""Who holds which block of the cache: the host's side of the sampler's memory.

Owns the free blocks of one data shard, the prompts that are stored and their readers, and the tables that tell the
device. Refuses to own arrays and the order in which rollouts are served.

    prompt --seat--> blocks, with places for several readers --seat--> further readers --leave--> freed with the last one
    slot   --seat--> blocks for its first tokens --extend--> more blocks             --leave--> freed
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rljax.pytree import with_fields
from rljax.sampler.cache import BLOCK
from rljax.sampler.paged import Tables


def blocks_for(tokens: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-tokens // BLOCK)


@dataclass(slots=True)
class StoredPrompt:
    """A stored prompt: its blocks, per reader's place the slot that reads it, and what was noted when it was computed."""

    tokens: tuple[int, ...]
    blocks: list[int]
    readers: list[int | None]
    notes: Any = None


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
    def used(self) -> int:
        """Number of blocks in use."""
        return len(self._used)

    def cover(self) -> int:
        """Return the number of arenas that hold all blocks in use; at least one."""
        highest = max(self._used, default=0)
        return next(index for index, end in enumerate(self._ends, 1) if highest < end)


@dataclass(slots=True)
class Ledger:
    """The blocks of one data shard.

    Example:
        ledger = Ledger(shards=1, readers=8, prompts=Pool((24,)), own=Pool((128,)))
        awaiting = ledger.seat(0, prompt=(1, 2, 3), tokens=16, compute=True)
        ledger.extend(0, start=3, tokens=32)
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
    _stored: dict[tuple[int, ...], list[StoredPrompt]] = field(default_factory=dict)
    _place: dict[int, tuple[StoredPrompt, int]] = field(default_factory=dict)
    _blocks: dict[int, list[int]] = field(default_factory=dict)
    _start: dict[int, int] = field(default_factory=dict)

    def has_place(self, prompt: tuple[int, ...]) -> bool:
        """Tell whether the prompt is stored with a place for one more reader."""
        return any(None in stored.readers for stored in self._stored.get(prompt, ()))

    def seat(self, slot: int, prompt: tuple[int, ...], tokens: int, compute: bool) -> list[int] | None:
        """Let the slot read a stored prompt, or store it, and give it blocks for so many own tokens.

        Args:
            slot: A slot that holds nothing.
            prompt: All tokens of the prompt but the last, which is the slot's first own token.
            tokens: Own tokens to make room for.
            compute: Whether the prompt may be stored if it is not; the caller then computes its keys and values.

        Returns:
            The blocks that await the prompt (none when it was stored), or None, and nothing is changed, when there is no
            room.
        """
        joins = self.has_place(prompt)
        if not joins and not compute:
            return None
        if not self.extend(slot, len(prompt), tokens):
            return None
        blocks: list[int] | None = [] if joins else self.prompts.take(blocks_for(len(prompt)))
        if blocks is None:
            self._free_own(slot)
            return None
        if not joins:
            self._stored.setdefault(prompt, []).append(StoredPrompt(prompt, blocks, [None] * self.readers))
        stored = next(stored for stored in self._stored[prompt] if None in stored.readers)
        place = stored.readers.index(None)
        stored.readers[place] = slot
        self._place[slot] = stored, place
        return blocks

    def note(self, prompt: tuple[int, ...], notes: Any) -> None:
        """Keep something beside a prompt that was just computed, as long as it is stored."""
        for stored in self._stored[prompt]:
            if stored.notes is None:  # several copies, made together, are equal
                stored.notes = notes

    def stored(self, slot: int) -> StoredPrompt:
        """Return the prompt that the slot reads."""
        return self._place[slot][0]

    def extend(self, slot: int, start: int, tokens: int) -> bool:
        """Give the slot blocks for so many own tokens, the first one at position `start`; False when there are too few."""
        held = self._blocks.get(slot, [])
        more = self.own.take(max(0, blocks_for(tokens) - len(held)))
        if more is None:
            return False
        self._blocks[slot], self._start[slot] = held + more, start
        return True

    def leave(self, slot: int) -> None:
        """Free what the slot holds; a prompt is forgotten with its last reader."""
        self._free_own(slot)
        stored, place = self._place.pop(slot)
        stored.readers[place] = None
        if stored.readers.count(None) == self.readers:
            self.prompts.give(stored.blocks)
            same = self._stored[stored.tokens]
            same.remove(stored)
            if not same:
                del self._stored[stored.tokens]

    def widest(self) -> tuple[int, int]:
        """Return the largest number of prompt blocks and of own blocks that one slot reads."""
        prompt = max((len(stored.blocks) for stored, _ in self._place.values()), default=0)
        return prompt, max(map(len, self._blocks.values()), default=0)

    def write(self, tables: Tables, shard: int) -> None:
        """Write this shard's part of the tables (numpy arrays, as `empty_tables` returns them)."""
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

    def _free_own(self, slot: int) -> None:
        self.own.give(self._blocks.pop(slot))
        del self._start[slot]


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
