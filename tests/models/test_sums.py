"""Gradients that layers add to a sum in place are those that JAX finds by itself."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.models.decoder import abstract_params, layer_kinds, merge, runs
from rljax.models.remat import Remat
from rljax.models.sums import SUMS, summed, with_sums
from rljax.pytree import Params
from tests import tiny_model, tiny_moe

PLAIN = tiny_model.ARCH
WINDOWED = dataclasses.replace(PLAIN, num_layers=7, window=3, windowed_layers=(0, 1, 3, 4, 6))
MIXED = dataclasses.replace(tiny_moe.ARCH, num_layers=7, dense_layers=(0, 2, 4, 6))
CASES = {"plain": PLAIN, "windowed": WINDOWED, "experts": tiny_moe.ARCH, "mixed": MIXED}


def random_like(tree: Any, seed: int, scale: float) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, scale, leaf.shape), jnp.float32), tree)


@pytest.mark.parametrize(
    ("name", "remat"), [("plain", "none"), ("plain", "dots"), ("windowed", "full"), ("experts", "dots"), ("mixed", "full")]
)
def test_the_sum_is_the_old_one_and_the_gradients(name: str, remat: Remat) -> None:
    arch = CASES[name]
    assert name == "plain" or len(runs(layer_kinds(arch))) > 1, "layers of several runs, some of them with periods"
    params, old = (random_like(abstract_params(arch), seed, scale) for seed, scale in ((0, 0.2), (1, 3.0)))
    tokens = jnp.asarray(np.random.default_rng(2).integers(1, arch.vocab_size, (2, 9)), jnp.int32)
    positions, segments = jnp.broadcast_to(jnp.arange(9), (2, 9)), jnp.ones((2, 9), jnp.int32)
    weights = random_like(jnp.zeros((2, 9, arch.vocab_size)), 3, 0.1)

    def loss(params: Params) -> jax.Array:
        decoder = merge(arch, params)
        hidden = decoder.forward(tokens, positions, segments, dtype=jnp.dtype("float32"), remat=remat).hidden
        return jnp.sum((hidden @ decoder.head_table.T) * weights)

    value, plain = jax.jit(jax.value_and_grad(loss))(params)
    again, found = jax.jit(lambda params, old: jax.value_and_grad(loss)(with_sums(params, old)))(params, old)
    assert value == again
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(found["layers"])), "nothing is differentiated by the layers"
    got, want = summed(old, found), jax.tree.map(jnp.add, old, plain)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert set(found[SUMS]) == set(params["layers"])
    for (path, one), other, gradient in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(want), jax.tree.leaves(plain), strict=True
    ):
        largest = float(jnp.max(jnp.abs(gradient)))
        assert largest > 0, path
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(largest, 3.0), err_msg=jax.tree_util.keystr(path))


def test_one_architecture_has_a_period_that_repeats() -> None:
    found: list[Any] = [run for arch in (WINDOWED, MIXED) for run in runs(layer_kinds(arch))]
    assert {(run.period > 1, run.repeats > 1) for run in found} >= {(True, True), (False, False)}
