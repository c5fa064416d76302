"""Small Llama models made by the reference library, and what both sides compute from the same token ids."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from rljax.config import MeshConfig
from rljax.mesh import build_mesh
from rljax.models import decoder
from rljax.models.arch import Arch
from rljax.models.hf import open_hf
from rljax.models.layout import fill
from rljax.pytree import Params
from rljax.records import SamplingParams
from rljax.rollouts.weights import publisher
from rljax.sampler.engine import Engine, Request

VOCAB = 97
F32 = jnp.dtype("float32")

TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,  # large enough that attention is far from uniform
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "wide-heads-one-kv": {"head_dim": 32, "num_key_value_heads": 1},
    "narrow-heads-tied": {"head_dim": 8, "tie_word_embeddings": True},
    "llama3-rope": {"rope_parameters": LLAMA3_ROPE},
    "linear-rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 500_000.0, "factor": 4.0}},
}


def make_llama(**changes: Any) -> transformers.LlamaForCausalLM:
    """Make a random model; norm scales too, so that leaving one out shows."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TINY, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def save_llama(directory: Path, shard_size: str = "1GB", **changes: Any) -> transformers.LlamaForCausalLM:
    """Save a random model with a small tokenizer and return it."""
    model = make_llama(**changes)
    model.save_pretrained(directory, max_shard_size=shard_size)
    for name, content in tokenizer_files().items():
        (directory / name).write_bytes(content)
    return model


def tokenizer_files(size: int = VOCAB) -> dict[str, bytes]:
    """Return the files of a word tokenizer with `size` ids, and a chat template."""
    names = ["<unk>", "<s>", "</s>", *(f"w{index}" for index in range(3, size))]
    special = [
        {"id": index, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, name in enumerate(names[:3])
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {name: index for index, name in enumerate(names)}, "unk_token": "<unk>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}",
    }
    return {
        "tokenizer.json": json.dumps(tokenizer).encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
        "generation_config.json": b'{"bos_token_id": 1,   "eos_token_id": [2, 0]}',
    }


def load_hf(directory: Path) -> tuple[Arch, Params]:
    """Load a folder in the way `convert` does, without writing a checkpoint."""
    model = open_hf(directory)
    params, notices = fill(model, np.dtype("float32"))
    assert not notices
    return model.arch, params


def random_ids(*shape: int, vocab: int = VOCAB, seed: int = 0) -> np.ndarray:
    """Return random token ids, without the special ones."""
    return np.random.default_rng(seed).integers(3, vocab, shape)


@partial(jax.jit, static_argnums=0)
def _logits(arch: Arch, params: Params, ids: Any, positions: Any, segments: Any) -> Any:
    model = decoder.merge(arch, params)
    return decoder.logits(model, model(ids, positions, segments, dtype=F32)[0])


def our_logits(arch: Arch, params: Params, ids: np.ndarray, positions: Any = None, segments: Any = None) -> np.ndarray:
    """Return our float32 logits [b, s, v]."""
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape) if positions is None else positions
    segments = np.ones_like(ids) if segments is None else segments
    return np.asarray(_logits(arch, params, *(jnp.asarray(part, jnp.int32) for part in (ids, positions, segments))))


def their_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """Return the reference's float32 logits [b, s, v]."""
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


def their_greedy(model: transformers.LlamaForCausalLM, prompts: Sequence[Sequence[int]], steps: int) -> list[list[int]]:
    """Return the reference's most likely continuations, end tokens not heeded; prompts are padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    generator: Any = model  # the library's protocol for `generate` does not fit its own models
    generator.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)  # without an end token
    with torch.no_grad():
        return generator.generate(ids, attention_mask=mask, max_new_tokens=steps)[:, width:].tolist()


def our_completions(
    arch: Arch, params: Params, prompts: Sequence[Sequence[int]], steps: int, temperature: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sampler's continuations [b, n] and their log-probabilities [b, n], end tokens not heeded."""
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    longest = max(map(len, prompts))
    engine = Engine(
        arch,
        mesh,
        (arch.vocab_size,),  # an end token that is never drawn
        slots=len(prompts),
        max_prompt_length=longest,
        max_completion_length=steps,
        readers=1,
        decode_chunk_steps=steps,
        dtype="float32",
    )
    engine.set_weights(publisher(arch, mesh, "float32")(jax.tree.map(jnp.asarray, params)), 0)
    sampling = SamplingParams(max_tokens=steps, temperature=temperature)
    engine.submit([Request(row, tuple(map(int, prompt)), (row, 1), sampling) for row, prompt in enumerate(prompts)])
    engine.step()
    done = dict(engine.poll())
    rows = [done[row] for row in range(len(prompts))]
    return np.stack([row.tokens for row in rows]), np.stack([row.logp for row in rows])
