"""A fault point does nothing until a variable names it, and then exactly what it says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rljax import faults
from rljax.faults import CRASH_AT, FAIL_AT, fault_point

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def fresh_counters() -> None:
    faults._passings.clear()


def test_without_the_variables_nothing_happens() -> None:
    fault_point("update")


def test_only_the_named_passing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAIL_AT, "update:2")
    fault_point("update")
    fault_point("sampling")
    fault_point("sampling")
    with pytest.raises(OSError, match=r"No space left on device .injected by RLJAX_FAIL_AT=update:2"):
        fault_point("update")
    fault_point("update")


@pytest.mark.parametrize("spec", ["update", "update:", ":1", "update:0", "update:-1", "update:x"])
@pytest.mark.parametrize("variable", [CRASH_AT, FAIL_AT])
def test_a_wrong_form_is_an_error(monkeypatch: pytest.MonkeyPatch, variable: str, spec: str) -> None:
    monkeypatch.setenv(variable, spec)
    with pytest.raises(ValueError, match=f"{variable}=.* is not of the form point:nth"):
        fault_point("update")


def test_a_crash_is_a_kill() -> None:
    program = "from rljax.faults import fault_point\nfor n in range(5): print(n, flush=True); fault_point('a.b')"
    environment = {**os.environ, CRASH_AT: "a.b:3"}
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout.split()) == (-9, ["0", "1", "2"])
