"""Layers of several kinds are scanned, so that depth costs no compile time; padding rows of the vocabulary never win."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.models.arch import Arch, Experts, Rope
from rljax.models.decoder import Run, abstract_params, decaying, init_params, logits, merge, runs, unstack
from rljax.pytree import leaf_names

PLAIN = Arch(
    vocab_size=24, num_layers=6, embed_dim=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_dim=12, rope=Rope(1e4),
    norm_eps=1e-5, tie_embeddings=True, max_position=64,
)  # fmt: skip
EXPERTS = Experts(count=4, per_token=2, ffn_dim=6, normalize=True, router_bias=True, bias=True)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("aaaa", [Run(0, 1, 4)]),
        ("abababab", [Run(0, 2, 4)]),
        ("aaaaabaaaaabaa", [Run(0, 6, 2), Run(12, 1, 2)]),
        ("aaabbbb", [Run(0, 1, 3), Run(3, 1, 4)]),
        ("abc", [Run(0, 1, 1), Run(1, 1, 1), Run(2, 1, 1)]),
        ("aaab" * 9, [Run(0, 4, 9)]),
    ],
)
def test_layers_are_split_into_repeating_periods(kinds: str, expected: list[Run]) -> None:
    found = runs(tuple(kinds))
    assert list(found) == expected
    assert "".join(kinds[run.first : run.first + run.period] * run.repeats for run in found) == kinds


def deep(periods: int) -> Arch:
    layers = range(3 * periods)
    return dataclasses.replace(
        PLAIN, num_layers=len(layers), window=4, windowed_layers=tuple(i for i in layers if i % 3), experts=EXPERTS,
        unrotated_layers=tuple(layers)[::3], dense_layers=tuple(layers)[1::3],
    )  # fmt: skip


def program(arch: Arch) -> str:
    rows = jax.ShapeDtypeStruct((2, 8), jnp.int32)

    def loss(params: Any, *rows: Any) -> Any:
        return jnp.sum(merge(arch, params)(*rows, dtype=jnp.dtype("float32"), remat="dots")[0])

    return jax.jit(jax.grad(loss)).lower(abstract_params(arch), rows, rows, rows).as_text()


def test_the_program_does_not_grow_with_depth() -> None:
    short, long = (len(program(deep(periods)).splitlines()) for periods in (2, 12))
    assert long < 1.02 * short


def test_rotations_are_computed_once_per_kind_of_layer() -> None:
    def tables(arch: Arch) -> int:
        rows = jax.ShapeDtypeStruct((2, 8), jnp.int32)
        traced = jax.make_jaxpr(lambda params, *rows: merge(arch, params)(*rows, dtype=jnp.dtype("float32"))[0])
        return str(traced(abstract_params(arch), rows, rows, rows)).count(" = sin ")

    arch = dataclasses.replace(deep(4), unrotated_layers=())
    assert tables(arch) == 1
    assert tables(dataclasses.replace(arch, windowed_rope=Rope(1e6))) == 2


def test_padding_rows_have_no_probability() -> None:
    arch = dataclasses.replace(PLAIN, valid_vocab=20)
    params = init_params(arch, 0)
    hidden = jnp.ones((1, 1, 8))
    found, plain = (np.asarray(logits(merge(a, params), hidden))[0, 0] for a in (arch, PLAIN))
    assert np.array_equal(found[:20], plain[:20])
    assert np.all(found[20:] == -np.inf)


def test_every_layer_gets_its_own_part_of_the_stack() -> None:
    arch = deep(2)

    def number(leaf: Any) -> Any:
        return jnp.broadcast_to(jnp.arange(leaf.shape[0]).reshape(-1, *(1,) * (len(leaf.shape) - 1)), leaf.shape)

    separate = unstack(arch, jax.tree.map(number, abstract_params(arch)))
    assert jax.tree.map(jnp.shape, separate) == jax.tree.map(jnp.shape, abstract_params(arch, stacked=False))
    layers = jax.tree.map(lambda leaf: leaf.max(), separate["layers"])
    assert [int(layer["qkv"]) for layer in layers.values()] == [0, 1, 2, 3, 4, 5]
    assert {i: int(layer["gate_up"]) for i, layer in layers.items() if "gate_up" in layer} == {1: 0, 4: 1}
    assert {i: int(layer["moe"]["router"]) for i, layer in layers.items() if "moe" in layer} == {0: 0, 2: 1, 3: 2, 5: 3}


def test_weight_decay_is_for_matrices_alone() -> None:
    arch = dataclasses.replace(
        deep(1), qkv_bias=True, out_bias=True, sinks=True, qk_norm="all", post_norm=True, tie_embeddings=False
    )
    names = leaf_names(decaying(arch))
    decayed = {name for name, yes in zip(names, jax.tree.leaves(decaying(arch)), strict=True) if yes}
    matrices = {"qkv", "out", "gate_up", "down", "moe.router", "moe.gate_up", "moe.down"}
    assert decayed == {"embed", "head", *(f"layers.{name}" for name in matrices)}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"window": 4}, "window"),
        ({"windowed_layers": (1,)}, "window"),
        ({"window": 4, "windowed_layers": (6,)}, "windowed_layers"),
        ({"window": 4, "windowed_layers": (2, 1)}, "windowed_layers"),
        ({"dense_layers": (1,)}, "dense_layers"),
        ({"valid_vocab": 25}, "valid_vocab"),
        ({"rope": Rope(1e4, rotary_fraction=0.3)}, "rotary_fraction"),
    ],
)
def test_switches_that_contradict_each_other_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(PLAIN, **changes)
