"""The program a worker process runs: take a request, run it in an environment, send the reply.

Owns the child's side of the pool: its isolation, its episodes and the frames on the wire. Refuses to own deadlines,
queues and judgement of replies, which are the parent's (`pool.py`), because only another process can stop code that hangs.

    python -P -m rljax.envs.worker FD PARENT_PID

Wire: a socket of its own, so that whatever an environment prints cannot corrupt it (standard output and error are a log
file). A frame is an 8-byte big-endian length and as many bytes. Requests are pickles, since a Task may hold any object and
the worker trusts its parent. Replies are JSON, since a parent that unpickled would run whatever an environment sends.

    parent -> worker   (env.name, env.options, sys.path, PYTHONPATH or None) once,
                       then (episode, pickled (task, seed) or None, text or None) per request
    worker -> parent   {"ready": true} or {"failed": why} once,
                       then {"episode", "seconds", and "value" or "error"} per request

Requests run one after the other in the main thread, where signal-based timeouts of third-party code work.
"""

import contextlib
import ctypes
import hashlib
import json
import os
import pickle
import random
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from rljax.envs.base import Env, EnvClass, parse_options, resolve
from rljax.records import Observation, StepResult, Task
from rljax.section import Section

HEADER = struct.Struct(">Q")
"""Length of the frame that follows (bytes)."""

MAX_REPLY = 100 * 2**20
"""Longest reply (bytes); more is an error of the environment, so that one episode cannot fill the trainer's memory."""

ORPHAN_SECONDS = 10.0
"""How long a worker that has closed its episodes waits to be killed before it leaves by itself (seconds)."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(slots=True)
class _Episode:
    env: Env
    task: Task
    seed: int
    turns: int = 0

    def seed_globals(self) -> None:
        """Seed the generators of the whole process, which episodes would otherwise take turns to draw from."""
        digest = hashlib.sha256(f"{self.task.id}\0{self.seed}\0{self.turns}".encode(errors="surrogatepass")).digest()
        random.seed(int.from_bytes(digest[:8]))
        np.random.seed(int.from_bytes(digest[8:12]))  # noqa: NPY002 - the legacy state is what environments share


class _Server:
    """The episodes of this process, by number."""

    def __init__(self, env_class: EnvClass, options: Section) -> None:
        self._env_class = env_class
        self._options = options
        self._episodes: dict[int, _Episode] = {}

    def answer(self, number: int, opening: bytes | None, text: str | None) -> tuple[str, str]:
        """Run one request and return "value" or "error" with its JSON.

        An `opening` opens the episode, a `text` steps it, both do one after the other, and neither closes it.
        """
        try:
            if opening is None and text is None:
                self._close(number)
                return "value", "null"
            result: Any = None
            if opening is not None:
                result = self._open(number, opening)
            if text is not None:
                result = self._step(number, text)
            encoded = json.dumps(_plain(result), default=_plain)
            if len(encoded) > MAX_REPLY:
                raise ValueError(f"the environment's reply has {len(encoded)} bytes, more than the {MAX_REPLY} allowed")
            return "value", encoded
        except BaseException as error:  # also SystemExit: whatever an environment raises is an outcome of its episode
            _log(traceback.format_exc())
            self._drop(number)
            return "error", json.dumps(describe(error))

    def _open(self, number: int, opening: bytes) -> Observation:
        task, seed = pickle.loads(opening)
        episode = self._episodes[number] = _Episode(self._env_class(self._options), task, seed)
        episode.seed_globals()
        return episode.env.reset(task, seed)

    def _step(self, number: int, text: str) -> StepResult:
        episode = self._episodes[number]
        episode.turns += 1
        episode.seed_globals()
        result = episode.env.step(text)
        if getattr(result, "done", False) is True:
            self._drop(number)
        return result

    def _close(self, number: int) -> None:
        episode = self._episodes.pop(number, None)
        if episode is not None:
            episode.env.close()

    def _drop(self, number: int) -> None:
        """Close an episode that is over; a failing `close` changes neither a score nor the first error."""
        try:
            self._close(number)
        except BaseException:
            _log(traceback.format_exc())

    def close(self) -> None:
        """Close every episode."""
        for number in list(self._episodes):
            self._drop(number)


def describe(error: BaseException) -> str:
    """Return an exception as one line: its type, its message and the line of code that raised it."""
    text = "".join(traceback.TracebackException.from_exception(error).format_exception_only()).strip()[:2000]
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else text


def _plain(value: Any) -> Any:
    """Turn records, mappings and numpy numbers into what JSON holds; raise TypeError for anything else."""
    if isinstance(value, Observation):
        return {"observation": {"messages": value.messages, "tools": value.tools}}
    if isinstance(value, StepResult):
        fields = ("messages", "reward", "done", "components")
        return {"step": {name: getattr(value, name) for name in fields}}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"an environment must return an Observation or StepResult of plain values, not {type(value).__name__}")


def _log(text: str) -> None:
    with contextlib.suppress(OSError):  # the environment may have closed standard error, which is no reason to die
        os.write(2, text.encode(errors="backslashreplace"))


def _send(connection: socket.socket, message: str) -> None:
    body = message.encode()
    connection.sendall(HEADER.pack(len(body)) + body)


def _receive(stream: BinaryIO) -> Any:
    """Return the next request, or None once the parent has closed its end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def _isolate(parent: int) -> None:
    """Die with the parent, adopt stray grandchildren, and leave Ctrl-C to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Grandchildren that detach themselves stay below this process, so that the parent finds and kills them.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _serve(connection: socket.socket, stream: BinaryIO, server: _Server) -> None:
    pid = os.getpid()
    while (request := _receive(stream)) is not None:
        started = time.perf_counter()
        outcome, encoded = server.answer(*request)
        if os.getpid() != pid:  # the environment forked and the copy came back here: it must not answer
            os._exit(1)
        signal.setitimer(signal.ITIMER_REAL, 0)  # a forgotten alarm would kill the next episode
        seconds = time.perf_counter() - started
        _send(connection, f'{{"episode": {request[0]}, "seconds": {seconds}, "{outcome}": {encoded}}}')


def main() -> None:
    """Serve requests until the parent closes its end, then close all episodes and wait to be killed."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    _isolate(parent)
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    stream = connection.makefile("rb")
    name, options, sys.path[:], python_path = _receive(stream)
    os.environ.pop("PYTHONPATH")  # set for this process alone, to find rljax
    if python_path is not None:
        os.environ["PYTHONPATH"] = python_path
    try:
        server = _Server(resolve(name), parse_options(name, options))
    except BaseException as error:
        _log(traceback.format_exc())
        _send(connection, json.dumps({"failed": describe(error)}))
        sys.exit(1)
    _send(connection, '{"ready": true}')
    _serve(connection, stream, server)
    server.close()
    with contextlib.suppress(OSError):  # the parent may be gone
        connection.shutdown(socket.SHUT_RDWR)
    # The parent kills this process and everything below it, which it can find only while this process lives.
    leave = time.monotonic() + ORPHAN_SECONDS
    while os.getppid() == parent and time.monotonic() < leave:
        time.sleep(0.05)


if __name__ == "__main__":
    main()
