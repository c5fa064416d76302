"""GGUF files of every family that is read: the same model as the original, and as the reference library reads the file."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from rljax.convert import convert
from rljax.models import gguf
from rljax.models.arch import Rope
from rljax.models.gguf import open_gguf
from rljax.models.gguf_tokenizer import tokenizer_files
from rljax.models.layout import fill, slots, view
from tests.models.families import SIZES, VOCAB, make
from tests.models.gguf_files import metadata, write_gguf
from tests.models.oracle import our_logits, random_ids, their_logits

LOGITS_ATOL = 2e-4  # as in test_parity

# Family -> its case, what it is made with, and what the format's converter writes beside what all have.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", {}, {}),
    "qwen3": (
        "qwen3",
        {"num_hidden_layers": 2},
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
        },
    ),
    "gemma2": (
        "gemma2",
        {"query_pre_attn_scalar": 16},
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            "attention.sliding_window": 6,
        },
    ),
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 16, "num_hidden_layers": 7, "sliding_window_pattern": 6},
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "attention.sliding_window": 6,
        },
    ),
}


def write(path: Path, family: str, **changes: Any) -> Any:
    """Write the file and return the model of the reference library it was made of."""
    case, options, own = FAMILIES[family]
    model = make(case, **options)
    config = model.config
    given = {
        "block_count": config.num_hidden_layers,
        "context_length": SIZES["max_position_embeddings"],
        "embedding_length": SIZES["hidden_size"],
        "feed_forward_length": SIZES["intermediate_size"],
        "attention.head_count": SIZES["num_attention_heads"],
        "attention.head_count_kv": SIZES["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": SIZES["rms_norm_eps"],
        "rope.freq_base": 1e4,
        **own,
    }
    shared = {key: value for key, value in metadata().items() if key.startswith("tokenizer.")}
    meta = {"general.architecture": family, **{f"{family}.{key}": value for key, value in given.items()}, **shared, **changes}
    tied = config.tie_word_embeddings
    weights = {name: weight for name, weight in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    write_gguf(path, weights, {key: value for key, value in meta.items() if value is not None})
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_the_original_model(tmp_path: Path, family: str) -> None:
    model = write(tmp_path / "model.gguf", family)
    found = open_gguf(tmp_path / "model.gguf")
    params, notices = fill(found, np.dtype("float32"))
    assert not notices
    ids = random_ids(2, 24, vocab=VOCAB)
    np.testing.assert_allclose(our_logits(found.arch, params, ids), their_logits(model, ids), rtol=0, atol=LOGITS_ATOL)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_equal_those_the_reference_reads(tmp_path: Path, family: str) -> None:
    model = write(tmp_path / "model.gguf", family)
    theirs: Any = load_gguf_checkpoint(str(tmp_path / "model.gguf"), return_tensors=True, model_to_load=model)
    found = open_gguf(tmp_path / "model.gguf")
    params, _ = fill(found, np.dtype("float32"))
    for slot in slots(found.arch):
        ours = view(params, slot).reshape(slot.shape)
        assert np.array_equal(ours, theirs["tensors"][slot.name].numpy()), slot.name


def test_a_file_is_converted_and_exported(tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", "gemma3")
    convert(tmp_path / "model.gguf", tmp_path / "there")
    convert(tmp_path / "there", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["architectures"], config["sliding_window"]) == (["Gemma3ForCausalLM"], 6)
    assert config["layer_types"] == list(model.config.layer_types)


def arch_of(family: str, **changes: Any) -> Any:
    common = {"block_count": 2, "context_length": 64, "embedding_length": 96, "feed_forward_length": 48, "vocab_size": 9}
    common |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    own = {**FAMILIES[family][2], **common, **changes}
    meta = {"general.architecture": family, **{f"{family}.{k}": v for k, v in own.items() if v is not None}}
    return gguf._arch(meta, "model.gguf", True, None)


def test_what_a_file_leaves_to_the_family() -> None:
    assert arch_of("gemma2", block_count=46).query_scalar == arch_of("gemma3", block_count=62).query_scalar == 96 / 4
    assert arch_of("gemma2", block_count=42).query_scalar == arch_of("gemma3", block_count=48).query_scalar == 16
    assert arch_of("gemma3", block_count=12).windowed_layers == (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)
    assert arch_of("gemma2", block_count=5).windowed_layers == (0, 2, 4)
    assert arch_of("gemma3").windowed_rope == Rope(10_000.0)
    assert arch_of("gemma3", **{"rope.freq_base": None}).rope.theta == 1e6
    assert arch_of("gemma3", **{"attention.sliding_window": None}).window is None
    assert arch_of("gemma3", final_logit_softcapping=4.0).final_soft_cap == 4.0
    assert arch_of("qwen2", **{"attention.key_length": None}).qkv_bias


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gemma2", {"attn_logit_softcapping": None}, "gemma2.attn_logit_softcapping is missing"),
        ("gemma2", {"attention.sliding_window": None}, "gemma2.attention.sliding_window is missing"),
        ("qwen3", {"rope.scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast"),
        ("qwen2", {"attention.sliding_window": 8}, "qwen2.attention.sliding_window is 8"),
        ("qwen3", {"expert_count": 8}, "qwen3.expert_count"),
    ],
)
def test_what_would_be_another_model_is_refused(family: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        arch_of(family, **changes)


PIECES = [*"▁abcderstu", "▁a", "▁b", "th", "er", "es", "st", "est", "re", "▁ab", "abc", "the", "▁the", "ther", "▁best"]


def sentencepiece(**changes: Any) -> tuple[dict[str, bytes], dict[str, float]]:
    """Return the files rebuilt from a small vocabulary, and the scores of its pieces."""
    rng = np.random.default_rng(2)
    order = [*PIECES, "h"]
    scores = dict(zip(order, (-rng.permutation(len(order))).astype(float).tolist(), strict=True))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *order, "<turn>", "[PAD]"]
    meta = {
        "general.architecture": "gemma2",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(order), 3, 5],
        "tokenizer.ggml.scores": [scores.get(token, 0.0) for token in tokens],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": False,
    }
    return tokenizer_files({**meta, **changes}, "model.gguf"), scores


def greedy(text: str, scores: dict[str, float]) -> list[str]:
    """Split a text as SentencePiece's BPE is defined: join the neighbours of the best piece, the leftmost first."""
    parts = list(text.replace(" ", "\u2581"))
    while True:
        joined = [(scores.get(a + b, -np.inf), -place) for place, (a, b) in enumerate(pairwise(parts))]
        best, place = max(joined, default=(-np.inf, 0))
        if best == -np.inf:
            break
        parts[-place : -place + 2] = ["".join(parts[-place : -place + 2])]
    return [piece for part in parts for piece in ([part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()])]


def test_a_sentencepiece_tokenizer_splits_as_it_is_defined() -> None:
    files, scores = sentencepiece()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcderstuh "), 30)) for _ in range(200)]
    for text in [*texts, "the best  abc", "é\u6771\n", " "]:
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found.tokens == greedy(text, scores), text
        assert tokenizer.decode(found.ids) == text
    assert tokenizer.encode("the<turn>").tokens == ["<s>", *greedy("the", scores), "<turn>"]
    assert tokenizer.token_to_id("[PAD]") is None


def test_a_space_is_put_in_front_where_the_file_says_so() -> None:
    files, scores = sentencepiece(**{"tokenizer.ggml.add_space_prefix": True})
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    found = tokenizer.encode("the best", add_special_tokens=False)
    assert found.tokens == greedy(" the best", scores)
    assert tokenizer.decode(found.ids) == "the best"
