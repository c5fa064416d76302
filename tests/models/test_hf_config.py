"""A config.json means what its family makes of it, and what that cannot be is refused by name."""

import json
from typing import Any

import numpy as np
import pytest

from rljax.models.arch import Arch, Experts
from rljax.models.hf_config import FAMILIES, FULL, SLIDING, arch_from_config
from tests.models.families import CASES, LONGROPE, YARN, make

REFERENCE_RTOL = 2e-6  # the reference computes the table in float32


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    """Return a case's whole configuration as the reference library writes it, with changes; an ellipsis removes a key."""
    found = make(name).config
    config = {**json.loads(found.to_json_string(use_diff=False)), "architectures": [CASES[name].model], **changes}
    return {key: value for key, value in config.items() if value is not ...}


def meaning(name: str, **changes: Any) -> Arch:
    return arch_from_config(config_of(name, **changes))[0]


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("mistral", {"sliding_window": ...}, "sliding_window is missing"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("mistral", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("mistral", {"layer_types": [FULL, SLIDING, FULL, FULL]}, "layer_types"),
        ("qwen2", {"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 6, "layer_types": None, "max_window_layers": None},
            "max_window",
        ),
        ("qwen2", {"layer_types": [FULL, SLIDING, FULL, FULL]}, "sliding_attention"),
        ("qwen2", {"layer_types": [FULL]}, "layer_types"),
        ("qwen2", {"num_experts": 8}, "num_experts"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen3", {"head_dim": ...}, "head_dim is missing"),
        ("qwen3", {"rope_parameters": {**YARN, "factor": None}}, "factor"),
        ("qwen3", {"rope_parameters": {**YARN, "truncate": 1}}, "truncate"),
        ("qwen3", {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("qwen3", {"rope_parameters": {FULL: YARN}}, "layer type"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias"),
        ("gemma2", {"final_logit_softcapping": ...}, "final_logit_softcapping is missing"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_act"),
        ("gemma2", {"query_pre_attn_scalar": None}, "query_pre_attn_scalar"),
        ("gemma2", {"sliding_window": None}, "sliding_window"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "architectures"),
        ("phi3-longrope", {"rope_parameters": {**LONGROPE, "short_factor": [1.0, "a"]}}, "short_factor"),
        ("phi3-longrope", {"rope_parameters": {**LONGROPE, "short_factor": [1.0]}}, "short_factors"),
        ("mixtral", {"num_experts_per_tok": 9}, "9 of 4 experts"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts"),
        ("mixtral", {"num_experts": 3}, "num_experts is 3"),
        ("mixtral", {"n_shared_experts": 1}, "n_shared_experts"),
        ("qwen3-moe", {"mlp_only_layers": "1"}, "mlp_only_layers"),
        ("qwen3-moe", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("gpt-oss", {"rope_parameters": None, "rope_theta": 1e5}, "rope_scaling is missing"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("gpt-oss", {"swiglu_limit": -1.0}, "swiglu_limit"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmo2", {"sliding_window": 8}, "sliding_window"),
    ],
)
def test_what_a_family_cannot_mean_is_refused_by_name(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        meaning(name, **changes)


def test_null_means_absent_in_every_family() -> None:
    for name in CASES:
        config = config_of(name)
        needed = FAMILIES[config["model_type"]].stated
        bare = {key: value for key, value in config.items() if value is not None or key in needed}
        nulls = dict.fromkeys(("mlp_bias", "rope_scaling", "use_bidirectional_attention", "clip_qkv", "pad_token_id"))
        assert arch_from_config(bare)[0] == arch_from_config({**config, **nulls})[0]


def test_an_unknown_key_is_told() -> None:
    _, notices = arch_from_config(config_of("qwen3", residual_scale_of_next_year=0.5))
    assert len(notices) == 1
    assert "residual_scale_of_next_year" in notices[0]


def test_switches_follow_from_the_keys() -> None:
    assert (meaning("qwen2").qkv_bias, meaning("qwen2").out_bias, meaning("llama").qkv_bias) == (True, False, False)
    windowed = meaning("qwen2", use_sliding_window=True, sliding_window=6, layer_types=None, max_window_layers=3)
    assert (windowed.window, windowed.windowed_layers) == (6, (3,))
    assert meaning("mistral", sliding_window=None).windowed_layers == ()
    assert meaning("gemma3", layer_types=None, sliding_window_pattern=3).windowed_layers == (0, 1, 3, 4)
    assert meaning("gemma3", layer_types=None, sliding_window_pattern=..., _sliding_window_pattern=...).windowed_layers == (
        0,
        1,
        2,
        3,
        4,
    )
    assert meaning("gpt-oss", layer_types=None).windowed_layers == (0, 2)
    assert meaning("smollm3", no_rope_layers=None, no_rope_layer_interval=3).unrotated_layers == (2,)
    assert meaning("qwen3-moe", decoder_sparse_step=2, mlp_only_layers=[]).dense_layers == (0, 2)
    assert meaning("qwen3-moe", num_experts=5, num_local_experts=None).experts == Experts(5, 2, 16, False)
    assert meaning("gemma2", tie_word_embeddings=...).tie_embeddings
    assert not meaning("qwen2", tie_word_embeddings=...).tie_embeddings


def test_old_keys_of_two_ropes_mean_the_same() -> None:
    old = {
        "rope_parameters": ...,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"type": "linear", "factor": 8.0},
    }
    assert meaning("gemma3", **old) == meaning("gemma3")


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_old_names_of_longrope_are_known(kind: str) -> None:
    table = {key: value for key, value in LONGROPE.items() if key.endswith("_factor") and key != "partial_rotary_factor"}
    old = {"rope_parameters": ..., "rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": {"type": kind, **table}}
    assert meaning("phi3-longrope", **old) == meaning("phi3-longrope")


ROPES: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn-attention-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 1.2, "mscale_all_dim": 0.8},
    "yarn-whole-channels": {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
    "yarn-without-length": {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
}


@pytest.mark.parametrize("name", ROPES)
def test_stretched_tables_equal_the_references(name: str) -> None:
    rotary = make("qwen3", rope_parameters=ROPES[name], head_dim=32).model.rotary_emb
    arch = meaning("qwen3", rope_parameters=ROPES[name], head_dim=32)
    np.testing.assert_allclose(
        arch.rope.inverse_frequencies(32, arch.max_position), rotary.inv_freq.numpy(), rtol=REFERENCE_RTOL
    )
    assert arch.rope.attention_factor == pytest.approx(rotary.attention_scaling)
