"""Conversion is complete and proved, or leaves nothing behind."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console
from safetensors.numpy import load_file, save_file

from rljax import manifest, zarr
from rljax.checkpoint import load_files, save_params
from rljax.conversion.proof import compare_logits
from rljax.convert import Checkpoint, convert, read_arch, read_checkpoint, source_kind
from rljax.data.tokenizer import Tokenizer
from rljax.manifest import StorageError, read_manifest
from rljax.models import layout
from rljax.models.decoder import abstract_params
from rljax.models.hf import open_hf
from rljax.models.shards import read_header
from tests.models.gguf_files import metadata, write_gguf
from tests.models.oracle import load_hf, make_llama, save_llama, tokenizer_files

MODULE = sys.modules["rljax.convert"]  # the attribute of the package is the function of the same name


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    save_llama(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "model"
    convert(source, target)
    return target


def tensors(folder: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_round_trip_returns_the_same_bits_and_files(source: Path, tmp_path: Path) -> None:
    there = convert(source, tmp_path / "für alle" / "my model")
    back = convert(there.target, tmp_path / "back")
    assert (there.kind, there.to, back.kind, back.to) == ("hf", "orbax", "orbax", "hf")
    assert there.verified
    assert back.verified
    assert tensors(tmp_path / "back") == tensors(source)
    for name in tokenizer_files():
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert names(tmp_path) == ["back", "back.conversion.json", "für alle"]
    assert names(tmp_path / "für alle") == ["my model", "my model.conversion.json"]
    assert (
        there.num_bytes
        == 4 * there.num_params
        == 4 * sum(value.size for value in load_file(source / "model.safetensors").values())
    )


def test_the_plan_is_one_to_one(source: Path, tmp_path: Path) -> None:
    for to in ("orbax", "hf"):
        plan = convert(source, tmp_path / "out", to=to, dry_run=True).plan
        assert len({row.source for row in plan}) == len({row.target for row in plan}) == len(plan) == 21
        assert {row.dtype for row in plan} == {"float32"}
        assert {row.transform for row in plan if "k_proj" in row.source} == {"key"}
    assert not (tmp_path / "out").exists()


def test_a_dry_run_shows_the_plan_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    screen = io.StringIO()
    report = convert(source, tmp_path / "out", dry_run=True, console=Console(file=screen, width=160))
    assert not report.written
    assert not list(tmp_path.iterdir())
    assert "model.layers.*.self_attn.q_proj.weight" in screen.getvalue()
    assert "layers.qkv[*].query" in screen.getvalue()
    assert "nothing was written" in screen.getvalue()


def test_parameters_load_onto_shardings(source: Path, checkpoint: Path) -> None:
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("tensor"))
    whole = NamedSharding(mesh, PartitionSpec())

    def shardings(arch: Any, shapes: Any) -> Any:
        return jax.tree.map(lambda leaf: split if leaf.shape[0] % 2 == 0 else whole, shapes)

    found = read_checkpoint(checkpoint, shardings)
    _, params = load_hf(source)
    assert isinstance(found, Checkpoint)
    assert found.params["layers"]["qkv"].sharding == split
    assert jax.tree.all(jax.tree.map(lambda ours, theirs: np.array_equal(ours, theirs), found.params, params))
    assert Tokenizer.load(found.tokenizer_dir).stop_ids == {0, 2}
    assert read_checkpoint(checkpoint, dtype="bfloat16").params["embed"].dtype == "bfloat16"


def test_gguf_and_hf_sources_give_the_same_checkpoint(source: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_llama().state_dict(), metadata())
    convert(tmp_path / "model.gguf", tmp_path / "model")
    ours, theirs = read_checkpoint(tmp_path / "model").params, load_hf(source)[1]
    assert jax.tree.all(jax.tree.map(lambda one, other: np.array_equal(one, other), ours, theirs))
    assert Tokenizer.load(tmp_path / "model").stop_ids == {1, 2}


def test_bfloat16_is_kept_on_export_and_may_be_widened(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "narrow", dtype="bfloat16")
    kept = convert(tmp_path / "narrow", tmp_path / "kept")
    wide = convert(tmp_path / "narrow", tmp_path / "wide", dtype="float32")
    assert (kept.dtype, wide.dtype) == ("bfloat16", "float32")
    ours = load_file(tmp_path / "kept" / "model.safetensors")
    for name, value in load_file(source / "model.safetensors").items():
        assert ours[name].tobytes() == value.astype("bfloat16").tobytes()
    assert load_file(tmp_path / "wide" / "model.safetensors")["model.norm.weight"].dtype == np.float32


def test_an_existing_target_is_kept_unless_told(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", to="hf")
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match="already holds a model"):
        convert(source, tmp_path / "out")
    assert contents(tmp_path / "out") == before
    convert(source, tmp_path / "out", overwrite=True)
    assert source_kind(tmp_path / "out") == "orbax"
    assert not (tmp_path / "out" / "config.json").exists()
    assert names(tmp_path) == ["out", "out.conversion.json"]


def test_a_target_that_is_something_else_is_never_replaced(source: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("years")
    (tmp_path / "file").write_text("x")
    shutil.copytree(source, tmp_path / "model")
    for target, told in (("work", "no model"), ("file", "no model"), ("file/out", "is a file"), ("model", "holds the source")):
        with pytest.raises(ValueError, match=told):
            convert(tmp_path / "model", tmp_path / target, overwrite=True)
    assert (tmp_path / "work" / "thesis.txt").read_text() == "years"
    (tmp_path / "empty").mkdir()
    assert convert(source, tmp_path / "empty").written


def test_an_unwritable_target_is_a_storage_error(source: Path) -> None:
    with pytest.raises(StorageError, match="could not be written"):
        convert(source, Path("/proc/rljax/model"))


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_an_interrupted_conversion_leaves_what_was_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    convert(source, tmp_path / "out")
    before = contents(tmp_path / "out")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(MODULE, "compare_bits", interrupted)
    for target in ("out", "new"):
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / target, to=to, overwrite=True)
    assert contents(tmp_path / "out") == before
    assert names(tmp_path) == ["out", "out.conversion.json"]


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_changed_bit_in_what_was_written_is_noticed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    original = MODULE.write_model

    def write(folder: Path, *rest: Any) -> Any:
        notices = original(folder, *rest)
        if to == "orbax":
            path, place = folder / "params" / "layers.down" / "1.0.0", -1  # noticed by its digest before it is compared
        else:
            entry = read_header(folder / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
            path, place = entry.file, entry.offset + 5
        raw = bytearray(path.read_bytes())
        raw[place] ^= 1
        path.write_bytes(raw)
        return notices

    monkeypatch.setattr(MODULE, "write_model", write)
    told = {"orbax": r"layers\.down/1\.0\.0 has other content", "hf": r"model\.layers\.1\.mlp\.down_proj\.weight reads back"}
    with pytest.raises(StorageError, match=told[to]):
        convert(source, tmp_path / "out", to=to)
    assert not list(tmp_path.iterdir())


def test_a_bad_source_leaves_nothing(source: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(source, bad)
    weights = load_file(bad / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:32]
    save_file(weights, bad / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        convert(bad, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_notices_reach_the_report_and_the_screen(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "odd")
    weights = {name: value.copy() for name, value in load_file(source / "model.safetensors").items()}
    weights["model.norm.weight"][0] = np.inf
    save_file(weights, tmp_path / "odd" / "model.safetensors")
    screen = io.StringIO()
    report = convert(tmp_path / "odd", tmp_path / "out", console=Console(file=screen, width=200))
    assert ["model.norm.weight" in notice for notice in report.notices] == [True]
    assert "NaN or infinity" in screen.getvalue()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json does not exist"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "not a tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(tokenizer_files(98)["tokenizer.json"]), "id 97"),
        (lambda folder: (folder / "config.json").unlink(), "no model"),
    ],
)
def test_a_model_without_its_tokenizer_is_refused(source: Path, tmp_path: Path, change: Any, told: str) -> None:
    shutil.copytree(source, tmp_path / "model")
    change(tmp_path / "model")
    with pytest.raises(ValueError, match=told):
        convert(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sources_of_no_known_kind_are_refused_with_a_hint(source: Path, tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.gguf").write_bytes(b"")
    for name, told in (("none", "does not exist"), ("weights.bin", "no .gguf file"), ("folder", r"did you mean .*a\.gguf")):
        with pytest.raises(ValueError, match=told):
            convert(tmp_path / name, tmp_path / "out")
    with pytest.raises(ValueError, match="rljax convert"):
        read_checkpoint(source)
    with pytest.raises(ValueError, match="shard_size"):
        convert(source, tmp_path / "out", shard_size=0)


def test_an_arch_file_of_another_version_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    arch = json.loads((tmp_path / "model" / "arch.json").read_text())
    (tmp_path / "model" / "arch.json").write_text(json.dumps({**arch, "flavour": 1}))
    with pytest.raises(ValueError, match="flavour"):
        read_arch(tmp_path / "model")


def test_a_damaged_checkpoint_is_not_exported(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "model")
    stored = (path for path in (tmp_path / "model" / "params").rglob("*") if path.is_file())
    largest = max(stored, key=lambda path: path.stat().st_size)
    raw = bytearray(largest.read_bytes())
    raw[len(raw) // 2] ^= 1
    largest.write_bytes(raw)
    with pytest.raises(StorageError, match="damaged"):
        convert(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_of_a_mixed_checkpoint_is_wide(checkpoint: Path, tmp_path: Path) -> None:
    arch = read_arch(checkpoint)
    params = jax.tree.map(lambda leaf: jax.numpy.ones(leaf.shape, leaf.dtype), abstract_params(arch))
    params["embed"] = params["embed"].astype("bfloat16")
    save_params(tmp_path / "mixed", params, {"arch.json": arch.to_json().encode(), **tokenizer_files()})
    assert convert(tmp_path / "mixed", tmp_path / "out").dtype == "float32"


def test_the_report_lies_beside_the_checkpoint(source: Path, tmp_path: Path) -> None:
    report = convert(source, tmp_path / "out")
    told = json.loads((tmp_path / "out.conversion.json").read_text(encoding="utf-8"))
    assert (told["verified"], told["logits"]["max_abs_difference"], told["logits"]["top1_agreement"]) == (True, 0.0, 1.0)
    assert len(told["plan"]) == len(report.plan)
    assert told["arch"]["rope"]["theta"] == report.arch.rope.theta
    assert (told["source"], told["num_bytes"]) == (str(source), report.num_bytes)


def test_logits_tell_how_much_a_narrower_type_costs(source: Path, tmp_path: Path) -> None:
    found = convert(source, tmp_path / "narrow", dtype="bfloat16").logits
    again = convert(tmp_path / "narrow", tmp_path / "back").logits
    assert found is not None
    assert again is not None
    assert found.source_dtype == "float32"
    assert 1e-3 < found.max_abs_difference < 1.0  # eight bits of mantissa, logits of about 10
    assert (again.source_dtype, again.max_abs_difference) == ("bfloat16", 0.0)


def test_other_weights_compute_other_logits(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "other")
    weights = {name: value.copy() for name, value in load_file(source / "model.safetensors").items()}
    weights["model.layers.1.mlp.up_proj.weight"] *= np.float32(1.01)
    save_file(weights, tmp_path / "other" / "model.safetensors")
    assert compare_logits(open_hf(source), None, "orbax", checkpoint, "float32").max_abs_difference == 0
    with pytest.raises(StorageError, match="computes other logits"):
        compare_logits(open_hf(tmp_path / "other"), None, "orbax", checkpoint, "float32")


@pytest.mark.parametrize(("verify", "bits", "logits"), [("none", False, False), ("bits", True, False), ("logits", True, True)])
def test_what_is_proved_can_be_chosen(source: Path, tmp_path: Path, verify: Any, bits: bool, logits: bool) -> None:
    report = convert(source, tmp_path / "out", verify=verify)
    assert (report.verified, report.logits is not None) == (bits, logits)


def test_a_model_that_is_too_large_to_run_is_still_compared_bit_by_bit(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "LOGITS_BELOW", 1000)
    report = convert(source, tmp_path / "out")
    assert (report.verified, report.logits) == (True, None)
    assert any("logits were not compared" in notice for notice in report.notices)


def test_all_bits_survive_when_tensors_come_a_few_rows_at_a_time(
    source: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf", make_llama().state_dict(), metadata())
    monkeypatch.setattr(layout, "_TILE_BYTES", 700)  # two or three rows
    monkeypatch.setattr(zarr, "_CHUNK_BYTES", 500)
    wanted = load_hf(source)[1]
    for name, model in (("hf", source), ("gguf", tmp_path / "model.gguf"), ("rljax", checkpoint)):
        convert(model, tmp_path / name, to="orbax", dtype="float32")
        ours = read_checkpoint(tmp_path / name).params
        assert jax.tree.all(jax.tree.map(lambda one, other: np.array_equal(one, other), ours, wanted)), name
    convert(tmp_path / "hf", tmp_path / "back")
    assert tensors(tmp_path / "back") == tensors(source)


def test_a_checkpoint_can_be_copied_in_another_type(checkpoint: Path, tmp_path: Path) -> None:
    report = convert(checkpoint, tmp_path / "narrow", to="orbax", dtype="bfloat16")
    assert (report.kind, report.to) == ("orbax", "orbax")
    ours = read_checkpoint(tmp_path / "narrow", dtype="bfloat16").params
    theirs = read_checkpoint(checkpoint, dtype="bfloat16").params
    assert jax.tree.all(jax.tree.map(lambda one, other: np.array_equal(one, other), ours, theirs))


def test_what_training_saved_is_exported_and_copied(checkpoint: Path, source: Path, tmp_path: Path) -> None:
    files = {**load_files(checkpoint), "arch.json": read_arch(checkpoint).to_json().encode()}
    save_params(tmp_path / "trained", read_checkpoint(checkpoint).params, files)
    convert(tmp_path / "trained", tmp_path / "exported")
    convert(tmp_path / "trained", tmp_path / "copied", to="orbax")
    convert(tmp_path / "copied", tmp_path / "exported again")
    assert tensors(tmp_path / "exported") == tensors(tmp_path / "exported again") == tensors(source)


@pytest.mark.parametrize(
    ("version", "told"),
    [(manifest.FORMAT + 1, "a newer rljax wrote it, so update rljax"), (manifest.FORMAT - 1, "convert the model again")],
)
def test_a_checkpoint_of_an_unknown_version_is_refused(checkpoint: Path, tmp_path: Path, version: int, told: str) -> None:
    shutil.copytree(checkpoint, tmp_path / "newer")
    body = read_manifest(checkpoint)
    (tmp_path / "newer" / "manifest.json").write_bytes(manifest._render({**body, "format": version}))
    with pytest.raises(ValueError, match=told):
        convert(tmp_path / "newer", tmp_path / "out")


@pytest.mark.parametrize("equal", [True, False])
def test_an_export_is_tied_when_its_arrays_are(source: Path, tmp_path: Path, equal: bool) -> None:
    shutil.copytree(source, tmp_path / "model")
    weights = load_file(source / "model.safetensors")
    if equal:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model" / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    convert(tmp_path / "model", tmp_path / "there", verify="none")
    convert(tmp_path / "there", tmp_path / "back", verify="none")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["tie_word_embeddings"] == equal
    found = tensors(tmp_path / "back")
    assert ("lm_head.weight" in found) == (not equal)
    assert found == {name: value.tobytes() for name, value in weights.items() if name in found}


def test_further_chat_templates_travel(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "model")
    templates = tmp_path / "model" / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ messages }} ü", encoding="utf-8")
    convert(tmp_path / "model", tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back")
    back = tmp_path / "back" / "additional_chat_templates"
    assert contents(back) == contents(templates)
    assert names(tmp_path / "back") == names(tmp_path / "model")


def test_another_architecture_is_refused(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    with pytest.raises(ValueError, match="BertModel"):
        convert(tmp_path / "model", tmp_path / "out")


def test_arrays_that_were_never_committed_are_no_model(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "saving-00000030.1").mkdir()
    shutil.copytree(checkpoint / "params", tmp_path / "saving-00000030.1" / "arrays")
    with pytest.raises(ValueError, match="never committed"):
        convert(tmp_path / "saving-00000030.1", tmp_path / "out")
    (tmp_path / "saving-00000030.1" / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="step of a run"):
        convert(tmp_path / "saving-00000030.1", tmp_path / "out")
    shutil.copytree(checkpoint, tmp_path / "torn")
    (tmp_path / "torn" / "manifest.json").unlink()
    with pytest.raises(StorageError, match=r"manifest\.json cannot be read"):
        convert(tmp_path / "torn", tmp_path / "out")
