"""The decoder, one head and one layer at a time, over whole sequences: no cache, no packing, no chunks.

`xp` is numpy, or jax.numpy where a gradient is wanted. Takes the parameters in the learner's layout. `kept` is what becomes of
the keys, and of the values, of one head before a query sees them.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from rljax.models.arch import Arch
from rljax.pytree import Params

Kept = Callable[[Any], Any]


def as_is(x: Any) -> Any:
    """Keep keys or values as they are."""
    return x


def in_int8(x: Any) -> Any:
    """Round each row to multiples of its largest number's 127th."""
    step = np.abs(x).max(-1, keepdims=True) / 127
    return np.rint(x / np.where(step == 0, 1, step)) * step


def hidden_states(arch: Arch, params: Params, tokens: Any, xp: Any = np, kept: Kept = as_is) -> Any:
    """Return the normalised final hidden state after each token of each row: [rows, tokens, width]."""
    hidden = params["embed"][tokens]
    for layer in range(arch.num_layers):
        block = {name: value[layer] for name, value in params["layers"].items()}
        hidden = hidden + attention(arch, block, norm(hidden, block["attn_norm"], arch, xp), xp, kept)
        hidden = hidden + mlp(block, norm(hidden, block["mlp_norm"], arch, xp), xp)
    return norm(hidden, params["final_norm"], arch, xp)


def logits(arch: Arch, params: Params, tokens: Any, xp: Any = np, kept: Kept = as_is) -> Any:
    """Return the logits after each token of each row: [rows, tokens, vocabulary]."""
    head = params["embed"] if arch.tie_embeddings else params["head"]
    return hidden_states(arch, params, tokens, xp, kept) @ head.T


def logprobs(arch: Arch, params: Params, tokens: Any, temperature: float, xp: Any = np, kept: Kept = as_is) -> Any:
    """Return the log-probability of each token but a row's first, given those before it: [rows, tokens - 1]."""
    scaled = logits(arch, params, tokens, xp, kept)[:, :-1] / temperature
    highest = scaled.max(-1, keepdims=True)
    chosen = xp.take_along_axis(scaled, tokens[:, 1:, None], 2)[..., 0]
    return chosen - highest[..., 0] - xp.log(xp.exp(scaled - highest).sum(-1))


def norm(x: Any, scale: Any, arch: Arch, xp: Any) -> Any:
    """Divide by the root of the mean square."""
    return x / xp.sqrt((x**2).mean(-1, keepdims=True) + arch.norm_eps) * scale[None, None]


def attention(arch: Arch, block: Params, x: Any, xp: Any, kept: Kept) -> Any:
    """Attend with each query head to the keys of its group, at the same or earlier positions."""
    length, out = x.shape[1], 0.0
    future = xp.arange(length)[None, :] > xp.arange(length)[:, None]
    for group in range(arch.num_kv_heads):
        *queries, key, value = (x @ block["qkv"][:, group, part] for part in range(arch.queries_per_kv + 2))
        key, value = kept(rope(arch, key, xp)), kept(value)
        for index, query in enumerate(queries):
            scores = rope(arch, query, xp) @ xp.swapaxes(key, 1, 2) / math.sqrt(arch.head_dim)
            shown = xp.exp(xp.where(future[None], -xp.inf, scores - scores.max(-1, keepdims=True)))
            out = out + (shown / shown.sum(-1, keepdims=True)) @ value @ block["out"][group, index]
    return out


def rope(arch: Arch, x: Any, xp: Any) -> Any:
    """Rotate channel i with channel i + c/2 by the angle position * theta^(-2i/c)."""
    half = arch.head_dim // 2
    angles = np.arange(x.shape[1])[:, None] * arch.rope.theta ** (-2.0 * np.arange(half) / arch.head_dim)[None]
    cos, sin = xp.asarray(np.cos(angles), x.dtype)[None], xp.asarray(np.sin(angles), x.dtype)[None]
    first, second = x[..., :half], x[..., half:]
    return xp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def mlp(block: Params, x: Any, xp: Any) -> Any:
    """Multiply the up-projection by silu of the gate and project down."""
    gate, up = x @ block["gate_up"][:, 0], x @ block["gate_up"][:, 1]
    return (gate / (1 + xp.exp(-gate)) * up) @ block["down"]
