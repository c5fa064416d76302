"""Moments in 8 bits: codes by hand, errors within their blocks, AdamW's direction, and a layout that needs no exchange."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.checkpoint import CheckpointStore
from rljax.config import OptimizerConfig
from rljax.learner.moments import Int8Moment, block_of, from_codes, kept, restored, to_codes
from rljax.learner.optimizer import Optimizer
from rljax.learner.state import _placed
from rljax.learner.step import Learner
from rljax.mesh import LEARNER_RULES, data_shards, param_shardings
from rljax.pytree import leaf_names
from rljax.records import RunMeta
from tests.tiny_model import ARCH, config_of, learner_of, mesh_of

FLOAT32 = 2e-6
"""Relative rounding of a magnitude in float32: its line begins below 0."""
LIKENESS = 0.97
"""Cosine between directions of codes and of float32 where gradients of a block differ by up to a thousand: there second moments
are a million times smaller than the largest, and codes a factor of two apart."""
WIDE = dataclasses.replace(ARCH, embed_dim=256, head_dim=64, ffn_dim=384)
EIGHT = {"optimizer": {"moments_dtype": "int8", "b1": 0.9, "eps": 1e-8, "learning_rate": 1e-3}}


def tree_code(byte: str) -> float:
    """Return what the bits of a code stand for, before the largest becomes 1: the dynamic tree, read bit by bit."""
    zeros = len(byte) - len(byte.lstrip("0"))
    rest = byte[zeros + 1 :]
    if zeros == len(byte):
        return 0.0
    part = int(rest, 2) if rest else 0
    edges = np.linspace(0.1, 1.0, 2 ** len(rest) + 1)
    return 10.0**-zeros * (edges[part] + edges[part + 1]) / 2


def magnitudes(signed: bool) -> np.ndarray:
    bits = 7 if signed else 8
    table = np.array([tree_code(f"{code:0{bits}b}") for code in range(2**bits)])
    return table / table[-1]


def numpy_codes(x: np.ndarray, draws: np.ndarray, block: int, signed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes and scales of blocks along the last dim, and how far each draw was from the other code."""
    table = magnitudes(signed)
    blocks = np.float64(x).reshape(*x.shape[:-1], -1, block)
    scale = np.abs(blocks).max(-1)
    size = (np.abs(blocks) / np.where(scale == 0, 1, scale)[..., None]).reshape(x.shape)
    below = np.clip(np.searchsorted(table, size, side="right") - 1, 0, len(table) - 2)
    share = (size - table[below]) / (table[below + 1] - table[below])
    margin = np.abs((np.float64(draws) + 0.5) / 2**16 - share)
    code = below + ((np.float64(draws) + 0.5) / 2**16 < share)
    if not signed:
        code = np.where(x > 0, np.maximum(code, 1), code)
    return np.where(x < 0, -code, code), scale, margin


def numpy_values(codes: np.ndarray, scale: np.ndarray, block: int, signed: bool) -> np.ndarray:
    return np.sign(codes) * magnitudes(signed)[np.abs(codes)] * np.repeat(scale, block, axis=-1)


def some_moments(signed: bool, shape: tuple[int, ...] = (5, 256)) -> np.ndarray:
    """Return numbers of many orders of magnitude, with a block of zeros and one of a single large number."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) * 10.0 ** rng.uniform(-9, 3, shape)
    x[1, 64:128] = 0.0
    x[2] = rng.normal(size=shape[1])
    x[2, 0] = 1e6
    return (x if signed else x * x).astype(np.float32)


def some_draws(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 2**16, shape, np.uint16)


encode = jax.jit(to_codes, static_argnames=("dim", "block", "signed"))


@pytest.mark.parametrize(("signed", "count", "least"), [(True, 128, 5.5e-7), (False, 256, 5.5e-8)])
def test_codes_are_the_dynamic_tree(signed: bool, count: int, least: float) -> None:
    table = magnitudes(signed)
    assert len(table) == count
    assert table[0] == 0
    assert table[-1] == 1
    assert table[1] == pytest.approx(least, rel=0.01)
    assert (np.diff(table) > 0).all()
    codes = np.arange(-127 if signed else 0, count, dtype=np.int8 if signed else np.uint8)
    codes = np.append(codes, np.zeros(-len(codes) % 64, codes.dtype))
    found = from_codes(Int8Moment(jnp.asarray(codes)[None], jnp.ones((1, len(codes) // 64))))[0]
    np.testing.assert_allclose(found, np.sign(codes) * table[np.abs(codes.astype(int))], rtol=FLOAT32)


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_gets_one_of_the_two_codes_beside_it(signed: bool) -> None:
    x = some_moments(signed)
    draws = some_draws(x.shape)
    found = encode(jnp.asarray(x), jnp.asarray(draws), dim=1, block=64, signed=signed)
    codes, scale, margin = numpy_codes(x, draws, 64, signed)
    np.testing.assert_array_equal(found.scale, np.float32(scale))
    clear = margin > 1e-4  # of the others float32 decides
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(np.asarray(found.codes)[clear], codes[clear])
    value = np.asarray(from_codes(found))
    np.testing.assert_allclose(value, numpy_values(np.asarray(found.codes, int), scale, 64, signed), rtol=FLOAT32)
    # The bound of a block: codes are nowhere further apart than in the first decade, 0.9 / 64 or 0.9 / 128 of the largest.
    width = 0.9 * np.repeat(scale, 64, axis=-1) / (64 if signed else 128)
    assert (np.abs(value - x) <= width * 1.01).all()
    assert (value[1, 64:128] == 0).all()
    assert np.isfinite(value).all()
    largest = np.abs(x).reshape(5, -1, 64).argmax(-1)
    rows, blocks = np.indices(largest.shape)
    np.testing.assert_allclose(value[rows, blocks * 64 + largest], x[rows, blocks * 64 + largest], rtol=FLOAT32)


def test_an_outlier_hurts_its_own_block_alone() -> None:
    x = np.random.default_rng(2).normal(size=(1, 256)).astype(np.float32)
    far = x.copy()
    far[0, 3] = 1e8
    draws = some_draws(x.shape)
    plain, hurt = (encode(jnp.asarray(y), jnp.asarray(draws), dim=1, block=64, signed=True) for y in (x, far))
    np.testing.assert_array_equal(plain.codes[:, 64:], hurt.codes[:, 64:])
    np.testing.assert_array_equal(plain.scale[:, 1:], hurt.scale[:, 1:])
    assert np.abs(np.asarray(from_codes(hurt))[0, 4:64]).max() < 1e8 * 1e-6, "what is 1e-8 of the largest has the lowest codes"


def test_rounding_is_right_on_average_and_a_second_moment_is_never_0() -> None:
    x = (10.0 ** np.linspace(-6.5, 0, 64)).astype(np.float32)[None]
    many = jax.jit(jax.vmap(lambda draws: from_codes(to_codes(jnp.asarray(x), draws, 1, 64, signed=False))))
    found = np.asarray(many(jnp.asarray(some_draws((4000, 1, 64)))), np.float64)
    assert (np.abs(found.mean(0) / x - 1) < 0.05).all(), "four standard errors where codes are a factor of 2 apart"
    tiny = encode(jnp.float32([[1.0, 1e-30, 0.0] + [1e-9] * 61]), jnp.zeros((1, 64), jnp.uint16) + 65535, 1, 64, signed=False)
    assert tiny.codes[0, :4].tolist() == [255, 1, 0, 1]


def test_what_is_not_finite_makes_its_block_so() -> None:
    for bad in (np.nan, np.inf):
        x = jnp.ones((1, 128)).at[0, 5].set(bad)
        value = np.asarray(from_codes(encode(x, jnp.zeros((1, 128), jnp.uint16), 1, 64, signed=True)))
        assert not np.isfinite(value[0, :64]).any()
        assert np.isfinite(value[0, 64:]).all()


@pytest.mark.parametrize("size", [1e-45, 1e-38, 3.4e38])
def test_the_smallest_and_largest_numbers_stay_finite(size: float) -> None:
    value = np.asarray(from_codes(encode(jnp.full((1, 64), size), jnp.zeros((1, 64), jnp.uint16), 1, 64, signed=False)))
    assert np.isfinite(value).all()


@pytest.mark.parametrize(
    ("names", "shape", "block"),
    [
        (("layers", "embed", "gate_up", "ffn"), (30, 576, 2, 1536), (3, 96)),
        (("layers", "ffn", "embed"), (30, 1536, 576), (2, 72)),
        (("layers", "embed", "kv_heads", "qkv", "head_dim"), (30, 576, 3, 5, 64), (4, 64)),
        (("vocab", "embed"), (49152, 576), (1, 72)),
        (("layers", "embed", "rank"), (30, 576, 16), (1, 72)),
        (("vocab", "embed"), (49152, 32), None),
        (("layers", "embed"), (30, 576), None),
        (("embed", "ffn"), (32, 64), None),
    ],
)
def test_blocks_have_64_to_127_numbers_of_matrices(names: Any, shape: Any, block: Any) -> None:
    assert block_of(names, shape) == block


def gradients_of(count: int) -> list[dict[str, np.ndarray]]:
    """Return gradients of a matrix whose columns differ by three orders of magnitude, of which some never have any."""
    rng = np.random.default_rng(3)
    scale = 10.0 ** rng.uniform(-3, 0, 128)
    scale[:8] = 0.0
    drawn = [(rng.normal(size=(64, 128)) * scale, rng.normal(size=128)) for _ in range(count)]
    return [{"w": w.astype(np.float32), "bias": bias.astype(np.float32)} for w, bias in drawn]


def test_updates_are_those_of_adamw_with_moments_that_go_through_codes() -> None:
    config = OptimizerConfig(moments_dtype="int8", learning_rate=0.01, b2=0.99, max_grad_norm=None)
    axes = {"w": ("embed", "ffn"), "bias": ("ffn",)}
    optimizer = Optimizer(config, lambda _: {"w": True, "bias": False}, axes)
    params = {"w": jnp.zeros((64, 128)), "bias": jnp.zeros(128)}
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    assert (state.moments[0].mu["w"].codes.dtype, state.moments[0].nu["w"].codes.dtype) == (jnp.int8, jnp.uint8)
    assert state.moments[0].mu["bias"].dtype == jnp.float32
    direction = np.zeros((64, 128))
    exact = {name: np.zeros((2, *leaf.shape)) for name, leaf in params.items()}
    for n, grads in enumerate(gradients_of(12), start=1):
        # The oracle takes the codes of the update before, which it has seen to be right, so that errors do not add up.
        old = [
            numpy_values(np.asarray(m.codes, int), np.asarray(m.scale), 64, signed)
            for m, signed in ((state.moments[0].mu["w"], True), (state.moments[0].nu["w"], False))
        ]
        first, second = 0.9 * old[0] + 0.1 * grads["w"], 0.99 * old[1] + 0.01 * np.float64(grads["w"]) ** 2
        direction = first / (1 - 0.9**n) / (np.sqrt(second / (1 - 0.99**n)) + config.eps)
        before, (params, state, _, _) = params, update(jax.tree.map(jnp.asarray, grads), state, params)
        np.testing.assert_allclose((before["w"] - params["w"]) / 0.01, direction, rtol=1e-3, atol=1e-4)
        for moment, value, signed in ((state.moments[0].mu["w"], first, True), (state.moments[0].nu["w"], second, False)):
            codes, scale, _ = numpy_codes(value, np.zeros(value.shape), 64, signed)
            np.testing.assert_allclose(moment.scale, scale, rtol=1e-5)
            assert np.isin(np.abs(np.asarray(moment.codes, int)) - np.abs(codes), (0, -1, 1)).all()
            table = magnitudes(signed)
            apart = np.abs(numpy_values(np.asarray(moment.codes, int), scale, 64, signed) - value) / np.repeat(scale, 64, -1)
            size = np.minimum(np.abs(value) / np.maximum(np.repeat(scale, 64, -1), 1e-30), 1 - 1e-9)
            at = np.clip(np.searchsorted(table, size, side="right") - 1, 0, len(table) - 2)
            assert (apart <= (table[at + 1] - table[at]) * 1.001 + 1e-7).all(), "a neighbour"
        for name in exact:
            exact[name][0] = 0.9 * exact[name][0] + 0.1 * grads[name]
            exact[name][1] = 0.99 * exact[name][1] + 0.01 * np.float64(grads[name]) ** 2
    wide = {name: e[0] / (1 - 0.9**12) / (np.sqrt(e[1] / (1 - 0.99**12)) + config.eps) for name, e in exact.items()}
    assert (np.asarray(params["w"])[:, :8] == 0).all(), "no gradient, no update"
    moved, want = direction[:, 8:].ravel(), wide["w"][:, 8:].ravel()
    cosine = moved @ want / np.linalg.norm(moved) / np.linalg.norm(want)
    assert cosine > LIKENESS
    assert np.linalg.norm(moved) == pytest.approx(np.linalg.norm(want), rel=0.05)


def test_float32_and_bfloat16_leave_no_codes_and_draws_depend_on_update_and_leaf() -> None:
    axes, moments = {"w": ("embed", "ffn")}, {"mu": {"w": jnp.asarray(some_moments(True, (64, 256)))}}
    assert kept(moments, "float32", jnp.int32(1), axes) is moments
    assert kept(moments, "bfloat16", jnp.int32(1), axes)["mu"]["w"].dtype == jnp.bfloat16
    one, again, other = (kept(moments, "int8", jnp.int32(n), axes)["mu"]["w"] for n in (1, 1, 2))
    np.testing.assert_array_equal(one.codes, again.codes)
    assert (one.codes != other.codes).mean() > 0.1
    assert restored({"w": one})["w"].dtype == jnp.float32


SHAPES = {"embed": (300, 256), "down": (2, 128, 256), "final_norm": (256,)}
NAMES = {"embed": ("vocab", "embed"), "down": ("layers", "ffn", "embed"), "final_norm": ("embed",)}
EXCHANGES = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_devices_exchange_no_codes_and_find_those_of_one(rule: Any) -> None:
    mesh, rng = mesh_of("tensor"), np.random.default_rng(4)
    optimizer = Optimizer(
        OptimizerConfig(moments_dtype="int8", rule=rule, learning_rate=0.01), lambda _: dict.fromkeys(NAMES, True), NAMES
    )
    grads, host = ({name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()} for _ in range(2))
    layout = param_shardings(mesh, {name: jnp.zeros(shape) for name, shape in SHAPES.items()}, NAMES, LEARNER_RULES)
    params = {name: jax.device_put(leaf, layout[name]) for name, leaf in host.items()}
    placed = _placed(jax.eval_shape(optimizer.init, params), params, mesh)
    state = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), optimizer.init(host), placed)

    def update(grads: Any, state: Any, params: Any) -> Any:
        found = optimizer.update(grads, state, params)
        return found.params, found.state

    out = layout, jax.tree.map(lambda leaf: leaf.sharding, placed)
    with jax.set_mesh(mesh):
        many = jax.jit(update, out_shardings=out).lower(jax.device_put(grads, layout), state, params).compile()
    text = many.as_text()
    assert text is not None
    exchanged = [
        line for line in text.splitlines() if any(f" {name}(" in line or f" {name}-start(" in line for name in EXCHANGES)
    ]
    if rule == "adamw":
        assert not exchanged, "nothing but the sum of the norm, an all-reduce"
    assert not [line for line in exchanged if "s8[" in line or "u8[" in line], "Newton-Schulz exchanges float32 alone"
    found, alone = many(jax.device_put(grads, layout), state, params), jax.jit(update)(grads, optimizer.init(host), host)
    for name, one, other in zip(leaf_names(alone), *map(jax.tree.leaves, (alone, found)), strict=True):
        if name.endswith("codes"):
            assert (np.asarray(one) == np.asarray(other)).mean() > 0.999, name
        else:
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4, err_msg=name)


def test_a_mesh_that_would_split_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh\.fsdp \(8\) must divide the 4 blocks of 64 numbers in .*'bfloat16'"):
        Learner(WIDE, mesh_of("fsdp"), config_of(8, **EIGHT))


def test_a_checkpoint_restores_on_another_mesh_bit_for_bit(tmp_path: Path) -> None:
    saved, other = (
        Learner(WIDE, mesh_of(m), config_of(data_shards(mesh_of(m)), **EIGHT)).abstract_state for m in ("tensor", "one")
    )
    rng = np.random.default_rng(5)

    def drawn(leaf: Any) -> jax.Array:
        floats = leaf.dtype == jnp.float32
        value = rng.normal(size=leaf.shape) if floats else rng.integers(0, 100, leaf.shape)
        return jax.device_put(value.astype(leaf.dtype), leaf.sharding)

    state = jax.tree.map(drawn, saved)
    assert {"optimizer.moments.0.nu.embed.codes", "optimizer.moments.0.nu.embed.scale"} < set(leaf_names(state))
    with CheckpointStore(tmp_path, 1) as store:
        store.save(1, state, RunMeta(1, 1, 0, 0, "hash", "tasks"))
        store.wait()
        back = store.restore(other)
    assert back is not None
    for path, old, new, like in zip(leaf_names(state), *map(jax.tree.leaves, (state, back.arrays, other)), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes(), path
        assert new.sharding.is_equivalent_to(like.sharding, new.ndim), path


def test_an_adapter_has_codes_where_its_factors_are_long_enough() -> None:
    config = config_of(1, **EIGHT, lora={"rank": 16})
    learner = Learner(WIDE, mesh_of("one"), config)
    state = learner.abstract_state
    adapter = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), state.params)
    update = jax.jit(learner.optimizer.update)(adapter, learner.init(adapter).optimizer, adapter)
    for leaf in jax.tree.leaves(update.params):
        np.testing.assert_allclose(leaf, 1 - 1e-3, rtol=1e-5)
    moments = state.optimizer.moments[0].nu["layers"]
    assert moments["o_proj"]["b"].codes.shape == state.params["layers"]["o_proj"]["b"].shape
    assert moments["gate_proj"]["a"].scale.shape == (2, 4, 16)
    assert learner_of("one").abstract_state.optimizer.moments[0].nu["embed"].dtype == jnp.float32


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_the_first_state_is_what_keeping_the_rules_own_gives(rule: str) -> None:
    axes = {"w": ("embed", "ffn"), "scale": ("embed",)}
    params = {"w": jnp.ones((64, 128)), "scale": jnp.ones(64)}
    config = OptimizerConfig(rule=rule, moments_dtype="int8", learning_rate=1e-3)
    optimizer = Optimizer(config, lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params), axes)
    wanted = jax.jit(lambda: kept(optimizer._rule.init(params), "int8", jnp.int32(0), axes))()
    jax.tree.map(np.testing.assert_array_equal, optimizer.init(params).moments, wanted)
