"""Make a tiny checkpoint with random parameters: a real one in every part, for smoke runs and tests in seconds.

    python tools/make_tiny_checkpoint.py checkpoints/tiny

The model has two layers and knows nothing. Its tokenizer is a byte-level BPE with a chat template, its files are those
that `rljax convert` writes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rljax.checkpoint import save_params
from rljax.conversion.sources import ARCH_FILE
from rljax.models.arch import Arch, Rope
from rljax.models.decoder import abstract_params
from rljax.models.parameters import INIT_STD
from rljax.pytree import Params

VOCAB_SIZE = 320

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>")

TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

CORPUS = (
    "user assistant system",
    "What is 3 + 4? Answer with just the number. What is 12 * 5? Answer with just the number.",
    "Which is the largest of 17, 42, 38 and 90? Answer with just the number.",
)


def tiny_arch() -> Arch:
    """Return the architecture: grouped queries and a tied head, all dims divisible by 8."""
    return Arch(
        vocab_size=VOCAB_SIZE,
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_dim=64,
        rope=Rope(theta=10_000.0),
        norm_eps=1e-5,
        tie_embeddings=True,
        max_position=512,
    )


def tokenizer_files() -> dict[str, bytes]:
    """Return the tokenizer's files by name."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    pad, _, end = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": end,
        "pad_token": pad,
        "chat_template": TEMPLATE,
    }
    return {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [backend.token_to_id(end)]}).encode(),
    }


def tiny_params(arch: Arch, seed: int) -> Params:
    """Draw the parameters on the host, where nothing needs to be compiled: normal weights, unit norms."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        norm = "norm" in jax.tree_util.keystr(path)
        values = np.ones(leaf.shape) if norm else rng.normal(scale=INIT_STD, size=leaf.shape)
        return jax.device_put(values.astype(np.float32))

    return jax.tree_util.tree_map_with_path(draw, abstract_params(arch))


def make_tiny_checkpoint(directory: Path, seed: int = 0) -> Path:
    """Write the checkpoint, in place of one that is already there, and return its folder.

    Raises:
        ValueError: The folder holds something else.
        StorageError: Writing failed.
    """
    arch = tiny_arch()
    files = {ARCH_FILE: arch.to_json().encode(), **tokenizer_files()}
    save_params(directory, tiny_params(arch, seed), files, overwrite=True)
    return directory


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description="Make a tiny checkpoint with random parameters.")
    parser.add_argument("directory", type=Path, help="folder to write, for example checkpoints/tiny")
    parser.add_argument("--seed", type=int, default=0, help="seed of the parameters (default: 0)")
    args = parser.parse_args(argv)
    print(f"wrote {make_tiny_checkpoint(args.directory, args.seed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
