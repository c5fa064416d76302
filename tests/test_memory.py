"""The estimate before the first compilation agrees with what XLA allocates, and counts exactly what is there."""

import ctypes
import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rljax.learner.step import Learner
from rljax.memory import Estimate, Part, activation_bytes, estimate, give_back_freed
from rljax.mesh import bytes_per_device, data_shards
from rljax.models.arch import Arch
from tests.tiny_model import (
    ARCH,
    batch_of,
    config_of,
    engine_of,
    first_state,
    host_params,
    learner_of,
    mesh_of,
    published,
    some_groups,
)

WITHIN = 1.5
"""How far an estimate may be from what XLA says."""
MIDDLE = dataclasses.replace(
    ARCH, vocab_size=2048, num_layers=8, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, ffn_dim=384
)
SHORT, LONG = (4, 200, 56), (1, 968, 56)
"""Rows of a micro-batch on a device, and tokens of prompt and completion; in long rows scores are most of what a layer uses."""


def found(arch: Arch, mesh: str, remat: str, rows: int, prompt: int, completion: int, moments: str) -> tuple[int, int]:
    """Return what the estimate and what XLA says of the memory of a train step on one device."""
    devices = mesh_of(mesh)
    config = config_of(
        data_shards(devices),
        model={"remat": remat},
        train={"micro_batch_size_per_device": rows},
        sampler={"max_prompt_length": prompt, "max_completion_length": completion},
        optimizer={"moments_dtype": moments},
    )
    learner = Learner(arch, devices, config)
    with jax.set_mesh(devices):
        batch = learner.put(batch_of(learner, some_groups()))
        real = learner._step.lower(learner.abstract_state, batch, None, None, None).compile().memory_analysis()
    assert real is not None, "XLA:CPU knows"
    parts = {part.name: part.size for part in estimate(config, learner, engine_of()).parts}
    names = ("parameters", "optimizer state", "gradients", "activations of a micro-batch")
    return sum(parts[name] for name in names), real.argument_size_in_bytes + real.temp_size_in_bytes


@pytest.mark.parametrize(
    "case",
    [
        (ARCH, "one", "dots", 4, 24, 16, "float32"),
        (MIDDLE, "one", "dots", *SHORT, "float32"),
        (MIDDLE, "one", "full", *SHORT, "int8"),
        (MIDDLE, "one", "offload", *SHORT, "float32"),
        (MIDDLE, "fsdp", "none", *SHORT, "float32"),
        (MIDDLE, "one", "full", *LONG, "float32"),
        (MIDDLE, "one", "none", *LONG, "float32"),
    ],
)
def test_the_step_takes_about_what_was_estimated(case: tuple[Any, ...]) -> None:
    ours, real = found(*case)
    assert real / WITHIN < ours < real * WITHIN


def test_the_gradients_of_all_layers_exist_once() -> None:
    deep = dataclasses.replace(ARCH, vocab_size=256, num_layers=24, embed_dim=64, num_heads=4, num_kv_heads=2, ffn_dim=256)
    _, real = found(deep, "one", "full", 4, 24, 8, "float32")
    learner = Learner(deep, mesh_of("one"), config_of())
    trained = bytes_per_device(learner.abstract_state.params)
    # Parameters and two moments are arguments; a second copy of the gradients would take it above five.
    assert 4 * trained < real < 4.7 * trained


def test_scores_are_counted_where_a_query_may_see_a_key() -> None:
    def size(prompt: int, rows: int) -> int:
        sampler = {"max_prompt_length": prompt, "max_completion_length": 64}
        options = {"model": {"remat": "full"}, "train": {"micro_batch_size_per_device": rows}, "sampler": sampler}
        return activation_bytes(Learner(MIDDLE, mesh_of("one"), config_of(1, **options)))

    # 128 queries with 128 keys, 128 with 256 and so on, of four heads, in three float32 arrays. All else is that of the tokens.
    one_long, two_short = (128 * sum(range(128, length + 1, 128)) for length in (2048, 1024))
    assert size(1984, 1) - size(960, 2) == 3 * 4 * 4 * (one_long - 2 * two_short)


def held(tree: Any) -> int:
    """Return what lies on the first device."""
    first = jax.devices()[0]
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards if shard.device == first]
    return sum(shard.data.nbytes for shard in shards)


def test_what_stays_is_counted_exactly() -> None:
    learner, engine = learner_of("tensor", algorithm={"beta": 0.1}), engine_of("tensor")
    parts = {part.name: part.size for part in estimate(learner.config, learner, engine).parts}
    state = first_state(learner)
    assert parts["parameters"] == held(state.params) == parts["reference"]
    assert parts["optimizer state"] == held(state.optimizer)
    assert parts["gradients"] == parts["parameters"] + held({**state.params, "layers": {}})
    assert parts["sampler's cache"] == held(engine._state)
    assert parts["sampler's weights"] == held(published(engine, host_params()))
    assert parts["critic"] == 0
    small = learner_of("tensor", sampler={"weights_dtype": "int8"})
    parts = {part.name: part.size for part in estimate(small.config, small, engine).parts}
    assert parts["sampler's weights"] == held(published(engine, host_params(), weights_dtype="int8"))
    eighth = engine_of("tensor", cache_dtype="int8")
    parts = {part.name: part.size for part in estimate(learner.config, learner, eighth).parts}
    assert parts["sampler's cache"] == held(eighth._state)
    keys_and_values = held(engine._state.cache) // 4  # numbers, with a scale of four bytes for each head's channels
    assert held(eighth._state.cache) == keys_and_values + 4 * keys_and_values // ARCH.head_dim


def test_a_critic_a_moving_reference_and_smaller_moments_are_counted() -> None:
    engine, plain = engine_of(), learner_of("one")
    before = {part.name: part.size for part in estimate(plain.config, plain, engine).parts}
    changes: dict[str, dict[str, Any]] = {
        "critic": {"algorithm": {"advantage": "gae"}},
        "reference": {"algorithm": {"beta": 0.1, "reference_sync_steps": 1}},
        "optimizer state": {"optimizer": {"moments_dtype": "bfloat16"}},
    }
    after = {}
    for name, sections in changes.items():
        learner = learner_of("one", **sections)
        after[name] = {part.name: part.size for part in estimate(learner.config, learner, engine).parts}[name]
    assert before["critic"] == before["reference"] == 0
    assert after["reference"] == before["parameters"]
    assert 3 * 0.6 * before["parameters"] < after["critic"] < 3 * before["parameters"], "no output head, but two moments"
    assert after["optimizer state"] == pytest.approx(before["optimizer state"] / 2, abs=16)
    sizes = []
    for kind in ("bfloat16", "int8"):
        learner = Learner(MIDDLE, mesh_of("one"), config_of(1, optimizer={"moments_dtype": kind}))
        sizes.append({part.name: part.size for part in estimate(learner.config, learner, engine).parts}["optimizer state"])
    assert sizes[1] == pytest.approx(sizes[0] / 2 * (1 + 4 / 64), rel=0.02), "a byte, and a scale of four for each 64"


def test_activations_fall_with_what_the_warning_names() -> None:
    size = activation_bytes(learner_of("one"))
    assert (
        activation_bytes(learner_of("one", model={"remat": "full"}))
        < size
        < activation_bytes(learner_of("one", model={"remat": "none"}))
    )
    assert activation_bytes(learner_of("one", train={"micro_batch_size_per_device": 2})) < size
    assert activation_bytes(learner_of("tensor")) < size


def test_tokens_are_those_of_the_longest_and_of_half_as_long_rollouts() -> None:
    learner = learner_of("one")
    told = estimate(learner.config, learner, engine_of())
    assert told.most_tokens == 8 * 4 * (24 + 16)
    assert told.expected_tokens == 8 * (12 + 4 * 8)


def test_too_little_memory_is_a_warning_that_names_what_to_lower() -> None:
    parts = (
        Part("parameters", 8_000_000_000, ("mesh.fsdp",)),
        Part("gradients", 1, ()),
        Part("sampler's cache", 2_000_000, ("sampler.slots",)),
    )
    fits, too_small = (Estimate(100, 50, parts, available).lines() for available in (9_000_000_000, 7_000_000_000))
    assert fits[0] == "tokens per step: 100 at most, 50 if rollouts are half as long"
    assert fits[1:] == [
        "memory: parameters 8.00 GB",
        "memory: gradients 0.01 MB",
        "memory: sampler's cache 2.00 MB",
        "memory: total 8.00 GB of 9.00 GB on each device, estimated",
    ]
    assert "mesh.fsdp" in too_small[-1]
    assert "sampler.slots" in too_small[-1]
    assert Estimate(100, 50, parts, None).lines()[-1] == "memory: total 8.00 GB on each device, estimated"


def test_bytes_of_a_device_follow_layout_and_type() -> None:
    place = jax.sharding.NamedSharding(mesh_of("tensor"), jax.sharding.PartitionSpec("fsdp", "tensor"))
    shapes = [jax.ShapeDtypeStruct((8, 6), dtype, sharding=place) for dtype in (jnp.float32, jnp.bfloat16, jnp.int4, bool)]
    assert [bytes_per_device([shape]) for shape in shapes] == [24, 12, 3, 6]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="no glibc")
def test_what_was_freed_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    allocated, size, count = ctypes.CDLL(None), 2**16, 4096  # each below what malloc takes from the system by itself
    allocated.malloc.restype, allocated.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [allocated.malloc(size) for _ in range(count)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    for piece in pieces[:-1]:  # the last one keeps the heap from shrinking at its end
        allocated.free(piece)
    before = resident()
    give_back_freed()
    assert before - resident() > size * count // 2
    allocated.free(pieces[-1])
