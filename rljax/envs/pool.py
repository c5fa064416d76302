"""A pool of worker processes that environments run in, driven by one thread that has other work to do.

Owns the parent's side: which episode lives where, queues, deadlines, dead workers, and the check of every reply. Refuses
to own policy: an outcome is reported, and whether the rollout is tried again or dropped is for the caller to say.

    driver ----- reset, step, close_episode -----> queue ---> at most a moment's work sent ahead ---> worker process
       <-------- poll: Reply(ok|error|timeout) <-- check <--- frames on a socket of its own <-------- runs one at a time

Nothing here waits without a bound. A request's deadline starts when the parent sees that the one before it on the same
worker is answered, and a worker that misses it is killed, together with its children, and replaced. That ends the request
it was working on. Its other episodes are opened again elsewhere if they had no step yet, since `reset` is a pure function
of task and seed; the others are lost and end as errors that say so.
"""

import json
import logging
import math
import os
import pickle
import selectors
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rljax.envs.base import parse_options
from rljax.envs.process import WorkerProcess
from rljax.envs.replies import Outcome, Reply, record
from rljax.records import Observation, StepResult, Task

START_TIMEOUT = 60.0
"""Longest time from the start of a worker to its first frame, imports included (seconds)."""

MAX_FRUITLESS_STARTS = 3
"""Workers in a row that may die before they answered anything; then the pool gives up, since the next would die too."""

CLOSE_TIMEOUT = 5.0
"""How long an idle worker may take to close its open episodes before it is killed (seconds)."""

RETIRE_TIMEOUT = 300.0
"""How long a worker over its memory cap waits for the next step of an episode that only it can continue (seconds)."""

AHEAD_SECONDS = 0.05
"""Work that may wait inside a worker, so that it stays busy while the driver is on the device (seconds)."""

AHEAD_REQUESTS = 64
"""The same as a number of requests, however short they are."""

SUPERVISE_SECONDS = 0.02
"""Time between two looks at deadlines and deaths (seconds); memory is looked at a fifth as often."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Episode:
    number: int  # its name on the wire
    key: Hashable
    task_id: str
    opening: bytes  # pickled (task, seed), kept to open the episode again elsewhere
    worker: "_Worker | None" = None  # where it is open
    stepped: bool = False  # a step was answered, so its state cannot be made again from the opening
    lost: str = ""  # why its state is gone
    request: "_Request | None" = None  # the one that is queued or in flight
    closed: bool = False  # the driver wants no more replies


@dataclass(slots=True, eq=False)
class _Request:
    kind: Literal["reset", "step", "close"]
    episode: _Episode
    text: str | None = None
    timeout: float = 0.0  # seconds, set when handed over
    seconds: float = 0.0  # how long it is expected to take, set when handed over


@dataclass(slots=True, eq=False)
class _Worker:
    slot: int
    process: WorkerProcess
    deadline: float  # when it is overdue (monotonic seconds)
    state: Literal["starting", "ready", "retiring", "closing"] = "starting"
    failure: str = ""  # why it could not start, in its own words
    answered: bool = False
    ahead: float = 0.0  # expected seconds of everything in flight
    queue: deque[_Request] = field(default_factory=deque)  # for its episodes, not yet handed over
    in_flight: deque[_Request] = field(default_factory=deque)  # handed over; it works on the first
    episodes: set[_Episode] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        """Whether it works on something that somebody waits for."""
        return any(request.kind != "close" for request in self.in_flight)

    def __str__(self) -> str:
        return f"environment worker {self.slot} (pid {self.process.pid})"


class LocalPool:
    """Worker processes on this host that run the episodes of one environment.

    Use it from one thread, which must live as long as the pool: Linux kills the workers when the thread that started them
    ends. An episode is named by any hashable value; at most one request of it may be pending.

        with LocalPool("arithmetic", {}, workers=2) as pool:
            pool.reset("a", task, seed=0)
            while pool.pending:
                for reply in pool.poll(timeout=1.0):
                    if reply.kind == "reset" and reply.outcome == "ok":
                        pool.step(reply.episode, "7")
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        workers: int = 2,
        reset_timeout: float = 30.0,
        step_timeout: float = 30.0,
        max_worker_rss_mb: int = 4096,
        log_dir: Path | None = None,
    ) -> None:
        """Check the name and options, start the workers, and return without waiting for them.

        Args:
            name: `env.name`.
            options: `env.options`.
            workers: Number of worker processes.
            reset_timeout: Deadline of one reset (seconds).
            step_timeout: Deadline of one step, scoring included (seconds).
            max_worker_rss_mb: A worker above this resident memory (MiB, Linux only) is replaced once its episodes allow it,
                and at once above twice as much, which is an error of the request it was working on.
            log_dir: Where the workers' output goes, one file each; by default a temporary folder that ends with the pool.

        Raises ValueError for a wrong name, option or number.
        """
        if workers < 1 or min(reset_timeout, step_timeout, max_worker_rss_mb) <= 0:
            raise ValueError("a pool needs at least one worker, and timeouts and a memory cap above 0")
        parse_options(name, options)
        self._hello = (name, dict(options), list(sys.path), os.environ.get("PYTHONPATH"))
        self._reset_timeout, self._step_timeout = reset_timeout, step_timeout
        self._max_rss = max_worker_rss_mb * 2**20
        self._temporary = log_dir is None
        self._log_dir = Path(tempfile.mkdtemp(prefix="rljax-envs-")) if log_dir is None else log_dir
        self._episodes: dict[Hashable, _Episode] = {}
        self._unbound: deque[_Request] = deque()  # for episodes that may open on any worker
        self._replies: list[Reply] = []
        self._unanswered = 0
        self._episode_count = 0
        self._seconds: dict[str, float] = {}  # by kind of request, how long it takes
        self._fruitless = 0
        self._next_look = self._next_memory_look = 0.0
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        try:
            self._log_dir.mkdir(parents=True, exist_ok=True)
            for slot in range(workers):
                self._workers.append(self._start(slot))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "LocalPool":
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    @property
    def pending(self) -> int:
        """Number of requests whose reply `poll` has not returned yet."""
        return self._unanswered + len(self._replies)

    def reset(self, episode: Hashable, task: Task, seed: int) -> None:
        """Open an episode; `poll` will return its Observation. Raises ValueError when the name is in use."""
        self._assert_open()
        if episode in self._episodes:
            raise ValueError(f"episode {episode!r} is open already; close it first")
        self._episode_count += 1
        state = _Episode(self._episode_count, episode, task.id, pickle.dumps((task, seed)))
        self._episodes[episode] = state
        self._submit(_Request("reset", state))

    def step(self, episode: Hashable, text: str) -> None:
        """Send a model message to an open episode; `poll` will return its StepResult.

        Raises ValueError when the episode is not open (never opened, done, failed or closed) or its last request is pending.
        """
        self._assert_open()
        state = self._episodes.get(episode)
        if state is None or state.request is not None:
            raise ValueError(f"episode {episode!r} {'waits for a reply' if state else 'is not open'}; it cannot take a step")
        self._submit(_Request("step", state, text))

    def close_episode(self, episode: Hashable) -> None:
        """Give an episode up, its pending request included; one that is over already is no error."""
        state = self._episodes.pop(episode, None)
        if state is None:
            return
        state.closed = True
        if state.request is not None:
            self._unanswered -= 1
            queue = state.worker.queue if state.worker else self._unbound
            if state.request not in queue:
                return  # being worked on: closed when the reply comes
            queue.remove(state.request)
        self._close_remotely(state)

    def poll(self, timeout: float) -> list[Reply]:
        """Return the replies that are there, waiting up to `timeout` seconds for the first; at once when nothing is pending.

        Everything the pool does happens in here, deadlines included, so call it often, with 0.0 between two device programs.

        Raises RuntimeError, and closes the pool, when worker after worker dies before it has answered anything.
        """
        self._assert_open()
        end = time.monotonic() + timeout
        while True:
            self._dispatch()
            idle = self._replies or not self.pending
            self._exchange(0.0 if idle else min(max(end - time.monotonic(), 0.0), SUPERVISE_SECONDS))
            self._supervise()
            self._dispatch()
            if self._replies or not self.pending or time.monotonic() >= end:
                replies, self._replies = self._replies, []
                return replies

    def close(self) -> None:
        """End all workers: idle ones may close their episodes first, busy ones are killed. Closing twice is no error."""
        if self._closed:
            return
        self._closed = True
        try:
            end = time.monotonic() + CLOSE_TIMEOUT
            idle = [w for w in self._workers if w.state in ("ready", "retiring") and w.episodes and not w.busy]
            for worker in idle:
                worker.process.finish()
            for worker in idle:
                while worker.process.receive() and time.monotonic() < end and worker.process.alive:
                    time.sleep(0.002)
        finally:
            for worker in self._workers:
                worker.process.kill()
                worker.process.close()
            self._selector.close()
            if self._temporary:
                shutil.rmtree(self._log_dir)

    def _assert_open(self) -> None:
        if self._closed:
            raise ValueError("the environment pool is closed")

    def _start(self, slot: int) -> _Worker:
        process = WorkerProcess(self._log_dir / f"worker-{slot}.log")
        self._selector.register(process.socket, selectors.EVENT_READ)
        process.send(self._hello)
        return _Worker(slot, process, deadline=time.monotonic() + START_TIMEOUT)

    def _submit(self, request: _Request) -> None:
        episode = request.episode
        if request.kind != "close":
            self._unanswered += 1
            episode.request = request
            if episode.lost:
                self._end(request, "error", episode.lost)
                return
        (episode.worker.queue if episode.worker else self._unbound).append(request)

    def _close_remotely(self, episode: _Episode) -> None:
        if episode.worker is not None:
            self._submit(_Request("close", episode))

    def _dispatch(self) -> None:
        """Hand queued requests over, those of open episodes first, new episodes to the worker that holds the fewest."""
        for worker in self._workers:
            while worker.queue and worker.state in ("ready", "retiring") and self._has_room(worker, worker.queue[0]):
                self._hand_over(worker, worker.queue.popleft())
        while self._unbound:
            request = self._unbound[0]
            free = [w for w in self._workers if w.state == "ready" and not w.queue and self._has_room(w, request)]
            if not free:
                return
            self._hand_over(min(free, key=lambda w: (len(w.episodes), len(w.in_flight))), self._unbound.popleft())

    def _has_room(self, worker: _Worker, request: _Request) -> bool:
        """Tell whether a request may wait inside a worker: not for long, as far as one can know."""
        if not worker.in_flight:
            return True
        if worker.process.unsent or len(worker.in_flight) >= AHEAD_REQUESTS:
            return False
        return worker.ahead + self._seconds.get(request.kind, math.inf) <= AHEAD_SECONDS

    def _hand_over(self, worker: _Worker, request: _Request) -> None:
        episode = request.episode
        opening = None if episode.worker is worker else episode.opening
        episode.worker = worker
        worker.episodes.add(episode)
        request.timeout = self._step_timeout if request.kind == "step" else self._reset_timeout
        if request.kind == "step" and opening:
            request.timeout += self._reset_timeout
        request.seconds = self._seconds.get(request.kind, AHEAD_SECONDS)
        worker.ahead += request.seconds
        worker.in_flight.append(request)
        if len(worker.in_flight) == 1:
            worker.deadline = time.monotonic() + request.timeout
        worker.process.send((episode.number, opening, request.text))

    def _exchange(self, wait: float) -> None:
        """Write and read what the sockets allow, waiting up to `wait` seconds for the first."""
        for worker in self._workers:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.process.unsent else 0)
            if self._selector.get_key(worker.process.socket).events != events:
                self._selector.modify(worker.process.socket, events)
        events_of = {key.fd: events for key, events in self._selector.select(wait)}
        for worker in list(self._workers):
            events = events_of.get(worker.process.socket.fileno(), 0)
            if events & selectors.EVENT_WRITE:
                worker.process.flush()
            if events & selectors.EVENT_READ:
                self._read(worker)

    def _read(self, worker: _Worker) -> None:
        """Take all replies a worker has sent, and bury it if it is dead or talks nonsense."""
        try:
            connected = self._collect(worker)
        except (ValueError, RecursionError) as error:
            self._bury(worker, f"sent what is no reply ({error})")
            return
        if not connected or not worker.process.alive:
            self._bury(worker, worker.failure or worker.process.cause_of_death())

    def _collect(self, worker: _Worker) -> bool:
        connected = worker.process.receive()
        for frame in worker.process.frames():
            self._take(worker, frame)
        return connected

    def _take(self, worker: _Worker, frame: bytes) -> None:
        """Handle one frame; raise ValueError when it is not the one that is due."""
        message = json.loads(frame)
        if not isinstance(message, dict):
            raise ValueError("no JSON object")
        if worker.state == "starting":
            if "failed" in message:
                worker.failure = f"could not start: {message['failed']}"
            if message.get("ready") is True:
                worker.state, worker.deadline = "ready", math.inf
            return
        request = worker.in_flight[0] if worker.in_flight else None
        seconds = message.get("seconds")
        if request is None or message.get("episode") != request.episode.number or not isinstance(seconds, float):
            raise ValueError("an answer to nothing that was asked")
        worker.in_flight.popleft()
        worker.answered, self._fruitless = True, 0
        worker.ahead = worker.ahead - request.seconds if worker.in_flight else 0.0
        worker.deadline = math.inf
        if worker.in_flight:
            worker.deadline = time.monotonic() + worker.in_flight[0].timeout
        elif worker.state == "retiring":
            worker.deadline = time.monotonic() + RETIRE_TIMEOUT
        before = self._seconds.get(request.kind, 0.0)
        self._seconds[request.kind] = max(seconds, 0.8 * before + 0.2 * seconds)  # up at once, down slowly
        self._judge(worker, request, message)

    def _judge(self, worker: _Worker, request: _Request, message: Mapping[str, Any]) -> None:
        """Turn a worker's reply into a Reply, checking everything an environment may have got wrong."""
        episode = request.episode
        if request.kind == "close" or "error" in message:
            episode.worker = None
            worker.episodes.discard(episode)
            self._end(request, "error", str(message.get("error", "")))
            return
        try:
            value = record(request.kind, message.get("value"))
        except ValueError as error:
            self._end(request, "error", f"the environment's {request.kind} returned {error}")
            self._close_remotely(episode)
            return
        if isinstance(value, StepResult):
            episode.stepped = True
            if value.done:
                episode.worker = None
                worker.episodes.discard(episode)
        self._end(request, "ok", "", value)
        if episode.closed:
            self._close_remotely(episode)

    def _end(self, request: _Request, outcome: Outcome, detail: str, value: Observation | StepResult | None = None) -> None:
        """Record the reply to a request, unless nobody waits for it, and forget an episode that is over."""
        episode = request.episode
        if request.kind == "close" or episode.closed:
            return
        episode.request = None
        self._unanswered -= 1
        self._replies.append(Reply(episode.key, request.kind, outcome, value, detail))
        if outcome != "ok" or (isinstance(value, StepResult) and value.done):
            del self._episodes[episode.key]

    def _supervise(self) -> None:
        """Bury workers that died or missed a deadline, and retire those that have grown too large."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + SUPERVISE_SECONDS
        look_at_memory = now >= self._next_memory_look
        if look_at_memory:
            self._next_memory_look = now + 5 * SUPERVISE_SECONDS
        for worker in list(self._workers):
            if not worker.process.alive:
                self._read(worker)
            elif now > worker.deadline:
                self._overdue(worker)
            elif look_at_memory:
                self._look_at_memory(worker)

    def _overdue(self, worker: _Worker) -> None:
        if worker.state == "starting":
            self._bury(worker, f"was not ready after {START_TIMEOUT:g} s")
        elif worker.in_flight:
            timeout = worker.in_flight[0].timeout
            self._bury(worker, f"was killed after {timeout:g} s without a reply", "timeout")
        else:
            self._bury(worker, "was replaced, being over its memory cap")

    def _look_at_memory(self, worker: _Worker) -> None:
        worker.process.limit_log()
        size = worker.process.resident_bytes()
        if size > 2 * self._max_rss:
            self._bury(worker, f"was killed at {size >> 20} MiB of memory, twice its cap")
            return
        if size > self._max_rss and worker.state == "ready":
            worker.state = "retiring"
            if not worker.in_flight:
                worker.deadline = time.monotonic() + RETIRE_TIMEOUT
        busy = worker.in_flight or worker.queue or any(episode.stepped for episode in worker.episodes)
        if worker.state == "retiring" and not busy:
            worker.state, worker.deadline = "closing", time.monotonic() + CLOSE_TIMEOUT
            worker.process.finish()

    def _bury(self, worker: _Worker, why: str, outcome: Outcome = "error") -> None:
        """Kill a worker, account for everything it held, and start another in its place.

        Raises RuntimeError when too many in a row have died without an answer.
        """
        suspect = worker.in_flight[0] if worker.in_flight else None
        worker.process.kill()
        with suppress(ValueError, RecursionError):  # a reply written in time counts, a torn one does not
            self._collect(worker)
        self._selector.unregister(worker.process.socket)
        worker.process.close()
        guilty = suspect if suspect and worker.in_flight and worker.in_flight[0] is suspect else None
        what = f"{worker} {why}"
        if guilty:
            what += f" while running the {guilty.kind} of {guilty.episode.task_id!r}"
            worker.in_flight.popleft()
            self._end(guilty, outcome, f"{what}; its output is in {worker.process.log}")
            guilty.episode.closed = True
        if worker.state != "closing":
            _log.warning("%s; replacing it", what)
        self._displace(worker, what)
        if not (worker.answered or guilty):
            self._fruitless += 1
        if self._fruitless >= MAX_FRUITLESS_STARTS:
            report = worker.process.log_tail()
            self.close()
            raise RuntimeError(
                f"{self._fruitless} environment workers in a row died before they answered anything; the last: "
                f"{what}\n--- end of {worker.process.log} ---\n{report}"
            )
        self._workers[worker.slot] = self._start(worker.slot)

    def _displace(self, worker: _Worker, what: str) -> None:
        """Queue what a dead worker held again where that is possible, and declare the rest lost."""
        for episode in worker.episodes:
            episode.worker = None
            episode.lost = f"this episode was lost: {what}" if episode.stepped else ""
        waiting: list[_Request] = []
        for request in (*worker.in_flight, *worker.queue):
            if request.kind == "close" or request.episode.closed:
                continue
            if request.episode.lost:
                self._end(request, "error", request.episode.lost)
            else:
                waiting.append(request)
        self._unbound.extendleft(reversed(waiting))
