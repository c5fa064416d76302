"""Small GGUF files, written in the way the format's own converter does."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
GEMMA_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

BYTE_TOKENS = [
    chr(code) for code in range(256 + 256) if chr(code).isprintable() and not chr(code).isspace() and code not in (0xAD,)
]
"""Printable characters, among them those that stand for single bytes in a byte-level vocabulary."""


def metadata(**changes: Any) -> dict[str, Any]:
    """Return the metadata of the tiny model of `oracle.TINY`; None leaves a key out."""
    tokens = ["<s>", "</s>", "<|im_end|>", "<think>", *BYTE_TOKENS[:90], "he", "ll", "hell"]
    meta = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4, *[1] * (len(tokens) - 4)],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}",
    }
    return {key: value for key, value in {**meta, **changes}.items() if value is not None}


def write_gguf(
    path: Path, weights: dict[str, torch.Tensor], meta: dict[str, Any], heads: int = 4, kv_heads: int = 2, kind: str = "F32"
) -> dict[str, np.ndarray]:
    """Write a model whose matrices are of type `kind`; returns the values it holds, in the source's order of rows."""
    architecture = meta["general.architecture"]
    writer, gemma = gguf.GGUFWriter(path, architecture), architecture.startswith("gemma")
    table = GEMMA_NAMES if gemma else NAMES
    for key, value in meta.items():
        if key == "general.architecture":
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        (writer.add_array if isinstance(value, list) else add[type(value)])(key, value)
    held = {}
    for name, weight in weights.items():
        array = weight.detach().numpy()
        if gemma and name.endswith("norm.weight"):
            array = array + 1
        chosen = gguf.GGMLQuantizationType["F32" if array.ndim == 1 else kind]
        held[name] = gguf.dequantize(gguf.quantize(array, chosen), chosen)
        part = name.removeprefix("model.layers.").split(".", 1)
        place = table.get(name)
        if place is None:
            inner, suffix = part[1].rsplit(".", 1)
            place = f"blk.{part[0]}.{table[inner]}.{suffix}"
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = permute(array, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(place, gguf.quantize(array, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows from half to interleaved rotary layout, head by head and pair by pair."""
    size = len(weights) // heads
    order = [head * size + half * size // 2 + pair for head in range(heads) for pair in range(size // 2) for half in range(2)]
    return weights[order]
