"""The table of tensors is one-to-one and moves numbers without arithmetic, for every family."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from rljax.models import layout
from rljax.models.arch import Arch, Experts, Rope
from rljax.models.decoder import count
from rljax.models.layout import Slot, empty_params, interleaved_to_half, part_of, slices, slots, tensor_shapes, tiles, view

ARCH = Arch(
    vocab_size=11, num_layers=2, embed_dim=6, num_heads=6, num_kv_heads=3, head_dim=4, ffn_dim=5,
    rope=Rope(1e4), norm_eps=1e-5, tie_embeddings=False, max_position=32,
)  # fmt: skip
EXPERTS = Experts(count=3, per_token=2, ffn_dim=7, normalize=True)

ARCHS = {
    "plain": ARCH,
    "tied": dataclasses.replace(ARCH, tie_embeddings=True),
    "biased": dataclasses.replace(ARCH, qkv_bias=True, out_bias=True),
    "norms around": dataclasses.replace(ARCH, post_norm=True, qk_norm="head"),
    "norms behind": dataclasses.replace(ARCH, pre_norm=False, post_norm=True, qk_norm="all"),
    "fused": dataclasses.replace(ARCH, family="phi3"),
    "separate experts": dataclasses.replace(ARCH, family="mixtral", experts=EXPERTS),
    "some experts": dataclasses.replace(ARCH, family="qwen3_moe", num_layers=4, experts=EXPERTS, dense_layers=(1,)),
    "stacked experts": dataclasses.replace(
        ARCH, family="gpt_oss", sinks=True, experts=dataclasses.replace(EXPERTS, router_bias=True, bias=True)
    ),
}


def leaves(tree: Any) -> list[np.ndarray]:
    return [leaf for value in tree.values() for leaf in (leaves(value) if isinstance(value, dict) else [value])]


def slot_of(arch: Arch, name: str) -> Slot:
    return next(slot for slot in slots(arch) if slot.name == name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHS)
def test_slots_fill_every_element_exactly_once(name: str, dtype: str) -> None:
    arch = ARCHS[name]
    params = empty_params(arch, np.dtype(dtype))
    for leaf in leaves(params):
        leaf[...] = 0
    for slot in slots(arch):
        part = view(params, slot)
        assert part.size == np.prod(slot.shape)
        part[...] += np.asarray(1, part.dtype)
    assert all((leaf == 1).all() for leaf in leaves(params))
    assert len({slot.name for slot in slots(arch)}) == len(slots(arch))
    assert sum(int(np.prod(shape)) for shape in tensor_shapes(slots(arch)).values()) == count(arch)


@pytest.mark.parametrize("tile_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize("name", ARCHS)
def test_tiles_are_the_rows_of_a_slot_in_order(name: str, tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_TILE_BYTES", tile_bytes)
    arch = ARCHS[name]
    pieces = slices(arch)
    assert sum(piece.size for piece in pieces) == count(arch)
    assert {slot.name for piece in pieces for slot in piece.slots} == {slot.name for slot in slots(arch)}
    for piece in pieces:
        numbers = np.arange(piece.size, dtype=np.float32).reshape(piece.shape)
        for slot in piece.slots:
            found = list(tiles(numbers, slot))
            assert [first for first, _, _ in found] == [0, *(last for _, last, _ in found[:-1])]
            assert found[-1][1] == slot.shape[0]
            rows = [part.reshape(last - first, *slot.shape[1:]) for first, last, part in found]
            assert np.array_equal(np.concatenate(rows), part_of(numbers, slot).reshape(slot.shape))


def test_a_slice_is_one_layer_with_all_of_its_experts() -> None:
    held = {(piece.target, piece.layer): piece for piece in slices(ARCHS["some experts"])}
    assert [layer for target, layer in held if target == "layers.moe.gate_up"] == [0, 1, 2]
    assert [layer for target, layer in held if target == "layers.gate_up"] == [0]
    piece = held["layers.moe.gate_up", 1]
    assert (piece.shape, len(piece.slots)) == ((3, 6, 2, 7), 6)
    assert piece.slots[3].name == "model.layers.2.mlp.experts.1.up_proj.weight"  # layer 1 is the dense one


def test_query_rows_are_head_major() -> None:
    params = empty_params(ARCH, np.dtype("float32"))
    slot = slot_of(ARCH, "model.layers.1.self_attn.q_proj.weight")
    rows = np.random.default_rng(0).normal(size=slot.shape).astype(np.float32)
    part = view(params, slot)
    part[...] = rows.reshape(part.shape)
    k, m, c = 2, 1, 3  # the second query head of the third key-value head: head 5
    assert np.array_equal(params["layers"]["qkv"][1, :, k, m, c], rows[5 * 4 + c])


def test_fused_tensors_are_rows_below_each_other() -> None:
    arch = ARCHS["fused"]
    names = [slot.name.removeprefix("model.layers.0.") for slot in slots(arch) if slot.tensor.endswith("qkv_proj.weight")][:3]
    assert names == [f"self_attn.qkv_proj.weight[{rows}]" for rows in ("0:24", "24:36", "36:48")]
    shapes = tensor_shapes(slots(arch))
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (48, 6)
    assert shapes["model.layers.1.mlp.gate_up_proj.weight"] == (10, 6)
    assert slot_of(arch, "model.layers.1.mlp.gate_up_proj.weight[5:10]").part == "up"


def test_stacked_experts_take_turns_with_gate_and_up() -> None:
    arch = ARCHS["stacked experts"]
    params = empty_params(arch, np.dtype("float32"))
    slot = slot_of(arch, "model.layers.1.mlp.experts.gate_up_proj")
    values = np.random.default_rng(0).normal(size=slot.shape).astype(np.float32)
    part = view(params, slot)
    part[...] = values.reshape(part.shape)
    gate_up = params["layers"]["moe"]["gate_up"]
    assert np.array_equal(gate_up[1, :, :, 0], values[:, :, 0::2])
    assert np.array_equal(gate_up[1, :, :, 1], values[:, :, 1::2])


def test_interleaved_rows_become_half_rows() -> None:
    assert interleaved_to_half(np.arange(4), 1).tolist() == [0, 2, 1, 3]
    assert interleaved_to_half(np.arange(12), 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
