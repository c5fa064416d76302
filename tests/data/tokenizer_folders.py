"""Tiny but real tokenizer folders, in the shapes that instruct models come in."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. What is 3 + 4? The answer is 7.",
    "You are a helpful assistant. user system tool model hello hello world, größer naïve 你好 🦊",
    '{"type": "function", "function": {"name": "add", "description": "Add two numbers", "parameters": {}}}',
]

CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if tools is not none %}
    {{- '<|start_header_id|>system<|end_header_id|>\\n\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + '\\n' }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- elif message.tool_calls is defined %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' + message.tool_calls[0].function | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if message.role == 'assistant' %}
            {%- generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}
        {%- else %}
            {{- message.content | trim + '<|eot_id|>' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

GEMMA = """\
{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

LLAMA2 = """\
{% for message in messages %}
{% if message.role == 'user' %}
{{ bos_token + '[INST] ' + message.content + ' [/INST]' }}
{% elif message.role == 'assistant' %}
{{ ' ' + message.content + ' ' + eos_token }}
{% endif %}
{% endfor %}
"""

REASONING = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' and not loop.last %}
        {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers <& 'größer'>",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
        },
    }
]


def byte_level(special: list[str], size: int = 420) -> Tokenizer:
    """Train a byte-level BPE (the GPT-2, Llama 3 and Qwen kind)."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 4, trainer)
    return backend


def sentencepiece_like(special: list[str], normalizer: Any, pre_tokenizer: Any) -> Tokenizer:
    """Train a BPE over `▁`-marked words with byte fallback (the Llama 2 and Gemma kind)."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=520, special_tokens=[*special, *raw], show_progress=False)
    backend.train_from_iterator([line.replace(" ", " ▁").split(" ") for line in CORPUS * 4], trainer)
    # The bytes are plain vocabulary, not added tokens: drop the mark that training put on them.
    description = json.loads(backend.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["content"] not in raw]
    return Tokenizer.from_str(json.dumps(description))


def save(folder: Path, backend: Tokenizer, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    """Write the folder of a checkpoint, without its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(described), encoding="utf-8")
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


def chatml(folder: Path) -> Path:
    """ChatML with a default system prompt and no BOS; the template is in the config."""
    backend = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    config = {"eos_token": "<|im_end|>", "bos_token": None, "pad_token": "<|endoftext|>", "chat_template": CHATML}
    return save(folder, backend, config, {"eos_token_id": [2, 0]})


def llama3(folder: Path) -> Path:
    """A template that writes BOS, a tokenizer that adds one as well, tools, a generation block; template in its own file."""
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    backend = byte_level(special)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]
    )
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<|begin_of_text|>", "normalized": False},
        "eos_token": "<|end_of_text|>",
        "chat_template": "never used: {{ nonsense }}",
    }
    save(folder, backend, config, {"eos_token_id": 1})
    (folder / "chat_template.jinja").write_text(LLAMA3, encoding="utf-8")
    return folder


def gemma(folder: Path) -> Path:
    """No system role, strict alternation, spaces become `▁` in the normaliser, two end tokens of which one is the eos."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    backend = sentencepiece_like(special, normalizers.Replace(" ", "▁"), None)
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "chat_template": GEMMA}
    return save(folder, backend, config, {"eos_token_id": [1, 5]})


def llama2(folder: Path) -> Path:
    """A space put before the first word only, and a template that writes BOS once per question."""
    backend = sentencepiece_like(["<unk>", "<s>", "</s>"], None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": LLAMA2}
    return save(folder, backend, config)


def reasoning(folder: Path) -> Path:
    """Two named templates, control tokens that are not marked special, and a template that drops old reasoning."""
    backend = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens(
        [AddedToken(text, special=False) for text in ("<think>", "</think>", "<tool_response>", "</tool_response>")]
    )
    templates = [
        {"name": "default", "template": REASONING},
        {"name": "tool_use", "template": "{{ tools | length }}" + REASONING},
    ]
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": templates}
    return save(folder, backend, config, {"eos_token_id": None})


FOLDERS = {"chatml": chatml, "llama3": llama3, "gemma": gemma, "llama2": llama2, "reasoning": reasoning}
