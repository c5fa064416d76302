"""Work on several things at once without holding more of them in memory than allowed.

Owns threads of that kind. Refuses to own what the work is.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

# Reading and writing wait for the disk, so there are more threads than cores on a small machine.
_THREADS = max(4, min(16, os.cpu_count() or 1))

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(work: Callable[[T], R], items: Iterable[T], cost: Callable[[T], int], limit: int) -> list[R]:
    """Apply `work` to every item in threads.

    When one fails, or the caller is interrupted, no further item is begun, those being worked on are finished, and the
    error is raised.

    Args:
        work: What to do; should mostly read, write or compute outside the interpreter lock.
        items: Begun in this order.
        cost: Memory that the work on an item takes (bytes).
        limit: Cost of the items worked on at one time (bytes); an item that costs more is worked on alone.

    Returns:
        The results, in the order of the items.
    """
    results: dict[int, R] = {}
    running: dict[Future[R], tuple[int, int]] = {}
    used = 0

    def collect() -> int:
        freed = 0
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            index, held = running.pop(done)
            results[index] = done.result()
            freed += held
        return freed

    with ThreadPoolExecutor(_THREADS) as pool:
        for index, item in enumerate(items):
            need = cost(item)
            while running and (used + need > limit or len(running) >= _THREADS):
                used -= collect()
            running[pool.submit(work, item)] = index, need
            used += need
        while running:
            collect()
    return [results[index] for index in sorted(results)]
