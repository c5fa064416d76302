"""What every test runs under: eight virtual CPU devices, strict broadcasting, no network, programs that are quick to compile.

The variables are set before anything imports jax, and as environment variables, so that child processes have them too.
Tests compile far longer than they compute, so LLVM optimises little; XLA's own passes, which decide about copies, fusions
and collectives, are those of every run.
"""

import os
import sys

assert "jax" not in sys.modules, "jax was imported before tests/conftest.py could configure it"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"
QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{QUICK_TO_COMPILE} {os.environ.get('XLA_FLAGS', '')}".strip()  # of two, the later one counts
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402

MAPS = Path("/proc/self/maps")
MOST_MAPS = 20_000


@pytest.fixture(scope="module", autouse=True)
def few_programs() -> Iterator[None]:
    """Let go of all compiled programs after a module where they have become many.

    XLA maps each part of a program into memory on its own, and Linux lets a process have 65,530 maps: a process that runs
    half of all tests reaches that, and LLVM then aborts it.
    """
    yield
    if "jax" in sys.modules and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        sys.modules["jax"].clear_caches()
