"""What runs in environment workers, launchers and the command line's help is imported without jax."""

import subprocess
import sys

import pytest

from tests.house.repository import ROOT, files

HOST_MODULES = ["rljax", "rljax.cli", "rljax.config", "rljax.recipe", "rljax.records"] + [
    ".".join(path.with_suffix("").parts) for path in files() if path.parts[:2] == ("rljax", "envs") and path.suffix == ".py"
]
HEAVY = ["flax", "jax", "jaxlib", "optax", "orbax", "tensorstore", "torch", "transformers"]


def imported(modules: list[str]) -> set[str]:
    """Import the modules in a fresh interpreter and return the names of everything that came with them."""
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize("module", HOST_MODULES)
def test_host_module_does_not_bring_jax(module: str) -> None:
    assert sorted(imported([module]) & set(HEAVY)) == []


def test_a_module_that_brings_jax_is_found() -> None:
    assert "jax" in imported(["rljax.pytree"])
