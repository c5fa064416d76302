"""The parent's end of one worker process: start it, exchange frames with it without waiting, kill it with all below it.

Owns the process, its socket and its log. Refuses to know episodes, queues and deadlines (`pool.py`).
"""

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import rljax
from rljax.envs.worker import HEADER, MAX_REPLY

MAX_FRAME = MAX_REPLY + 2**14
"""Longest frame a worker may send (bytes): a reply, or an error, and what is around it."""

MAX_LOG_BYTES = 16 * 2**20
"""A worker's log is emptied when it grows beyond this (bytes)."""

KILL_TIMEOUT = 10.0
"""How long a killed process may take to be gone (seconds); only the kernel can hold it up."""

_ENVIRONMENT = {
    "PYTHONPATH": str(Path(rljax.__file__).parents[1]),  # only until the worker has the parent's sys.path
    "PYTHONHASHSEED": "0",  # sets iterate in the same order in every worker
    "PYTHONUNBUFFERED": "1",  # what was printed before a kill is in the log
    "JAX_PLATFORMS": "cpu",  # an environment that imports jax must not take the accelerator from the trainer
    # Many workers share the host: one thread each, for every linear algebra library.
    **dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
    ),
}


class WorkerProcess:
    """A running `rljax.envs.worker`.

    Linux kills it when the thread that started it ends, so start it from one that lives as long as it should.
    """

    def __init__(self, log: Path) -> None:
        """Start the process; what it prints is appended to `log`."""
        self.log = log
        self._inbox, self._outbox = bytearray(), bytearray()
        self._killed = False
        self.socket, child_end = socket.socketpair()
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "rljax.envs.worker"]
        try:
            with child_end, log.open("ab") as output:
                self._process = subprocess.Popen(
                    [*command, str(child_end.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(child_end.fileno(),),
                    env={**os.environ, **_ENVIRONMENT},
                    start_new_session=True,  # a group of its own to kill, out of reach of the terminal's Ctrl-C
                )
        except BaseException:
            self.socket.close()
            raise
        self.socket.setblocking(False)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    @property
    def unsent(self) -> bool:
        """Whether frames wait for room in the socket."""
        return bool(self._outbox)

    def send(self, message: Any) -> None:
        """Queue a frame and write what the socket takes."""
        body = pickle.dumps(message)
        self._outbox += HEADER.pack(len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes without waiting."""
        try:
            while self._outbox:
                del self._outbox[: self.socket.send(self._outbox)]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):  # it is dead; reading will tell
            self._outbox.clear()

    def finish(self) -> None:
        """Ask the worker to close its episodes; it has done so when `receive` returns False."""
        with suppress(OSError):  # it is dead; reading will tell
            self.socket.shutdown(socket.SHUT_WR)

    def receive(self) -> bool:
        """Read what has arrived, at most a frame too long; return False when the worker's end is closed."""
        try:
            while len(self._inbox) < HEADER.size + MAX_FRAME:
                data = self.socket.recv(2**20)
                if not data:
                    return False
                self._inbox += data
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        return True

    def frames(self) -> Iterator[bytes]:
        """Yield the complete frames read so far; raise ValueError for a length that no worker sends."""
        while len(self._inbox) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._inbox)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes")
            end = HEADER.size + length
            if len(self._inbox) < end:
                return
            frame = bytes(self._inbox[HEADER.size : end])
            del self._inbox[:end]
            yield frame

    def cause_of_death(self) -> str:
        """Say how a process whose connection is closed ended."""
        with suppress(subprocess.TimeoutExpired):  # the connection closes a moment before the process is gone
            self._process.wait(timeout=0.2)
        status = self._process.returncode
        if status is None:
            return "closed its connection"
        return f"died by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    def kill(self) -> None:
        """End the process, its group and its descendants at once, and wait for it; a second call does nothing."""
        if self._killed:  # its id may belong to another process by now
            return
        self._killed = True
        descendants = _descendants(self.pid)
        with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS, when only zombies are left in the group
            os.killpg(self.pid, signal.SIGKILL)
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait(timeout=KILL_TIMEOUT)

    def close(self) -> None:
        """Let go of the socket; call it last."""
        self.socket.close()

    def resident_bytes(self) -> int:
        """Return the resident memory (bytes); 0 where /proc does not tell."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0

    def limit_log(self) -> None:
        """Empty the log when it has become too long; it is opened for appending, so the worker goes on at its start."""
        with suppress(FileNotFoundError):  # someone tidied up
            if self.log.stat().st_size > MAX_LOG_BYTES:
                os.truncate(self.log, 0)

    def log_tail(self) -> str:
        """Return the end of the log, for people."""
        try:
            return self.log.read_bytes()[-4000:].decode(errors="replace").strip()
        except FileNotFoundError:
            return ""


def _descendants(pid: int) -> list[int]:
    """Return the processes below a process, as far as /proc tells (Linux)."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread has just ended
            for child in map(int, children.read_text().split()):
                found += [child, *_descendants(child)]
    return found
