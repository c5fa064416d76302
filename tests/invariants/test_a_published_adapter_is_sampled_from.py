"""After a publish, the sampler draws from base and adapter: its log-probabilities and greedy tokens are the learner's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.models.decoder import logits, merge
from rljax.models.lora import attach
from rljax.rollouts.weights import publisher
from tests.learner.test_lora import lora_learner
from tests.learner.test_quantized_base import kept
from tests.tiny_model import (
    ARCH,
    batch_of,
    engine_of,
    first_state,
    host_adapter,
    host_params,
    placed,
    rollouts_of,
    run,
    some_requests,
)

GAP = 3e-5
"""Float32 programs that sum in different orders, one with products of low rank; log-probabilities of the order 10."""
INT8_GAP = 0.2
"""Nats: what rounding weights to 8 bits may change on average; without the adapter it is more than 1."""


@pytest.mark.parametrize(
    ("mode", "kind"), [("merged", "as-is"), ("separate", "as-is"), ("merged", "nf4"), ("separate", "nf4"), ("merged", "int8")]
)
def test_the_samplers_log_probabilities_are_the_learners(mode: str, kind: str) -> None:
    learner = lora_learner(base_dtype=kind)
    assert learner.lora is not None
    base, adapter = kept(learner, host_params()), first_state(learner, host_adapter(learner.lora)).params
    engine, requests = engine_of(), some_requests(4, 8, temperature=0.7)
    publish = publisher(ARCH, learner.mesh, "float32", learner.lora, mode == "separate")
    engine.set_weights(publish(adapter, base), 1)
    batch = batch_of(learner, rollouts_of(requests, run(engine, requests)))
    scored = learner.put(batch)
    found = np.asarray(learner.score(adapter, scored, base))[batch.mask]
    assert batch.mask.sum() > 30
    assert np.abs(found - batch.logp_behavior[batch.mask]).max() < GAP
    without = np.asarray(learner.score(None, scored, base))[batch.mask]
    assert np.abs(found - without).max() > 1, "an adapter that was not bound would show"

    greedy = some_requests(2, attempts=1, temperature=0.0)
    done = run(engine, greedy)
    for asked in greedy:
        assert_greedy(learner, base, adapter, asked.prompt, done[asked.ticket].tokens)


def assert_greedy(learner: Any, base: Any, adapter: Any, prompt: tuple[int, ...], drawn: np.ndarray) -> None:
    """Every drawn token is the likeliest one of the learner's forward pass."""
    tokens = jnp.asarray([*prompt, *drawn.tolist()])[None]
    positions = jnp.arange(tokens.shape[1])[None]

    @jax.jit
    def forward(base: Any, adapter: Any) -> jax.Array:
        model = merge(ARCH, attach(base, adapter, learner.lora))
        return logits(model, model(tokens, positions, positions * 0 + 1, dtype=jnp.dtype("float32"))[0])

    out = forward(base, adapter)
    assert np.asarray(out[0, len(prompt) - 1 : -1].argmax(-1)).tolist() == drawn.tolist()


def test_a_base_is_published_once_and_an_adapter_every_time() -> None:
    learner = lora_learner("tensor")
    assert learner.lora is not None
    base, adapter = placed(learner, host_params()), first_state(learner, host_adapter(learner.lora)).params
    publish = publisher(ARCH, learner.mesh, "bfloat16", learner.lora, separate=True)
    first = publish(adapter, base)
    second = publish(jax.tree.map(lambda leaf: 2 * leaf, adapter), base)
    for layer in ARCH.layers:
        ours, theirs = first["layers"][layer], second["layers"][layer]
        assert ours["qkv"] is theirs["qkv"]
        assert np.array_equal(2 * ours["q_proj"]["b"], theirs["q_proj"]["b"])
        assert ours["q_proj"]["b"].dtype == jnp.bfloat16
        assert ours["q_proj"]["b"].sharding.spec == jax.sharding.PartitionSpec(None, "tensor", None, None)
    assert first["embed"] is second["embed"]
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((base, adapter)))
    assert set(publish(base)["layers"][0]) == {"attn_norm", "qkv", "out", "mlp_norm", "gate_up", "down"}


@pytest.mark.parametrize("mode", ["merged", "separate"])
def test_what_is_in_int8_has_the_adapter_inside_or_beside_it(mode: str) -> None:
    learner = lora_learner()
    assert learner.lora is not None
    base, adapter = kept(learner, host_params()), first_state(learner, host_adapter(learner.lora)).params
    engine, requests = engine_of(), some_requests(2, 4, temperature=0.7)
    publish = publisher(ARCH, learner.mesh, "float32", learner.lora, mode == "separate", "int8")
    engine.set_weights(publish(adapter, base), 1)
    batch = batch_of(learner, rollouts_of(requests, run(engine, requests)))
    sampled, scored = batch.logp_behavior[batch.mask], learner.put(batch)
    with_it, without = (np.asarray(learner.score(part, scored, base))[batch.mask] for part in (adapter, None))
    assert 1e-3 < np.abs(with_it - sampled).mean() < INT8_GAP < np.abs(without - sampled).mean() / 4
