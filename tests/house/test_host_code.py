"""What runs in environment workers, launchers and the command line's help is imported without jax."""

import json
import subprocess
import sys

from tests.house.repository import ROOT, files

HEAVY = ("flax", "grain", "jax", "jaxlib", "optax", "orbax", "tensorstore", "torch", "transformers")

# Imports one module after the other and notes what each was the first to bring.
PROGRAM = """
import json, sys
from importlib import import_module
brought = {}
for name in sys.argv[1:]:
    before = set(sys.modules)
    import_module(name)
    brought[name] = sorted(set(sys.modules) - before)
print(json.dumps(brought))
"""


def heavy_imports(modules: list[str]) -> dict[str, list[str]]:
    """Import modules in a fresh interpreter and name those that brought something heavy, with what they brought."""
    result = subprocess.run([sys.executable, "-c", PROGRAM, *modules], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    brought = {name: sorted(set(new) & set(HEAVY)) for name, new in json.loads(result.stdout).items()}
    return {name: heavy for name, heavy in brought.items() if heavy}


def test_host_code_does_not_bring_jax() -> None:
    modules = [f"rljax.{name}" for name in ("config", "records", "recipe", "manifest", "run_dir", "signals", "cli")]
    modules += [".".join(path.with_suffix("").parts) for path in files() if path.match("rljax/envs/*.py")]
    assert heavy_imports(modules) == {}


def test_a_module_that_brings_jax_is_named() -> None:
    found = heavy_imports(["rljax.records", "rljax.pytree"])
    assert list(found) == ["rljax.pytree"]
    assert "jax" in found["rljax.pytree"]
