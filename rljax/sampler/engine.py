"""The sampling engine: a queue of prompts, slots on the mesh, and the order in which the compiled programs run.

Owns admission (which waiting rollout gets which slot), the shapes that are compiled, and the harvest of finished
completions. Refuses to own text, rewards and training.

    submit -> waiting -> (fill: prompts computed once, shared) -> slots -> (decode_chunk)* -> poll -> Completion

A rollout's tokens depend on the weights, its prompt, its id and its attempt; not on its slot, its neighbours or when
it was admitted. Every draw is keyed by `draw_key(seed, purpose, task id, attempt)` and the position of the token.
"""

import hashlib
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
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
from rljax.records import Completion
from rljax.sampler.cache import Slots, empty_slots, slots_sharding
from rljax.sampler.decode import Admission, decode_chunk, fill

_SMALLEST_BUCKET = 16  # tokens; prompts are padded to this times a power of two


@dataclass(frozen=True, slots=True)
class Request:
    """One rollout to sample.

    Example:
        Request(ticket=("task", 0), prompt=(1, 5, 6), key=draw_key(0, "train", "task", 0), max_tokens=32, temperature=1.0)
    """

    ticket: Hashable
    """Comes back with the completion."""
    prompt: tuple[int, ...]
    """Token ids to continue; requests with equal prompts share one computation of it."""
    key: tuple[int, int]
    """Random key of the rollout, from `draw_key`."""
    max_tokens: int
    """Longest completion (tokens)."""
    temperature: float
    """Sampling temperature; 0 takes the most likely token."""


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
        cache_positions: int,
        prefill_rows: int,
        decode_chunk_steps: int,
        dtype: Any,
    ):
        """Allocate the cache; programs compile on first use.

        Args:
            arch: Model to sample from.
            mesh: Devices; slots are split over the data axes.
            stop_ids: Tokens that end a completion.
            slots: Rollouts decoded together.
            max_prompt_length: Longest prompt (tokens).
            max_completion_length: Longest completion (tokens).
            cache_positions: Cache positions per slot (tokens).
            prefill_rows: Different prompts computed by one prefill, over all devices.
            decode_chunk_steps: Decode steps between two looks by the host.
            dtype: Type of parameters and products, and of the cache except on CPUs, where it is float32.

        Raises:
            ValueError: slots do not divide over the mesh, nothing ends a completion, or the cache is too short.
        """
        self.shards = data_shards(mesh)
        if slots % self.shards:
            raise ValueError(f"sampler.slots ({slots}) must be a multiple of mesh.replica x mesh.fsdp ({self.shards})")
        if not stop_ids:
            raise ValueError("no token ends a completion; set eos_token_id in the checkpoint's generation_config.json")
        if max_prompt_length + max_completion_length > cache_positions:
            raise ValueError(
                f"a prompt of {max_prompt_length} and a completion of {max_completion_length} tokens exceed the cache of "
                f"{cache_positions} positions; raise sampler.cache_length"
            )
        self.mesh, self.arch, self.slots = mesh, arch, slots
        self.max_prompt_length, self.max_completion_length = max_prompt_length, max_completion_length
        self._rows = -(-prefill_rows // self.shards)  # per data shard
        self._stop_ids = jax.device_put(np.array(sorted(stop_ids), np.int32), sharding(mesh))
        self._row_sharding = sharding(mesh, DATA_AXES)
        # XLA:CPU writes into a bfloat16 array by converting all of it to float32 and back.
        cache_dtype = jnp.dtype("float32" if mesh.devices.flat[0].platform == "cpu" else dtype)
        self._state: Slots = empty_slots(arch, slots, cache_positions, max_completion_length, cache_dtype, mesh)
        # The slots are donated: a program that copied the cache instead of updating it would double the memory.
        layout = slots_sharding(mesh)
        self._fill = jax.jit(partial(fill, arch, mesh), donate_argnums=1, out_shardings=layout)
        self._decode = jax.jit(partial(decode_chunk, arch, decode_chunk_steps), donate_argnums=1, out_shardings=layout)
        self._params: Params | None = None
        self._version = -1
        self._waiting: deque[Request] = deque()
        self._running: dict[int, tuple[Request, int]] = {}  # slot -> request and the version it is sampled with

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

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue rollouts; those with equal prompts should stand next to each other.

        Raises:
            ValueError: a request does not fit the prompt, completion or cache length. Nothing is queued then.
        """
        for request in requests:
            if not 1 <= len(request.prompt) <= self.max_prompt_length:
                raise ValueError(
                    f"the prompt of {request.ticket} has {len(request.prompt)} tokens; "
                    f"sampler.max_prompt_length allows 1 to {self.max_prompt_length}"
                )
            if not 1 <= request.max_tokens <= self.max_completion_length:
                raise ValueError(
                    f"{request.ticket} asks for {request.max_tokens} tokens; "
                    f"sampler.max_completion_length allows 1 to {self.max_completion_length}"
                )
        self._waiting.extend(requests)

    def step(self) -> None:
        """Admit waiting rollouts to free slots and start decoding a chunk; returns before the device is done."""
        assert self._params is not None, "set_weights comes before step"
        with jax.set_mesh(self.mesh):
            while self._waiting and len(self._running) < self.slots:
                self._state = self._fill(self._params, self._state, self._admit())
            if self._running:
                self._state = self._decode(self._params, self._state, self._stop_ids)

    def poll(self) -> list[tuple[Hashable, Completion]]:
        """Wait for the chunk in progress and return the completions that ended with it."""
        if not self._running:
            return []
        state = self._state
        remaining, counts = jax.device_get((state.remaining, state.count))
        ended = [slot for slot in self._running if remaining[slot] == 0]
        if not ended:
            return []
        tokens, logps = jax.device_get((state.out_tokens, state.out_logp))
        stops = set(np.asarray(self._stop_ids).tolist())
        done = []
        for slot in ended:
            request, version = self._running.pop(slot)
            drawn = tokens[slot, : counts[slot]].copy()
            reason = "stop" if int(drawn[-1]) in stops else "length"
            done.append((request.ticket, Completion(drawn, logps[slot, : counts[slot]].copy(), version, reason)))
        return done

    def stream(self, request: Request) -> Iterator[np.ndarray]:
        """Sample one rollout and yield its tokens as they come, for a person who watches."""
        assert not self.pending, "a stream polls the engine alone: it would drop the completions of others"
        self.submit([request])
        sent = 0
        while self.pending:
            self.step()
            slot = next(slot for slot, (running, _) in self._running.items() if running is request)
            count = int(jax.device_get(self._state.count)[slot])
            yield jax.device_get(self._state.out_tokens)[slot, sent:count].copy()
            sent = count
            self.poll()

    def abort(self) -> None:
        """Forget every waiting and running rollout."""
        self._waiting.clear()
        self._running.clear()
        idle = jnp.zeros_like(self._state.remaining, device=self._row_sharding)
        self._state = Slots(**{**vars(self._state), "remaining": idle})

    def _admit(self) -> Admission:
        """Give waiting rollouts free slots, first come first served, as far as one prefill reaches.

        All prompts of one prefill are of one bucket: the padded length may change the last bits of keys and values, so it
        must follow from the prompt alone and not from what else happens to wait.
        """
        per_shard = self.slots // self.shards
        free = deque(slot for slot in self._by_shard_in_turn(per_shard) if slot not in self._running)
        prompts: list[dict[tuple[int, ...], int]] = [{} for _ in range(self.shards)]
        chosen: list[tuple[int, int, Request]] = []
        width = self._bucket(len(self._waiting[0].prompt) - 1)
        while self._waiting and free:
            request = self._waiting[0]
            if self._bucket(len(request.prompt) - 1) != width:
                break
            slot = self._place(request.prompt, free, prompts, per_shard)
            if slot is None:
                break
            free.remove(slot)
            rows = prompts[slot // per_shard]
            row = rows.setdefault(request.prompt[:-1], len(rows))
            chosen.append((slot, row, self._waiting.popleft()))
            self._running[slot] = (request, self._version)
        return self._admission(chosen, prompts, width)

    def _by_shard_in_turn(self, per_shard: int) -> Iterator[int]:
        """Yield every slot, going round the data shards, so that they fill evenly."""
        for within in range(per_shard):
            for shard in range(self.shards):
                yield shard * per_shard + within

    def _place(
        self, prompt: tuple[int, ...], free: deque[int], prompts: list[dict[tuple[int, ...], int]], per_shard: int
    ) -> int | None:
        """Return a free slot whose shard already computes this prompt, else one whose shard has a prefill row left."""
        open_row = None
        for slot in free:
            rows = prompts[slot // per_shard]
            if prompt[:-1] in rows:
                return slot
            if open_row is None and len(rows) < self._rows:
                open_row = slot
        return open_row

    def _admission(
        self, chosen: list[tuple[int, int, Request]], prompts: list[dict[tuple[int, ...], int]], width: int
    ) -> Admission:
        """Build the arrays of one prefill, `width` tokens wide."""
        tokens = np.zeros((self.shards * self._rows, width), np.int32)
        lengths = np.zeros(len(tokens), np.int32)
        for shard, rows in enumerate(prompts):
            for prompt, row in rows.items():
                tokens[shard * self._rows + row, : len(prompt)] = prompt
                lengths[shard * self._rows + row] = len(prompt)
        row = np.full(self.slots, -1, np.int32)
        token, position, limit = (np.zeros(self.slots, np.int32) for _ in range(3))
        key, temperature = np.zeros((self.slots, 2), np.uint32), np.zeros(self.slots, np.float32)
        for slot, source, request in chosen:
            row[slot], token[slot], position[slot] = source, request.prompt[-1], len(request.prompt) - 1
            limit[slot], key[slot], temperature[slot] = request.max_tokens, request.key, request.temperature
        fields = {"tokens": tokens, "lengths": lengths, "row": row, "token": token, "position": position, "limit": limit}
        fields |= {"draw_key": key, "temperature": temperature}
        return Admission(**jax.device_put(fields, self._row_sharding))

    def _bucket(self, length: int) -> int:
        """Return the padded prompt length: the smallest power-of-two bucket that holds it, at most the longest allowed."""
        width = _SMALLEST_BUCKET
        while width < length:
            width *= 2
        return min(width, self.max_prompt_length)
