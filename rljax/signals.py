"""Asking a run to stop: SIGTERM and Ctrl-C become a request that the loop honours at the next safe moment.

Owns the signal handlers while a run is on. Refuses to own what stopping means.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType


class StopRequest:
    """Whether someone has asked to stop, and who.

    Example:
        with stop_requests() as stop:
            while not stop():
                work()
    """

    def __init__(self) -> None:
        """Start without a request."""
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        """Tell whether to stop."""
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        message = f"\nrljax: {self.signal.name}: saving and stopping; the same command continues the run.\n"
        # Not through sys.stderr: a handler may interrupt a write to it, which Python does not let it enter again.
        with suppress(OSError):  # a closed terminal is no reason not to save
            os.write(2, message.encode())


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn SIGTERM and SIGINT into a request; a second Ctrl-C interrupts at once. The old handlers come back at the end.

    Outside the main thread, where Python allows no handlers, the request is never made.
    """
    request = StopRequest()
    signals = (signal.SIGTERM, signal.SIGINT)
    try:
        before = {number: signal.signal(number, request._handle) for number in signals}
    except ValueError:
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
