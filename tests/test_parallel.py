"""Work in threads keeps to its memory, its order and its errors."""

import threading
import time

import pytest

from rljax.parallel import in_parallel


def test_results_come_in_order_and_within_the_limit() -> None:
    lock, held, most, together = threading.Lock(), 0, 0, 0

    def work(size: int) -> int:
        nonlocal held, most, together
        with lock:
            held += size
            most, together = max(most, held), together + (held > size)
        time.sleep(0.005)
        with lock:
            held -= size
        return size * 10

    sizes = [3, 1, 2, 4, 1, 1, 5, 2, 2, 3]
    assert in_parallel(work, sizes, lambda size: size, 5) == [size * 10 for size in sizes]
    assert most <= 5
    assert together > 0


def test_an_item_above_the_limit_is_worked_on_alone() -> None:
    running = threading.Semaphore(1)

    def work(size: int) -> int:
        assert running.acquire(blocking=False)
        time.sleep(0.005)
        running.release()
        return size

    assert in_parallel(work, [9, 9, 9], lambda size: size, 5) == [9, 9, 9]


def test_an_error_ends_the_work() -> None:
    begun = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 3:
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        in_parallel(work, range(1000), lambda number: 1, 2)
    assert len(begun) < 1000
