"""The configurations of Hugging Face model folders: config.json into an `Arch` and back.

Owns the table of families: what each key means for each of them, and which values are refused. Everything is strict:
whatever would make the converted model another model than the source is an error that names the file and the key.
Refuses to own files, tensors and the keys of rotary embeddings (hf_rope.py).

A key is read by the family, or changes the computation and must then have the value that switches it off, or is known to
change nothing; what is none of these is reported in a notice. Null means absent. Where the reference library takes a
value for an absent key that it does not take for null, the key must be there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rljax.models.arch import Arch, Experts
from rljax.models.hf_rope import RopeFacts, configured_length, read_rope, write_rope

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys of special tokens, which generation_config.json holds too."""

FULL, SLIDING = "full_attention", "sliding_attention"

# Keys that change the computation in some family, and the values with which they do not; an empty tuple allows only null.
_CHANGES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias", "bias"), (False,)),
    **dict.fromkeys(
        ("use_sliding_window", "use_bidirectional_attention", "use_qk_norm", "qk_layernorm", "use_mrope"), (False,)
    ),
    **dict.fromkeys(
        ("alibi", "use_parallel_residual", "parallel_attn", "add_cross_attention", "rope_interleave", "rope_interleaved"),
        (False,),
    ),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv"), ()),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "no_rope_layers", "rope_local_base_freq"), ()),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), ()),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "swiglu_limit", "quantization_config"), ()),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (1.0,)),
    "partial_rotary_factor": (1.0,),
}

# Keys that say nothing about the computation of a forward pass, or only about training in the reference library.
_HARMLESS = {
    *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "auto_map", "name_or_path", "id2label"),
    *("label2id", "return_dict", "output_hidden_states", "output_attentions", "output_router_logits", "use_cache"),
    *("initializer_range", "attention_dropout", "embd_pdrop", "resid_pdrop", "router_aux_loss_coef", "router_jitter_noise"),
    *("pretraining_tp", "is_encoder_decoder", "chunk_size_feed_forward", "problem_type", "cache_implementation", "eos_token"),
    *("max_window_layers", "initial_context_length", "experts_per_token", "task_specific_params", "tokenizer_class"),
    *("is_decoder", "is_llama_config", "sep_token_id", "decoder_start_token_id", "num_labels"),
    *TOKEN_IDS,
}  # fmt: skip

_GATES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "clamped": "silu"}


class _Keys:
    """The keys of one configuration, and which of them were read."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self.config, self.where = config, where
        self.given = {key: value for key, value in config.items() if value is not None}
        self.read: set[str] = set()
        self.notices: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.given.get(key, default)

    def number(self, key: str, kind: type = int, default: Any = None) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{self.where}: {key} is missing; it is needed to build the model")
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or value <= 0:
            raise ValueError(f"{self.where}: {key} must be a positive {kind.__name__}, got {value!r}")
        return value

    def optional(self, key: str, kind: type = int) -> Any:
        return self.number(key, kind) if self.get(key) is not None else None

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} must be true or false, got {value!r}")
        return value

    def numbers(self, key: str) -> list[int] | None:
        value = self.get(key)
        if value is not None and not (isinstance(value, list) and all(type(entry) is int for entry in value)):
            raise ValueError(f"{self.where}: {key} must be a list of whole numbers, got {value!r}")
        return value

    def layer_types(self, layers: int, default: Callable[[int], bool]) -> tuple[int, ...]:
        """Return the layers with a window; `default` says which they are when there is no list."""
        types = self.get("layer_types", [SLIDING if default(layer) else FULL for layer in range(layers)])
        if not isinstance(types, list) or len(types) != layers or not set(types) <= {FULL, SLIDING}:
            raise ValueError(
                f"{self.where}: layer_types must say {FULL} or {SLIDING} for each of {layers} layers, got {types!r}"
            )
        return tuple(layer for layer, kind in enumerate(types) if kind == SLIDING)

    def finish(self) -> None:
        """Refuse what was not read and changes the computation; note what is unknown."""
        for key, value in self.given.items():
            if key in self.read or key in _HARMLESS or key.startswith("_"):
                continue
            if key == "layer_types" and value == [FULL] * len(value):
                continue
            if key == "layer_types" or (key in _CHANGES and value not in _CHANGES[key]):
                supported = " or ".join(map(repr, _CHANGES.get(key, ()))) or "null"
                raise ValueError(f"{self.where}: {key} is {value!r}; rljax supports only {supported} for this family")
            if key not in _CHANGES:
                self.notices.append(f"{self.where}: {key} is unknown and was ignored; make sure that it changes no computation")


Fields = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """A group of keys that belong together: how they are read into fields of `Arch`, and written."""

    read: Callable[[_Keys, Fields], Fields]
    write: Callable[[Arch], dict[str, Any]] = lambda arch: {}


@dataclass(frozen=True)
class Family:
    """One entry of the table of families."""

    architecture: str
    """Name of the reference library's class."""
    theta: float | None = 10_000.0
    """rope_theta when it is absent; None when it must be there."""
    tied: bool = False
    """tie_word_embeddings when it is absent."""
    stated: tuple[str, ...] = ()
    """Keys that must be there, null or not."""
    switches: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Arch` that all members have."""
    parts: Sequence[Part] = ()
    """Groups of keys of this family, beyond those of all."""
    ropes: Mapping[str, str] = field(default_factory=dict)
    """Other names of kinds of rotary embedding."""
    partial_rope: bool = False
    """Whether a part of each head may be rotated."""


def arch_from_config(config: Mapping[str, Any], where: str = "config.json") -> tuple[Arch, list[str]]:
    """Translate a config.json into an architecture.

    Null means absent everywhere. Returns the architecture and notices of defaults that were assumed.

    Raises:
        ValueError: a key is missing, of the wrong type, in conflict with another one, or asks for what rljax lacks.
    """
    keys = _Keys(config, where)
    name = _family_name(keys.given, where)
    family = FAMILIES[name]
    for key in family.stated:
        if key not in config:
            raise ValueError(f"{where}: {key} is missing, and libraries disagree on what that means; state it, if as null")
    width, heads, max_position = (keys.number(key) for key in ("hidden_size", "num_attention_heads", "max_position_embeddings"))
    if keys.get("head_dim") is None and width % heads:
        raise ValueError(f"{where}: hidden_size ({width}) is no multiple of num_attention_heads ({heads}); head_dim is needed")
    fields: Fields = {
        "family": name,
        "vocab_size": keys.number("vocab_size"),
        "num_layers": keys.number("num_hidden_layers"),
        "embed_dim": width,
        "num_heads": heads,
        "num_kv_heads": keys.number("num_key_value_heads", default=heads),
        "head_dim": keys.number("head_dim", default=width // heads),
        "ffn_dim": keys.number("intermediate_size"),
        "norm_eps": float(keys.number("rms_norm_eps", float)),
        "tie_embeddings": keys.flag("tie_word_embeddings", family.tied),
        **family.switches,
    }
    _check_gate(keys, fields.get("gate", "silu"))
    fields |= _ropes(keys, family, max_position)
    for part in family.parts:
        fields |= part.read(keys, fields)
    keys.finish()
    return Arch(**fields), keys.notices


def config_from_arch(arch: Arch, dtype: str, token_ids: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json that means `arch`, under the old and the new names of moved keys."""
    rope, family = arch.rope, FAMILIES[arch.family]
    table = write_rope(rope)
    shared = {"partial_rotary_factor": rope.rotary_fraction} if family.partial_rope else {}
    config = {
        "architectures": [family.architecture],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.embed_dim,
        "intermediate_size": arch.ffn_dim,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": _GATES[arch.gate],
        "rms_norm_eps": arch.norm_eps,
        "max_position_embeddings": configured_length(rope, arch.max_position),
        "tie_word_embeddings": arch.tie_embeddings,
        **shared,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else table,
        "rope_parameters": {**table, "rope_theta": rope.theta, **shared},
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    for part in family.parts:
        config |= part.write(arch)
    # Null where there is none: an absent key may mean an id of the family's own vocabulary.
    return config | {key: token_ids.get(key) for key in TOKEN_IDS}


def _family_name(given: Mapping[str, Any], where: str) -> str:
    by_class = {family.architecture: name for name, family in FAMILIES.items()}
    model_type = given.get("model_type")
    names = given.get("architectures")
    if names is None and model_type in FAMILIES:
        names = [FAMILIES[model_type].architecture]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in by_class:
        asked = model_type if names is None else names
        raise ValueError(f"{where}: architectures is {asked}; rljax loads {', '.join(sorted(by_class))}")
    if model_type is not None and model_type != by_class[names[0]]:
        raise ValueError(f"{where}: model_type {model_type!r} is not the one of {names[0]}; correct whichever is wrong")
    return by_class[names[0]]


def _check_gate(keys: _Keys, gate: str) -> None:
    for key in ("hidden_act", "hidden_activation"):
        value = keys.get(key, _GATES[gate])
        if value != _GATES[gate]:
            raise ValueError(f"{keys.where}: {key} is {value!r}; rljax supports only {_GATES[gate]!r} for this family")


def _ropes(keys: _Keys, family: Family, max_position: int) -> Fields:
    """Read the rotary embedding; families with one per kind of layer replace it in a part of their own."""
    facts = RopeFacts(keys.where, max_position, family.theta, family.ropes, family.partial_rope)
    places = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    tables = {place: keys.get(place) for place in places if keys.get(place) is not None}
    if family.theta is None and not tables.keys() & {"rope_parameters", "rope_scaling"}:
        raise ValueError(f"{keys.where}: rope_scaling is missing, and this family is never without; add it")
    nested = tables.get("rope_parameters", {})
    if isinstance(nested, Mapping) and (FULL in nested or SLIDING in nested):
        if _TWO_ROPES not in family.parts or not set(nested) <= {FULL, SLIDING}:
            raise ValueError(f"{keys.where}: rope_parameters has entries by layer type, which this family does not have")
        tables["rope_parameters"] = nested.get(FULL, {})
    rope, longest, notices = read_rope(tables, facts)
    keys.notices += notices
    return {"rope": rope, "max_position": longest}


def _windows(keys: _Keys, layers: tuple[int, ...]) -> Fields:
    return {"window": keys.number("sliding_window"), "windowed_layers": layers} if layers else {}


def _typed(arch: Arch) -> dict[str, Any]:
    return {
        "sliding_window": arch.window,
        "layer_types": [SLIDING if layer in arch.windowed_layers else FULL for layer in arch.layers],
    }


def _window_everywhere(keys: _Keys, fields: Fields) -> Fields:
    return _windows(keys, tuple(range(fields["num_layers"])) if keys.get("sliding_window") is not None else ())


def _window_by_type(keys: _Keys, fields: Fields) -> Fields:
    found = _windows(keys, keys.layer_types(fields["num_layers"], lambda layer: layer % 2 == 0))
    keys.get("sliding_window")  # without effect when no layer has one
    return found


def _window_by_pattern(keys: _Keys, fields: Fields) -> Fields:
    stored = keys.get("_sliding_window_pattern", 6)
    pattern = keys.number("sliding_window_pattern", default=stored)
    found = _windows(keys, keys.layer_types(fields["num_layers"], lambda layer: (layer + 1) % pattern != 0))
    keys.get("sliding_window")
    return found


def _window_when_switched_on(everywhere: bool) -> Callable[[_Keys, Fields], Fields]:
    def read(keys: _Keys, fields: Fields) -> Fields:
        on, size, layers = keys.flag("use_sliding_window", False), keys.get("sliding_window"), fields["num_layers"]
        if everywhere:
            return _windows(keys, tuple(range(layers)) if on and size is not None else ())
        first = keys.get("max_window_layers", 0 if not on or size is None else None)
        unrotated = fields.get("unrotated_layers")
        if unrotated is None and (type(first) is not int or first < 0):
            raise ValueError(f"{keys.where}: max_window_layers must say how many layers have no window, got {first!r}")

        def default(layer: int) -> bool:
            return on and size is not None and (layer >= first if unrotated is None else layer in unrotated)

        windowed = keys.layer_types(layers, default)
        if windowed and not on:
            raise ValueError(f"{keys.where}: layer_types has {SLIDING}, but use_sliding_window is false; correct one of them")
        return _windows(keys, windowed)

    return read


def _switched(arch: Arch) -> dict[str, Any]:
    return {"use_sliding_window": arch.window is not None, "sliding_window": arch.window}


def _biases(default: bool) -> Part:
    def read(keys: _Keys, fields: Fields) -> Fields:
        return dict.fromkeys(("qkv_bias", "out_bias"), keys.flag("attention_bias", default))

    return Part(read, lambda arch: {"attention_bias": arch.qkv_bias})


def _unrotated(keys: _Keys, fields: Fields) -> Fields:
    layers, interval = fields["num_layers"], keys.number("no_rope_layer_interval", default=4)
    rotated = keys.numbers("no_rope_layers")  # 1 for layers with rotation, whatever the name says
    if rotated is None:
        rotated = [int((layer + 1) % interval != 0) for layer in range(layers)]
    if len(rotated) != layers or not set(rotated) <= {0, 1}:
        raise ValueError(f"{keys.where}: no_rope_layers must have a 0 or 1 for each of {layers} layers, got {rotated}")
    return {"unrotated_layers": tuple(layer for layer, on in enumerate(rotated) if not on)}


def _two_ropes(keys: _Keys, fields: Fields) -> Fields:
    nested = keys.get("rope_parameters", {})
    table = nested.get(SLIDING) or {} if isinstance(nested, Mapping) else {}
    local = keys.get("rope_local_base_freq")
    facts = RopeFacts(keys.where, fields["max_position"], 10_000.0, {}, False)
    tables = {"rope_parameters": table} | ({} if local is None else {"rope_theta": local})
    rope, _, notices = read_rope(tables, facts)
    keys.notices += notices
    return {"windowed_rope": rope}


def _write_two_ropes(arch: Arch) -> dict[str, Any]:
    local = arch.rope if arch.windowed_rope is None else arch.windowed_rope
    tables = {name: {**write_rope(rope), "rope_theta": rope.theta} for name, rope in ((FULL, arch.rope), (SLIDING, local))}
    return {"rope_parameters": tables, "rope_local_base_freq": local.theta}


def _scores(keys: _Keys, fields: Fields) -> Fields:
    if keys.flag("use_bidirectional_attention", False):
        raise ValueError(f"{keys.where}: use_bidirectional_attention is true; rljax supports only decoders that look back")
    return {
        "query_scalar": float(keys.number("query_pre_attn_scalar", float)),
        "attention_soft_cap": keys.optional("attn_logit_softcapping", float),
        "final_soft_cap": keys.optional("final_logit_softcapping", float),
    }


def _write_scores(arch: Arch) -> dict[str, Any]:
    scalar = arch.head_dim if arch.query_scalar is None else arch.query_scalar
    return {
        "hidden_activation": _GATES[arch.gate],
        "query_pre_attn_scalar": int(scalar) if scalar == int(scalar) else scalar,
        "attn_logit_softcapping": arch.attention_soft_cap,
        "final_logit_softcapping": arch.final_soft_cap,
    }


def _num_experts(keys: _Keys) -> int:
    old, new = keys.optional("num_experts"), keys.optional("num_local_experts")
    if old is not None and new is not None and old != new:
        raise ValueError(f"{keys.where}: num_experts is {old}, but num_local_experts is {new}; remove the wrong one")
    return keys.number("num_local_experts") if old is None else old


def _experts(**fixed: bool) -> Callable[[_Keys, Fields], Fields]:
    def read(keys: _Keys, fields: Fields) -> Fields:
        return {"experts": Experts(_num_experts(keys), keys.number("num_experts_per_tok"), fields["ffn_dim"], True, **fixed)}

    return read


def _write_experts(arch: Arch) -> dict[str, Any]:
    assert arch.experts is not None
    return {"num_local_experts": arch.experts.count, "num_experts_per_tok": arch.experts.per_token}


def _narrow_experts(keys: _Keys, fields: Fields) -> Fields:
    normalize, step = keys.flag("norm_topk_prob", False), keys.number("decoder_sparse_step", default=1)
    only = keys.numbers("mlp_only_layers") or []
    dense = tuple(layer for layer in range(fields["num_layers"]) if layer in only or (layer + 1) % step)
    width = keys.number("moe_intermediate_size")
    experts = Experts(_num_experts(keys), keys.number("num_experts_per_tok"), width, normalize)
    return {"experts": experts, "dense_layers": dense}


def _write_narrow_experts(arch: Arch) -> dict[str, Any]:
    assert arch.experts is not None
    return {
        "num_experts": arch.experts.count,
        "num_experts_per_tok": arch.experts.per_token,
        "moe_intermediate_size": arch.experts.ffn_dim,
        "norm_topk_prob": arch.experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(arch.dense_layers),
    }


def _clamped(keys: _Keys, fields: Fields) -> Fields:
    return {
        "gate_limit": float(keys.number("swiglu_limit", float, default=7.0)),
        "gate_steepness": float(keys.number("swiglu_alpha", float, default=1.702)),
    }


_WINDOW_EVERYWHERE = Part(_window_everywhere, lambda arch: {"sliding_window": arch.window})
_WINDOW_FROM_LAYER = Part(
    _window_when_switched_on(everywhere=False),
    lambda arch: _switched(arch) | _typed(arch) | {"max_window_layers": arch.num_layers - len(arch.windowed_layers)},
)
_LENGTH_BESIDE = Part(
    lambda keys, fields: {},
    lambda arch: {"original_max_position_embeddings": arch.rope.original_max_position} if arch.rope.kind == "longrope" else {},
)
_WINDOW_SWITCHED = Part(_window_when_switched_on(everywhere=True), _switched)
_TWO_ROPES = Part(_two_ropes, _write_two_ropes)
_SCORES = Part(_scores, _write_scores)
_UNROTATED = Part(
    _unrotated, lambda arch: {"no_rope_layers": [int(layer not in arch.unrotated_layers) for layer in arch.layers]}
)
_WRITE_CLAMPED = {"gate_limit": "swiglu_limit", "gate_steepness": "swiglu_alpha"}
_TWO_NORMS = {"post_norm": True, "norm_offset": True, "embed_scale": True, "gate": "gelu_tanh"}

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", parts=(_biases(False), Part(lambda k, f: {}, lambda arch: {"mlp_bias": False}))),
    "mistral": Family("MistralForCausalLM", stated=("sliding_window", "num_key_value_heads"), parts=(_WINDOW_EVERYWHERE,)),
    "smollm3": Family(
        "SmolLM3ForCausalLM",
        theta=2e6,
        tied=True,
        stated=("num_key_value_heads",),
        parts=(_biases(False), _UNROTATED, _WINDOW_FROM_LAYER),
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", stated=("num_key_value_heads",), switches={"qkv_bias": True}, parts=(_WINDOW_FROM_LAYER,)
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        stated=("num_key_value_heads", "head_dim"),
        switches={"qk_norm": "head"},
        parts=(_biases(False), _WINDOW_FROM_LAYER),
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        tied=True,
        stated=("num_key_value_heads", "head_dim", "attn_logit_softcapping", "final_logit_softcapping"),
        switches=_TWO_NORMS,
        parts=(_biases(False), Part(_window_by_type, _typed), _SCORES),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        theta=1e6,
        tied=True,
        stated=("num_key_value_heads", "head_dim"),
        switches={**_TWO_NORMS, "qk_norm": "head"},
        parts=(_biases(False), Part(_window_by_pattern, _typed), _SCORES, _TWO_ROPES),
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM", switches={"pre_norm": False, "post_norm": True, "qk_norm": "all"}, parts=(_biases(False),)
    ),
    "phi3": Family(
        "Phi3ForCausalLM",
        parts=(_WINDOW_EVERYWHERE, _LENGTH_BESIDE),
        ropes={"su": "longrope", "yarn": "longrope"},
        partial_rope=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        theta=1e6,
        stated=("num_key_value_heads",),
        parts=(_WINDOW_EVERYWHERE, Part(_experts(), _write_experts)),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        stated=("num_key_value_heads", "head_dim"),
        switches={"qk_norm": "head"},
        parts=(_biases(False), _WINDOW_SWITCHED, Part(_narrow_experts, _write_narrow_experts)),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        theta=None,
        stated=("num_key_value_heads", "head_dim"),
        switches={"sinks": True, "gate": "clamped"},
        parts=(
            _biases(True),
            Part(_window_by_type, _typed),
            Part(_experts(router_bias=True, bias=True), _write_experts),
            Part(_clamped, lambda arch: {key: getattr(arch, name) for name, key in _WRITE_CLAMPED.items()}),
        ),
    ),
}
