"""Arrays written slice by slice are restored by Orbax, and a part of one is read without the rest."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorstore

from rljax import zarr
from rljax.manifest import DamagedError
from rljax.zarr import ArraySpec, StoredArrays, create_arrays, write_slice

ROOT = Path(__file__).resolve().parents[1]


def write(folder: Path, spec: ArraySpec, values: np.ndarray) -> dict[str, dict[str, object]]:
    create_arrays(folder, {"w": spec})
    layers = range(len(values)) if spec.stacked else [None]
    return dict(write_slice(folder, "w", spec, layer, values if layer is None else values[layer]) for layer in layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stacked", [True, False])
def test_chunks_are_in_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, stacked: bool) -> None:
    monkeypatch.setattr(zarr, "_CHUNK_BYTES", 64)
    values = np.random.default_rng(0).normal(size=(4, 12, 2, 6)).astype(dtype)
    spec = ArraySpec(values.shape, dtype, stacked, (1, 3))
    assert spec.chunk == (1 if stacked else 4, 3, 2, 3)
    facts = write(tmp_path / "a", spec, values)
    stored = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/a/w"}}, read=True).result()
    assert stored.read().result().tobytes() == values.tobytes()
    assert stored[2:3, 4:9, :, 1:].read().result().tobytes() == values[2:3, 4:9, :, 1:].tobytes()
    reader = StoredArrays(tmp_path / "a")
    if stacked:
        assert reader.read("w", 3).tobytes() == values[3].tobytes()
    else:
        assert reader.read("w", None).tobytes() == values.tobytes()
    assert {name: fact["size"] for name, fact in facts.items()} == {
        name: (tmp_path / "a" / name).stat().st_size for name in facts
    }


@pytest.mark.parametrize("stacked", [True, False])
def test_a_changed_file_is_noticed_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacked: bool) -> None:
    monkeypatch.setattr(zarr, "_CHUNK_BYTES", 64)
    values = np.random.default_rng(0).normal(size=(4, 12, 6)).astype("float32")
    facts = write(tmp_path / "a", ArraySpec(values.shape, "float32", stacked, (1,)), values)
    path = "w/2.0.0" if stacked else "w/0.0.0"
    reader = StoredArrays(tmp_path / "a", facts)
    assert reader.proves(path)
    assert not reader.proves("w/zarr.json")
    assert not StoredArrays(tmp_path / "a").proves(path)
    layer = 2 if stacked else None
    whole = (tmp_path / "a" / path).read_bytes()
    for damaged, told in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), "other content"),
        (whole[:-1], "too short"),
        (whole[1:], "places of its chunks"),
    ):
        (tmp_path / "a" / path).write_bytes(damaged)
        with pytest.raises(DamagedError, match=told):
            reader.read("w", layer)
    (tmp_path / "a" / path).unlink()
    with pytest.raises(DamagedError, match="No such file"):
        reader.read("w", layer)
    (tmp_path / "a" / path).write_bytes(whole)
    assert reader.read("w", layer).tobytes() == (values[2] if stacked else values).tobytes()


def test_the_only_layer_of_a_stack_is_compared_too(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(1, 12, 6)).astype("float32")
    facts = write(tmp_path / "a", ArraySpec(values.shape, "float32", True, ()), values)
    reader = StoredArrays(tmp_path / "a", facts)
    assert reader.proves("w/0.0.0")
    assert reader.read("w", 0).tobytes() == values[0].tobytes()
    path = tmp_path / "a" / "w/0.0.0"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DamagedError, match="other content"):
        reader.read("w", 0)


def test_what_orbax_laid_out_otherwise_is_read_too(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(4, 12, 6)).astype("float32")
    spec = ArraySpec(values.shape, "float32", True, ())
    facts = write(tmp_path / "a", spec, values)
    description = tmp_path / "a" / "w" / "zarr.json"
    described = json.loads(description.read_text())
    described["attributes"] = {}  # not what `create_arrays` writes
    description.write_text(json.dumps(described))
    reader = StoredArrays(tmp_path / "a", facts)
    assert not reader.proves("w/0.0.0")
    assert reader.read("w", 1).tobytes() == values[1].tobytes()


def test_small_slices_and_odd_dims_are_not_cut() -> None:
    assert ArraySpec((2, 64, 64), "float32", True, (1, 2)).chunk == (1, 64, 64)
    assert ArraySpec((2, 4096, 1001), "float32", True, (2,)).chunk == (1, 4096, 1001)
    wide = ArraySpec((80, 8192, 2, 28672), "bfloat16", True, (1, 3))
    assert wide.chunk == (1, 256, 2, 896)  # at most 32 pieces along a dim
    assert ArraySpec((4096, 8192), "float32", False, (0, 1)).chunk == (256, 1024)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no arrays"):
        StoredArrays(tmp_path)


READS_ITS_PART = """
import sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[2]}", 2, int(sys.argv[1]))
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rljax import checkpoint, zarr
from rljax.zarr import ArraySpec, create_arrays, write_slice
zarr._CHUNK_BYTES = 1 << 18  # a small model has small shards
shape, folder = (4, 2048, 2048), Path(sys.argv[3]) / "params"
mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
spec = ArraySpec(shape, "float32", True, (1, 2))
layer = lambda number: np.arange(2048 * 2048, dtype=np.float32).reshape(shape[1:]) + number
if jax.process_index() == 0:
    create_arrays(folder, {"w": spec})
    for number in range(4):
        write_slice(folder, "w", spec, number, layer(number))
jax.experimental.multihost_utils.sync_global_devices("written")
def bytes_read():
    return int(next(line.split()[1] for line in open("/proc/self/io") if line.startswith("rchar")))
for dims, share in (((None, "fsdp", "tensor"), 0.5), ((None, "tensor", "fsdp"), 0.5), ((None, ("fsdp", "tensor"), None), 0.5)):
    sharding = NamedSharding(mesh, PartitionSpec(*dims))
    before = bytes_read()
    found = checkpoint._read_arrays(folder, {}, {"w": jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)})["w"]
    read = (bytes_read() - before) / (4 * 2048 * 2048 * 4)
    for shard in found.addressable_shards:
        expected = np.stack([layer(number) for number in range(4)])[shard.index]
        np.testing.assert_array_equal(shard.data, expected)
    print(dims, read, flush=True)
    assert share <= read < share + 0.05, (dims, read)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs the kernel's count of bytes read")
def test_each_of_two_processes_reads_only_the_bytes_of_its_shards(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", READS_ITS_PART, str(rank), port, tmp_path],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=180)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(told)
