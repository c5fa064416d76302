"""Deliberate faults at named points, so that tests can ask what a crash or a full disk right there would do.

Owns one function and two environment variables. Refuses to own any policy: without the variables a point does nothing.
Nothing here imports jax.
"""

import errno
import os
import signal
import threading
from collections import Counter

CRASH_AT = "RLJAX_CRASH_AT"
"""Environment variable `point:nth`: the process kills itself (SIGKILL) when it passes `point` for the nth time, from 1."""
FAIL_AT = "RLJAX_FAIL_AT"
"""Environment variable `point:nth`: the point raises OSError (no space left on device) at its nth passing, from 1."""

_passings: Counter[str] = Counter()
_lock = threading.Lock()


def fault_point(name: str) -> None:
    """Mark a place where a test may kill this process or make it fail; otherwise do nothing.

    Args:
        name: What is about to happen, as `part.moment`, for example `checkpoint.pre_manifest`.

    Raises:
        OSError: `RLJAX_FAIL_AT` names this point and this is the passing it asks for.
        ValueError: One of the two variables is not of the form `point:nth`.
    """
    crash, fail = os.environ.get(CRASH_AT), os.environ.get(FAIL_AT)
    if crash is None and fail is None:
        return
    with _lock:
        _passings[name] += 1
        passing = _passings[name]
    if crash is not None and _parse(CRASH_AT, crash) == (name, passing):
        os.kill(os.getpid(), signal.SIGKILL)
    if fail is not None and _parse(FAIL_AT, fail) == (name, passing):
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (injected by {FAIL_AT}={fail})")


def _parse(variable: str, text: str) -> tuple[str, int]:
    """Split `point:nth` into its two halves."""
    point, _, nth = text.rpartition(":")
    if not point or not nth.isdecimal() or int(nth) < 1:
        raise ValueError(f"{variable}={text!r} is not of the form point:nth, for example checkpoint.begin:1")
    return point, int(nth)
