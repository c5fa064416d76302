"""The configurations of Hugging Face model folders: config.json into an `Arch` and back.

Owns what each key means and which values are refused. Everything is strict: whatever would make the converted model
another model than the source is an error that names the file and the key. Refuses to own files and tensors.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rljax.models.arch import Arch, Rope

DEFAULT_ROPE_THETA = 10_000.0
"""What the Llama family means by a configuration without `rope_theta` (arXiv:2104.09864, section 3.3)."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of special tokens, which generation_config.json holds too."""

# Keys that would change the computation with any value but these; an empty tuple allows only null.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "sliding_window": (),
    "quantization_config": (),
    "partial_rotary_factor": (1.0,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
}


def arch_from_config(config: Mapping[str, Any], where: str = "config.json") -> tuple[Arch, list[str]]:
    """Translate a config.json into an architecture.

    Null means absent everywhere. Returns the architecture and notices of defaults that were assumed.

    Raises:
        ValueError: a key is missing, of the wrong type, in conflict with another one, or asks for what rljax lacks.
    """
    given = {key: value for key, value in config.items() if value is not None}
    names = given.get("architectures") or [_CLASS_OF_TYPE.get(given.get("model_type", ""), given.get("model_type"))]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in FAMILIES:
        raise ValueError(f"{where}: architectures is {names}; rljax loads {', '.join(sorted(FAMILIES))}")
    model_type = given.get("model_type")
    if model_type is not None and _CLASS_OF_TYPE.get(model_type) != names[0]:
        raise ValueError(f"{where}: model_type {model_type!r} is not the one of {names[0]}; correct whichever is wrong")
    return FAMILIES[names[0]](given, where)


def config_from_arch(arch: Arch, dtype: str, token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json that means `arch`, under the old and the new names of moved keys."""
    rope = arch.rope
    stretch: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        stretch["factor"] = rope.factor
    if rope.kind == "llama3":
        stretch["low_freq_factor"] = rope.low_freq_factor
        stretch["high_freq_factor"] = rope.high_freq_factor
        stretch["original_max_position_embeddings"] = rope.original_max_position
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.embed_dim,
        "intermediate_size": arch.ffn_dim,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": arch.max_position,
        "tie_word_embeddings": arch.tie_embeddings,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else stretch,
        "rope_parameters": {**stretch, "rope_theta": rope.theta},
        "dtype": dtype,
        "torch_dtype": dtype,
        **{key: token_ids[key] for key in TOKEN_IDS if token_ids.get(key) is not None},
    }


def _llama(config: Mapping[str, Any], where: str) -> tuple[Arch, list[str]]:
    for key, allowed in _NEUTRAL.items():
        if key in config and config[key] not in allowed:
            supported = " or ".join(map(repr, allowed)) or "null"
            raise ValueError(f"{where}: {key} is {config[key]!r}; rljax supports only {supported}")

    def number(key: str, kind: type = int, default: Any = None) -> Any:
        value = config.get(key, default)
        if value is None:
            raise ValueError(f"{where}: {key} is missing; it is needed to build the model")
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0:
            raise ValueError(f"{where}: {key} must be a positive {kind.__name__}, got {value!r}")
        return value

    width, heads, max_position = number("hidden_size"), number("num_attention_heads"), number("max_position_embeddings")
    if "head_dim" not in config and width % heads:
        raise ValueError(f"{where}: hidden_size ({width}) is no multiple of num_attention_heads ({heads}); head_dim is needed")
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise ValueError(f"{where}: tie_word_embeddings must be true or false, got {tied!r}")
    rope, notices = _rope(config, max_position, where)
    arch = Arch(
        vocab_size=number("vocab_size"),
        num_layers=number("num_hidden_layers"),
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", default=heads),
        head_dim=number("head_dim", default=width // heads),
        ffn_dim=number("intermediate_size"),
        rope=rope,
        norm_eps=float(number("rms_norm_eps", float)),
        tie_embeddings=tied,
        max_position=max_position,
    )
    return arch, notices


# Rotary keys that mean something for each kind, and must be there.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(config: Mapping[str, Any], max_position: int, where: str) -> tuple[Rope, list[str]]:
    """Read the rotary embedding from the old keys (rope_theta, rope_scaling), the new one (rope_parameters), or both."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for place in ("rope_parameters", "rope_scaling", "rope_theta"):
        entry = config.get(place, {})
        entry = {"rope_theta": entry} if place == "rope_theta" and entry != {} else entry
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where}: {place} must be a table or null, got {entry!r}")
        for old, value in entry.items():
            key = "rope_type" if old == "type" else old
            if value is None:
                continue
            if key in merged and merged[key] != value:
                raise ValueError(
                    f"{where}: {place} says {key} = {value!r}, but {origin[key]} says {merged[key]!r}; remove the wrong one"
                )
            merged[key], origin[key] = value, place
    kind = merged.pop("rope_type", "default")
    if kind not in _ROPE_KEYS:
        raise ValueError(f"{where}: rope_type {kind!r} is not supported; rljax knows {', '.join(_ROPE_KEYS)}")
    notices = [] if "rope_theta" in merged else [f"{where} names no rope_theta; took the family's {DEFAULT_ROPE_THETA:g}"]
    theta = merged.pop("rope_theta", DEFAULT_ROPE_THETA)
    if merged.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{where}: partial_rotary_factor other than 1 is not supported")
    if kind == "llama3":
        merged.setdefault("original_max_position_embeddings", max_position)
    for key in merged:
        if key not in _ROPE_KEYS[kind]:
            raise ValueError(f"{where}: {origin[key]}.{key} has no meaning for rope_type {kind!r}; remove it")
    values = {"theta": theta, **{key: merged.get(key) for key in _ROPE_KEYS[kind]}}
    for key, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{where}: rotary embedding of type {kind!r} needs a positive {key}, got {value!r}")
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ValueError(f"{where}: low_freq_factor must be below high_freq_factor in rope_scaling")
    original = values.pop("original_max_position_embeddings", None)
    numbers = {key: float(value) for key, value in values.items()}
    return Rope(kind=kind, **numbers, **({} if original is None else {"original_max_position": int(original)})), notices


FAMILIES: dict[str, Callable[[Mapping[str, Any], str], tuple[Arch, list[str]]]] = {"LlamaForCausalLM": _llama}
_CLASS_OF_TYPE = {"llama": "LlamaForCausalLM"}
