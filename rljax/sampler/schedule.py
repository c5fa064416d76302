"""Which rollout waits, runs or is parked, and what of it is computed next: the engine's host side.

Owns admission, the order in which room is made, and the pieces in which prompts are computed. Refuses to own device arrays
and compiled programs (engine.py), and which block is free (blocks.py).

    submit -> waiting --admit--> a slot, its prompt computed in pieces --start--> decoding --finish--> gone, or parked
                 ^                    |                                  |                               |
                 '---- sent back when blocks run out, youngest first ----'       given up for room, <----'
                                                                                 oldest first, or admitted again

Room is made in this order: parked caches are given up, then rollouts are sent back; a waiting one waits.
"""

import heapq
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljax.records import SamplingParams
from rljax.sampler.blocks import Ledger, Parked, Prompt, blocks_for
from rljax.sampler.stops import StopStream


@dataclass(frozen=True, slots=True)
class Request:
    """One rollout to sample.

    Example:
        Request(("task", 0), prompt=(1, 5, 6), key=draw_key(0, "train", "task", 0), params=SamplingParams(max_tokens=32))
    """

    ticket: Hashable
    """Comes back with the completion."""
    prompt: tuple[int, ...]
    """Token ids to continue; requests with equal prompts share one computation of it."""
    key: tuple[int, int]
    """Random key of the rollout, from `draw_key`; the seed of everything that is drawn for it."""
    params: SamplingParams
    """How it is drawn, and what is reported."""
    cache_key: Hashable | None = None
    """Name under which an engine with `reuse_cache` parks the cache when the completion ends, until `Engine.release`: a later
    request with this key, whose prompt begins with the prompt and completion of the earlier one, computes only what is new."""


@dataclass(slots=True)
class Running:
    """A rollout in a slot."""

    request: Request
    """What was asked for."""
    origin: int
    """Position of the first token in its own blocks."""
    computed: int
    """How many tokens before the last of the prompt have keys and values, once its stored prompt is computed."""
    reach: int
    """Tokens that it may have drawn by the end of the chunk in progress."""
    versions: list[tuple[int, int]]
    """Weight versions in use, each with the number of tokens that were drawn before it."""
    reused: int = 0
    """Tokens of its prompt that were in its parked cache."""
    started: bool = False
    """Whether it is being decoded; if not, some of its prompt is still to be computed."""
    drawn: int = 0
    """Tokens that it has drawn, as far as the host has looked."""
    pure: bool = True
    """Whether all of its cache was computed with the weights in use."""
    record: list[Any] = field(default_factory=list)
    """To which experts its parked cache and the pieces after it went, where that is recorded; see `Piece.record`."""
    text: StopStream | None = None
    """Looks for its stop strings, if it has any."""
    prompt_logp: tuple[Any, int] | None = None
    """Log-probabilities of prompts on the device, and which row is its own, if they were asked for."""

    @property
    def before(self) -> int:
        """Tokens before the last one of the prompt, which is the first that is decoded."""
        return len(self.request.prompt) - 1

    def own_tokens(self, drawn: int) -> int:
        """Return how many tokens its own blocks hold when so many have been drawn."""
        return self.before - self.origin + drawn


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of one sequence whose keys and values are to be computed together.

    Example:
        Piece(tokens=(5, 6, 7), first=32, origin=0, base=0, blocks=(4, 9), whole=False, record=[])
    """

    tokens: tuple[int, ...]
    """The tokens."""
    first: int
    """Position of the first one."""
    origin: int
    """Position of the first token of the blocks they go to."""
    base: int
    """Blocks that are read before those."""
    blocks: tuple[int, ...]
    """Blocks up to the piece's end, in the order of tokens; own ones counted on after the prompt pool's."""
    whole: bool
    """Whether it is a whole prompt, which continues nothing."""
    record: list[Any]
    """Where who computes it adds (experts of several pieces, row, number of tokens), if experts are recorded."""


@dataclass(slots=True)
class Counts:
    """What happened since these counts were begun."""

    preempted: int = 0
    """Rollouts sent back for want of blocks."""
    evicted: int = 0
    """Parked caches given up for want of blocks."""
    reused: int = 0
    """Prompt tokens of later turns whose keys and values were in the cache."""
    later: int = 0
    """Prompt tokens of later turns."""
    occupancy: float = 0.0
    """Largest share of all blocks in use at once."""
    drawn: int = 0
    """Tokens drawn in decode steps."""
    rows: int = 0
    """Rows of those steps, each of which may draw one."""


@dataclass(frozen=True, slots=True)
class _Held:
    """A parked cache."""

    shard: int
    tokens: tuple[int, ...]
    parked: Parked
    experts: Any


@dataclass(slots=True)
class Schedule:
    """The slots and their blocks, over all data shards.

    Example:
        schedule = Schedule(ledgers=[ledger], per_shard=64, steps=8, chunk=256, reuse=True)
        schedule.waiting.append(request)
        schedule.admit(version=0)
    """

    ledgers: Sequence[Ledger]
    """Blocks of each data shard."""
    per_shard: int
    """Slots of a data shard; slot i is number i mod per_shard of shard i div per_shard."""
    steps: int
    """Tokens drawn between two looks."""
    chunk: int
    """Tokens of one sequence that are computed together."""
    reuse: bool
    """Whether caches are parked under the requests' cache keys."""
    waiting: deque[Request] = field(default_factory=deque)
    """Requests without a slot, in the order in which they are served."""
    running: dict[int, Running] = field(default_factory=dict)
    """Rollouts by slot, in the order of admission."""
    halted: set[int] = field(default_factory=set)
    """Slots whose rollouts were taken away and that the device may still be decoding; emptied by the engine."""
    counts: Counts = field(default_factory=Counts)
    """What happened; replaced by the engine."""
    _free: list[list[int]] = field(default_factory=list)
    _held: dict[Hashable, _Held] = field(default_factory=dict)
    _ended: set[Hashable] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Every slot is free."""
        self._free = [list(range(self.per_shard)) for _ in self.ledgers]

    def make_room(self) -> None:
        """Give decoding rollouts blocks for the next chunk; without any, send the youngest of a data shard back.

        It starts again later and draws the same tokens: they depend on its key, not on when it runs.
        """
        for slot, running in list(self.running.items()):
            if not running.started or slot not in self.running:
                continue
            shard, local = divmod(slot, self.per_shard)
            running.reach = min(running.reach + self.steps, running.request.params.max_tokens)
            while slot in self.running and not self.ledgers[shard].extend(local, running.own_tokens(running.reach)):
                if not self._evict(shard):
                    youngest = next(other for other in reversed(self.running) if other // self.per_shard == shard)
                    self.waiting.appendleft(self.vacate(youngest).request)
                    self.counts.preempted += 1

    def admit(self, version: int) -> None:
        """Give waiting rollouts slots and blocks, first come first served.

        One that has to wait for a slot on the data shard of its parked cache lets those pass that take slots of others.
        """
        passed: list[Request] = []
        while self.waiting and any(self._free):
            request = self.waiting.popleft()
            held = self._continuable(request)
            if held is not None and not self._free[held.shard]:
                passed.append(request)
                continue
            slot = self._fresh(request) if held is None else self._again(request, held)
            if slot is None:
                passed.append(request)
                break
            running = self.running[slot]
            running.versions = [(0, version)]
            if request.cache_key in self._ended:
                self.counts.later += running.before
                self.counts.reused += running.reused
        self.waiting.extendleft(reversed(passed))
        pools = [pool for ledger in self.ledgers for pool in (ledger.prompts, ledger.own)]
        used, size = sum(pool.used for pool in pools), sum(pool.size for pool in pools)
        self.counts.occupancy = max(self.counts.occupancy, used / size)

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Yield, with its data shard, the next piece of every sequence that is not computed yet, and count it as computed."""
        seen: set[int] = set()
        for slot, running in self.running.items():
            if running.started:
                continue
            shard, local = divmod(slot, self.per_shard)
            ledger, prompt = self.ledgers[shard], self.ledgers[shard].prompt_of(local)
            if prompt.computed < len(prompt.tokens):
                if id(prompt) not in seen:
                    size = min(self.chunk, len(prompt.tokens) - prompt.computed)
                    yield shard, _prompt_piece(prompt, size)
                    prompt.computed += size
            elif running.computed < running.before:
                size = min(self.chunk, running.before - running.computed)
                yield shard, _own_piece(running, size, ledger.pages_of(local))
                running.computed += size
            seen.add(id(prompt))

    def start(self) -> set[int]:
        """Let those be decoded whose prompts are computed, and return their slots."""
        started = set()
        for slot, running in self.running.items():
            shard, local = divmod(slot, self.per_shard)
            prompt = self.ledgers[shard].prompt_of(local)
            if not running.started and prompt.computed == len(prompt.tokens) and running.computed == running.before:
                running.started = True
                started.add(slot)
        return started

    def copies(self, started: Iterable[int]) -> list[list[tuple[int, int]]]:
        """Return, per data shard, (block, other block) for slots that started and read a copy of their prompt's last block.

        It is to be made now. Own blocks are counted on after the prompt pool's. What is continued on its cache has the copy.
        """
        pairs: list[list[tuple[int, int]]] = [[] for _ in self.ledgers]
        for slot in started:
            running, (shard, local) = self.running[slot], divmod(slot, self.per_shard)
            ledger = self.ledgers[shard]
            if not running.reused and running.origin < running.before:
                pairs[shard].append((ledger.prompt_of(local).blocks[-1], ledger.prompts.size + ledger.blocks_of(local)[0]))
        return pairs

    def finish(self, slot: int, drawn: Sequence[int], experts: Any = None) -> None:
        """Free a slot whose rollout has drawn these tokens; park its cache, and their experts, if the request says so."""
        running = self._leave(slot)
        key, (shard, local) = running.request.cache_key, divmod(slot, self.per_shard)
        parked = self.ledgers[shard].park(local, running.own_tokens(len(drawn)))
        if key is None or not (self.reuse and running.pure and running.started):
            self.ledgers[shard].drop(parked)
        else:
            self.release(key)
            # The last token was drawn but not fed: it has no key and value.
            self._held[key] = _Held(shard, (*running.request.prompt, *drawn)[:-1], parked, experts)
        if key is not None and running.started:
            self._ended.add(key)

    def vacate(self, slot: int) -> Running:
        """Free a slot and what it holds."""
        shard, local = divmod(slot, self.per_shard)
        self.ledgers[shard].leave(local)
        self.halted.add(slot)
        return self._leave(slot)

    def release(self, key: Hashable, for_good: bool = True) -> None:
        """Free what is parked under a key, if anything is; for good, when no later turn will ask for it."""
        held = self._held.pop(key, None)
        if held is not None:
            self.ledgers[held.shard].drop(held.parked)
        if for_good:
            self._ended.discard(key)

    def new_weights(self, drawn: dict[int, int], version: int) -> None:
        """Note that what is computed from now on has other weights: nothing computed before is given to anybody new.

        Args:
            drawn: Per slot that is being decoded, how many tokens it has drawn.
            version: Of the new weights.
        """
        for ledger in self.ledgers:
            ledger.forget()
        for key in list(self._held):
            self.release(key, for_good=False)
        for slot, running in self.running.items():
            count = drawn.get(slot, 0)
            running.versions = [*(old for old in running.versions if old[0] < count), (count, version)]
            running.pure = False

    def clear(self) -> None:
        """Forget every rollout and everything parked."""
        self.waiting.clear()
        for slot in list(self.running):
            self.vacate(slot)
        for key in list(self._held):
            self.release(key)
        self._ended.clear()

    def _leave(self, slot: int) -> Running:
        shard, local = divmod(slot, self.per_shard)
        heapq.heappush(self._free[shard], local)
        return self.running.pop(slot)

    def _continuable(self, request: Request) -> _Held | None:
        """Return the parked cache that a request continues; what is parked under its key and does not fit it is freed."""
        held = self._held.get(request.cache_key)
        if held is None:
            return None
        count = len(held.tokens)
        if count < len(request.prompt) and request.prompt[:count] == held.tokens:
            return held
        self.release(request.cache_key, for_good=False)
        return None

    def _again(self, request: Request, held: _Held) -> int | None:
        """Return a slot with the parked cache and room for what is new."""
        shard, origin, parked = held.shard, held.parked.start, self._held.pop(request.cache_key).parked
        count = len(held.tokens)
        running = Running(request, origin, count, min(request.params.max_tokens, self.steps), [], reused=count)
        if held.experts is not None:
            running.record.append((held.experts[None], 0, count))
        local = self._free[shard][0]
        while not self.ledgers[shard].resume(local, parked, running.own_tokens(running.reach)):
            if self._evict(shard):
                continue
            if any(slot // self.per_shard == shard for slot in self.running):
                self._held[request.cache_key] = held  # the room will come
                return None
            # Alone, and still without room: a conversation of own blocks takes more of them than one that is a prompt.
            self.ledgers[shard].drop(parked)
            return self._fresh(request)
        return self._take(shard, running)

    def _fresh(self, request: Request) -> int | None:
        """Return a slot with blocks for the request: where its prompt is stored, else where most slots are free."""
        prompt = request.prompt[:-1]
        origin = self.ledgers[0].start_of(prompt)
        running = Running(request, origin, len(prompt), min(request.params.max_tokens, self.steps), [])
        shards = [shard for shard, free in enumerate(self._free) if free]
        shards.sort(key=lambda shard: (not self.ledgers[shard].has_place(prompt), -len(self._free[shard])))
        for evicting in (False, True):
            for shard in shards:
                while True:
                    if self.ledgers[shard].seat(self._free[shard][0], prompt, running.own_tokens(running.reach)):
                        return self._take(shard, running)
                    if not evicting or not self._evict(shard):
                        break
        return None

    def _take(self, shard: int, running: Running) -> int:
        slot = shard * self.per_shard + heapq.heappop(self._free[shard])
        self.running[slot] = running
        return slot

    def _evict(self, shard: int) -> bool:
        """Give up the cache of a data shard that has been parked longest; False when there is none."""
        oldest = next((key for key, held in self._held.items() if held.shard == shard), None)
        if oldest is None:
            return False
        self.release(oldest, for_good=False)
        self.counts.evicted += 1
        return True


def _own_piece(running: Running, size: int, blocks: Sequence[int]) -> Piece:
    """Return the next piece of what a rollout continues, in its own blocks; these come after those of its prompt."""
    first, end, base = running.computed, running.computed + size, blocks_for(running.origin)
    read = tuple(blocks[: base + blocks_for(end - running.origin)])
    return Piece(running.request.prompt[first:end], first, running.origin, base, read, whole=False, record=running.record)


def _prompt_piece(prompt: Prompt, size: int) -> Piece:
    """Return the next piece of a stored prompt."""
    first, end = prompt.computed, prompt.computed + size
    return Piece(
        prompt.tokens[first:end],
        first,
        0,
        0,
        tuple(prompt.blocks[: blocks_for(end)]),
        size == len(prompt.tokens),
        prompt.record,
    )
