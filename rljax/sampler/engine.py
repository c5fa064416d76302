"""The sampling engine: a queue of prompts, slots on the mesh, and the order in which the compiled programs run.

Owns admission (which waiting rollout gets which slot), the shapes that are compiled, and the harvest of finished
completions. Refuses to own text, rewards and training.

    submit -> waiting -> (fill: prompts computed once, shared) -> (start) -> slots -> (decode_chunk)* -> poll -> Completion
                 ^------------------------- sent back when blocks run out ----------------'

A rollout's tokens depend on the weights, its prompt, its id and its attempt; not on its slot, its neighbours or when
it was admitted. Every draw is keyed by `draw_key(seed, purpose, task id, attempt)` and the position of the token.
"""

import hashlib
import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rljax.mesh import DATA_AXES, data_shards, sharding
from rljax.models.arch import Arch
from rljax.pytree import Params
from rljax.records import Completion, SamplingParams, TopTokens
from rljax.sampler.blocks import Ledger, Pool, blocks_for, empty_tables
from rljax.sampler.cache import BLOCK, Report, Slots, arena_sizes, empty_slots, slots_sharding
from rljax.sampler.decode import Prompts, Starts, decode_chunk, fill, score_prompts, start
from rljax.sampler.draw import Rules
from rljax.sampler.paged import Tables
from rljax.sampler.rules import build_rules, end_tokens, has_rules, refuse_impossible
from rljax.sampler.stops import StopStream, TextStream

_FIRST_OWN_BLOCKS = 2  # per slot, in the first arena
_COLUMNS = (2,)  # blocks per slot that tables have room for, these times a power of two
_PROMPT_LENGTHS = (16, 24)  # tokens that a prefill has room for, these times a power of two

_Rows = list[tuple[tuple[int, ...], list[int]]]  # prompts to compute on one data shard, and their blocks


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


@dataclass(slots=True)
class _Running:
    """A rollout in a slot."""

    request: Request
    version: int
    reach: int
    """Tokens that it may have drawn by the end of the chunk in progress."""
    text: StopStream | None = None
    """Looks for its stop strings, if it has any."""
    prompt_logp: tuple[jax.Array, int] | None = None
    """Log-probabilities of prompts, and which row is its own, if they were asked for."""


def draw_key(seed: int, purpose: str, task_id: str, attempt: int) -> tuple[int, int]:
    """Return the random key (two 32-bit words) of one rollout: a pure function of its arguments.

    `purpose` separates training from evaluation, so that neither disturbs the other.
    """
    digest = hashlib.blake2b(f"{seed}\x1f{purpose}\x1f{task_id}\x1f{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


class Engine:
    """Samples completions on the mesh, a fixed number of slots at a time."""

    def __init__(
        self,
        arch: Arch,
        mesh: Mesh,
        stop_ids: Sequence[int],
        *,
        slots: int,
        max_prompt_length: int,
        max_completion_length: int,
        cache_tokens: int | None = None,
        readers: int,
        decode_chunk_steps: int,
        dtype: Any,
        record_routing: bool = False,
        logprobs: int | None = None,
        open_text: Callable[[], TextStream] | None = None,
    ):
        """Allocate the cache; programs compile on first use.

        Args:
            arch: Model to sample from.
            mesh: Devices; slots are split over the data axes.
            stop_ids: Tokens that end a completion.
            slots: Rollouts decoded together.
            max_prompt_length: Longest prompt (tokens).
            max_completion_length: Longest completion (tokens).
            cache_tokens: Tokens that the cache holds, over all slots; default: every slot at its longest. With less,
                rollouts wait for room, and when those that run outgrow it, the youngest starts again later.
            readers: Rollouts that share one stored prompt.
            decode_chunk_steps: Decode steps between two looks by the host.
            dtype: Type of parameters and products, and of the cache except on CPUs, where it is float32.
            record_routing: Whether completions tell to which experts their tokens went.
            logprobs: Most likely tokens that requests may have reported; None for no report. Every step pays for it.
            open_text: Opens a stream from the tokens of one completion to text; stop strings need it.

        Raises:
            ValueError: slots do not divide over the mesh, nothing ends a completion, the cache is too small, or the model has
                no experts whose choice could be recorded.
        """
        if record_routing and arch.experts is None:
            raise ValueError("algorithm.routing_replay is for models with experts, and this model has none; set it to false")
        self.shards = data_shards(mesh)
        if slots % self.shards:
            raise ValueError(f"sampler.slots ({slots}) must be a multiple of mesh.replica x mesh.fsdp ({self.shards})")
        if not stop_ids:
            raise ValueError("no token ends a completion; set eos_token_id in the checkpoint's generation_config.json")
        self.mesh, self.arch, self.slots = mesh, arch, slots
        self.max_prompt_length, self.max_completion_length = max_prompt_length, max_completion_length
        self._per_shard, self._steps = slots // self.shards, decode_chunk_steps
        self._rows, self._readers = -(-self._per_shard // readers), min(readers, self._per_shard)  # _rows: per prefill
        self._ends, self._row_sharding = frozenset(stop_ids), sharding(mesh, DATA_AXES)
        self._logprobs, self._open_text = logprobs, open_text
        self._stop_ids = jax.device_put(np.array(sorted(stop_ids), np.int32), sharding(mesh))
        self._columns = blocks_for(max_prompt_length - 1), blocks_for(max_completion_length)
        arenas = self._arenas(cache_tokens)
        self._arena_ends = tuple(np.cumsum(pool).tolist() for pool in arenas)
        self._ledgers = [Ledger(self.shards, self._readers, *map(Pool, arenas)) for _ in range(self.shards)]
        # XLA:CPU writes into a bfloat16 array by converting all of it to float32 and back.
        cache_dtype = jnp.dtype("float32" if mesh.devices.flat[0].platform == "cpu" else dtype)
        self._state = empty_slots(arch, slots, *arenas, max_completion_length, cache_dtype, mesh, record_routing, logprobs)
        # The slots are donated: a program that copied the cache instead of updating it would double the memory.
        layout = slots_sharding(mesh)
        self._fill = jax.jit(partial(fill, arch, mesh), donate_argnums=1, out_shardings=(layout, self._row_sharding))
        self._start = jax.jit(start, donate_argnums=0, out_shardings=layout.progress)
        self._decode = jax.jit(partial(decode_chunk, arch, mesh, decode_chunk_steps), donate_argnums=1, out_shardings=layout)
        self._score = jax.jit(partial(score_prompts, arch))
        self._params: Params | None = None
        self._version = -1
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Running] = {}  # by slot, in the order of admission
        self._rules: tuple[dict[int, SamplingParams], Rules] | None = None  # who asks for what, and the same on the device
        self._halted: set[int] = set()  # slots that were vacated while the device still draws in them
        self._free = [list(range(self._per_shard)) for _ in range(self.shards)]  # per data shard, a heap
        self.preempted = 0
        """Rollouts sent back for want of blocks so far."""

    def set_weights(self, params: Params, version: int) -> None:
        """Sample from these parameters from now on.

        Args:
            params: Parameters in the sampler's layout and type, from `rollouts.weights.publish`.
            version: Recorded with every token sampled from them.
        """
        assert not self._running, "weights changed while rollouts were in progress: their cache holds the old ones"
        self._params, self._version = params, version

    @property
    def pending(self) -> int:
        """Number of submitted rollouts that have not been polled."""
        return len(self._waiting) + len(self._running)

    @property
    def free(self) -> int:
        """Number of slots that neither a running nor a waiting rollout would take."""
        return max(0, self.slots - self.pending)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue rollouts; those with equal prompts should stand next to each other.

        Raises:
            ValueError: a request does not fit the prompt or completion length, or asks for what cannot be drawn or reported.
                Nothing is queued then.
        """
        for request in requests:
            if not 1 <= len(request.prompt) <= self.max_prompt_length:
                raise ValueError(
                    f"the prompt of {request.ticket} has {len(request.prompt)} tokens; "
                    f"sampler.max_prompt_length allows 1 to {self.max_prompt_length}"
                )
            if request.params.max_tokens > self.max_completion_length:
                raise ValueError(
                    f"{request.ticket} asks for {request.params.max_tokens} tokens; "
                    f"sampler.max_completion_length allows 1 to {self.max_completion_length}"
                )
            refuse_impossible(request.params, self.arch, self._ends, self._logprobs, self._open_text is not None)
        self._waiting.extend(requests)

    def step(self) -> None:
        """Admit waiting rollouts to free slots and start decoding a chunk; returns before the device is done."""
        assert self._params is not None, "set_weights comes before step"
        with jax.set_mesh(self.mesh):
            # Those that run come first: a newcomer they would have to send back again is not let in.
            stopped = self._make_room() | self._halted
            self._halted.clear()
            started = self._admit()
            if stopped or started:
                progress = self._start(self._state.progress, self._starts(stopped | started))
                self._state = Slots(self._state.cache, progress)
            self._score_prompts(started)
            if self._running:
                rules = self._rules_in_use()
                self._state = self._decode(self._params, self._state, self._tables(), self._stop_ids, rules)

    def poll(self) -> list[tuple[Hashable, Completion]]:
        """Wait for the chunk in progress and return the completions that ended with it."""
        if not self._running:
            return []
        progress = self._state.progress
        remaining, counts = jax.device_get((progress.remaining, progress.count))
        ends = {slot: int(counts[slot]) for slot in self._running if remaining[slot] == 0}
        found: dict[int, str] = {}
        if any(running.request.params.stop for running in self._running.values()):
            for slot, tokens in enumerate(jax.device_get(progress.out_tokens)):
                if slot in self._running and (stop := self._stop_string(self._running[slot], tokens[: counts[slot]])):
                    ends[slot], found[slot] = stop
        if not ends:
            return []
        self._halted |= {slot for slot in ends if remaining[slot]}
        outputs = jax.device_get((progress.out_tokens, progress.out_logp, progress.report, progress.out_choices))
        return [self._harvest(slot, count, found.get(slot), *outputs) for slot, count in ends.items()]

    def _stop_string(self, running: _Running, tokens: np.ndarray) -> tuple[int, str] | None:
        """Return how many of the tokens drawn so far stay and the stop string that they end with, if they do."""
        params = running.request.params
        if not params.stop:
            return None
        if running.text is None:
            assert self._open_text is not None, "such a request is refused"
            running.text = StopStream(self._open_text(), params.stop, params.min_tokens)
        for token in tokens[running.text.count :]:
            running.text.push(token)
            if running.text.stop is not None:
                return running.text.count, running.text.stop
        return None

    def _harvest(
        self,
        slot: int,
        count: int,
        stop: str | None,
        tokens: np.ndarray,
        logps: np.ndarray,
        report: Report | None,
        experts: np.ndarray | None,
    ) -> tuple[Hashable, Completion]:
        """Free a slot and return its completion of so many tokens."""
        choices = None if experts is None else self._with_prompt(slot, experts[slot, :count])
        running = self._vacate(slot)
        params, drawn = running.request.params, tokens[slot, :count].copy()
        last = int(drawn[-1])
        ended: str | int | None = last if stop is None and last in end_tokens(params, self._ends) else stop
        raw, top, prompt_logp = None, None, None
        if params.logprobs is not None:
            assert report is not None, "such a request is refused"
            raw, ids, likely = (np.asarray(part)[slot, :count] for part in (report.chosen, report.ids, report.logp))
            raw, top = raw.copy(), TopTokens(ids[:, : params.logprobs].copy(), likely[:, : params.logprobs].copy())
        if running.prompt_logp is not None:
            logp_of_prompts, row = running.prompt_logp
            prompt_logp = np.asarray(logp_of_prompts)[row, : len(running.request.prompt)].copy()
        reason = "length" if ended is None else "stop"
        logp = logps[slot, :count].copy()
        done = Completion(drawn, logp, running.version, reason, ended, raw, top, prompt_logp, choices)
        return running.request.ticket, done

    def stream(self, request: Request) -> Iterator[np.ndarray]:
        """Sample one rollout and yield its tokens as they come, for a person who watches."""
        assert not self.pending, "a stream polls the engine alone: it would drop the completions of others"
        self.submit([request])
        sent = 0
        while self.pending:
            self.step()
            slot = next(slot for slot, running in self._running.items() if running.request is request)
            # Only what is left after the search for stop strings is shown.
            if done := self.poll():
                yield done[0][1].tokens[sent:]
                return
            count = int(jax.device_get(self._state.progress.count)[slot])
            yield jax.device_get(self._state.progress.out_tokens)[slot, sent:count].copy()
            sent = count

    def abort(self) -> None:
        """Forget every waiting and running rollout."""
        self._waiting.clear()
        for slot in list(self._running):
            self._vacate(slot)

    def _arenas(self, cache_tokens: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size both pools, per data shard: in full, or in proportion so that they hold `cache_tokens` over all shards."""
        longest = self._columns
        full = tuple(self._per_shard * blocks for blocks in longest)
        if cache_tokens is not None:
            share = cache_tokens // self.shards // BLOCK
            if share < sum(longest):
                raise ValueError(
                    f"a prompt of {self.max_prompt_length} and a completion of {self.max_completion_length} tokens exceed the "
                    f"cache of {cache_tokens // self.shards} tokens per data shard; raise sampler.cache_tokens"
                )
            full = tuple(max(blocks, min(all_, share * all_ // sum(full))) for blocks, all_ in zip(longest, full, strict=True))
        # In the usual case every prompt is shared, and completions are short: the first arenas are made for that.
        first = self._rows * longest[0], self._per_shard * min(longest[1], _FIRST_OWN_BLOCKS)
        # A one-token prompt needs no block, and an array needs a row.
        prompt, own = (arena_sizes(max(1, blocks), max(1, start)) for blocks, start in zip(full, first, strict=True))
        return prompt, own

    def _admit(self) -> set[int]:
        """Give waiting rollouts slots and blocks, first come first served; compute prompts that are not stored.

        Returns:
            The slots that start.
        """
        starting: set[int] = set()
        while self._waiting:
            # All prompts of one prefill are of one bucket: the padded length may change the last bits of keys and values,
            # so it must follow from the prompt alone and not from what else happens to wait.
            width = self._bucket(len(self._waiting[0].prompt) - 1)
            rows: list[_Rows] = [[] for _ in range(self.shards)]
            seated = 0
            while self._waiting and self._bucket(len(self._waiting[0].prompt) - 1) == width:
                slot = self._seat(self._waiting[0], rows)
                if slot is None:
                    break
                request = self._waiting.popleft()
                self._running[slot] = _Running(request, self._version, min(request.params.max_tokens, self._steps))
                starting.add(slot)
                seated += 1
            if any(rows):
                assert self._params is not None
                self._state, choices = self._fill(self._params, self._state, self._prompts(rows, width))
                for shard, prompts in enumerate(rows if choices is not None else ()):
                    for row, (prompt, _) in enumerate(prompts, shard * self._rows):
                        self._ledgers[shard].note(prompt, (choices, row))
            if not seated:
                break
        return starting

    def _seat(self, request: Request, rows: list[_Rows]) -> int | None:
        """Return a slot with blocks for the request: where its prompt is stored, else where one more can be computed."""
        prompt = request.prompt[:-1]
        tokens = min(request.params.max_tokens, self._steps)
        shards = [shard for shard in range(self.shards) if self._free[shard]]
        # Where the prompt is stored, else where most slots are free: shards fill evenly.
        shards.sort(key=lambda shard: (not self._ledgers[shard].has_place(prompt), -len(self._free[shard])))
        for shard in shards:
            slot = self._free[shard][0]
            compute = len(rows[shard]) < self._rows or not prompt
            blocks = self._ledgers[shard].seat(slot, prompt, tokens, compute)
            if blocks is None:
                continue
            if blocks:
                rows[shard].append((prompt, blocks))
            return shard * self._per_shard + heapq.heappop(self._free[shard])
        return None

    def _with_prompt(self, slot: int, fed: np.ndarray) -> np.ndarray:
        """Put the experts of the slot's stored prompt before those of the tokens it was fed: its last one, and what it drew."""
        shard, local = divmod(slot, self._per_shard)
        stored = self._ledgers[shard].stored(local)
        if not stored.tokens:
            return fed.copy()
        choices, row = stored.notes
        return np.concatenate([np.asarray(choices)[row, : len(stored.tokens)], fed])

    def _make_room(self) -> set[int]:
        """Give running rollouts blocks for the next chunk; send the youngest of a data shard back when there are none.

        It starts again later and draws the same tokens: they depend on its key, not on when it runs.

        Returns:
            The slots of those sent back.
        """
        sent_back: set[int] = set()
        for slot, running in list(self._running.items()):
            shard, local = divmod(slot, self._per_shard)
            running.reach = min(running.reach + self._steps, running.request.params.max_tokens)
            start = len(running.request.prompt) - 1
            while slot in self._running and not self._ledgers[shard].extend(local, start, running.reach):
                youngest = next(other for other in reversed(self._running) if other // self._per_shard == shard)
                self._waiting.appendleft(self._vacate(youngest).request)
                sent_back.add(youngest)
        self.preempted += len(sent_back)
        return sent_back

    def _vacate(self, slot: int) -> _Running:
        """Free a slot and what it holds."""
        shard, local = divmod(slot, self._per_shard)
        self._ledgers[shard].leave(local)
        heapq.heappush(self._free[shard], local)
        return self._running.pop(slot)

    def _prompts(self, rows: Sequence[_Rows], width: int) -> Prompts:
        """Build the arrays of one prefill, `width` tokens wide."""
        tokens = np.zeros((self.shards * self._rows, width), np.int32)
        lengths = np.zeros(len(tokens), np.int32)
        blocks = np.full((len(tokens), blocks_for(width)), -1, np.int32)
        for shard, prompts in enumerate(rows):
            for row, (prompt, taken) in enumerate(prompts, shard * self._rows):
                tokens[row, : len(prompt)], lengths[row], blocks[row, : len(taken)] = prompt, len(prompt), taken
        return Prompts(**jax.device_put({"tokens": tokens, "lengths": lengths, "blocks": blocks}, self._row_sharding))

    def _score_prompts(self, started: Collection[int]) -> None:
        """Start computing the log-probabilities of the prompts whose requests ask for them."""
        asking = [self._running[slot] for slot in started if self._running[slot].request.params.prompt_logprobs]
        rows = self.shards * self._rows
        for first in range(0, len(asking), rows):
            prompts = [running.request.prompt for running in asking[first : first + rows]]
            tokens = np.zeros((rows, self._bucket(max(map(len, prompts)))), np.int32)
            lengths = np.zeros(rows, np.int32)
            for row, prompt in enumerate(prompts):
                tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
            logp = self._score(self._params, *jax.device_put((tokens, lengths), self._row_sharding))
            for row, running in enumerate(asking[first : first + rows]):
                running.prompt_logp = logp, row

    def _rules_in_use(self) -> Rules | None:
        """Return what running requests ask of the draw; it is sent to the device again only when that has changed."""
        asked = {slot: run.request.params for slot, run in self._running.items() if has_rules(run.request.params)}
        if not asked:
            return None
        if self._rules is None or asked != self._rules[0]:
            before = None if self._rules is None else self._rules[1]
            rules = build_rules(asked, self.slots, self.arch.vocab_size, before)
            self._rules = asked, jax.device_put(rules, self._row_sharding)
        return self._rules[1]

    def _starts(self, slots: Collection[int]) -> Starts:
        """Build the arrays that start rollouts in these slots, and stop those that nothing runs in."""
        starts = np.zeros(self.slots, bool)
        token, position, limit = (np.zeros(self.slots, np.int32) for _ in range(3))
        key, temperature = np.zeros((self.slots, 2), np.uint32), np.zeros(self.slots, np.float32)
        for slot in slots:
            starts[slot] = True
            if slot in self._running:
                request = self._running[slot].request
                token[slot], position[slot] = request.prompt[-1], len(request.prompt) - 1
                limit[slot], key[slot], temperature[slot] = request.params.max_tokens, request.key, request.params.temperature
        fields = {"starts": starts, "token": token, "position": position, "limit": limit}
        fields |= {"draw_key": key, "temperature": temperature}
        return Starts(**jax.device_put(fields, self._row_sharding))

    def _tables(self) -> Tables:
        """Return who reads which block, covering the arenas in use and as many blocks per slot as the longest rollout has."""
        covered = [max(ledger.prompts.cover() for ledger in self._ledgers), max(ledger.own.cover() for ledger in self._ledgers)]
        blocks = [self.shards * ends[count - 1] for ends, count in zip(self._arena_ends, covered, strict=True)]
        widest = [max(counts) for counts in zip(*(ledger.widest() for ledger in self._ledgers), strict=True)]
        columns = [bucket(count, _COLUMNS, most) for count, most in zip(widest, self._columns, strict=True)]
        tables = empty_tables(self.slots, blocks[0], self._readers, blocks[1], (columns[0], columns[1]))
        for shard, ledger in enumerate(self._ledgers):
            ledger.write(tables, shard)
        return jax.device_put(tables, self._row_sharding)

    def _bucket(self, length: int) -> int:
        """Return the padded prompt length: the smallest bucket that holds it, at most the longest allowed."""
        return bucket(length, _PROMPT_LENGTHS, self.max_prompt_length)


def bucket(size: int, smallest: Sequence[int], largest: int) -> int:
    """Return the least of smallest x 2^n, for any n, that is at least `size`, at most `largest`: few shapes to compile."""
    doublings = max(0, *(math.ceil(math.log2(max(size, 1) / least)) for least in smallest))
    return min(*(least << n for least in smallest for n in range(doublings + 1) if least << n >= size), largest)
