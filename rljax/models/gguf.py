"""GGUF files: metadata, dequantised tensors and tokenizer, read as a model.

Owns the translation of one Llama-architecture .gguf file: its metadata into an `Arch`, its tensor names and its row order
of query and key projections into those of Hugging Face checkpoints, and its tokenizer metadata into tokenizer files.
Refuses to own writing. What the file does not say, or rljax cannot do, is an error that names the metadata key.

The file stores query and key rows so that the two channels of a rotated pair are neighbours; see `interleaved_to_half`.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rljax.models.arch import Arch, Rope
from rljax.models.layout import HEAD, Origin, Outside, interleaved_to_half, mismatches, refuse, slots

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", HEAD: "output.weight"}
_ROPE_FACTORS = "rope_freqs.weight"
_DEFAULT_THETA = 10_000.0

# What the published llama3 models use; a file keeps only the resulting factors, which are checked against these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
_FACTOR_RTOL = 1e-5  # the factors are stored as float32

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # values of tokenizer.ggml.token_type

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a turn when the chat template writes them."""


def open_gguf(path: Path) -> Outside:
    """Open a .gguf file and check it against its metadata; tensors are dequantised later, one at a time.

    Raises:
        ValueError: the file is broken, not a Llama model, or holds what rljax cannot represent; or `gguf` is not installed.
    """
    try:
        import gguf  # optional: most conversions do without
    except ModuleNotFoundError as err:
        raise ValueError(f"{path}: reading GGUF needs the package gguf; install rljax[gguf]") from err
    try:
        reader = gguf.GGUFReader(path)
        meta = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as err:
        raise ValueError(f"{path}: not a complete GGUF file ({type(err).__name__}: {err}); download it again") from err
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if len(stored) != len(reader.tensors):
        listed = [tensor.name for tensor in reader.tensors]
        twice = next(name for name in listed if listed.count(name) > 1)
        raise ValueError(f"{path}: {twice} is stored twice; download it again")
    convertible = tuple(
        sorted({tensor.tensor_type.name for tensor in reader.tensors if _dequantizes(gguf, tensor.tensor_type)})
    )

    def dequantize(name: str, first: int, last: int) -> np.ndarray:
        tensor = stored[name]
        shape = [int(size) for size in reversed(tensor.shape)]
        row = int(tensor.n_bytes) // shape[0]
        # Read rather than mapped, so that what has been read does not count as memory of the process.
        raw = np.fromfile(path, np.uint8, (last - first) * row, offset=int(tensor.data_offset) + first * row)
        values = gguf.dequantize(raw.reshape(last - first, -1), tensor.tensor_type)
        return values.reshape(last - first, *shape[1:])

    tied = "output.weight" not in stored
    factors = None
    if _ROPE_FACTORS in stored:
        factors = dequantize(_ROPE_FACTORS, 0, int(stored[_ROPE_FACTORS].shape[-1]))
    arch = _arch(meta, str(path), tied, factors)
    names: dict[str, str] = {_gguf_name(slot.tensor): slot.tensor for slot in slots(arch)}
    origins = {
        names.get(name, name): Origin(path, name, tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name)
        for name, tensor in stored.items()
        if name != _ROPE_FACTORS
    }
    refuse(path, mismatches(slots(arch), origins, convertible), "convert the model from its original format instead")

    def rows(name: str, first: int, last: int) -> np.ndarray:
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return dequantize(origins[name].name, first, last)
        c = arch.head_dim  # rows are reordered inside a head, so whole heads are read
        start, stop = first // c * c, -(-last // c) * c
        heads = dequantize(origins[name].name, start, stop)
        return interleaved_to_half(heads, len(heads) // c)[first - start : last - start]

    notices = () if "llama.rope.freq_base" in meta else (f"{path} names no llama.rope.freq_base; took {_DEFAULT_THETA:g}",)
    return Outside(arch, origins, rows, tokenizer_files(meta, str(path)), notices)


def tokenizer_files(meta: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json made from GGUF metadata.

    Control tokens become special added tokens. The end tokens are the file's, and those with which its chat template
    ends a turn.

    Raises:
        ValueError: the tokenizer is not a byte-level BPE whose splitting rules are known.
    """
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ValueError(
            f"{where}: tokenizer.ggml.model is {kind!r}; only 'gpt2' can be rebuilt, so convert the original model"
        )
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ValueError(f"{where}: tokenizer.ggml.pre is {pre!r}, of which the splitting rules are unknown; known: {known}")
    tokens = meta["tokenizer.ggml.tokens"]
    types = meta.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(set(tokens)) != len(tokens) or len(types) != len(tokens):
        raise ValueError(
            f"{where}: tokenizer.ggml.tokens repeats a token or does not match token_type; download the file again"
        )
    # The last ones may only be names for padding rows of the embedding.
    used = 1 + max((index for index, kind in enumerate(types) if kind != _UNUSED), default=-1)
    tokens, types = tokens[:used], types[:used]
    named = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        index = meta.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and not 0 <= index < len(tokens):
            raise ValueError(f"{where}: tokenizer.ggml.{key}_token_id is {index}, and there are {len(tokens)} tokens")
        if index is not None:
            named[name] = tokens[index]
    add_bos = meta.get("tokenizer.ggml.add_bos_token", pre in _ADDS_BOS)
    if add_bos and "bos_token" not in named:
        raise ValueError(f"{where}: tokenizer.ggml.add_bos_token is set without tokenizer.ggml.bos_token_id")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": meta.get("tokenizer.ggml.add_eos_token", False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.get("llama.context_length"),
        **named,
        "chat_template": meta.get("tokenizer.chat_template"),
    }
    generation = {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(meta, tokens, types),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    return {
        "tokenizer.json": json.dumps(
            _tokenizer_json(meta, tokens, types, pre, named["bos_token"] if add_bos else None)
        ).encode(),
        "tokenizer_config.json": _settings_json(settings),
        "generation_config.json": _settings_json(generation),
    }


def _settings_json(settings: Mapping[str, Any]) -> bytes:
    given = {key: value for key, value in settings.items() if value is not None}
    return (json.dumps(given, ensure_ascii=False, indent=2) + "\n").encode()


def _end_ids(meta: Mapping[str, Any], tokens: list[str], types: list[int]) -> list[int]:
    """Return the ids that end a turn: those the metadata names, and those the chat template writes."""
    keys = (f"tokenizer.ggml.{key}_token_id" for key in ("eos", "eot", "eom"))
    template = meta.get("tokenizer.chat_template") or ""
    written = {token for token in _TURN_ENDS if token in template}
    ids = {index for index, token in enumerate(tokens) if token in written and types[index] == _CONTROL}
    return sorted(ids | {meta[key] for key in keys if key in meta})


def _tokenizer_json(meta: Mapping[str, Any], tokens: list[str], types: list[int], pre: str, bos: str | None) -> dict[str, Any]:
    """Return the content of tokenizer.json: a byte-level BPE, with the BOS token put in front if there is one."""
    normalizer, split = PRE_TOKENIZERS[pre]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": token, **flags, "special": kind == _CONTROL}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    processor: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    if bos is not None:
        text = [{"Sequence": {"id": "A", "type_id": 0}}]
        start = [{"SpecialToken": {"id": bos, "type_id": 0}}]
        processor = {
            "type": "TemplateProcessing",
            "single": [*start, *text],
            "pair": [*start, *text, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "post_processor": processor,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _IGNORES_MERGES,
            "vocab": {token: index for index, token in enumerate(tokens)},
            # A token may hold no space, so the first space that is not the first character divides the two.
            "merges": [[merge[: (cut := merge.index(" ", 1))], merge[cut + 1 :]] for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def _arch(meta: Mapping[str, Any], where: str, tied: bool, rope_factors: np.ndarray | None) -> Arch:
    """Translate the metadata into an architecture."""
    family = meta.get("general.architecture")
    if family != "llama":
        raise ValueError(f"{where}: general.architecture is {family!r}; rljax loads llama")
    if meta.get("split.count", 1) > 1:
        raise ValueError(f"{where}: split.count is {meta['split.count']}; merge the parts into one file first")
    for key in ("llama.expert_count", "llama.attention.sliding_window", "llama.attention.clamp_kqv", "llama.logit_scale"):
        if meta.get(key):
            raise ValueError(f"{where}: {key} is {meta[key]}; rljax does not support it")

    def number(key: str, default: Any = None) -> Any:
        value = meta.get(f"llama.{key}", default)
        if value is None:
            raise ValueError(f"{where}: llama.{key} is missing; convert the model from its original format instead")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{where}: llama.{key} must be one positive number, got {value!r}")
        return value

    width, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise ValueError(
                f"{where}: llama.{key} is {number(key)}, but heads have {head_dim} channels; rljax needs both equal"
            )
    return Arch(
        vocab_size=number("vocab_size", len(meta.get("tokenizer.ggml.tokens", ())) or None),
        num_layers=number("block_count"),
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn_dim=number("feed_forward_length"),
        rope=_rope(meta, where, number, head_dim, rope_factors),
        norm_eps=_shortest(number("attention.layer_norm_rms_epsilon")),
        tie_embeddings=tied,
        max_position=number("context_length"),
    )


def _rope(meta: Mapping[str, Any], where: str, number: Callable[..., Any], head_dim: int, factors: np.ndarray | None) -> Rope:
    theta = _shortest(number("rope.freq_base", _DEFAULT_THETA))
    kind = meta.get("llama.rope.scaling.type", "linear" if "llama.rope.scale_linear" in meta else "none")
    if kind not in ("none", "linear"):
        raise ValueError(f"{where}: llama.rope.scaling.type is {kind!r}; rljax supports none and linear")
    if factors is None and kind == "none":
        return Rope(theta)
    if factors is None:
        return Rope(theta, "linear", _shortest(number("rope.scaling.factor", meta.get("llama.rope.scale_linear"))))
    rope = Rope(theta, "llama3", _shortest(float(factors.max())), **_LLAMA3)
    implied = Rope(theta).inverse_frequencies(head_dim) / rope.inverse_frequencies(head_dim)
    if kind != "none" or factors.shape != implied.shape or not np.allclose(factors, implied, rtol=_FACTOR_RTOL):
        raise ValueError(f"{where}: {_ROPE_FACTORS} is not the llama3 stretch rljax knows; convert the original model instead")
    return rope


def _dequantizes(gguf: Any, kind: Any) -> bool:
    """Tell whether the package can dequantise a type, by giving it one block of zeros."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _gguf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, *rest = name.removesuffix(".weight").split(".")
    return f"blk.{layer}.{_NAMES['.'.join(rest)]}.weight"


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05 for 9.99999974e-06."""
    return float(str(np.float32(value)))


def _bytes(regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def _regex(numbers: str) -> list[dict[str, Any]]:
    pattern = {"Regex": _SPLIT.format(numbers=numbers)}
    return [{"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}, _bytes(False)]


# Name of the splitting rules -> (normalizer, pre-tokenizers).
PRE_TOKENIZERS: dict[str, tuple[dict[str, Any] | None, list[dict[str, Any]]]] = {
    "gpt-2": (None, [_bytes(True)]),
    "smollm": (None, [{"type": "Digits", "individual_digits": True}, _bytes(True)]),
    "llama-bpe": (None, _regex(r"\p{N}{1,3}")),
    "qwen2": ({"type": "NFC"}, _regex(r"\p{N}")),
}
_IGNORES_MERGES = ("llama-bpe",)
_ADDS_BOS = ("llama-bpe",)
