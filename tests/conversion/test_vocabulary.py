"""A tokenizer says which rows of the embedding are tokens; the others are kept, and never drawn."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rljax.conversion.sources import read_arch
from rljax.conversion.vocabulary import valid_rows
from rljax.convert import convert, read_checkpoint
from rljax.manifest import MANIFEST, read_manifest, seal
from rljax.models.gguf import open_gguf
from tests.models.gguf_files import metadata, write_gguf
from tests.models.oracle import VOCAB, make_llama, our_completions, save_llama, their_logits, tokenizer_files

TOKENS = 90
LOGP_ATOL = 1e-4  # two float32 programs that sum in different orders


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose last seven rows belong to no token; its best next token is often one of them."""
    folder = tmp_path_factory.mktemp("padded")
    save_llama(folder)
    (folder / "tokenizer.json").write_bytes(tokenizer_files(TOKENS)["tokenizer.json"])
    return folder


def tensors(folder: Path) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in load_file(folder / "model.safetensors").items()}


def test_padding_rows_are_never_drawn_and_go_back_as_they_came(padded: Path, tmp_path: Path) -> None:
    report = convert(padded, tmp_path / "there")
    assert report.notices == ("the last 7 rows of the embedding belong to no token: they are kept, and never drawn",)
    assert (report.arch.vocab_size, report.arch.valid_vocab) == (VOCAB, TOKENS)
    assert read_arch(tmp_path / "there") == report.arch
    convert(tmp_path / "there", tmp_path / "back")
    assert tensors(tmp_path / "back") == tensors(padded)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == VOCAB


def test_the_sampler_draws_as_if_the_rows_were_not_there(padded: Path, tmp_path: Path) -> None:
    convert(padded, tmp_path / "there", verify="none")
    found = read_checkpoint(tmp_path / "there")
    prompts = np.random.default_rng(1).integers(3, TOKENS, (6, 5))
    logits = their_logits(make_llama(), prompts)[:, -1]
    assert (logits.argmax(-1) >= TOKENS).any()  # else this test could not fail
    tokens, _ = our_completions(found.arch, found.params, prompts.tolist(), 1)
    assert np.array_equal(tokens[:, 0], logits[:, :TOKENS].argmax(-1))
    tokens, logp = our_completions(found.arch, found.params, prompts.tolist(), 1, temperature=1.0)
    assert tokens.max() < TOKENS
    expected = torch.log_softmax(torch.tensor(logits[:, :TOKENS]), -1).numpy()
    np.testing.assert_allclose(logp[:, 0], expected[np.arange(6), tokens[:, 0]], atol=LOGP_ATOL)


def test_a_checkpoint_from_before_learns_of_its_padding_when_it_is_rewritten(padded: Path, tmp_path: Path) -> None:
    convert(padded, tmp_path / "there", verify="none")
    shutil.copytree(tmp_path / "there", tmp_path / "before")
    arch = json.loads((tmp_path / "before" / "arch.json").read_text())
    (tmp_path / "before" / "arch.json").write_text(json.dumps({**arch, "valid_vocab": None}))
    manifest_of_changed_file(tmp_path / "before", "arch.json")
    convert(tmp_path / "before", tmp_path / "rewritten", to="orbax")
    assert read_arch(tmp_path / "rewritten").valid_vocab == TOKENS


def manifest_of_changed_file(folder: Path, name: str) -> None:
    """Write the manifest of a folder again, after one of its files was changed on purpose."""
    body = read_manifest(folder)
    (folder / MANIFEST).unlink()
    known = {path: facts for path, facts in body["files"].items() if path != name}
    seal(folder, {"leaves": body["leaves"]}, known)


def files(*added: Any, **others: Any) -> dict[str, bytes]:
    tokenizer = json.loads(tokenizer_files(10)["tokenizer.json"])
    tokenizer["added_tokens"] += [{"id": index, "content": text, "special": special} for index, text, special in added]
    return {"tokenizer.json": json.dumps(tokenizer).encode()} | {
        name.replace("__", "."): content if isinstance(content, bytes) else json.dumps(content).encode()
        for name, content in others.items()
    }


IMAGE = (10, "<image>", True)


def test_a_special_token_beyond_the_embedding_is_told_when_nothing_makes_it() -> None:
    valid, notices = valid_rows(files(IMAGE, tokenizer_config__json={"image_token": "<image>"}), 10, Path("m"))
    assert valid is None
    assert len(notices) == 1
    assert "<image>" in notices[0]
    assert valid_rows(files((11, "<image>", True)), 11, Path("m"))[0] == 10


@pytest.mark.parametrize(
    ("found", "rows"),
    [
        (files((10, "<image>", False)), 10),  # any text that spells it makes it
        (files(IMAGE), 9),  # a word of the vocabulary is beyond, too
        (files(IMAGE, tokenizer_config__json={"pad_token": "<image>"}), 10),
        (files(IMAGE, tokenizer_config__json={"eos_token": {"content": "<image>"}}), 10),
        (files(IMAGE, tokenizer_config__json={"chat_template": "{{ bos }}<image>"}), 10),
        (files(IMAGE, tokenizer_config__json={"chat_template": [{"name": "default", "template": "<image>"}]}), 10),
        (files(IMAGE, chat_template__jinja=b"<image>"), 10),
        (files(IMAGE, generation_config__json={"eos_token_id": [1, 10]}), 10),
        (files(IMAGE, generation_config__json={"eos_token_id": 10}), 10),
    ],
)
def test_an_id_beyond_the_embedding_that_may_be_used_is_refused(found: dict[str, bytes], rows: int) -> None:
    with pytest.raises(ValueError, match=f"has the id 10, but the model has {rows} rows"):
        valid_rows(found, rows, Path("m"))


def test_names_of_padding_rows_in_a_gguf_file_are_no_tokens(tmp_path: Path) -> None:
    meta = metadata()
    tokens = [*meta["tokenizer.ggml.tokens"][:-2], "[PAD95]", "[PAD96]"]
    types = [*meta["tokenizer.ggml.token_type"][:-2], 5, 5]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": ["h e"]}
    write_gguf(tmp_path / "model.gguf", make_llama().state_dict(), {**meta, **changes})
    found = open_gguf(tmp_path / "model.gguf")
    assert found.arch.vocab_size == VOCAB
    assert valid_rows(found.files, VOCAB, tmp_path / "model.gguf")[0] == VOCAB - 2
