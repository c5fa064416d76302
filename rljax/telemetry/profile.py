"""Where the time of a run goes: every second is counted to exactly one bucket.

Owns the clock of a run. Refuses to own device profiles and the writing of numbers.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rljax.telemetry.metrics import BUCKETS, Bucket

NANOSECONDS = 1_000_000_000
"""Nanoseconds per second. The clock counts whole ones, so that buckets add up exactly."""


class Clock:
    """Counts wall time into buckets; what happens in no bucket is `idle`.

    Buckets nest, and an inner one pauses the outer one. A clock belongs to the thread that runs the loop.

    Example:
        clock = Clock()
        with clock.bucket("sampling"):
            sample()
            with clock.bucket("env_wait"):  # not counted as sampling
                wait()
        seconds = clock.take()  # {"sampling": 1.2, "env_wait": 0.3, "idle": 0.01, ...}
    """

    def __init__(self, now: Callable[[], int] = time.perf_counter_ns) -> None:
        """Start counting.

        Args:
            now: A clock that never goes back, in nanoseconds.
        """
        self._now = now
        self._last = now()
        self._open: list[Bucket] = ["idle"]
        self._spent = dict.fromkeys(BUCKETS, 0)
        self._before = dict.fromkeys(BUCKETS, 0)

    @property
    def phase(self) -> Bucket:
        """The bucket that is being counted now."""
        return self._open[-1]

    @contextmanager
    def bucket(self, name: Bucket) -> Iterator[None]:
        """Count the time inside the context to a bucket."""
        assert name in BUCKETS, f"no bucket {name!r}; the buckets are {', '.join(BUCKETS)}"
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def reassign(self, seconds: float, name: Bucket) -> None:
        """Count the last `seconds` of the open bucket to another one, for work that is only known about afterwards."""
        self._count()
        moved = min(int(seconds * NANOSECONDS), self._spent[self.phase])
        self._spent[self.phase] -= moved
        self._spent[name] += moved

    def take(self) -> dict[Bucket, float]:
        """Return the seconds per bucket since the last `take` (or the start); their sum is the wall time."""
        self._count()
        taken: dict[Bucket, float] = {bucket: self._spent[bucket] / NANOSECONDS for bucket in BUCKETS}
        for bucket in BUCKETS:
            self._before[bucket] += self._spent[bucket]
            self._spent[bucket] = 0
        return taken

    def totals(self) -> dict[Bucket, float]:
        """Return the seconds per bucket since the clock started."""
        self._count()
        return {bucket: (self._before[bucket] + self._spent[bucket]) / NANOSECONDS for bucket in BUCKETS}

    def _count(self) -> None:
        now = self._now()
        self._spent[self._open[-1]] += now - self._last
        self._last = now
