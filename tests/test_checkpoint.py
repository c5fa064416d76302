"""A checkpoint is whole or not there, is proved before it is used, and never disappears before a newer one is good."""

import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from rljax import faults
from rljax.checkpoint import CheckpointStore, StorageError
from rljax.pytree import pytree
from tests.checkpointed_run import (
    abstract_of,
    bits,
    contents,
    continue_run,
    first_state,
    flip,
    meta_of,
    restore,
    save_steps,
    update,
)


@pytree
class TrainState:
    params: Any
    opt_state: Any
    step: Any


@pytest.fixture(autouse=True)
def fresh_fault_counters() -> None:
    faults._passings.clear()


def put(values: Any, sharding: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), values)


def mesh_of(fsdp: int, tensor: int) -> Mesh:
    return jax.make_mesh(
        (fsdp, tensor), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: fsdp * tensor]
    )


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[bytes]]]:
    directory = tmp_path_factory.mktemp("two")
    return directory, save_steps(directory, 2, 4)


# What comes back


def test_any_tree_of_arrays_comes_back_in_every_bit(tmp_path: Path) -> None:
    sharding = NamedSharding(mesh_of(4, 2), PartitionSpec("fsdp", "tensor"))
    params = put({"dense": {"w": np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)}}, sharding)
    params["half"] = put(np.arange(6, dtype=jnp.bfloat16) / 7, NamedSharding(sharding.mesh, PartitionSpec()))
    params["layers"] = [put(np.array([True, False]), jax.devices()[0]), put(np.int32(7), jax.devices()[0]), None]
    state = TrainState(params, optax.adamw(1e-3).init(params["dense"]), put(np.int32(3), jax.devices()[0]))
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(3, state, meta_of(3))
    with CheckpointStore(tmp_path, keep=1) as store:
        restored = store.restore(abstract_of(state))
    assert restored is not None
    assert jax.tree.structure(restored.arrays) == jax.tree.structure(state)
    assert bits(restored.arrays) == bits(state)
    assert all(
        jax.tree.leaves(jax.tree.map(lambda a, b: a.dtype == b.dtype and a.sharding == b.sharding, restored.arrays, state))
    )
    assert (restored.step, restored.meta, restored.skipped) == (3, meta_of(3), ())


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_random_keys_draw_the_same_after_a_restore(tmp_path: Path, generator: str) -> None:
    keys = {"one": jax.random.key(7, impl=generator), "many": jax.random.split(jax.random.key(8, impl=generator), 8)}
    keys["many"] = jax.device_put(keys["many"], NamedSharding(mesh_of(4, 2), PartitionSpec("fsdp")))
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(1, keys, meta_of(1))
        restored = store.restore(abstract_of(keys))
    assert restored is not None
    assert restored.arrays["many"].sharding == keys["many"].sharding
    assert jax.random.uniform(restored.arrays["one"]) == jax.random.uniform(keys["one"])
    np.testing.assert_array_equal(
        jax.vmap(jax.random.uniform)(restored.arrays["many"]), jax.vmap(jax.random.uniform)(keys["many"])
    )


def test_a_key_of_another_generator_is_refused(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(1, {"key": jax.random.key(7)}, meta_of(1))
        with pytest.raises(ValueError, match="leaf 'key' was saved as key<fry>"):
            store.restore(abstract_of({"key": jax.random.key(7, impl="rbg")}))


def test_a_checkpoint_is_restored_onto_another_mesh(tmp_path: Path) -> None:
    values = {"w": np.arange(64, dtype=np.float32).reshape(8, 8), "b": np.arange(8, dtype=np.float32)}
    spec = {"w": PartitionSpec("fsdp", "tensor"), "b": PartitionSpec("tensor")}
    shardings: list[dict[str, Any]] = [
        {name: NamedSharding(mesh_of(*size), spec[name]) for name in spec} for size in ((8, 1), (4, 2))
    ]
    shardings.append({name: SingleDeviceSharding(jax.devices()[0]) for name in spec})
    for number, source in enumerate(shardings):
        with CheckpointStore(tmp_path / str(number), keep=1) as store:
            store.save(1, jax.tree.map(jax.device_put, values, source), meta_of(1))
            for target in shardings:
                shapes = {name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=target[name]) for name, v in values.items()}
                restored = store.restore(shapes)
                assert restored is not None
                assert {name: leaf.sharding for name, leaf in restored.arrays.items()} == target
                jax.tree.map(np.testing.assert_array_equal, restored.arrays, values)


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path: Path) -> None:
    grow = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 1.5 + 1, tree), donate_argnums=0)
    state = put(
        {str(i): np.full((256, 1024), i, np.float32) for i in range(8)}, NamedSharding(mesh_of(8, 1), PartitionSpec("fsdp"))
    )
    shapes, expected = abstract_of(state), bits(state)
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(1, state, meta_of(1))
        for _ in range(10):
            state = grow(state)
        jax.block_until_ready(state)
        restored = store.restore(shapes)
    assert restored is not None
    assert bits(restored.arrays) == expected


def test_an_unused_directory_restores_nothing(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "new", keep=1) as store:
        assert store.latest() is None
        assert store.restore(abstract_of(first_state())) is None


# What does not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": np.zeros(2, np.float32)}, "leaf 'extra' is missing from the checkpoint"),
        ({"w": None}, "leaf 'w' is in the checkpoint only"),
        ({"w": np.zeros((2, 3), np.float32)}, r"leaf 'w' was saved as float32\[3, 2\], expected float32\[2, 3\]"),
        ({"w": np.zeros((4, 2), np.float32)}, r"leaf 'w' was saved as float32\[3, 2\], expected float32\[4, 2\]"),
        ({"w": np.zeros((3, 2), jnp.bfloat16)}, r"leaf 'w' was saved as float32\[3, 2\], expected bfloat16\[3, 2\]"),
    ],
)
def test_a_leaf_that_differs_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    device = jax.devices()[0]
    state = put({"w": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32)}, device)
    with CheckpointStore(tmp_path, keep=3) as store:
        store.save(1, put({**state, **change}, device), meta_of(1))  # an older one that would fit is no way out
        store.save(2, state, meta_of(2), blocking=True)
        before = contents(tmp_path)
        with pytest.raises(ValueError, match=message):
            store.restore(abstract_of(put({**state, **change}, device)))
    assert contents(tmp_path) == before


def test_a_shape_without_sharding_is_refused(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path, keep=1) as store, pytest.raises(ValueError, match=r"leaf 'a\.0' of the abstract tree"):
        store.restore({"a": [jax.ShapeDtypeStruct((2,), jnp.float32)]})


@pytest.mark.parametrize(
    ("leaf", "message"),
    [(np.ones(2), "leaf 'x' is a ndarray"), (3, "leaf 'x' is a int"), (jnp.ones((0, 2)), "leaf 'x' is empty")],
)
def test_what_is_no_array_is_not_saved(tmp_path: Path, leaf: Any, message: str) -> None:
    with CheckpointStore(tmp_path, keep=1) as store, pytest.raises(ValueError, match=message):
        store.save(1, {"x": leaf}, meta_of(1))


def test_a_donated_array_is_not_saved(tmp_path: Path) -> None:
    state = first_state()
    update(state)
    with CheckpointStore(tmp_path, keep=1) as store, pytest.raises(ValueError, match="has been donated"):
        store.save(1, state, meta_of(1))


def test_steps_only_grow_and_agree_with_the_meta(tmp_path: Path) -> None:
    save_steps(tmp_path, 4)
    with CheckpointStore(tmp_path, keep=1) as store:
        for step in (3, 4):
            with pytest.raises(ValueError, match=f"step {step} is not newer than the checkpoint of step 4"):
                store.save(step, first_state(), meta_of(step))
        with pytest.raises(ValueError, match="RunMeta of step 5"):
            store.save(6, first_state(), meta_of(5))


@pytest.mark.parametrize("directory", ["gs://bucket/run", "s3://bucket"])
def test_an_object_store_is_refused(directory: str) -> None:
    with pytest.raises(ValueError, match="object-store"):
        CheckpointStore(Path(directory), keep=1)


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [flip, truncate, zero, Path.unlink])
def test_damage_to_any_file_is_found_and_the_older_checkpoint_used(
    tmp_path: Path, two_checkpoints: tuple[Path, dict[int, list[bytes]]], damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    source, saved = two_checkpoints
    files = sorted(contents(source / "step-00000004"))
    assert len(files) > 8
    for number, name in enumerate(files):
        directory = tmp_path / str(number)
        shutil.copytree(source, directory)
        damage(directory / "step-00000004" / name)
        damaged = contents(directory / "step-00000004")
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rljax.checkpoint"):
            restored = restore(directory)
        assert restored.step == 2, name
        assert bits(restored.arrays) == saved[2]
        assert [skip.step for skip in restored.skipped] == [4]
        assert name in restored.skipped[0].reason
        assert "step-00000004" in caplog.text
        assert name in caplog.text
        assert restored.skipped[0].moved_to == directory.resolve() / "quarantine" / "step-00000004"
        assert contents(directory / "quarantine" / "step-00000004") == damaged
        assert sorted(os.listdir(directory)) == [".lock", "quarantine", "step-00000002"]


def test_every_bit_of_the_manifest_counts(tmp_path: Path, two_checkpoints: tuple[Path, dict[int, list[bytes]]]) -> None:
    shutil.copytree(two_checkpoints[0], tmp_path, dirs_exist_ok=True)
    manifest = tmp_path / "step-00000004" / "manifest.json"
    raw = manifest.read_bytes()
    with CheckpointStore(tmp_path, keep=2) as store:
        for position in range(0, len(raw), 97):
            changed = bytearray(raw)
            changed[position] ^= 1 << position % 8
            manifest.write_bytes(changed)
            restored = store.restore(abstract_of(first_state()))
            assert restored is not None
            assert restored.step == 2, position
            manifest.parent.parent.joinpath("quarantine", "step-00000004").rename(manifest.parent)


def test_a_checkpoint_under_another_name_is_damaged(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000008")
    assert restore(tmp_path).skipped[0].reason == "it is the checkpoint of step 2"


def test_quarantine_keeps_what_it_has_and_frees_the_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    for copies in (1, 2):
        _, state = continue_run(tmp_path, 4)
        flip(tmp_path / "step-00000004" / "manifest.json")
        assert restore(tmp_path).step == 2
        assert len(os.listdir(tmp_path / "quarantine")) == copies
    restored, last = continue_run(tmp_path, 4)
    assert restored is not None
    assert bits(last) == bits(state)
    assert restore(tmp_path).step == 4


def test_without_a_good_checkpoint_nothing_starts_and_nothing_changes(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4)
    flip(tmp_path / "step-00000002" / "manifest.json")
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(StorageError, match=r"none of the 2 checkpoints .*step 4: manifest.json cannot be read.*step 2"):
        restore(tmp_path)
    assert contents(tmp_path) == before


# Failing saves


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the system refuse to write files beyond `size` bytes, as it does when a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# The other writes of a failed save end after Orbax has closed the event loop that waited for them.
late_writes = pytest.mark.filterwarnings("ignore:Exception ignored in. None:pytest.PytestUnraisableExceptionWarning")


@late_writes
@pytest.mark.parametrize("keep", [1, 2])
def test_a_failed_write_is_told_at_the_next_check_and_costs_nothing_older(tmp_path: Path, keep: int) -> None:
    saved = save_steps(tmp_path, 2)
    state = first_state()
    with CheckpointStore(tmp_path, keep) as store:
        with largest_file(4096):
            store.save(4, state, meta_of(4))
            assert store._pending is not None
            store._pending.exception(timeout=60)
        with pytest.raises(StorageError, match=r"checkpoint of step 4 could not be saved: .*File too large"):
            store.check()
        store.check()  # told once
        assert [name for name in os.listdir(tmp_path) if name.startswith("step-")] == ["step-00000002"]
        restored = store.restore(abstract_of(state))
        assert restored is not None
        assert bits(restored.arrays) == saved[2]
        store.save(4, state, meta_of(4))  # the same step, once there is room
        store.wait()
        assert sorted(os.listdir(tmp_path)) == [".lock", *["step-00000002"][: keep - 1], "step-00000004"]


@pytest.mark.parametrize("call", ["save", "wait", "close"])
@pytest.mark.parametrize("point", ["writing", "data_written", "pre_manifest", "post_manifest"])
def test_a_failure_at_any_point_is_raised_by_whatever_is_called_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, call: str
) -> None:
    saved = save_steps(tmp_path, 2)
    monkeypatch.setenv(faults.FAIL_AT, f"checkpoint.{point}:1")
    store = CheckpointStore(tmp_path, keep=1)
    store.save(4, first_state(), meta_of(4))
    arguments = (6, first_state(), meta_of(6)) if call == "save" else ()
    with pytest.raises(StorageError, match=r"checkpoint of step 4 could not be saved: .*No space left on device"):
        getattr(store, call)(*arguments)
    store.close()
    assert bits(restore(tmp_path).arrays) == saved[2]


def test_a_failure_before_the_background_begins_is_raised_by_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.FAIL_AT, "checkpoint.begin:1")
    with CheckpointStore(tmp_path, keep=1) as store, pytest.raises(StorageError, match="step 4 could not be saved"):
        store.save(4, first_state(), meta_of(4))


def test_a_failed_deletion_is_told_and_finished_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 2)
    monkeypatch.setenv(faults.FAIL_AT, "checkpoint.mid_gc:1")
    with CheckpointStore(tmp_path, keep=1) as store:
        store.save(4, first_state(), meta_of(4))
        with pytest.raises(StorageError, match="checkpoints older than step 4 could not be deleted"):
            store.wait()
        store.save(6, first_state(), meta_of(6), blocking=True)
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000006"]


@late_writes
def test_a_full_disk_is_told_and_the_run_recovers_when_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        saved = save_steps(disk, 2)
        filler = disk / "filler"
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(256 * 1024))
        with CheckpointStore(disk, keep=1) as store:
            with pytest.raises(StorageError, match="step 4 could not be saved"):
                store.save(4, first_state(), meta_of(4), blocking=True)
            restored = store.restore(abstract_of(first_state()))
            assert restored is not None
            assert bits(restored.arrays) == saved[2]
            filler.unlink()
            store.save(6, first_state(), meta_of(6), blocking=True)
            assert sorted(os.listdir(disk)) == [".lock", "step-00000006"]
    finally:
        subprocess.run(["umount", disk], check=True)


# Ends of a run


def save_and_end(directory: Path, end: BaseException) -> None:
    with CheckpointStore(directory, keep=1) as store:
        store.save(2, first_state(), meta_of(2))
        raise end


def test_leaving_the_program_waits_for_the_commit(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        save_and_end(tmp_path, SystemExit(3))
    assert restore(tmp_path).step == 2


def test_what_ended_the_run_is_not_hidden_by_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.FAIL_AT, "checkpoint.data_written:1")
    with pytest.raises(KeyError) as caught:
        save_and_end(tmp_path, KeyError("cause"))
    assert "step 2 could not be saved" in caught.value.__notes__[0]


def test_the_newest_are_kept_and_only_leftovers_of_ours_are_swept(tmp_path: Path) -> None:
    foreign = ["notes", "saving-notes", "step-best", "saving-1", "saving-00000001"]
    for name in [*foreign, "saving-00000006.3", "deleting-00000001"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    saved = save_steps(tmp_path, 2, 4, 6, 8, keep=2)
    assert sorted(os.listdir(tmp_path)) == sorted([*foreign, ".lock", "step-00000006", "step-00000008"])
    assert bits(restore(tmp_path).arrays) == saved[8]


def test_a_second_run_in_the_directory_is_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "run")
    with CheckpointStore(tmp_path / "run", keep=1):
        for directory in (tmp_path / "run", link):
            with pytest.raises(StorageError, match=f"in use by another run .process {os.getpid()} on "):
                CheckpointStore(directory, keep=1)
    CheckpointStore(link, keep=1).close()


def test_an_unusable_directory_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot be used"):
        CheckpointStore(tmp_path / "file", keep=1)
