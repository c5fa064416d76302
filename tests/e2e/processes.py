"""Runs in processes of their own, which tests may kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.tiny_run import scratch

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # seconds until a test gives up waiting; only a broken run gets there


class Server:
    """Starts runs on one device, one after the other."""

    def __init__(self) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "JAX_NUM_CPU_DEVICES": "1",
            "OPENBLAS_NUM_THREADS": "1",  # its threads would not survive the fork
            "JAX_COMPILATION_CACHE_DIR": str(scratch() / "compiled-one-device"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        for name in ("RLJAX_CRASH_AT", "RLJAX_FAIL_AT"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._runs = 0
        self.output = ""

    def start(self, argv: Sequence[str], main: str = "rljax.cli:main", **env: str) -> int:
        """Start a run and return its process id; `wait` comes next."""
        self._runs += 1
        self._log = scratch() / f"run-{self._runs}.log"
        order = {"main": main, "argv": list(argv), "env": env, "log": str(self._log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer("pid")

    def wait(self) -> int:
        """Wait for the run to end and return its exit status; what it printed is in `output`."""
        code = self._answer("code")
        self.output = self._log.read_text()
        return code

    def run(self, argv: Sequence[str], main: str = "rljax.cli:main", **env: str) -> int:
        """Start a run, wait for its end and return its exit status."""
        self.start(argv, main, **env)
        return self.wait()

    def signal_when(self, pid: int, number: signal.Signals, ready: Callable[[], bool], delay: float = 0.0) -> None:
        """Send a signal as soon as something is the case, plus a delay; a run that ends before that is left alone."""
        give_up = time.monotonic() + PATIENCE
        with suppress(ProcessLookupError):
            while not ready():
                assert time.monotonic() < give_up, f"waited too long; so far: {self.shown()}"
                os.kill(pid, 0)
                time.sleep(0.002)
            time.sleep(delay)
            os.kill(pid, number)

    def shown(self) -> str:
        """Return what the run has printed so far."""
        return self._log.read_text() if self._log.exists() else ""

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _answer(self, key: str) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the fork server ended with {self._process.wait()}"
        return json.loads(line)[key]


@contextmanager
def serving() -> Iterator[Server]:
    """Open a server."""
    server = Server()
    try:
        yield server
    finally:
        server.close()
