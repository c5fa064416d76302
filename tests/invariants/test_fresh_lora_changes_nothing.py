"""With an adapter that was not trained yet, learner and sampler compute the same bits as without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.models.decoder import logits, merge
from rljax.models.lora import TARGETS, LoraSpec, attach, init_adapter
from rljax.rollouts.weights import publisher
from tests.tiny_model import ARCH, bits, engine_of, host_params, run, some_requests

SPEC = LoraSpec(rank=4, alpha=8.0, rslora=True, targets=TARGETS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_bits(dtype: str) -> None:
    params = jax.tree.map(jnp.asarray, host_params())
    tokens = jnp.asarray(np.random.default_rng(0).integers(8, ARCH.vocab_size, (2, 12)))
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))

    @jax.jit
    def run(params: dict) -> jax.Array:
        model = merge(ARCH, params)
        return logits(model, model(tokens, positions, positions * 0 + 1, dtype=jnp.dtype(dtype))[0])

    assert np.array_equal(run(params), run(attach(params, init_adapter(ARCH, SPEC, 0), SPEC)))


@pytest.mark.parametrize("separate", [False, True])
def test_samples_are_the_same_bits(separate: bool) -> None:
    engine, requests = engine_of(), some_requests(3)
    before = bits(run(engine, requests))
    publish = publisher(ARCH, engine.mesh, "float32", SPEC, separate)
    engine.set_weights(publish(init_adapter(ARCH, SPEC, 0), jax.tree.map(jnp.asarray, host_params())), 0)
    assert bits(run(engine, requests)) == before
