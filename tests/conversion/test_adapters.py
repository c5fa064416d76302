"""Adapters go in and out of PEFT's format, merge into their base, and are refused where they would mean something else."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from rljax.cli import EXIT_DONE, EXIT_USAGE, main
from rljax.conversion.merge import open_adapter
from rljax.convert import convert, read_checkpoint
from rljax.models.decoder import abstract_params
from rljax.models.lora import TARGETS, attach
from tests.models.families import save
from tests.models.oracle import load_hf, our_logits, random_ids, save_llama, their_logits, tokenizer_files

LOGITS_ATOL = 2e-4  # as in test_parity
MERGED_ATOL = 1e-6  # one product of rank 4, summed in another order
RANK = 4


def in_and_out(target: str) -> tuple[int, int]:
    sizes = {"q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "o_proj": (64, 64), "down_proj": (96, 64)}
    return sizes.get(target, (64, 96))


def write_adapter(folder: Path, targets: Any = TARGETS, dtype: str = "float32", layers: int = 2, **options: Any) -> Path:
    """Write what PEFT writes, without it."""
    folder.mkdir(parents=True)
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(layers):
        for target in targets:
            part = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            inputs, outputs = in_and_out(target)
            for side, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                name = f"base_model.model.model.layers.{layer}.{part}.{target}.lora_{side}.weight"
                tensors[name] = (rng.normal(size=shape) * 0.3).astype(dtype)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": list(targets), **options}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "adapter_model.safetensors")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in tensors_of(folder).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_returns_the_same_bits(checkpoint: Path, tmp_path: Path, dtype: str) -> None:
    source = write_adapter(tmp_path / "peft", dtype=dtype, use_rslora=True)
    there = convert(source, tmp_path / "adapter", base=checkpoint)
    back = convert(tmp_path / "adapter", tmp_path / "back", base=checkpoint)
    assert [(report.kind, report.to, report.dtype, report.verified) for report in (there, back)] == [
        ("peft", "adapter", dtype, True),
        ("adapter", "peft", dtype, True),
    ]
    assert contents(tmp_path / "back") == contents(source)
    told = json.loads((tmp_path / "back" / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["use_rslora"], told["target_modules"]) == (RANK, 8, True, list(TARGETS))
    assert len({row.source for row in there.plan}) == len({row.target for row in there.plan}) == len(there.plan) == 28
    assert there.num_params == sum(value.size for value in tensors_of(source).values())


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_merging_adds_the_scaled_product_once(base: Path, tmp_path: Path, rslora: bool, scale: float) -> None:
    source = write_adapter(tmp_path / "peft", use_rslora=rslora)
    convert(source, tmp_path / "merged", base=base, to="hf")
    before, after, factors = load_file(base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors"), {}
    factors = tensors_of(source)
    for name, value in before.items():
        start = f"base_model.model.{name.removesuffix('.weight')}.lora"
        product = factors[f"{start}_B.weight"] @ factors[f"{start}_A.weight"] if f"{start}_A.weight" in factors else 0
        np.testing.assert_allclose(after[name], value + scale * product, rtol=0, atol=2e-6)
        assert np.array_equal(after[name], value) == (np.ndim(product) == 0)


def test_a_second_merge_and_another_base_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    convert(write_adapter(tmp_path / "peft"), tmp_path / "adapter", base=checkpoint)
    convert(tmp_path / "adapter", tmp_path / "merged", base=checkpoint, to="orbax")
    with pytest.raises(ValueError, match=rf"adapter {tmp_path}/adapter belongs to another model than {tmp_path}/merged"):
        convert(tmp_path / "adapter", tmp_path / "twice", base=tmp_path / "merged", to="orbax")
    (tmp_path / "wide").mkdir()
    save_llama(tmp_path / "wide", hidden_size=128)
    with pytest.raises(ValueError, match=rf"peft/adapter_model.*q_proj.*\(4, 64\).*{tmp_path}/wide.*\(4, 128\).*for the/base"):
        convert(
            write_adapter(tmp_path / "x" / "peft", base_model_name_or_path="the/base"), tmp_path / "no", base=tmp_path / "wide"
        )
    assert not (tmp_path / "twice").exists()
    assert not (tmp_path / "no").exists()


def test_a_base_must_be_named_and_a_model(base: Path, checkpoint: Path, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "peft", base_model_name_or_path="someone/llama")
    with pytest.raises(ValueError, match=r"someone/llama, which is not here; name .* --base"):
        convert(source, tmp_path / "out")
    with pytest.raises(ValueError, match="is an adapter; --base is for the whole model"):
        convert(source, tmp_path / "out", base=source)
    with pytest.raises(ValueError, match=f"{base} is no checkpoint of rljax, .* make one with"):
        convert(source, tmp_path / "out", base=base)
    with pytest.raises(ValueError, match="is a whole model, and --base is for adapters"):
        convert(checkpoint, tmp_path / "out", base=base)
    with pytest.raises(ValueError, match="no adapter can be made"):
        convert(checkpoint, tmp_path / "out", to="peft")
    named = write_adapter(tmp_path / "named", base_model_name_or_path=str(checkpoint))
    assert convert(named, tmp_path / "out").written


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"r": "4"}, "needs r"),
        ({"r": 8}, r"lora_A.weight has shape \(4, 64\), and rank 8"),
        ({"lora_alpha": 0}, "an alpha above 0"),
        ({"target_modules": ["q_proj"]}, "target_modules of adapter_config.json is q_proj, but"),
    ],
)
def test_an_option_that_changes_the_function_is_refused(
    checkpoint: Path, tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        convert(write_adapter(tmp_path / "peft", **options), tmp_path / "out", base=checkpoint)
    assert not (tmp_path / "out").exists()


def test_options_that_are_switched_off_or_unknown_are_taken(checkpoint: Path, tmp_path: Path) -> None:
    off = {"bias": "none", "rank_pattern": {}, "modules_to_save": None, "use_dora": False, "loftq_config": {}, "sparkle": 1}
    source = write_adapter(tmp_path / "peft", ("v_proj", "q_proj"), **{**off, "target_modules": "all-linear"})
    report = convert(source, tmp_path / "out", base=checkpoint)
    assert ["sparkle is unknown" in notice for notice in report.notices] == [True]
    assert open_adapter("adapter", tmp_path / "out", checkpoint).spec.targets == ("q_proj", "v_proj")


QUERY = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop(QUERY), f"{QUERY} is missing"),
        (lambda t: t.update({QUERY: t[QUERY].T}), r"q_proj.lora_B.weight has shape \(4, 64\)"),
        (lambda t: t.update({QUERY: t[QUERY].astype(np.int8)}), "is of type I8"),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[QUERY]}), "lm_head.lora_A.weight has no place"),
        (lambda t: t.update({QUERY.replace("self_attn", "mlp"): t[QUERY]}), "mlp.q_proj.lora_B.weight has no place"),
        (lambda t: t.update({QUERY.replace(".1.", ".2."): t[QUERY]}), "layers.2.self_attn.q_proj.lora_B.weight has no place"),
    ],
)
def test_a_wrong_tensor_is_refused_by_name(checkpoint: Path, tmp_path: Path, change: Any, told: str) -> None:
    source = write_adapter(tmp_path / "peft")
    tensors = tensors_of(source)
    change(tensors)
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, source / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=told):
        convert(source, tmp_path / "out", base=checkpoint)


def test_the_command_line_merges_and_refuses(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_adapter(tmp_path / "peft", dtype="float16")
    assert main(["convert", str(source), str(tmp_path / "out"), "--base", str(base), "--to", "hf"]) == EXIT_DONE
    (source / "adapter_model.safetensors").unlink()
    assert main(["convert", str(source), str(tmp_path / "no"), "--base", str(base), "--to", "hf"]) == EXIT_USAGE
    assert "adapter_model.safetensors does not exist" in capsys.readouterr().err


def test_a_family_with_joined_projections_has_no_peft(tmp_path: Path) -> None:
    (tmp_path / "phi3").mkdir()
    save("phi3", tmp_path / "phi3")
    for name, content in tokenizer_files().items():
        (tmp_path / "phi3" / name).write_bytes(content)
    with pytest.raises(ValueError, match="several projections in one matrix"):
        convert(write_adapter(tmp_path / "peft"), tmp_path / "out", base=tmp_path / "phi3", to="hf")


def peft_model(base: Path, folder: Path, **options: Any) -> Any:
    """Make an adapter with PEFT itself, save it, and return the adapted model."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about its own use of other libraries
        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=8, task_type="CAUSAL_LM", **options)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:  # zero at first
                    weight.copy_(torch.randn_like(weight) * 0.3)
        model.save_pretrained(folder)
    return model


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's own use of another library
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"target_modules": "all-linear", "use_rslora": True}),
        ("qwen3", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
        ("gemma2", {"target_modules": ["q_proj", "k_proj", "o_proj", "up_proj"]}),
        ("qwen3-moe", {"target_modules": ["q_proj", "o_proj"]}),
    ],
)
def test_peft_computes_the_same(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    base = tmp_path / "base"
    save(name, base)
    for file, content in tokenizer_files().items():
        (base / file).write_bytes(content)
    theirs = peft_model(base, tmp_path / "peft", **options)
    ids = random_ids(2, 12)
    expected = their_logits(theirs, ids)
    assert np.abs(expected - their_logits(transformers.AutoModelForCausalLM.from_pretrained(base), ids)).max() > 0.1

    convert(base, tmp_path / "checkpoint", verify="none")
    convert(tmp_path / "peft", tmp_path / "adapter", base=tmp_path / "checkpoint")
    found = read_checkpoint(tmp_path / "checkpoint")
    adapter = open_adapter("adapter", tmp_path / "adapter", tmp_path / "checkpoint")
    beside = attach(found.params, {"layers": adapter.factors}, adapter.spec)
    np.testing.assert_allclose(our_logits(found.arch, beside, ids), expected, rtol=0, atol=LOGITS_ATOL)

    for source, its_base in (("adapter", "checkpoint"), ("peft", "base")):
        convert(tmp_path / source, tmp_path / f"merged {source}", base=tmp_path / its_base, to="hf")
        arch, params = load_hf(tmp_path / f"merged {source}")
        np.testing.assert_allclose(our_logits(arch, params, ids), expected, rtol=0, atol=LOGITS_ATOL)

    convert(tmp_path / "adapter", tmp_path / "back", base=tmp_path / "checkpoint")
    assert contents(tmp_path / "back") == contents(tmp_path / "peft")
    peft = pytest.importorskip("peft")
    again = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "back").eval()
    np.testing.assert_allclose(their_logits(again, ids), expected, rtol=0, atol=1e-6)
    merged = theirs.merge_and_unload().state_dict()
    for key, value in load_file(tmp_path / "merged adapter" / "model.safetensors").items():
        if ".experts." not in key:  # the reference library keeps experts in other tensors than its files do
            np.testing.assert_allclose(value, merged[key].numpy(), rtol=0, atol=MERGED_ATOL, err_msg=key)


def test_the_base_is_not_changed(checkpoint: Path, tmp_path: Path) -> None:
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract_params(read_checkpoint(checkpoint).arch))
    before = {str(path): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    shutil.copytree(write_adapter(tmp_path / "peft"), tmp_path / "copy")
    convert(tmp_path / "copy", tmp_path / "merged", base=checkpoint, to="orbax")
    assert jax.tree.map(lambda leaf: leaf.shape, read_checkpoint(tmp_path / "merged").params) == shapes
    assert {str(path): path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()} == before
