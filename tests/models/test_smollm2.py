"""A real model: SmolLM2-135M-Instruct from its GGUF file computes and reads text as it does in the reference library."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rich.console import Console
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from rljax.convert import convert, read_checkpoint
from rljax.data.tokenizer import Tokenizer
from tests.models.oracle import our_completions, our_logits, their_greedy, their_logits
from tools.fetch_smollm2 import fetch

pytestmark = pytest.mark.slow

DOWNLOADS = Path(__file__).parents[2] / "downloads"
LOGITS_ATOL = 2e-4  # two float32 programs that sum in different orders over 30 layers; logits are of the order 30

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n",
    "1 2 3 4 5 6 7 8 9 10 11 12",
    "Größe, naïve café, 你好世界, Привет 🦊\n\n\t",
    "Q",
    "Once upon a time, in a small village at the foot of a mountain, there lived an old clockmaker who " * 3,
    '{"name": "add", "arguments": {"a": 3, "b": [1, 2.5, null]}}',
]

TEXTS = [
    *PROMPTS,
    "",
    " ",
    "   leading and trailing   ",
    "line\nline\r\nline\n\n\nline",
    "it's we'll they've I'M",
    "x=1234567890;y=0x1F",
    "3.14159 and 1,000,000",
    "<|im_start|>system\nhi<|im_end|>",
    "a<|endoftext|>b",
    "\u00a0nbsp\u200bzero",
    "👨‍👩‍👧‍👦 e\u0301",
    "CamelCase snake_case kebab-case",
]


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    return fetch(DOWNLOADS)


@pytest.fixture(scope="module")
def checkpoint(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("smollm2") / "model"
    screen = io.StringIO()
    report = convert(gguf_file, target, console=Console(file=screen))
    assert (report.num_params, report.verified, report.notices) == (134_515_008, True, ())
    return target


@pytest.fixture(scope="module")
def reference(gguf_file: Path) -> transformers.LlamaForCausalLM:
    """The model as the reference library itself reads the GGUF file."""
    parsed: dict[str, Any] = load_gguf_checkpoint(str(gguf_file))
    config = transformers.LlamaConfig(**{**parsed["config"], "rope_theta": parsed["config"]["rope_theta"]})
    model = transformers.LlamaForCausalLM(config).eval()
    tensors = load_gguf_checkpoint(str(gguf_file), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    model.tie_weights()
    return model


def test_logits_and_greedy_tokens_equal_the_references(checkpoint: Path, reference: transformers.LlamaForCausalLM) -> None:
    found, tokenizer = read_checkpoint(checkpoint), Tokenizer.load(checkpoint)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    for prompt in prompts:
        ids = np.array([prompt])
        ours, theirs = our_logits(found.arch, found.params, ids), their_logits(reference, ids)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=LOGITS_ATOL)
    tokens, _ = our_completions(found.arch, found.params, prompts, 64)
    assert tokens.tolist() == their_greedy(reference, prompts, 64)


def test_the_exported_folder_is_the_same_model(
    checkpoint: Path, reference: transformers.LlamaForCausalLM, tmp_path: Path
) -> None:
    convert(checkpoint, tmp_path / "exported")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).eval()
    theirs = reference.state_dict()
    for name, weight in exported.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported")
    ids = tokenizer(PROMPTS[2], return_tensors="np")["input_ids"]
    np.testing.assert_allclose(their_logits(exported, ids), their_logits(reference, ids), rtol=0, atol=LOGITS_ATOL)
    assert exported.generation_config.eos_token_id == [2]


def test_token_ids_equal_the_references(checkpoint: Path, gguf_file: Path) -> None:
    ours = Tokenizer.load(checkpoint)
    from_folder = transformers.AutoTokenizer.from_pretrained(checkpoint)
    from_gguf = transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    for text in TEXTS:
        assert ours.encode(text) == from_folder.encode(text, add_special_tokens=False), text
        # The reference joins a space with the first digit after it, which the file's own rules (`smollm`) do not.
        spaced = text.translate({ord(digit): None for digit in "0123456789"})
        assert ours.encode(spaced) == from_gguf.encode(spaced, add_special_tokens=False), spaced
    assert [ours.decode([index]) for index in ours.encode(" 1024")] == [" ", "1", "0", "2", "4"]
    talk = [{"role": "user", "content": "What is 3 + 4?"}]
    theirs = from_folder.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert ours.apply_chat_template(talk) == list(theirs)
