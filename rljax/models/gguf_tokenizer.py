"""Tokenizers of GGUF files, rebuilt as the tokenizer files of a Hugging Face folder.

Owns the translation of a file's tokenizer metadata: byte-level BPE with known splitting rules, and SentencePiece's BPE.
Refuses to own the rest of the file (`gguf.py`).
"""

import json
from collections.abc import Mapping
from typing import Any

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)  # values of tokenizer.ggml.token_type

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Control tokens that end a turn when the chat template writes them."""

_SPACE = "\u2581"  # what SentencePiece has in the place of a space


def tokenizer_files(meta: Mapping[str, Any], where: str) -> dict[str, bytes]:
    """Return tokenizer.json, tokenizer_config.json and generation_config.json made from GGUF metadata.

    Control tokens become special added tokens. The end tokens are the file's, and those with which its chat template
    ends a turn.

    Raises:
        ValueError: the tokenizer is neither a byte-level BPE whose splitting rules are known nor one of SentencePiece's.
    """
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"{where}: tokenizer.ggml.model is {kind!r}; only 'gpt2' and 'llama' can be rebuilt, so convert the original model"
        )
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
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
    add_bos = meta.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _ADDS_BOS)
    if add_bos and "bos_token" not in named:
        raise ValueError(f"{where}: tokenizer.ggml.add_bos_token is set without tokenizer.ggml.bos_token_id")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": meta.get("tokenizer.ggml.add_eos_token", False),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta.get(f"{meta['general.architecture']}.context_length"),
        **named,
        "chat_template": meta.get("tokenizer.chat_template"),
    }
    generation = {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(meta, tokens, types),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    bos = named["bos_token"] if add_bos else None
    build = _byte_level if kind == "gpt2" else _sentencepiece
    tokenizer = {**_shared(tokens, types, bos), **build(meta, tokens, types)}
    return {
        "tokenizer.json": json.dumps(tokenizer).encode(),
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


def _shared(tokens: list[str], types: list[int], bos: str | None) -> dict[str, Any]:
    """Return the parts of tokenizer.json that do not depend on its kind: added tokens, and the BOS token put in front."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": token, **flags, "special": kind != _USER_DEFINED}
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
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
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "post_processor": processor}


_BPE = {"type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}


def _byte_level(meta: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Return the parts of tokenizer.json of a byte-level BPE."""
    pre = meta["tokenizer.ggml.pre"]
    normalizer, split = PRE_TOKENIZERS[pre]
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            **_BPE,
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in _IGNORES_MERGES,
            "vocab": {token: index for index, token in enumerate(tokens)},
            # A token may hold no space, so the first space that is not the first character divides the two.
            "merges": [[merge[: (cut := merge.index(" ", 1))], merge[cut + 1 :]] for merge in meta["tokenizer.ggml.merges"]],
        },
    }


def _sentencepiece(meta: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Return the parts of tokenizer.json of SentencePiece's BPE: spaces are a character, what is no piece becomes bytes.

    SentencePiece joins the neighbours that make the piece of the highest score, the leftmost first. A list of merges in the
    order of the scores of what they make does the same.
    """
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    scores, vocab = meta["tokenizer.ggml.scores"], {token: index for index, token in enumerate(tokens)}
    made = [index for index, kind in enumerate(types) if kind in (_NORMAL, _USER_DEFINED)]
    pieces = {tokens[index] for index in made}
    merges = [
        [token[:cut], token[cut:]]
        for token in map(tokens.__getitem__, sorted(made, key=lambda index: -scores[index]))
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = meta.get("tokenizer.ggml.unknown_token_id", next((i for i, kind in enumerate(types) if kind == _UNKNOWN), None))
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*([{"type": "Prepend", "prepend": _SPACE}] if prefix else []), spaces],
        },
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            **_BPE,
            "unk_token": None if unknown is None else tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


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
