"""Hugging Face folders: what they mean, and what is refused before anything is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from rljax.models.arch import Arch, Rope
from rljax.models.hf import open_hf, write_hf
from rljax.models.hf_config import arch_from_config, config_from_arch
from rljax.models.layout import fill, slots
from tests.models.oracle import LLAMA3_ROPE, TINY, VARIANTS, load_hf, make_llama, save_llama, tokenizer_files

CONFIG: dict[str, Any] = {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 1e6}
REFERENCE_RTOL = 1e-6  # the reference computes the table in float32


def meaning(**changes: Any) -> Arch:
    return arch_from_config({**CONFIG, **changes})[0]


def test_null_means_absent() -> None:
    nulls = dict.fromkeys(
        ("head_dim", "sliding_window", "rope_scaling", "pad_token_id", "num_key_value_heads", "rope_parameters")
    )
    absent = {key: value for key, value in CONFIG.items() if key not in nulls}
    assert meaning(**nulls) == arch_from_config(absent)[0]
    assert meaning(head_dim=None).head_dim == 16
    assert meaning(num_key_value_heads=None).num_kv_heads == 4


def test_an_explicit_head_dim_wins_and_shapes_follow() -> None:
    shapes = {slot.name.split(".")[-2]: slot.shape for slot in slots(meaning(head_dim=32))}
    assert (shapes["q_proj"], shapes["k_proj"], shapes["v_proj"], shapes["o_proj"]) == (
        (128, 64),
        (64, 64),
        (64, 64),
        (64, 128),
    )


def test_old_and_new_rope_keys_mean_the_same() -> None:
    llama3 = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old_type = {"type": "llama3", **{key: value for key, value in llama3.items() if key != "rope_type"}}
    forms: list[dict[str, Any]] = [
        {"rope_theta": 1e4, "rope_scaling": llama3},
        {"rope_theta": 1e4, "rope_scaling": old_type},
        {"rope_theta": None, "rope_parameters": LLAMA3_ROPE},
        {"rope_theta": 1e4, "rope_scaling": llama3, "rope_parameters": LLAMA3_ROPE},
    ]
    assert {meaning(**form).rope for form in forms} == {Rope(1e4, "llama3", 8.0, 1.0, 4.0, 32)}
    plain = [{}, {"rope_scaling": {"type": "default"}}, {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}}]
    assert {meaning(**form).rope for form in plain} == {Rope(1e6)}


def test_a_missing_theta_is_the_familys_and_said_so() -> None:
    arch, notices = arch_from_config({**CONFIG, "rope_theta": None})
    assert arch.rope == Rope(10_000.0)
    assert len(notices) == 1
    assert "rope_theta" in notices[0]


def test_llama3_frequencies_are_the_published_ones() -> None:
    table = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192).inverse_frequencies(128)
    expected = {0: 1.0, 20: 0.0165604, 30: 0.00137189, 35: 9.55621e-05, 63: 3.06893e-07}
    np.testing.assert_allclose(table[list(expected)], list(expected.values()), rtol=1e-5)  # six digits are given


@pytest.mark.parametrize("variant", VARIANTS)
def test_rope_tables_equal_the_references(variant: str) -> None:
    model = make_llama(**VARIANTS[variant])
    arch, _ = arch_from_config(
        json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": ["LlamaForCausalLM"]}
    )
    table = model.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(arch.rope.inverse_frequencies(arch.head_dim), table, rtol=REFERENCE_RTOL)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["BertModel"]}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "LlamaForCausalLM"]}, "architectures"),
        ({"architectures": None, "model_type": "bert"}, "architectures"),
        ({"model_type": "mistral"}, "model_type"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"type": "mrope", "factor": 4.0}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1}}, "beta_fast"),
        ({"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}}, "rope_type"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta"),
        ({"rope_parameters": LLAMA3_ROPE, "rope_theta": 1e4, "rope_scaling": {"type": "default"}}, "rope_type"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 66, "head_dim": None}, "head_dim"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_what_rljax_cannot_compute_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        meaning(**changes)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_written_config_means_the_same_to_both_sides(variant: str, tmp_path: Path) -> None:
    arch = meaning(rope_theta=None, **{"rope_parameters": {"rope_theta": 1e6}, **VARIANTS[variant]})
    (tmp_path / "config.json").write_text(
        json.dumps(config_from_arch(arch, "bfloat16", {"bos_token_id": 0, "eos_token_id": [2, 0]}))
    )
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert arch_from_config(json.loads((tmp_path / "config.json").read_text())) == (arch, [])
    assert arch_from_config(json.loads(theirs.to_json_string(use_diff=False))) == (arch, [])
    assert (theirs.dtype, theirs.bos_token_id, theirs.eos_token_id) == (torch.bfloat16, 0, [2, 0])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_llama(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_llama(folder, shard_size="100KB")
    return folder


def test_single_and_sharded_files_hold_the_same_model(tiny: Path, tiny_sharded: Path) -> None:
    assert len(list(tiny_sharded.glob("*.safetensors"))) > 2
    (_, one), (_, many) = load_hf(tiny), load_hf(tiny_sharded)
    assert one["layers"]["qkv"].tobytes() == many["layers"]["qkv"].tobytes()
    assert one["embed"].tobytes() == many["embed"].tobytes()


@pytest.mark.parametrize("shard_size", [10**9, 150_000])
def test_export_is_read_back_by_both_sides_bit_by_bit(tiny: Path, tmp_path: Path, shard_size: int) -> None:
    files = tokenizer_files()
    assert write_hf(tmp_path, open_hf(tiny), "float32", shard_size) == []
    source = load_file(tiny / "model.safetensors")
    names = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    written = {name: value for file in names for name, value in load_file(tmp_path / file).items()}
    assert {name: value.tobytes() for name, value in written.items()} == {
        name: value.tobytes() for name, value in source.items()
    }
    index = tmp_path / "model.safetensors.index.json"
    assert index.exists() == (len(names) > 1) == (shard_size < 10**9)
    if len(names) > 1:
        told = json.loads(index.read_text())
        assert set(told["weight_map"]) == set(source)
        assert set(told["weight_map"].values()) == set(names)
        assert told["metadata"]["total_size"] == sum(value.nbytes for value in source.values())
    assert {name: (tmp_path / name).read_bytes() for name in files} == files
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {name: weight.numpy().tobytes() for name, weight in theirs.state_dict().items()} == {
        name: value.tobytes() for name, value in source.items()
    }


def test_export_rounds_to_the_nearest_even_bfloat16(tiny: Path, tmp_path: Path) -> None:
    tensors = {name: value.copy() for name, value in load_file(tiny / "model.safetensors").items()}
    tensors["model.norm.weight"][:2] = 1.00390625, 1.01171875
    (tmp_path / "out").mkdir()
    write_hf(tmp_path / "out", open_hf(altered(tiny, tmp_path / "in", tensors)), "bfloat16", 10**9)
    stored = load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"]
    assert (stored[:2].astype(np.float32).tolist(), stored.dtype.name, stored.dtype.itemsize) == (
        [1.0, 1.015625],
        "bfloat16",
        2,
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_each_tensor_is_read_in_its_own_type(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    types = ["float32", "float16", "bfloat16"]
    mixed = {name: tensors[name].astype(types[index % 3]) for index, name in enumerate(sorted(tensors))}
    folder = altered(tiny, tmp_path, mixed)
    params, _ = fill(open_hf(folder), np.dtype("float32"))
    up = np.stack([mixed[f"model.layers.{layer}.mlp.up_proj.weight"].astype(np.float32) for layer in range(2)])
    assert np.array_equal(params["layers"]["gate_up"][:, :, 1].swapaxes(1, 2), up)


def altered(source: Path, target: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Copy a single-file model with other tensors in it."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, target / "model.safetensors")
    return target


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop(QUERY), f"{QUERY} is missing"),
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}), "q_proj.bias"),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY][:32]}), f"{QUERY} .*shape \\(32, 64\\)"),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY].reshape(32, 128)}), QUERY),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY].astype(np.int8)}), f"{QUERY} .*I8"),
        (lambda tensors: tensors.update({QUERY: tensors[QUERY].astype(np.float64)}), f"{QUERY} .*F64"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(tiny: Path, tmp_path: Path, change: Callable[[Any], Any], named: str) -> None:
    tensors = load_file(tiny / "model.safetensors")
    change(tensors)
    with pytest.raises(ValueError, match=named):
        open_hf(altered(tiny, tmp_path, tensors))


def test_known_buffers_are_left_out_with_a_notice(tiny: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    assert "rotary" in open_hf(altered(tiny, tmp_path, tensors)).notices[0]


@pytest.mark.parametrize("equal", [True, False])
def test_a_stored_head_of_a_tied_model(tiny: Path, tmp_path: Path, equal: bool) -> None:
    tensors = load_file(tiny / "model.safetensors")
    if equal:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    folder = altered(tiny, tmp_path, tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    model = open_hf(folder)
    params, _ = fill(model, np.dtype("float32"))
    assert model.arch.tie_embeddings == equal
    assert ("head" in params) == (not equal)
    assert len(model.notices) == (not equal)
    if not equal:
        assert np.array_equal(params["head"], tensors["lm_head.weight"])


def test_a_tensor_with_nan_is_named(tiny: Path, tmp_path: Path) -> None:
    tensors = {name: value.copy() for name, value in load_file(tiny / "model.safetensors").items()}
    tensors[QUERY][3, 5] = np.nan
    _, notices = fill(open_hf(altered(tiny, tmp_path, tensors)), np.dtype("float32"))
    assert len(notices) == 1
    assert QUERY in notices[0]


@pytest.mark.parametrize("content", [lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: raw[:100], lambda raw: b""])
def test_a_cut_or_padded_file_is_refused(tiny: Path, tmp_path: Path, content: Callable[[bytes], bytes]) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(ValueError, match=r"model\.safetensors: not a complete"):
        open_hf(tmp_path)


def store_twice(folder: Path, index: dict[str, Any]) -> None:
    first, second = sorted(set(index["weight_map"].values()))[:2]
    tensors = load_file(folder / second)
    tensors.update(dict(list(load_file(folder / first).items())[:1]))
    save_file(tensors, folder / second)


def drop_file(folder: Path, index: dict[str, Any]) -> None:
    (folder / next(iter(index["weight_map"].values()))).unlink()


def name_other_file(folder: Path, index: dict[str, Any]) -> None:
    files = sorted(set(index["weight_map"].values()))
    name = next(name for name, file in index["weight_map"].items() if file == files[0])
    index["weight_map"][name] = files[1]


def leave_folder(folder: Path, index: dict[str, Any]) -> None:
    index["weight_map"][next(iter(index["weight_map"]))] = "../model.safetensors"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (store_twice, "is stored twice"),
        (drop_file, "does not exist"),
        (name_other_file, "index"),
        (leave_folder, "no file name"),
        (lambda folder, index: index["weight_map"].popitem(), "the index does not say so"),
        (lambda folder, index: index.pop("weight_map"), "no weight_map"),
        (lambda folder, index: (folder / "model.safetensors").write_bytes(b""), "has both"),
    ],
)
def test_an_index_that_disagrees_with_the_files_is_refused(
    tiny_sharded: Path, tmp_path: Path, change: Callable[[Path, dict[str, Any]], Any], named: str
) -> None:
    shutil.copytree(tiny_sharded, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(tmp_path, index)
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=named):
        open_hf(tmp_path)


def test_broken_json_is_refused_with_the_file(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    for text, told in (("{", "not valid JSON"), ("[]", "expected a JSON object"), ('{"a": 1, "a": 2}', "listed twice")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=rf"config\.json.*{told}"):
            open_hf(tmp_path)


def test_end_tokens_of_the_config_survive_without_a_generation_config(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 0, "pad_token_id": None}))
    assert json.loads(open_hf(tmp_path).files["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": 0}
