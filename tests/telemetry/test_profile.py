"""Every second of a run is counted to exactly one bucket."""

import random
from contextlib import ExitStack
from typing import Any

import pytest

from rljax.telemetry.metrics import BUCKETS
from rljax.telemetry.profile import NANOSECONDS, Clock

ROUNDING = 1e-9
"""Sums of nine float seconds differ from the whole by rounding only."""


class HandTime:
    """A clock moved by hand."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def fail(self) -> None:
        self.seconds += 1
        raise ZeroDivisionError

    def __call__(self) -> int:
        return round(self.seconds * NANOSECONDS)


def test_buckets_nest_and_the_rest_is_idle() -> None:
    time = HandTime()
    clock = Clock(time)
    assert clock.phase == "idle"
    time.seconds += 1
    with clock.bucket("sampling"):
        time.seconds += 2
        with clock.bucket("env_wait"):
            assert clock.phase == "env_wait"
            time.seconds += 4
        assert clock.phase == "sampling"
        time.seconds += 8
    time.seconds += 16
    taken = clock.take()
    assert taken == dict.fromkeys(BUCKETS, 0.0) | {"idle": 17.0, "sampling": 10.0, "env_wait": 4.0}
    assert sum(clock.take().values()) == 0.0


def test_taking_inside_a_bucket_splits_it() -> None:
    time = HandTime()
    clock = Clock(time)
    with clock.bucket("update"):
        time.seconds += 2
        assert clock.take()["update"] == 2.0
        time.seconds += 3
    assert clock.take()["update"] == 3.0
    assert clock.totals()["update"] == 5.0


def test_an_error_closes_the_bucket() -> None:
    time = HandTime()
    clock = Clock(time)
    with pytest.raises(ZeroDivisionError), clock.bucket("publish"), clock.bucket("compile"):
        time.fail()
    assert clock.phase == "idle"
    assert clock.take()["compile"] == 1.0


def test_the_same_bucket_may_be_entered_twice() -> None:
    time = HandTime()
    clock = Clock(time)
    with clock.bucket("update"), clock.bucket("update"):
        time.seconds += 2
    assert clock.take()["update"] == 2.0


def test_an_unknown_bucket_is_refused() -> None:
    name: Any = "thinking"
    # Where annotations are checked at run time, that check comes first.
    with pytest.raises((AssertionError, TypeError), match="thinking"), Clock().bucket(name):
        pass


def test_the_buckets_always_add_up_to_the_wall_time() -> None:
    random_steps = random.Random(0)
    time = HandTime()
    clock = Clock(time)
    started = before = time.seconds
    for _ in range(50):
        with ExitStack() as stack:
            for _ in range(random_steps.randrange(4)):
                stack.enter_context(clock.bucket(random_steps.choice(BUCKETS)))
                time.seconds += random_steps.random()
        time.seconds += random_steps.random()
        assert sum(clock.take().values()) == pytest.approx(time.seconds - before, abs=ROUNDING)
        before = time.seconds
    assert sum(clock.totals().values()) == pytest.approx(time.seconds - started, abs=50 * ROUNDING)


def test_real_time_is_counted() -> None:
    clock = Clock()
    with clock.bucket("scoring"):
        sum(range(100_000))
    taken = clock.take()
    assert taken["scoring"] > 0
    assert all(seconds >= 0 for seconds in taken.values())
