"""Every family computes what the reference library computes, and its checkpoints come back bit by bit."""

import dataclasses
import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from rljax.models import decoder
from rljax.models.arch import Arch
from rljax.models.hf import open_hf, write_hf
from rljax.models.hf_config import FAMILIES, arch_from_config
from rljax.models.layout import slots, view
from rljax.pytree import Params
from tests.models.families import CASES, make, save, stored
from tests.models.oracle import F32, load_hf, our_completions, our_logits, random_ids, their_logits

LOGITS_ATOL = 2e-5  # two float32 programs that sum in different orders; logits are of the order 3
GRADIENT_RTOL = 1e-3  # of the largest entry of each tensor's gradient
SAME_PROGRAM_ATOL = 2e-5  # our own decoder under another layout of the same tokens
LENGTH = 24  # four windows


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def one(name: str) -> tuple[Any, Path, Arch, Params]:
        folder = tmp_path_factory.mktemp(name)
        model = save(name, folder)
        return model, folder, *load_hf(folder)

    return one


@partial(jax.jit, static_argnums=0)
def our_gradient(arch: Arch, params: Params, ids: Any) -> Params:
    def loss(params: Params) -> Any:
        model = decoder.merge(arch, params)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        logits = decoder.logits(model, model(ids, positions, jnp.ones_like(ids), dtype=F32)[0])[:, :-1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], axis=-1)
        return -chosen.mean()

    return jax.grad(loss)(params)


def their_gradient(name: str, ids: np.ndarray, folder: Path) -> dict[str, np.ndarray]:
    """Return the reference's gradient under the names of a checkpoint: saved as if it were the weights."""
    model = make(name)
    tokens = torch.tensor(ids)
    logits = model(tokens).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_every_family_has_a_case(saved: Any) -> None:
    assert {saved(name)[2].family for name in CASES} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_references(saved: Any, name: str) -> None:
    model, _, arch, params = saved(name)
    ids = random_ids(3, LENGTH)
    theirs = their_logits(model, ids)
    assert np.abs(theirs).max() > 1  # else small differences prove nothing
    np.testing.assert_allclose(our_logits(arch, params, ids), theirs, rtol=0, atol=LOGITS_ATOL)


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_references(saved: Any, name: str, tmp_path: Path) -> None:
    _, _, arch, params = saved(name)
    ids = random_ids(3, LENGTH)
    theirs, ours = their_gradient(name, ids, tmp_path), jax.tree.map(np.asarray, our_gradient(arch, params, ids))
    for slot in slots(arch):
        expected = theirs[slot.tensor][slot.offset : slot.offset + slot.shape[0]]
        largest = np.abs(expected).max()
        assert largest > 0, slot.name
        found = view(ours, slot).reshape(slot.shape)
        np.testing.assert_allclose(found, expected, rtol=0, atol=GRADIENT_RTOL * largest, err_msg=slot.name)


@pytest.mark.parametrize("name", CASES)
def test_cached_decode_equals_the_full_forward(saved: Any, name: str) -> None:
    _, _, arch, params = saved(name)
    prompts = [random_ids(3).tolist(), random_ids(11, seed=1).tolist()]
    tokens, logp = our_completions(arch, params, prompts, 13, temperature=1.0)
    for row, prompt in enumerate(prompts):
        # Both rows have one length, so that one program serves them: what comes later changes nothing.
        whole = np.array([[*prompt, *tokens[row]] + [3] * (11 - len(prompt))])
        full = our_logits(arch, params, whole)[0, len(prompt) - 1 : len(prompt) + 12].astype(np.float64)
        expected = full[np.arange(13), tokens[row]] - np.log(np.exp(full).sum(1))
        np.testing.assert_allclose(logp[row], expected, rtol=0, atol=SAME_PROGRAM_ATOL)


@pytest.mark.parametrize("name", CASES)
def test_padding_on_either_side_and_neighbours_change_nothing(saved: Any, name: str) -> None:
    _, _, arch, params = saved(name)
    ids = random_ids(3, LENGTH)
    plain = our_logits(arch, params, ids)
    # Left padding, right padding, and two sequences in one row, in the shape of the first test.
    padded, positions, segments = (np.zeros((3, LENGTH), np.int64) for _ in range(3))
    for row, (begin, length, source) in enumerate([(7, 17, 0), (0, 15, 1), (0, 14, 2)]):
        where = slice(begin, begin + length)
        padded[row, where], positions[row, where], segments[row, where] = ids[source, :length], np.arange(length), 1
    padded[2, 14:], positions[2, 14:], segments[2, 14:] = ids[0, :10], np.arange(10), 2
    out = our_logits(arch, params, padded, positions, segments)
    assert np.isfinite(out).all()
    for found, expected in (
        (out[0, 7:], plain[0, :17]),
        (out[1, :15], plain[1, :15]),
        (out[2, :14], plain[2, :14]),
        (out[2, 14:], plain[0, :10]),
    ):
        np.testing.assert_allclose(found, expected, rtol=0, atol=SAME_PROGRAM_ATOL)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_comes_back_bit_by_bit(saved: Any, name: str, tmp_path: Path) -> None:
    model, folder, _, _ = saved(name)
    assert write_hf(tmp_path, open_hf(folder), "float32", 40_000) == []
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert stored(tmp_path) == stored(folder)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(again) is type(model)
    ids = random_ids(3, LENGTH)
    assert their_logits(again, ids).tobytes() == their_logits(model, ids).tobytes()


@pytest.mark.parametrize("name", CASES)
def test_all_forms_of_a_configuration_mean_the_same(saved: Any, name: str, tmp_path: Path) -> None:
    model, folder, arch, _ = saved(name)
    assert not [notice for notice in open_hf(folder).notices if "longrope" not in notice]
    write_hf(tmp_path, open_hf(folder), "float32", 10**9)
    ours = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in ours.items() if key != "rope_parameters"}
    full = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": ours["architectures"]}
    reread = json.loads(transformers.AutoConfig.from_pretrained(tmp_path).to_json_string(use_diff=False))
    for config in (ours, old, full, reread):
        found, notices = arch_from_config(config)
        assert found == arch
        assert not [notice for notice in notices if "longrope" not in notice]
    assert Arch.from_json(arch.to_json()) == arch


def test_dynamic_and_longrope_are_fixed_to_one_length(tmp_path: Path) -> None:
    length = 48
    ids = random_ids(1, length)
    model = save("llama", tmp_path / "a", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
                 max_position_embeddings=16)  # fmt: skip
    arch, params = load_hf(tmp_path / "a")
    assert arch.max_position == 16
    np.testing.assert_allclose(
        our_logits(arch, params, ids[:, :16]), their_logits(model, ids[:, :16]), rtol=0, atol=LOGITS_ATOL
    )
    longer = dataclasses.replace(arch, max_position=length)
    np.testing.assert_allclose(our_logits(longer, params, ids), their_logits(model, ids), rtol=0, atol=LOGITS_ATOL)
    model = save("phi3-longrope", tmp_path / "b", original_max_position_embeddings=16)
    arch, params = load_hf(tmp_path / "b")
    assert arch.max_position == 16
    longer = dataclasses.replace(arch, max_position=length)
    np.testing.assert_allclose(our_logits(longer, params, ids), their_logits(model, ids), rtol=0, atol=LOGITS_ATOL)
