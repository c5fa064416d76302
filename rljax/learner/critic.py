"""The compiled programs of the critic: values, and one update.

Owns the critic's forward pass and its loop over micro-batches, on the batches and the mesh of the learner. Refuses to own
the loss (algorithms/value.py), returns (algorithms/credit.py), and the state, which is part of `TrainState`.

    values: for each micro-batch: trunk -> hidden states before the scored tokens -> value
    step:   the same -> loss -> gradients, added up; then clip, update, donate the old state

The critic shares nothing with the policy but where it began, so training it does not move the policy. With experts, its own
router decides.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from rljax.algorithms.value import VALUE_METRICS, ValueMetrics, value_loss
from rljax.learner.state import CriticState, critic_arch, critic_optimizer
from rljax.learner.step import (
    DeviceBatch,
    Learner,
    laid_out,
    micro_batch,
    no_gradients,
    of_scored_tokens,
    scored_hidden,
)
from rljax.mesh import DATA_AXES, by_replica, sharding
from rljax.models.decoder import merge
from rljax.models.sums import summed, with_sums
from rljax.pytree import Params, pytree


@pytree
class CriticOutput:
    """What one update of the critic reports."""

    metrics: ValueMetrics
    """Sums over the step's scored tokens, as `value_loss` returns them."""
    grad_norm: Float[Array, ""]
    """Global gradient norm before the clip."""


class Critic:
    """The critic of one learner, whose mesh, batches and options it shares."""

    def __init__(self, learner: Learner):
        """Prepare the programs; they compile on first use, once, whatever the rollouts' lengths."""
        assert learner.abstract_state.critic is not None, "the learner keeps no state for a critic"
        self.learner, self.arch = learner, critic_arch(learner.arch)
        self.optimizer = critic_optimizer(learner.arch, learner.config)
        self._layout = jax.tree.map(lambda leaf: leaf.sharding, learner.abstract_state.critic)
        self._values = jax.jit(partial(_values, self))
        self._step = jax.jit(partial(_critic_step, self), donate_argnums=0, out_shardings=(self._layout, None))

    def put(self, slots: Float[np.ndarray, "m r j"]) -> Float[Array, "m r j"]:
        """Lay numbers of a batch's scored tokens on the mesh, as the batch lies."""
        return jax.device_put(slots, sharding(self.learner.mesh, None, DATA_AXES))

    def values(self, params: Params, batch: DeviceBatch) -> Float[Array, "m r j"]:
        """Return the value of the state before each scored token of the batch is drawn; 0 in filler slots."""
        with jax.set_mesh(self.learner.mesh):
            return self._values(params, batch.unrouted())

    def step(
        self, state: CriticState, batch: DeviceBatch, values: Float[Array, "m r j"], returns: Float[Array, "m r j"]
    ) -> tuple[CriticState, CriticOutput]:
        """Update the state (which is donated) on one batch: the mean loss over its scored tokens.

        Args:
            state: State before the step.
            batch: Packed rollouts.
            values: Values when the returns were computed, from `values`.
            returns: What the value of each scored token should be; see `put`.
        """
        with jax.set_mesh(self.learner.mesh):
            return self._step(state, batch.unrouted(), values, returns)


def _forward(critic: Critic, params: Params, micro: DeviceBatch) -> Float[Array, "r j"]:
    """Return the value before each scored token of one micro-batch, in float32 whatever the trunk computes in."""
    hidden, _ = scored_hidden(merge(critic.arch, params["trunk"]), micro, critic.learner.config)
    return jnp.einsum("rjd,d->rj", hidden.astype(jnp.float32), params["value"])


def _values(critic: Critic, params: Params, batch: DeviceBatch) -> Float[Array, "m r j"]:
    return of_scored_tokens(batch, lambda micro: _forward(critic, params, micro))


def _critic_step(
    critic: Critic, state: CriticState, batch: DeviceBatch, values: Array, returns: Array
) -> tuple[CriticState, CriticOutput]:
    weight = 1.0 / jnp.maximum(jnp.sum(batch.mask.astype(jnp.float32)), 1.0)  # one denominator for all micro-batches
    cliprange = critic.learner.config.algorithm.cliprange_value

    layout = critic.learner.abstract_state.critic
    assert layout is not None, "checked when the critic was made"

    def loss(params: Params, weight: Array, micro: DeviceBatch, old: Array, target: Array) -> tuple[Array, ValueMetrics]:
        return value_loss(_forward(critic, params, micro), old, target, weight, micro.mask, cliprange)

    def accumulated(shared: tuple[Params, Array], rows: tuple[DeviceBatch, Array, Array]) -> tuple[Any, Any, Any]:
        def body(index: Array, carry: tuple[Any, ValueMetrics]) -> tuple[Any, ValueMetrics]:
            grads, metrics = carry
            known = jax.tree.map(lambda leaf: micro_batch(leaf, index), rows)
            params, weight = shared
            held = {**params, "trunk": with_sums(params["trunk"], grads["trunk"])}
            (_, found), fresh = jax.value_and_grad(loss, has_aux=True)(held, weight, *known)
            grads = {"trunk": summed(grads["trunk"], fresh["trunk"]), "value": grads["value"] + fresh["value"]}
            return laid_out(grads, layout.params), jax.tree.map(jnp.add, metrics, found)

        start = no_gradients(layout.params), {name: jnp.zeros((), jnp.float32) for name in VALUE_METRICS}
        return jax.lax.fori_loop(0, batch.num_micro, body, start), (), ()

    (grads, metrics), _, _ = by_replica(accumulated, (state.params, weight), (batch, values, returns))
    update = critic.optimizer.update(grads, state.optimizer, state.params)
    return CriticState(update.params, update.state), CriticOutput(metrics, update.grad_norm)
