"""The table of tensors is one-to-one and moves numbers without arithmetic."""

import numpy as np
import pytest

from rljax.models.arch import Arch, Rope
from rljax.models.layout import empty_params, interleaved_to_half, slots, view

ARCH = Arch(
    vocab_size=11, num_layers=2, embed_dim=6, num_heads=6, num_kv_heads=3, head_dim=4, ffn_dim=5,
    rope=Rope(1e4), norm_eps=1e-5, tie_embeddings=False, max_position=32,
)  # fmt: skip


def leaves(tree):
    return [leaf for value in tree.values() for leaf in (leaves(value) if isinstance(value, dict) else [value])]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_fill_every_element_exactly_once(dtype: str) -> None:
    params = empty_params(ARCH, np.dtype(dtype))
    for leaf in leaves(params):
        leaf[...] = 0
    for slot in slots(ARCH):
        part = view(params, slot)
        assert part.size == np.prod(slot.shape)
        part[...] += np.asarray(1, part.dtype)
    assert all((leaf == 1).all() for leaf in leaves(params))
    assert len({slot.name for slot in slots(ARCH)}) == len(slots(ARCH))


def test_query_rows_are_head_major() -> None:
    params = empty_params(ARCH, np.dtype("float32"))
    slot = next(slot for slot in slots(ARCH) if slot.name == "model.layers.1.self_attn.q_proj.weight")
    rows = np.random.default_rng(0).normal(size=slot.shape).astype(np.float32)
    part = view(params, slot)
    part[...] = rows.reshape(part.shape)
    k, m, c = 2, 1, 3  # the second query head of the third key-value head: head 5
    assert np.array_equal(params["layers"]["qkv"][1, :, k, m, c], rows[5 * 4 + c])


def test_interleaved_rows_become_half_rows() -> None:
    assert interleaved_to_half(np.arange(4), 1).tolist() == [0, 2, 1, 3]
    assert interleaved_to_half(np.arange(12), 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
