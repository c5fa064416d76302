"""The sampling engine: a queue of prompts, slots on the mesh, and the order in which the compiled programs run.

Owns the device's arrays, the programs and the harvest of finished completions. Refuses to own which rollout gets which slot
and blocks (schedule.py), the shapes that are compiled (shapes.py), text, rewards and training.

    submit -> schedule -> (fill, extend: prompts computed once, shared) -> (start) -> (decode_chunk)* -> poll -> Completion
                 ^                                                                                        |
                 '-------------- a later turn, whose cache was parked meanwhile (`Request.cache_key`) ----'

A rollout's tokens depend on the weights, its prompt, its id and its attempt; not on its slot, its neighbours or when
it was admitted. Every draw is keyed by `draw_key(seed, purpose, task id, attempt)` and the position of the token.
"""

import hashlib
import itertools
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rljax.mesh import DATA_AXES, bytes_per_device, data_shards, on_cpu, sharding
from rljax.models.arch import Arch
from rljax.pytree import Params
from rljax.records import Completion, SamplingParams, TopTokens
from rljax.sampler.blocks import Ledger, Pool, Size, blocks_for, empty_page_table, empty_tables
from rljax.sampler.cache import LayerCache, Report, Slots, empty_slots, slots_sharding, stored_form
from rljax.sampler.decode import Prompts, Starts, decode_chunk, extend, fill, score_prompts, start
from rljax.sampler.draw import Rules
from rljax.sampler.kernels import AttentionChoice
from rljax.sampler.paged import InBlocks, Pieces, Tables
from rljax.sampler.pages import InPages, PageTable
from rljax.sampler.rules import build_rules, end_tokens, has_rules, refuse_impossible
from rljax.sampler.schedule import Counts, Piece, Request, Running, Schedule
from rljax.sampler.shapes import least, prompt_lengths, shapes_of
from rljax.sampler.stops import StopStream, TextStream

_BY_XLA = AttentionChoice(None, "nothing else was asked for")
_COMPILED_TOGETHER = 8  # programs of a warm-up, at most


def draw_key(seed: int, purpose: str, task_id: str, attempt: int) -> tuple[int, int]:
    """Return the random key (two 32-bit words) of one rollout: a pure function of its arguments.

    `purpose` separates training from evaluation, so that neither disturbs the other.
    """
    digest = hashlib.blake2b(f"{seed}\x1f{purpose}\x1f{task_id}\x1f{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


class Engine:
    """Samples completions on the mesh, a fixed number of slots at a time."""

    _rows_in_use = 0
    """Rows of the chunk in progress."""

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
        prefill_chunk: int | None = None,
        reuse_cache: bool = False,
        batch_invariant: bool = False,
        dtype: Any,
        cache_dtype: str = "as-is",
        attention: AttentionChoice = _BY_XLA,
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
            cache_tokens: Tokens the cache holds; default: every slot at its longest. With less, rollouts wait or start again.
            readers: Rollouts that share one stored prompt.
            decode_chunk_steps: Decode steps between two looks by the host.
            prefill_chunk: Tokens of one prompt that are computed between two chunks of decode steps; default: all of it.
            reuse_cache: Whether caches are parked under the requests' cache keys. The pool of own tokens is larger then.
            batch_invariant: Whether every decode step has one shape, so that what else runs changes no bit of a rollout.
            dtype: Type of parameters and products, and of a cache as it is except on CPUs, where that is float32.
            cache_dtype: How keys and values are kept: `as-is`, or `int8`, as codes with a scale each.
            attention: What attends in decode steps. With a kernel they have one shape, and every cache is one of pages.
            record_routing: Whether completions tell to which experts their tokens went.
            logprobs: Most likely tokens that requests may have reported; None for no report. Every step pays for it.
            open_text: Opens a stream from the tokens of one completion to text; stop strings need it.

        Raises:
            ValueError: slots do not divide over the mesh, nothing ends a completion, the cache is too small, or no experts.
        """
        self.shards = _shards_of(arch, slots, mesh, stop_ids, record_routing)
        self.mesh, self.arch, self.slots = mesh, arch, slots
        self.max_prompt_length, self.max_completion_length = max_prompt_length, max_completion_length
        per_shard, readers = slots // self.shards, min(readers, slots // self.shards)
        self._rows = -(-per_shard // readers)  # prompts per prefill and data shard
        share, chunk = (None if cache_tokens is None else cache_tokens // self.shards), (prefill_chunk or max_prompt_length)
        sizes = per_shard, self._rows, max_prompt_length, max_completion_length, chunk, share
        self.attention, kernel = attention, attention.kernel
        shapes = shapes_of(*sizes, continued=reuse_cache, aligned=kernel is not None)
        # A kernel reads no more for a wider table and larger pools.
        self._shapes = shapes.largest() if batch_invariant or kernel is not None else shapes
        pools = self._shapes.prompt_arenas, self._shapes.own_arenas
        sizes = [sum(arenas) for arenas in pools]
        ledgers = [Ledger(self.shards, readers, *map(Pool, sizes), aligned=kernel is not None) for _ in range(self.shards)]
        self._schedule = Schedule(ledgers, per_shard, decode_chunk_steps, chunk, reuse_cache)
        self._stop_ids = jax.device_put(np.array(sorted(stop_ids), np.int32), sharding(mesh))
        self._ends, self._row_sharding = frozenset(stop_ids), sharding(mesh, DATA_AXES)
        self._logprobs, self._open_text, kind = logprobs, open_text, _cache_dtype(mesh, dtype, cache_dtype)
        form = InBlocks() if kernel is None else InPages(kernel)
        self._state: Slots = empty_slots(arch, form, slots, *pools, max_completion_length, kind, mesh, record_routing, logprobs)
        self._fill, self._extend, self._start, self._copy, self._decode = _jitted(arch, mesh, form, decode_chunk_steps)
        self._score = jax.jit(partial(score_prompts, arch, stored_form(self._state.cache)))
        self._params, self._version, self._rules = None, -1, None  # rules: who asks for what, and the same on the device

    def set_weights(self, params: Params, version: int) -> None:
        """Sample from these parameters from now on; what is parked is freed, and no stored prompt is given to newcomers.

        Rollouts in progress go on with the new parameters on the cache they have, as with the in-flight updates of
        PipelineRL (arXiv:2509.19128): each of their tokens has the version that drew it.

        Args:
            params: Parameters in the sampler's layout and type, from `rollouts.weights.publish`.
            version: Recorded with every token sampled from them.
        """
        decoding = [slot for slot, running in self._schedule.running.items() if running.started]
        counts = jax.device_get(self._state.progress.count) if decoding else ()
        self._schedule.new_weights({slot: int(counts[slot]) for slot in decoding}, version)
        self._params, self._version = params, version

    def warm_up(self, requests: Iterable[SamplingParams] = ()) -> int:
        """Compile every program that any lengths will ask for, several at a time; return how many there are.

        Without it each is compiled when it is first met. `requests` are what will be asked of the draw: where some of them
        change the distribution or the end tokens, decode steps are compiled for those, too.
        """
        assert self._params is not None, "set_weights comes before a warm-up"
        for asked in filter(has_rules, requests):
            self._keep_rules({0: asked})  # each with the room of those before it
        # Most of a compilation is passes that run on one core, and each takes memory.
        with jax.set_mesh(self.mesh), ThreadPoolExecutor(min(_COMPILED_TOGETHER, os.cpu_count() or 1)) as pool:
            compiling = [pool.submit(program.lower(*inputs).compile) for program, inputs in self._programs()]
        for compiled in compiling:
            compiled.result()  # or its error
        return len(compiling)

    def _programs(self) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        """Yield the programs with inputs of every shape there is: longest compilations first."""
        shapes, nobody, state = self._shapes, [()] * self.shards, self._state
        rules = (None,) if self._rules is None else (None, self._rules[1])
        for size, asked in itertools.product(reversed(shapes.decode()), rules):
            yield self._decode, (self._params, state, *self._tables(size, empty=True), self._stop_ids, asked)
        for seen in itertools.product(shapes.pieces, shapes.seen):
            yield self._extend, (self._params, state, self._pieces(Pieces, nobody, *seen))
        for width in shapes.prompts:
            yield self._fill, (self._params, state, self._pieces(Prompts, nobody, width, blocks_for(width)))
        yield self._start, (state.progress, self._starts((), ()))
        if self.attention.kernel is not None or len(shapes.own_arenas) > 1 or len(shapes.prompt_arenas) > 1:
            yield self._copy, (state.cache[0], *self._copies([()]))

    @property
    def pending(self) -> int:
        """Number of submitted rollouts that have not been polled."""
        return len(self._schedule.waiting) + len(self._schedule.running)

    @property
    def num_bytes(self) -> int:
        """Memory of the cache and of the slots' progress on each device (bytes)."""
        return bytes_per_device(self._state)

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
        self._schedule.waiting.extend(requests)

    def step(self) -> None:
        """Admit waiting rollouts, compute a piece of each prompt and start a chunk of decode steps.

        Returns before the device is done.
        """
        assert self._params is not None, "set_weights comes before step"
        schedule = self._schedule
        with jax.set_mesh(self.mesh):
            # Those that run come first: a newcomer they would have to send back again is not let in.
            schedule.make_room()
            schedule.admit(self._version)
            self._compute()
            started = schedule.start()
            if started or schedule.halted:
                progress = self._start(self._state.progress, self._starts(started, schedule.halted))
                self._state = Slots(self._state.cache, progress)
                schedule.halted.clear()
            if self.attention.kernel is not None:
                self._copy_blocks(schedule.copies(started))
            self._score_prompts(started)
            if any(running.started for running in schedule.running.values()):
                size = self._size()
                self._copy_blocks([ledger.compact(size) for ledger in schedule.ledgers])
                rules, self._rows_in_use = self._rules_in_use(), self.shards * size.rows
                self._state = self._decode(self._params, self._state, *self._tables(size), self._stop_ids, rules)

    def poll(self) -> list[tuple[Hashable, Completion]]:
        """Wait for the chunk in progress and return the completions that ended with it."""
        decoding = {slot: running for slot, running in self._schedule.running.items() if running.started}
        if not decoding:
            return []
        progress = self._state.progress
        remaining, counts = jax.device_get((progress.remaining, progress.count))
        self._count(decoding, counts)
        ends: dict[int, tuple[int, str | None]] = {slot: (int(counts[slot]), None) for slot in decoding if remaining[slot] == 0}
        if any(running.request.params.stop for running in decoding.values()):
            drawn = jax.device_get(progress.out_tokens)
            for slot, running in decoding.items():
                if stop := self._stop_string(running, drawn[slot, : counts[slot]]):
                    ends[slot] = stop
        self._schedule.halted |= {slot for slot in ends if remaining[slot]}
        return [(decoding[slot].request.ticket, done) for slot, done in self._harvest(ends).items()]

    def _count(self, decoding: Mapping[int, Running], counts: np.ndarray) -> None:
        """Note what the chunk in progress has drawn; it had as many steps as the rollout that drew most."""
        drawn = [int(counts[slot]) - running.drawn for slot, running in decoding.items()]
        for slot, running in decoding.items():
            running.drawn = int(counts[slot])
        self._schedule.counts.drawn += sum(drawn)
        self._schedule.counts.rows += max(drawn) * self._rows_in_use
        self._rows_in_use = 0  # who polls again sees the same chunk

    def _stop_string(self, running: Running, tokens: np.ndarray) -> tuple[int, str] | None:
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

    def stream(self, request: Request) -> Iterator[np.ndarray]:
        """Sample one rollout and yield its tokens as they come, for a person who watches."""
        assert not self.pending, "a stream polls the engine alone: it would drop the completions of others"
        self.submit([request])
        sent = 0
        while self.pending:
            self.step()
            # Only what is left after the search for stop strings is shown.
            if done := self.poll():
                yield done[0][1].tokens[sent:]
                return
            for slot, running in self._schedule.running.items():
                if running.started:
                    count = int(jax.device_get(self._state.progress.count)[slot])
                    yield jax.device_get(self._state.progress.out_tokens)[slot, sent:count].copy()
                    sent = count

    def abort(self, ticket: Hashable) -> Completion:
        """Take a rollout back and return what it has drawn; a request with the prompt and these tokens continues it.

        The draws are those it would have made: they depend on its key and on positions. With a cache key, its cache may
        be parked. A rollout that came to its end in the chunk in progress is complete.

        Raises:
            KeyError: no rollout with this ticket is waiting or running.
        """
        for request in self._schedule.waiting:
            if request.ticket == ticket:
                self._schedule.waiting.remove(request)
                return _nothing_drawn()
        slot = next((slot for slot, running in self._schedule.running.items() if running.request.ticket == ticket), None)
        if slot is None:
            raise KeyError(f"no rollout with the ticket {ticket!r} is waiting or running")
        if self._schedule.running[slot].started:
            self._schedule.halted.add(slot)
            count = int(jax.device_get(self._state.progress.count)[slot])
            return self._harvest({slot: (count, None)})[slot]
        self._schedule.vacate(slot)
        return _nothing_drawn()

    def release(self, cache_key: Hashable) -> None:
        """Free what is parked under a cache key: no later turn will come."""
        self._schedule.release(cache_key)

    def clear(self) -> None:
        """Forget every waiting and running rollout, and everything parked."""
        self._schedule.clear()

    def take_metrics(self) -> dict[str, float]:
        """Return how the cache was used since this was last called."""
        counts, self._schedule.counts = self._schedule.counts, Counts()
        values = {
            "cache/preempted": float(counts.preempted),
            "cache/evicted": float(counts.evicted),
            "cache/occupancy_max": counts.occupancy,
        }
        values |= {"cache/reused_fraction": counts.reused / counts.later} if counts.later else {}
        return values | ({"sampler/occupancy": counts.drawn / counts.rows} if counts.rows else {})

    def _harvest(self, ends: Mapping[int, tuple[int, str | None]]) -> dict[int, Completion]:
        """Free slots and return what their rollouts have drawn: so many tokens, and the stop string that they end with."""
        if not ends:
            return {}
        now = self._state.progress
        remaining, *outputs = jax.device_get((now.remaining, now.out_tokens, now.out_logp, now.report, now.out_choices))
        done = {}
        for slot, (count, stop) in ends.items():
            tokens, logps, report, fed = (jax.tree.map(lambda part, at=slot: part[at], part) for part in outputs)
            running = self._schedule.running[slot]
            experts = None if fed is None else self._experts(slot, running, fed[:count])
            drawn = tokens[:count].copy()
            self._schedule.finish(slot, drawn.tolist(), experts)
            found = _ended(running.request.params, drawn, stop, self._ends)
            reason = "stop" if found is not None else "abort" if remaining[slot] else "length"
            reported = _reported(running, count, report)
            versions = _versions(running, count)
            done[slot] = Completion(drawn, logps[:count].copy(), versions, reason, found, *reported, experts)
        return done

    def _experts(self, slot: int, running: Running, fed: np.ndarray) -> np.ndarray:
        """Put the experts of what was computed before decoding before those of the tokens that were fed."""
        shard, local = divmod(slot, self._schedule.per_shard)
        record = running.record or self._schedule.ledgers[shard].prompt_of(local).record
        return np.concatenate([*(np.asarray(choices)[row, :count] for choices, row, count in record), fed])

    def _compute(self) -> None:
        """Compute the next piece of every prompt that is not computed yet."""
        calls: dict[tuple[bool, int, int], list[list[Piece]]] = {}
        for shard, piece in self._schedule.pieces():
            # The padded sizes may change the last bits of keys and values, so they follow from the piece alone and not from
            # what else happens to be computed.
            if piece.whole:
                width = least(self._shapes.prompts, len(piece.tokens))
                shape = True, width, blocks_for(width)
            else:
                shape = False, least(self._shapes.pieces, len(piece.tokens)), least(self._shapes.seen, len(piece.blocks))
            calls.setdefault(shape, [[] for _ in range(self.shards)])[shard].append(piece)
        for (whole, width, blocks), shards in calls.items():
            for first in range(0, max(map(len, shards)), self._rows):
                rows = [pieces[first : first + self._rows] for pieces in shards]
                program, new = (self._fill, Prompts) if whole else (self._extend, Pieces)
                self._state, experts = program(self._params, self._state, self._pieces(new, rows, width, blocks))
                for shard, pieces in enumerate(rows if experts is not None else ()):
                    for row, piece in enumerate(pieces, shard * self._rows):
                        piece.record.append((experts, row, len(piece.tokens)))

    def _pieces(self, kind: type[Prompts] | type[Pieces], rows: Sequence[Sequence[Piece]], width: int, blocks: int) -> Any:
        """Build the arrays of one prefill, `width` tokens and `blocks` blocks wide."""
        count = self.shards * self._rows
        tokens, taken = np.zeros((count, width), np.int32), np.full((count, blocks), -1, np.int32)
        lengths, first, origin, base = (np.zeros(count, np.int32) for _ in range(4))
        for shard, pieces in enumerate(rows):
            for row, piece in enumerate(pieces, shard * self._rows):
                lengths[row], first[row], origin[row], base[row] = len(piece.tokens), piece.first, piece.origin, piece.base
                tokens[row, : len(piece.tokens)], taken[row, : len(piece.blocks)] = piece.tokens, piece.blocks
        fields = {"tokens": tokens, "lengths": lengths, "blocks": taken}
        fields |= {"first": first, "origin": origin, "base": base} if kind is Pieces else {}
        return kind(**jax.device_put(fields, self._row_sharding))

    def _score_prompts(self, started: Collection[int]) -> None:
        """Start computing the log-probabilities of the prompts whose requests ask for them."""
        asking = [
            self._schedule.running[slot] for slot in started if self._schedule.running[slot].request.params.prompt_logprobs
        ]
        rows = self.shards * self._rows
        for first in range(0, len(asking), rows):
            prompts = [running.request.prompt for running in asking[first : first + rows]]
            width = least(prompt_lengths(self.max_prompt_length), max(map(len, prompts)))
            tokens = np.zeros((rows, width), np.int32)
            lengths = np.zeros(rows, np.int32)
            for row, prompt in enumerate(prompts):
                tokens[row, : len(prompt)], lengths[row] = prompt, len(prompt)
            logp = self._score(self._params, *jax.device_put((tokens, lengths), self._row_sharding))
            for row, running in enumerate(asking[first : first + rows]):
                running.prompt_logp = logp, row

    def _rules_in_use(self) -> Rules | None:
        """Return what running requests ask of the draw; it is sent to the device again only when that has changed."""
        asked = {slot: run.request.params for slot, run in self._schedule.running.items() if has_rules(run.request.params)}
        if not asked:
            return None
        if self._rules is None or asked != self._rules[0]:
            return self._keep_rules(asked)
        return self._rules[1]

    def _keep_rules(self, asked: dict[int, SamplingParams]) -> Rules:
        before = None if self._rules is None else self._rules[1]
        rules = jax.device_put(build_rules(asked, self.slots, self.arch.vocab_size, before), self._row_sharding)
        self._rules = asked, rules
        return rules

    def _starts(self, started: Collection[int], halted: Collection[int]) -> Starts:
        """Build the arrays that start rollouts in some slots and stop what is decoded in others."""
        starts = np.zeros(self.slots, bool)
        token, position, origin, limit = (np.zeros(self.slots, np.int32) for _ in range(4))
        key, temperature = np.zeros((self.slots, 2), np.uint32), np.zeros(self.slots, np.float32)
        starts[[*halted]] = True
        for slot in started:
            running = self._schedule.running[slot]
            request = running.request
            starts[slot], origin[slot] = True, running.origin
            token[slot], position[slot] = request.prompt[-1], running.before
            limit[slot], key[slot], temperature[slot] = request.params.max_tokens, request.key, request.params.temperature
        fields = {"starts": starts, "token": token, "position": position, "origin": origin, "limit": limit}
        fields |= {"draw_key": key, "temperature": temperature}
        return Starts(**jax.device_put(fields, self._row_sharding))

    def _copy_blocks(self, copies: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copy blocks to others, given as pairs for each data shard, by one small program that is the same for all layers."""
        per_shard = self._schedule.per_shard
        for first in range(0, max(map(len, copies)), per_shard):
            part = self._copies([pairs[first : first + per_shard] for pairs in copies])
            self._state = Slots(tuple(self._copy(layer, *part) for layer in self._state.cache), self._state.progress)

    def _copies(self, copies: Sequence[Sequence[tuple[int, int]]]) -> tuple[jax.Array, jax.Array]:
        """Build the arrays that say which block is copied to which, at most one pair per slot of each data shard."""
        both = np.full((2, self.shards, self._schedule.per_shard), -1, np.int32)
        for shard, pairs in enumerate(copies):
            for index, pair in enumerate(pairs):
                both[:, shard, index] = pair
        source, target = jax.device_put((both[0].ravel(), both[1].ravel()), self._row_sharding)
        return source, target

    def _size(self) -> Size:
        """Return the size of a decode step that has room for all that runs."""
        ends = self._shapes.ends
        return self._shapes.fitting(ledger.need(*ends) for ledger in self._schedule.ledgers)

    def _tables(self, size: Size, empty: bool = False) -> tuple[Tables | PageTable, jax.Array | None]:
        """Return who reads which block, and the slots of its rows if those are not all of them; see `decode_chunk`."""
        ledgers, per_shard, rows = self._schedule.ledgers, self._schedule.per_shard, size.rows * self.shards
        if self.attention.kernel is not None:
            pages = self._state.cache[0]
            assert not isinstance(pages, LayerCache), "a kernel reads pages"
            tables = empty_page_table(rows, self.attention.kernel.columns(self._shapes.longest, pages))
        else:
            tables = empty_tables(self.shards, size, ledgers[0].readers)
        chosen = None if size.rows == per_shard else np.full((self.shards, size.rows), per_shard, np.int32)
        for shard, ledger in enumerate(() if empty else ledgers):
            places = {slot: slot for slot in range(per_shard)} if chosen is None else ledger.rows()
            ledger.write(tables, shard, places)
            if chosen is not None:
                chosen[shard, : len(places)] = [*places]
        return jax.device_put((tables, None if chosen is None else chosen.ravel()), self._row_sharding)


def _jitted(arch: Arch, mesh: Mesh, form: InBlocks | InPages, steps: int) -> tuple[Any, Any, Any, Any, Any]:
    """Return the programs that write a prompt, a piece, the start of rollouts, copies of blocks, and tokens."""
    # The slots are donated: a program that copied the cache instead of updating it would double the memory.
    both = layout, _ = slots_sharding(mesh, form), sharding(mesh, DATA_AXES)
    return (
        jax.jit(partial(fill, arch, mesh, form), donate_argnums=1, out_shardings=both),
        jax.jit(partial(extend, arch, mesh, form), donate_argnums=1, out_shardings=both),
        jax.jit(start, donate_argnums=0, out_shardings=layout.progress),
        jax.jit(partial(form.copied, mesh), donate_argnums=0, out_shardings=layout.cache),
        jax.jit(partial(decode_chunk, arch, mesh, form, steps), donate_argnums=1, out_shardings=layout),
    )


def _shards_of(arch: Arch, slots: int, mesh: Mesh, stop_ids: Sequence[int], record_routing: bool) -> int:
    """Return the number of data shards; raise ValueError for what does not fit them or the model."""
    shards = data_shards(mesh)
    if record_routing and arch.experts is None:
        raise ValueError("algorithm.routing_replay is for models with experts, and this model has none; set it to false")
    if slots % shards:
        raise ValueError(f"sampler.slots ({slots}) must be a multiple of mesh.replica x mesh.fsdp ({shards})")
    if not stop_ids:
        raise ValueError("no token ends a completion; set eos_token_id in the checkpoint's generation_config.json")
    return shards


def _cache_dtype(mesh: Mesh, dtype: Any, kept: str) -> jnp.dtype:
    assert kept in ("as-is", "int8"), kept
    if kept == "int8":
        return jnp.dtype("int8")
    # XLA:CPU writes into a bfloat16 array by converting all of it to float32 and back.
    return jnp.dtype("float32" if on_cpu(mesh) else dtype)


def _ended(params: SamplingParams, drawn: np.ndarray, stop: str | None, ends: frozenset[int]) -> str | int | None:
    """Return what ended a completion: a stop string or an end token, or nothing."""
    if stop is not None or not len(drawn):
        return stop
    last = int(drawn[-1])
    return last if last in end_tokens(params, ends) else None


def _reported(
    running: Running, count: int, report: Report | None
) -> tuple[np.ndarray | None, TopTokens | None, np.ndarray | None]:
    """Return what a request asked for beside the tokens: their own log-probabilities, the likeliest, and the prompt's."""
    params, raw, top, prompt_logp = running.request.params, None, None, None
    if params.logprobs is not None:
        assert report is not None, "such a request is refused"
        raw, ids, likely = (np.asarray(part)[:count] for part in (report.chosen, report.ids, report.logp))
        raw, top = raw.copy(), TopTokens(ids[:, : params.logprobs].copy(), likely[:, : params.logprobs].copy())
    if running.prompt_logp is not None:
        logp_of_prompts, row = running.prompt_logp
        prompt_logp = np.asarray(logp_of_prompts)[row, : len(running.request.prompt)].copy()
    return raw, top, prompt_logp


def _versions(running: Running, count: int) -> np.ndarray:
    """Return the weight version of each of the tokens that a rollout has drawn."""
    firsts = [first for first, _ in running.versions]
    lengths = np.diff([*firsts, max(count, firsts[-1])])
    return np.repeat([version for _, version in running.versions], lengths).astype(np.int32)


def _nothing_drawn() -> Completion:
    return Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), "abort", None)
