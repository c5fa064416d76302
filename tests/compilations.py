"""What compiles while a test runs, by name. Owns the listener; refuses to own how many there should be."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def compilations() -> Iterator[Counter[str]]:
    """Count the programs that are compiled (or read from a compilation cache) from here on, by their functions' names.

    JAX's own count per function (`_cache_size`) is of its fast path, which forgets programs when many were used since.
    """
    found: Counter[str] = Counter()

    def listen(event: str, duration_secs: float, *, fun_name: str = "", **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found[fun_name.removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
