"""A model checkpoint is a folder that is complete or not there, and is checked before it is used."""

import os
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rljax import faults
from rljax.checkpoint import StorageError, load_files, load_params, save_params
from tests.checkpointed_run import abstract_of, bits

FILES = {"arch.json": b'{"layers": 2}', "tokenizer.json": b"\x00\xff", "more/template.jinja": b"x"}


@pytest.fixture(autouse=True)
def fresh_fault_counters() -> None:
    faults._passings.clear()


def parameters(seed: int = 0, dtype: Any = jnp.float32) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    values = {"embed": rng.normal(size=(8, 4)), "layers": {"w": rng.normal(size=(2, 8, 4))}}
    return jax.tree.map(lambda value: jax.device_put(jnp.asarray(value, dtype), jax.devices()[0]), values)


def test_parameters_and_files_come_back(tmp_path: Path) -> None:
    save_params(tmp_path / "deep" / "model", parameters(), FILES)
    assert bits(load_params(tmp_path / "deep" / "model", abstract_of(parameters()))) == bits(parameters())
    assert load_files(tmp_path / "deep" / "model") == FILES
    assert os.listdir(tmp_path / "deep") == ["model"]
    assert sorted(os.listdir(tmp_path / "deep" / "model")) == ["arch.json", "manifest.json", "more", "params", "tokenizer.json"]


def test_parameters_are_loaded_onto_a_mesh(tmp_path: Path) -> None:
    save_params(tmp_path / "model", parameters(), FILES)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "tensor"))
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), parameters())
    loaded = load_params(tmp_path / "model", shapes)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(loaded))
    assert bits(loaded) == bits(parameters())


def test_parameters_are_changed_one_at_a_time(tmp_path: Path) -> None:
    save_params(tmp_path / "model", parameters(), FILES)
    read: dict[str, Any] = {}

    def change(name: str, leaf: jax.Array) -> jax.Array:
        assert all(earlier() is None for earlier in read.values()), "what was changed is not kept beside what it became"
        read[name] = weakref.ref(leaf)
        return -leaf

    found = load_params(tmp_path / "model", abstract_of(parameters()), change)
    assert list(read) == ["embed", "layers.w"]
    assert bits(found) == bits(jax.tree.map(lambda leaf: -leaf, parameters()))


@pytest.mark.parametrize(("stored", "wanted"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
def test_floating_point_types_are_converted_as_asked(tmp_path: Path, stored: Any, wanted: Any) -> None:
    save_params(tmp_path / "model", parameters(dtype=stored), FILES)
    expected = jax.tree.map(lambda leaf: leaf.astype(wanted), parameters(dtype=stored))
    assert bits(load_params(tmp_path / "model", abstract_of(expected))) == bits(expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": jnp.ones(2)}, "leaf 'extra' is missing"),
        ({"embed": None}, "leaf 'embed' is in the checkpoint only"),
        ({"embed": jnp.ones((4, 8))}, "leaf 'embed' was saved as"),
        ({"embed": jnp.ones((8, 4), jnp.int32)}, "leaf 'embed' was saved as"),
    ],
)
def test_a_leaf_that_differs_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_params(tmp_path / "model", parameters(), FILES)
    with pytest.raises(ValueError, match=message):
        load_params(tmp_path / "model", abstract_of({**parameters(), **change}))


def test_damage_to_any_file_is_named(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_params(model, parameters(), FILES)
    for path in [path for path in model.rglob("*") if path.is_file()]:
        raw = path.read_bytes()
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(StorageError, match=f"is damaged: .*{path.name}"):
            load_params(model, abstract_of(parameters()))
        if path.parent == model:
            with pytest.raises(StorageError, match=f"is damaged: .*{path.name}"):
                load_files(model)
        path.unlink()
        with pytest.raises(StorageError, match=f"is damaged: .*{path.name}"):
            load_params(model, abstract_of(parameters()))
        path.write_bytes(raw)
    load_params(model, abstract_of(parameters()))


def test_what_is_no_model_checkpoint_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no model checkpoint at .*rljax convert"):
        load_params(tmp_path / "none", abstract_of(parameters()))
    with pytest.raises(ValueError, match="is not a model checkpoint"):
        load_files(tmp_path)


def test_a_folder_is_replaced_only_when_allowed_and_only_when_it_is_ours(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()  # an empty folder is no loss
    save_params(model, parameters(0), FILES)
    with pytest.raises(ValueError, match="already holds a model checkpoint"):
        save_params(model, parameters(1), FILES)
    assert bits(load_params(model, abstract_of(parameters()))) == bits(parameters(0))
    save_params(model, parameters(1), {}, overwrite=True)
    assert bits(load_params(model, abstract_of(parameters()))) == bits(parameters(1))
    assert load_files(model) == {}
    assert os.listdir(tmp_path) == ["model"]
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("x")
    with pytest.raises(ValueError, match="exists and is not a model checkpoint"):
        save_params(tmp_path / "thesis", parameters(), {}, overwrite=True)


@pytest.mark.parametrize("name", ["params", "params/b", "manifest.json", "a/b/c", "a/../b", "/a", "..", ""])
def test_file_names_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a file"):
        save_params(tmp_path / "model", parameters(), {name: b""})


@pytest.mark.parametrize("point", ["pre_manifest", "post_manifest"])
def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    model = tmp_path / "model"
    monkeypatch.setenv(faults.FAIL_AT, f"checkpoint.{point}:1")
    with pytest.raises(StorageError, match=r"could not be written: .*No space left"):
        save_params(model, parameters(0), FILES)
    assert not model.exists()
    save_params(model, parameters(0), FILES)
    faults._passings.clear()
    with pytest.raises(StorageError, match="could not be written"):
        save_params(model, parameters(1), FILES, overwrite=True)
    assert bits(load_params(model, abstract_of(parameters()))) == bits(parameters(0))
    save_params(model, parameters(1), FILES, overwrite=True)
    assert os.listdir(tmp_path) == ["model"]


def test_a_model_caught_between_two_names_is_put_back_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    save_params(model, parameters(0), FILES)
    model.rename(tmp_path / ".model.replaced")  # what a kill between the two renames leaves
    monkeypatch.setenv(faults.FAIL_AT, "checkpoint.pre_manifest:1")
    with pytest.raises(StorageError):
        save_params(model, parameters(1), FILES)
    assert bits(load_params(model, abstract_of(parameters()))) == bits(parameters(0))
