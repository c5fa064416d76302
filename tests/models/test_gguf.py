"""GGUF files: the same model as its original, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from rljax.models.arch import Rope
from rljax.models.gguf import open_gguf
from rljax.models.layout import fill, slots, view
from tests.models.gguf_files import metadata, write_gguf
from tests.models.oracle import make_llama, our_logits, random_ids, their_logits

LOGITS_ATOL = 2e-4  # as in test_parity


def state(**changes: Any) -> dict[str, torch.Tensor]:
    tied = changes.get("tie_word_embeddings", False)
    return {name: weight for name, weight in make_llama(**changes).state_dict().items() if not (tied and "lm_head" in name)}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_tensor_is_dequantised_and_in_the_original_row_order(tmp_path: Path, kind: str) -> None:
    held = write_gguf(tmp_path / "model.gguf", state(), metadata(), kind=kind)
    model = open_gguf(tmp_path / "model.gguf")
    params, notices = fill(model, np.dtype("float32"))
    assert not notices
    for slot in slots(model.arch):
        assert np.array_equal(view(params, slot).reshape(slot.shape), held[slot.name]), slot.name


def test_logits_equal_those_of_the_original_model(tmp_path: Path) -> None:
    model = make_llama(tie_word_embeddings=True)
    weights = {name: weight for name, weight in model.state_dict().items() if "lm_head" not in name}
    write_gguf(tmp_path / "model.gguf", weights, metadata())
    ours = open_gguf(tmp_path / "model.gguf")
    assert ours.arch.tie_embeddings
    assert ours.arch.norm_eps == 1e-5
    params, _ = fill(ours, np.dtype("float32"))
    for length in (4, 128):
        ids = random_ids(1, length)
        np.testing.assert_allclose(our_logits(ours.arch, params, ids), their_logits(model, ids), rtol=0, atol=LOGITS_ATOL)


def with_factors(weights: dict[str, torch.Tensor], factors: np.ndarray, path: Path, **changes: Any) -> None:
    write_gguf(path, {**weights, "rope_freqs.weight": torch.tensor(factors)}, metadata(**changes))


def test_llama3_stretch_is_recognised_from_its_factors(tmp_path: Path) -> None:
    rope = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    factors = Rope(500_000.0).inverse_frequencies(16) / rope.inverse_frequencies(16)
    theta = {"llama.rope.freq_base": 500_000.0}
    with_factors(state(), factors, tmp_path / "model.gguf", **theta)
    assert open_gguf(tmp_path / "model.gguf").arch.rope == rope
    factors[4] *= 1.01
    with_factors(state(), factors, tmp_path / "other.gguf", **theta)
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        open_gguf(tmp_path / "other.gguf")


def test_linear_stretch_is_read(tmp_path: Path) -> None:
    meta = metadata(**{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    write_gguf(tmp_path / "model.gguf", state(), meta)
    assert open_gguf(tmp_path / "model.gguf").arch.rope == Rope(10_000.0, "linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"general.architecture": "mamba"}, "general.architecture"),
        ({"llama.block_count": None}, "block_count"),
        ({"llama.block_count": 3}, r"model\.layers\.2\..* is missing"),
        ({"llama.block_count": 1}, r"blk\.1\..* no place"),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv"),
        ({"llama.attention.head_count_kv": 4}, "attn_k.weight .* shape"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.type": "yarn"}, "scaling.factor is missing"),
        ({"llama.attention.sliding_window": 8}, "sliding_window"),
        ({"llama.vocab_size": 98}, "token_embd"),
        ({"split.count": 2}, "split.count"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.eos_token_id": 97}, "eos_token_id"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "add_bos_token"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    write_gguf(tmp_path / "model.gguf", state(), metadata(**changes))
    with pytest.raises(ValueError, match=named):
        open_gguf(tmp_path / "model.gguf")


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", state(), metadata())
    raw = (tmp_path / "model.gguf").read_bytes()
    for size in (0, 3, 20, 200, 3000, len(raw) // 2, len(raw) - 100):
        (tmp_path / "cut.gguf").write_bytes(raw[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf"):
            open_gguf(tmp_path / "cut.gguf")


def test_the_tokenizer_is_rebuilt(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", state(), metadata())
    files = open_gguf(tmp_path / "model.gguf").files
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("hello</s>77<think>").tokens == ["hell", "o", "</s>", "7", "7", "<think>"]
    assert tokenizer.decode(tokenizer.encode("hello</s>77<think>").ids, skip_special_tokens=True) == "hello77<think>"
    assert json.loads(files["generation_config.json"]) == {"bos_token_id": 0, "eos_token_id": [1, 2]}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs("hello</s>77<think>")["input_ids"] == tokenizer.encode("hello</s>77<think>").ids
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")
    assert theirs.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False) == "he<|im_end|>"


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", state(), metadata(**{"tokenizer.ggml.add_bos_token": True}))
    tokenizer = Tokenizer.from_str(open_gguf(tmp_path / "model.gguf").files["tokenizer.json"].decode())
    assert tokenizer.encode("he").tokens == ["<s>", "he"]
    assert tokenizer.encode("he", add_special_tokens=False).tokens == ["he"]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġok", "!!"]),
        ("gpt-2", ["It", "'s", "Ġ1234", "Ġok", "!!"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "Ġok", "!!"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġok", "!!"]),
    ],
)
def test_text_is_split_by_the_named_rules(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    write_gguf(tmp_path / "model.gguf", state(), metadata(**{"tokenizer.ggml.pre": pre}))
    tokenizer = Tokenizer.from_str(open_gguf(tmp_path / "model.gguf").files["tokenizer.json"].decode())
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It's 1234 ok!!")] == pieces


def test_without_the_package_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"rljax\[gguf\]"):
        open_gguf(tmp_path / "model.gguf")
