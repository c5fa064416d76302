"""What requests may ask of the draw, and the arrays that tell the device: the host's side of draw.py.

Owns which requests are refused before anything is sampled. Refuses to own the queue and the sampling rule itself.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rljax.models.arch import Arch
from rljax.pytree import with_fields
from rljax.records import SamplingParams
from rljax.sampler.draw import Rules


def has_rules(params: SamplingParams) -> bool:
    """Tell whether a request asks for more than a temperature and the engine's end tokens."""
    return params.reshapes or bool(params.stop_token_ids) or params.ignore_eos


def end_tokens(params: SamplingParams, stop_ids: frozenset[int]) -> frozenset[int]:
    """Return the tokens that end a completion."""
    return (frozenset() if params.ignore_eos else stop_ids) | frozenset(params.stop_token_ids)


def refuse_impossible(params: SamplingParams, arch: Arch, stop_ids: frozenset[int], logprobs: int | None, text: bool) -> None:
    """Refuse what cannot be drawn or reported.

    Args:
        params: What a request asks.
        arch: The model.
        stop_ids: The engine's end tokens.
        logprobs: Most likely tokens that the engine reports; None when it reports nothing.
        text: Whether the engine can turn tokens into text.

    Raises:
        ValueError: ids outside the vocabulary, nothing left to draw, or more than the engine was made for.
    """
    vocab = arch.vocab_size if arch.valid_vocab is None else arch.valid_vocab
    lists = {"logit_bias": params.logit_bias, "allowed_token_ids": params.allowed_token_ids or ()}
    for name, ids in {**lists, "stop_token_ids": params.stop_token_ids}.items():
        outside = [token for token in ids if not 0 <= token < vocab]
        if outside:
            raise ValueError(f"{name} has the ids {outside[:5]}; the model has ids from 0 to {vocab - 1}")
    if params.allowed_token_ids is not None or params.logit_bias:
        _refuse_empty(params, vocab, stop_ids)
    if params.logprobs is not None and (logprobs is None or params.logprobs > logprobs):
        made = "none" if logprobs is None else f"at most {logprobs}"
        asked = params.logprobs
        raise ValueError(f"logprobs is {asked}, and the engine reports {made}; make it with logprobs={asked}")
    if params.stop and not text:
        raise ValueError("stop strings need an engine that knows the tokens' text; make it with open_text")


def _refuse_empty(params: SamplingParams, vocab: int, stop_ids: frozenset[int]) -> None:
    allowed = set(range(vocab) if params.allowed_token_ids is None else params.allowed_token_ids)
    allowed -= {token for token, bias in params.logit_bias.items() if bias == -np.inf}
    if not allowed:
        raise ValueError("allowed_token_ids and logit_bias leave no token to draw; allow at least one")
    if params.min_tokens and not allowed - end_tokens(params, stop_ids):
        raise ValueError(
            "allowed_token_ids and logit_bias leave end tokens alone, and min_tokens forbids those at first; "
            "allow another token, or set min_tokens to 0"
        )


def build_rules(asked: Mapping[int, SamplingParams], slots: int, vocab: int, before: Rules | None = None) -> Rules:
    """Return the rules of all slots as numpy arrays.

    Args:
        asked: By slot, what those ask that have rules.
        slots: Number of slots.
        vocab: Vocabulary entries.
        before: Rules that were in use: what had room in them has room again, so that a program is not compiled for less.
    """
    most = max(len(params.stop_token_ids) for params in asked.values())
    widest = 1 << max(0, most - 1).bit_length()  # a power of two: few shapes to compile
    biased = any(params.logit_bias or params.allowed_token_ids is not None for params in asked.values())
    if before is not None:
        widest, biased = max(widest, before.stop_ids.shape[1]), biased or before.bias is not None
    arrays: dict[str, Any] = {"top_k": np.zeros(slots, np.int32), "top_p": np.ones(slots, np.float32)}
    arrays |= {"min_p": np.zeros(slots, np.float32), "min_tokens": np.zeros(slots, np.int32)}
    arrays |= {"ignore_eos": np.zeros(slots, bool), "stop_ids": np.full((slots, widest), -1, np.int32)}
    arrays["bias"] = np.zeros((slots, vocab), np.float32) if biased else None
    for slot, params in asked.items():
        arrays["top_k"][slot] = min(max(params.top_k, 0), vocab)
        for name in ("top_p", "min_p", "min_tokens", "ignore_eos"):
            arrays[name][slot] = getattr(params, name)
        arrays["stop_ids"][slot, : len(params.stop_token_ids)] = params.stop_token_ids
        if arrays["bias"] is not None:
            _set_bias(arrays["bias"][slot], params)
    return with_fields(Rules, **arrays)


def _set_bias(row: np.ndarray, params: SamplingParams) -> None:
    if params.allowed_token_ids is not None:
        row[:] = -np.inf
        row[list(params.allowed_token_ids)] = 0.0
    for token, bias in params.logit_bias.items():
        row[token] += bias
