"""With windows, sinks, soft caps, experts and layers of several kinds, sampler, learner and meshes still agree."""

import dataclasses
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from rljax.config import MeshConfig
from rljax.learner.step import Learner
from rljax.mesh import build_mesh, data_shards
from rljax.models.arch import Experts, Rope
from rljax.models.block import CONTRACTED
from rljax.models.decoder import abstract_params
from rljax.models.int8 import Int8Weight
from rljax.pytree import Params
from rljax.sampler.engine import Engine
from tests.models.test_int8 import restored
from tests.tiny_model import ARCH as PLAIN
from tests.tiny_model import (
    STOP_IDS,
    batch_of,
    config_of,
    first_state,
    gradient,
    published,
    request,
    rollouts_of,
    run,
    some_requests,
)

GAP = 2e-5
"""Two float32 programs that sum in different orders; log-probabilities are of the order 6 (nats)."""
ONE_CODE, INT8_CACHE = 0.01, 0.05
"""Rounding keys and values of four layers by 0.5 % each moves logits of the order 2 by a few hundredths (nats); where a number
stands in the middle between two codes, its last bit decides, and that moves them by a fraction of it."""
ATOL = 5e-6
"""Float32 sums over devices in another order; gradients are of the order 1."""

ARCH = dataclasses.replace(
    PLAIN, num_layers=4, post_norm=True, norm_offset=True, embed_scale=True, qk_norm="all", qkv_bias=True, out_bias=True,
    sinks=True, query_scalar=5.0, attention_soft_cap=3.0, final_soft_cap=6.0, valid_vocab=290, window=5,
    windowed_layers=(0, 2), windowed_rope=Rope(100.0, rotary_fraction=0.5), unrotated_layers=(3,), gate="gelu_tanh",
    experts=Experts(count=4, per_token=2, ffn_dim=16, normalize=False, router_bias=True, bias=True), dense_layers=(1,),
)  # fmt: skip
MESHES = {
    "one": {"fsdp": 1},
    "expert": {"fsdp": 2, "expert": 2, "tensor": 2},
    "replica": {"replica": 2, "fsdp": 2, "expert": 2},
}


@cache
def params() -> Params:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.2, leaf.shape).astype(np.float32), abstract_params(ARCH))


def mesh_of(name: str) -> Mesh:
    return build_mesh(MeshConfig(**MESHES[name]), jax.devices()[: 1 if name == "one" else 8])


@cache
def engine_on(mesh: str, cache_dtype: str = "as-is") -> Engine:
    engine = Engine(
        ARCH, mesh_of(mesh), STOP_IDS, slots=8, max_prompt_length=24, max_completion_length=16,
        readers=4, decode_chunk_steps=5, reuse_cache=True, dtype="float32", cache_dtype=cache_dtype,
    )  # fmt: skip
    engine.set_weights(published(engine, params()), 0)
    return engine


@cache
def sampled(mesh: str) -> Any:
    requests = some_requests(4, 8)
    return requests, run(engine_on(mesh), requests)


@cache
def step_on(mesh: str) -> Any:
    devices = mesh_of(mesh)
    learner = Learner(ARCH, devices, config_of(data_shards(devices), sampler={"temperature": 1.0}))
    batch = batch_of(learner, rollouts_of(*sampled("one")))
    state = first_state(learner, params())
    scores = np.asarray(learner.score(state.params, learner.put(batch)))
    state, output = learner.step(state, learner.put(batch))
    return batch, scores, output.metrics["loss"], gradient(state)


def test_the_samplers_log_probabilities_are_the_learners() -> None:
    batch, scores, _, _ = step_on("one")
    assert batch.mask.sum() > 60
    assert np.abs((scores - batch.logp_behavior)[batch.mask]).max() < GAP


@pytest.mark.parametrize(("mesh", "cache_dtype", "most"), [("one", "as-is", GAP), ("expert", "int8", ONE_CODE)])
def test_a_turn_on_a_kept_cache_is_that_of_a_whole_prompt(mesh: str, cache_dtype: str, most: float) -> None:
    engine, turns, found = engine_on(mesh, cache_dtype), {}, []
    first = [request(("turns", attempt), range(20, 27), 6, cache_key=attempt) for attempt in range(4)]
    said = run(engine, first)
    engine.take_metrics()
    for kept in (True, False):
        later = [
            request(
                asked.ticket, (*asked.prompt, *said[asked.ticket].tokens.tolist(), 50, 51, 52), 8, cache_key=asked.cache_key
            )
            for asked in first
        ]
        turns[kept] = run(engine, later)
        assert (engine.take_metrics().get("cache/reused_fraction", 0.0) > 0.5) == kept
        for asked in first:
            engine.release(asked.cache_key)
    for ticket, done in turns[True].items():
        assert done.tokens.tolist() == turns[False][ticket].tokens.tolist()
        found.append(np.abs(done.logp - turns[False][ticket].logp))
    assert np.concatenate(found).max() < most
    assert np.median(np.concatenate(found)) < GAP


def test_in_8_bits_keys_and_values_move_log_probabilities_a_little() -> None:
    requests, plain = sampled("one")
    small = run(engine_on("expert", "int8"), requests)
    alike = [ticket for ticket, done in small.items() if done.tokens.tolist() == plain[ticket].tokens.tolist()]
    assert len(alike) > len(requests) / 2
    moved = np.concatenate([np.abs(small[ticket].logp - plain[ticket].logp) for ticket in alike])
    assert 10 * GAP < moved.mean() < INT8_CACHE


def test_padding_rows_of_the_vocabulary_are_never_drawn() -> None:
    drawn = np.concatenate([done.tokens for done in sampled("one")[1].values()])
    assert drawn.max() < 290
    assert drawn.max() > 250


@pytest.mark.parametrize("mesh", ["expert", pytest.param("replica", marks=pytest.mark.slow)])
def test_a_step_on_many_devices_is_the_step_on_one(mesh: str) -> None:
    (batch, scores, *single), (_, other, *sharded) = step_on("one"), step_on(mesh)
    np.testing.assert_allclose(other[batch.mask], scores[batch.mask], rtol=0, atol=GAP)
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(single[1])) > 0
    for one, many in zip(jax.tree.leaves(single), jax.tree.leaves(sharded), strict=True):
        np.testing.assert_allclose(many, one, rtol=0, atol=ATOL)


@pytest.mark.parametrize("mesh", ["expert"])
def test_many_devices_sample_the_tokens_of_one(mesh: str) -> None:
    single, sharded = sampled("one")[1], sampled(mesh)[1]
    assert set(single) == set(sharded)
    for ticket, done in single.items():
        assert sharded[ticket].tokens.tolist() == done.tokens.tolist()


def test_in_8_bits_many_devices_sample_as_one_does_from_what_the_codes_stand_for() -> None:
    many, one = engine_on("expert"), engine_on("one")
    requests = some_requests(2, 4)
    small = published(many, params(), weights_dtype="int8")
    weights = [leaf for leaf in jax.tree.leaves(small, is_leaf=is_int8) if is_int8(leaf)]
    assert len(weights) == 4 * 2 + 4 * 2  # attention everywhere, an MLP in one layer, experts in three
    many.set_weights(small, 1)
    like = published(one, params())
    whole = jax.tree_util.tree_map_with_path(as_array, small, is_leaf=is_int8)
    one.set_weights(jax.tree.map(lambda leaf, at: jax.device_put(leaf.astype(at.dtype), at.sharding), whole, like), 1)
    found, expected = run(many, requests), run(one, requests)
    for ticket, done in expected.items():
        assert found[ticket].tokens.tolist() == done.tokens.tolist()
        np.testing.assert_allclose(found[ticket].logp, done.logp, rtol=0, atol=GAP)
    many.set_weights(published(many, params()), 0)
    one.set_weights(like, 0)


def as_array(path: Any, leaf: Any) -> np.ndarray:
    group, name = (getattr(key, "key", None) for key in [None, *path][-2:])
    return (
        restored(leaf, CONTRACTED["moe"][name] if group == "moe" else CONTRACTED[name]) if is_int8(leaf) else np.asarray(leaf)
    )


def is_int8(leaf: Any) -> bool:
    return isinstance(leaf, Int8Weight)
