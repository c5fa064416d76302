"""Runs that die at any moment of a save or a restore, what must be durable before that, and runs of several processes."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rljax import faults
from tests.checkpointed_run import LAST_STEP, bits, contents, continue_run, flip, restore, save_steps, states

ROOT = Path(__file__).resolve().parents[1]

SURVIVES = {
    **dict.fromkeys(["begin", "writing", "data_written", "pre_manifest", "post_manifest"], 4),
    **dict.fromkeys(["committed", "pre_gc", "mid_gc"], 6),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kill one run per point, each at its third save, and two runs during their restore, twice each."""
    directory = tmp_path_factory.mktemp("killed")
    save_steps(directory / "start", 2, 4)
    orders = []
    for point in [*SURVIVES, "verified", "restored"]:
        shutil.copytree(directory / "start", directory / point)
        orders.append(f"{directory / point}=checkpoint.{point}:1")
    for point in ("verified", "restored"):
        flip(directory / point / "step-00000004" / "manifest.json")
        orders.append(orders[[order.split("=")[1] for order in orders].index(f"checkpoint.{point}:1")])
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop(faults.CRASH_AT, None)
    script = Path(__file__).with_name("checkpointed_run.py")
    result = subprocess.run([sys.executable, script, *orders], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return directory


@pytest.mark.parametrize("point", SURVIVES)
def test_a_killed_save_leaves_the_last_committed_step_and_no_litter(killed: Path, point: str) -> None:
    restored, state = continue_run(killed / point, LAST_STEP)
    assert restored is not None
    assert (restored.step, restored.skipped) == (SURVIVES[point], ())
    uninterrupted = next(state for step, state in enumerate(states(), start=1) if step == LAST_STEP)
    assert bits(state) == bits(uninterrupted)
    assert sorted(os.listdir(killed / point)) == [".lock", "step-00000006", "step-00000008"]


@pytest.mark.parametrize("point", ["verified", "restored"])
def test_a_restore_killed_twice_changes_nothing_on_disk(killed: Path, point: str) -> None:
    before = contents(killed / "start")
    after = contents(killed / point)
    assert {name for name in before if before[name] != after.get(name)} == {"step-00000004/manifest.json"}
    assert set(after) == set(before)
    restored = restore(killed / point)
    assert restored.step == 2
    assert [skip.step for skip in restored.skipped] == [4]


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_files_are_durable_before_the_name_says_so(tmp_path: Path) -> None:
    trace, directory = tmp_path / "trace", tmp_path / "run"
    script = f"from tests.checkpointed_run import *\nfrom pathlib import Path\ncontinue_run(Path({str(directory)!r}), 2)"
    calls = "trace=fsync,fdatasync,rename,renameat,renameat2"
    command = ["strace", "-f", "-y", "--seccomp-bpf", "-e", calls, "-o", trace, sys.executable, "-c", script]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    if result.returncode and "ptrace" in result.stderr:
        pytest.skip("strace may not trace here")
    assert result.returncode == 0, result.stderr
    lines = [line for line in trace.read_text().splitlines() if "resumed>" not in line]
    saving, step = directory / "saving-00000002.1", directory / "step-00000002"

    def line_of(call: str, *parts: str) -> int:
        return next(n for n, line in enumerate(lines) if call in line and all(part in line for part in parts))

    commit = line_of("rename", f'"{saving}"', f'"{step}"')
    for name in contents(step):
        if name != "manifest.json":
            assert line_of("sync(", f"<{saving / name}>") < commit
    written = line_of("rename", f'"{saving}/manifest.json"')
    assert line_of("fsync(", f"<{saving}/manifest.json.partial>") < written
    for folder in {saving / Path(name).parent for name in contents(step)} - {saving}:
        assert line_of("fsync(", f"<{folder}>") < written
    assert written < line_of("fsync(", f"<{saving}>") < commit
    assert any("fsync(" in line and f"<{directory}>" in line for line in lines[commit:])


TWO_PROCESSES = """
import sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]))
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rljax.checkpoint import CheckpointStore, load_params, save_params
from tests.checkpointed_run import abstract_of, meta_of
mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
values = np.arange(32, dtype=np.float32)
def state(step): return {"w": jax.make_array_from_callback((32,), sharding, lambda index: values[index] + step)}
root = Path(sys.argv[3])
with CheckpointStore(root / "run", keep=2) as store:
    for step in (1, 2, 3):
        store.save(step, state(step), meta_of(step))
if jax.process_index() == 0:
    victim = sorted((root / "run" / "step-00000003" / "arrays").rglob("ocdbt.process_1/d/*"))[-1]
    victim.write_bytes(bytes(victim.stat().st_size))
jax.experimental.multihost_utils.sync_global_devices("damaged")
with CheckpointStore(root / "run", keep=2) as store:
    restored = store.restore(abstract_of(state(0)))
assert restored.step == 2 and restored.meta == meta_of(2) and len(restored.skipped) == 1, restored
for shard in restored.arrays["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, values[shard.index] + 2)
save_params(root / "model", state(5), {"arch.json": b"{}"})
for shard in load_params(root / "model", abstract_of(state(0)))["w"].addressable_shards:
    np.testing.assert_array_equal(shard.data, values[shard.index] + 5)
"""


def test_two_processes_save_together_and_agree_on_the_good_checkpoint(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    program = [sys.executable, "-c", TWO_PROCESSES]
    running = [
        subprocess.Popen([*program, str(rank), port, tmp_path], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=180)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "quarantine", "step-00000002"]
