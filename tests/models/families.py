"""One or two tiny models of every family, made by the reference library with every switch where it shows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.numpy import load_file

from tests.models.oracle import LLAMA3_ROPE

VOCAB = 97

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.1, 1.7],
    "long_factor": [2.0, 5.0],
    "partial_rotary_factor": 0.5,
}
SWITCHED = {"use_sliding_window": True, "sliding_window": 6}


@dataclass(frozen=True)
class Case:
    """A configuration of the reference library and its model class."""

    config: str
    model: str
    changes: dict[str, Any]


def case(name: str, model: str = "", **changes: Any) -> Case:
    return Case(f"{name}Config", f"{model or name}ForCausalLM", changes)


CASES: dict[str, Case] = {
    "llama": case("Llama", rope_parameters=LLAMA3_ROPE),
    "llama-biased-tied": case("Llama", attention_bias=True, tie_word_embeddings=True),
    "smollm3": case("SmolLM3", num_hidden_layers=5, no_rope_layer_interval=2),
    "smollm3-windowed": case("SmolLM3", num_hidden_layers=5, no_rope_layer_interval=2, **SWITCHED),
    "mistral": case("Mistral", sliding_window=6, head_dim=16),
    "qwen2": case("Qwen2", tie_word_embeddings=True),
    "qwen2-windowed": case("Qwen2", num_hidden_layers=5, max_window_layers=3, **SWITCHED),
    "qwen3": case("Qwen3", head_dim=16, rope_parameters=YARN),
    "gemma2": case(
        "Gemma2",
        num_hidden_layers=5,
        head_dim=16,
        sliding_window=6,
        query_pre_attn_scalar=12,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=4.0,
    ),
    "gemma3": case(
        "Gemma3Text",
        "Gemma3",
        num_hidden_layers=5,
        head_dim=16,
        sliding_window=6,
        query_pre_attn_scalar=12,
        sliding_window_pattern=2,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "olmo2": case("Olmo2"),
    "phi3": case("Phi3", num_key_value_heads=4, sliding_window=6, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "phi3-longrope": case(
        "Phi3", max_position_embeddings=256, original_max_position_embeddings=64, rope_parameters=LONGROPE
    ),
    "mixtral": case("Mixtral", num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2),
    "qwen3-moe": case(
        "Qwen3Moe",
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        head_dim=16,
        mlp_only_layers=[1],
        norm_topk_prob=False,
    ),
    "qwen3-moe-normalized": case(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=3, moe_intermediate_size=16, head_dim=8, norm_topk_prob=True, **SWITCHED
    ),
    "gpt-oss": case(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=6,
        swiglu_limit=0.5,
        rope_parameters={**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
}  # fmt: skip


def make(name: str, **changes: Any) -> Any:
    """Make a random model, its scales, biases and sinks too: at their first values a lost one would not show."""
    torch.manual_seed(0)
    found = CASES[name]
    config = getattr(transformers, found.config)(**{**SIZES, **found.changes, **changes})
    model = getattr(transformers, found.model)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "bias" in key or "sinks" in key or "router" in key or ".gate.weight" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    return model


def save(name: str, directory: Path, **changes: Any) -> Any:
    """Save a random model and return it."""
    model = make(name, **changes)
    model.save_pretrained(directory)
    return model


def stored(directory: Path) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Return shape, type and bytes of every tensor of a folder."""
    return {
        name: (value.shape, value.dtype.name, value.tobytes())
        for path in directory.glob("*.safetensors")
        for name, value in load_file(path).items()
    }
