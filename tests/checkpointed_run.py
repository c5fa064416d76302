"""A tiny run that saves every second step, and a program that starts it in processes which kill themselves.

    OPENBLAS_NUM_THREADS=1 python checkpointed_run.py DIRECTORY=POINT:NTH ...

For each argument a child continues the run in DIRECTORY to step 8 and dies by SIGKILL where it passes POINT for the NTH
time. Children are forked after the imports and before jax starts, so that each costs a fraction of a second.
"""

import functools
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.checkpoint import CheckpointStore, Restored
from rljax.faults import CRASH_AT
from rljax.records import RunMeta

State = dict[str, Any]
SAVE_EVERY = 2
LAST_STEP = 8


def first_state() -> State:
    weights = np.linspace(0.0, 1.0, 4096, dtype=np.float32).reshape(64, 64)
    return {"params": {"w": jax.device_put(weights)}, "key": jax.random.key(3), "count": jax.device_put(np.int32(0))}


@functools.partial(jax.jit, donate_argnums=0)
def update(state: State) -> State:
    key, draw = jax.random.split(state["key"])
    weights = jnp.sin(state["params"]["w"] + jax.random.uniform(draw))
    return {"params": {"w": weights}, "key": key, "count": state["count"] + 1}


def meta_of(step: int) -> RunMeta:
    return RunMeta(step, version=step, seed=3, prompt_position=8 * step, config_hash="c0ffee", dataset_fingerprint="beef")


def abstract_of(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def bits(tree: Any) -> list[bytes]:
    """Return what each leaf consists of."""
    keys = jax.dtypes.prng_key
    leaves = (jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, keys) else leaf for leaf in jax.tree.leaves(tree))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def states() -> Iterator[State]:
    """Yield the state after step 1, 2, ...; each is donated to the next step."""
    state = first_state()
    while True:
        state = update(state)
        yield state


def continue_run(directory: Path, last_step: int, keep: int = 2) -> tuple[Restored | None, State]:
    """Restore, go on to `last_step`, saving on the way; return what was restored and the last state."""
    state, first = first_state(), 0
    with CheckpointStore(directory, keep) as store:
        restored = store.restore(abstract_of(state))
        if restored is not None:
            first = restored.step
            state = restored.arrays  # donated by the first update, as in training
        for step in range(first + 1, last_step + 1):
            store.check()
            state = update(state)
            if step % SAVE_EVERY == 0:
                store.save(step, state, meta_of(step))
    return restored, state


def save_steps(directory: Path, *steps: int, keep: int = 9) -> dict[int, list[bytes]]:
    """Save the states of these steps and return their bits."""
    saved = {}
    with CheckpointStore(directory, keep) as store:
        for step, state in zip(range(1, max(steps) + 1), states(), strict=False):
            if step in steps:
                saved[step] = bits(state)
                store.save(step, state, meta_of(step))
    return saved


def restore(directory: Path, keep: int = 9) -> Any:
    with CheckpointStore(directory, keep) as store:
        return store.restore(abstract_of(first_state()))


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def main() -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "forking needs a process with one thread"
    warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
    for argument in sys.argv[1:]:
        directory, point = argument.split("=")
        child = os.fork()
        if child == 0:
            os.environ[CRASH_AT] = point
            continue_run(Path(directory), LAST_STEP)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == -9, f"{point} ended with {status} instead of SIGKILL"


if __name__ == "__main__":
    main()
