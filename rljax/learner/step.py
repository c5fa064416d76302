"""The compiled programs of the learner: one optimizer step, and scoring.

Owns the loop over micro-batches inside the compiled step, the forward pass that loss and scoring share, and the
layout of a batch on the mesh. Refuses to own the loss itself, packing and the optimizer's rule.

    step:   for each micro-batch (a loop on the device, its trip count a value, not a shape):
                hidden -> the positions that predict scored tokens -> logp -> loss -> gradients, added up
            clip, update, donate the old state
    score:  the same forward pass, without the loss

An array of [rows, positions, vocabulary] never exists: log-probabilities are made in chunks.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from rljax.algorithms.kl import next_beta
from rljax.algorithms.logprobs import token_logprobs
from rljax.algorithms.losses import Metrics, ScoredTokens, combine_metrics, empty_metrics, policy_loss
from rljax.config import Config
from rljax.data.packing import Batch
from rljax.learner.optimizer import Optimizer
from rljax.learner.state import TrainState, abstract_state, critic_optimizer, first_critic, first_reference, next_reference
from rljax.mesh import DATA_AXES, constrain, sharding
from rljax.models.arch import Arch
from rljax.models.decoder import Decoder, decaying, merge
from rljax.pytree import Params, pytree

LOGIT_POSITIONS = 512
"""Positions per device whose logits exist at the same time: times the vocabulary times 4 bytes is their memory."""


@pytree
class DeviceBatch:
    """The arrays of one optimizer step on the mesh: rows are split over the data axes."""

    tokens: Int[Array, "m r s"]
    positions: Int[Array, "m r s"]
    segments: Int[Array, "m r s"]
    parents: Int[Array, "m r s"]
    score_index: Int[Array, "m r j"]
    targets: Int[Array, "m r j"]
    mask: Bool[Array, "m r j"]
    logp_behavior: Float[Array, "m r j"]
    advantage: Float[Array, "m r j"]
    weight: Float[Array, "m r j"]
    rollout: Int[Array, "m r j"]
    scored: Int[Array, " m"]
    num_micro: Int[Array, ""]


@pytree
class StepOutput:
    """What one optimizer step reports."""

    metrics: Metrics
    """Sums over the step's scored tokens, as `policy_loss` returns them."""
    logp: Float[Array, "m r j"]
    """Log-probability of each scored token before the update (nats)."""
    grad_norm: Float[Array, ""]
    """Global gradient norm before the clip."""
    learning_rate: Float[Array, ""]
    """Learning rate of this update."""


class Learner:
    """The compiled train and score programs of one model on one mesh."""

    def __init__(self, arch: Arch, mesh: Mesh, config: Config):
        """Prepare the programs; they compile on first use, once, whatever the rollouts' lengths.

        Raises:
            ValueError: the model does not divide over the mesh.
        """
        if mesh.shape["expert"] > 1 and arch.experts is None:
            raise ValueError(f"mesh.expert is {mesh.shape['expert']}, and this model has no experts to split; set it to 1")
        self.arch, self.mesh, self.config = arch, mesh, config
        self.optimizer = Optimizer(config.optimizer, lambda _: decaying(arch))
        self.abstract_state = abstract_state(arch, mesh, config, self.optimizer)
        layout = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        self._layout = layout
        self._init = jax.jit(self.optimizer.init, out_shardings=layout.optimizer)
        self._init_reference = jax.jit(
            partial(first_reference, config=config.algorithm), out_shardings=(layout.reference, layout.beta)
        )
        own = critic_optimizer(arch, config)
        self._init_critic = jax.jit(partial(first_critic, optimizer=own), out_shardings=layout.critic)
        self._step = jax.jit(partial(_train_step, self), donate_argnums=0, out_shardings=(layout, None))
        self._score = jax.jit(partial(_score, self))

    def init(self, params: Params) -> TrainState:
        """Return the state before the first step; `params` become part of it."""
        reference, beta = self._init_reference(params)
        critic = None if self._layout.critic is None else self._init_critic(params)
        return TrainState(params, self._init(params), reference, beta, critic)

    def put(self, batch: Batch) -> DeviceBatch:
        """Lay a packed batch on the mesh."""
        rows = sharding(self.mesh, None, DATA_AXES)
        names = [name for name in DeviceBatch.__dataclass_fields__ if name not in ("scored", "num_micro")]
        whole = sharding(self.mesh)
        return DeviceBatch(
            **{name: jax.device_put(getattr(batch, name), rows) for name in names},
            scored=jax.device_put(batch.scored, whole),
            num_micro=jax.device_put(np.int32(batch.num_micro), whole),
        )

    def step(
        self,
        state: TrainState,
        batch: DeviceBatch,
        logp_prox: Float[Array, "m r j"] | None = None,
        logp_ref: Float[Array, "m r j"] | None = None,
    ) -> tuple[TrainState, StepOutput]:
        """Update the state (which is donated) on one batch.

        Args:
            state: State before the step.
            batch: Packed rollouts.
            logp_prox: Log-probabilities under the policy at the start of the update, from `score`. None when the batch
                is used for a single update: then they are the current ones, and every ratio is 1 by construction.
            logp_ref: Log-probabilities under the reference policy; needed when `beta` is above 0.
        """
        with jax.set_mesh(self.mesh):
            return self._step(state, batch, logp_prox, logp_ref)

    def score(self, params: Params, batch: DeviceBatch) -> Float[Array, "m r j"]:
        """Return the log-probability of every scored token of the batch (nats); 0 in filler slots."""
        with jax.set_mesh(self.mesh):
            return self._score(params, batch)


def scored_hidden(decoder: Decoder, micro: DeviceBatch, config: Config) -> Float[Array, "r j d"]:
    """Return the final hidden state before each scored token of one micro-batch is drawn."""
    dtype = jnp.dtype(config.model.compute_dtype)
    rows = (micro.tokens, micro.positions, micro.segments)
    hidden, _ = decoder(*rows, parents=micro.parents, dtype=dtype, remat=config.model.remat)
    return constrain(jnp.take_along_axis(hidden, micro.score_index[..., None], axis=1), DATA_AXES)


def _forward(learner: Learner, params: Params, micro: DeviceBatch) -> tuple[Array, Array]:
    """Return log-probability and entropy of each scored token of one micro-batch; shared by loss and scoring."""
    config = learner.config
    decoder = merge(learner.arch, params)
    return token_logprobs(
        scored_hidden(decoder, micro, config),
        decoder.head_table,
        micro.targets,
        temperature=config.sampler.temperature,
        valid_vocab=learner.arch.valid_vocab,
        soft_cap=learner.arch.final_soft_cap,
        chunk=max(1, LOGIT_POSITIONS // config.train.micro_batch_size_per_device),
        length=micro.scored,
        entropy_gradient=config.algorithm.entropy_coef > 0,
    )


def _train_step(
    learner: Learner, state: TrainState, batch: DeviceBatch, logp_prox: Array | None, logp_ref: Array | None
) -> tuple[TrainState, StepOutput]:
    algorithm = learner.config.algorithm

    def loss(params: Params, micro: DeviceBatch, prox: Array | None, ref: Array | None) -> tuple[Array, Any]:
        logp, entropy = _forward(learner, params, micro)
        current = jax.lax.stop_gradient(logp)
        prox = current if prox is None else prox
        known = (micro.mask, micro.advantage, micro.weight, micro.logp_behavior, prox, micro.rollout, ref)
        value, metrics = policy_loss(logp, entropy, ScoredTokens(*known), algorithm, state.beta)
        return value, (metrics, current)

    def body(index: Array, carry: tuple[Any, Metrics, Array]) -> tuple[Any, Metrics, Array]:
        grads, metrics, logps = carry
        micro, prox, ref = jax.tree.map(lambda leaf: micro_batch(leaf, index), (batch, logp_prox, logp_ref))
        (_, (found, logp)), fresh = jax.value_and_grad(loss, has_aux=True)(state.params, micro, prox, ref)
        logps = jax.lax.dynamic_update_index_in_dim(logps, logp, index, 0)
        return jax.tree.map(jnp.add, grads, fresh), combine_metrics(metrics, found), logps

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), state.params)
    start = (jax.lax.with_sharding_constraint(zeros, learner._layout.params), empty_metrics(), jnp.zeros(batch.mask.shape))
    grads, metrics, logps = jax.lax.fori_loop(0, batch.num_micro, body, start)
    update = learner.optimizer.update(grads, state.optimizer, state.params)
    output = StepOutput(metrics, logps, update.grad_norm, update.learning_rate)
    reference = next_reference(state.reference, update.params, update.state.updates, algorithm)
    beta = state.beta
    if beta is not None and algorithm.kl_target is not None:
        measured = metrics["kl_ref"] / metrics["tokens"]
        beta = jnp.where(metrics["tokens"] > 0, next_beta(beta, measured, algorithm.kl_target, algorithm.kl_gain), beta)
    return TrainState(update.params, update.state, reference, beta, state.critic), output


def _score(learner: Learner, params: Params, batch: DeviceBatch) -> Float[Array, "m r j"]:
    def body(index: Array, logps: Array) -> Array:
        micro = jax.tree.map(lambda leaf: micro_batch(leaf, index), batch)
        logp, _ = _forward(learner, params, micro)
        return jax.lax.dynamic_update_index_in_dim(logps, jnp.where(micro.mask, logp, 0.0), index, 0)

    return jax.lax.fori_loop(0, batch.num_micro, body, jnp.zeros(batch.mask.shape))


def micro_batch(leaf: Array, index: Array) -> Array:
    """Return one micro-batch's part of a batch's array; scalars belong to all."""
    return leaf if leaf.ndim == 0 else jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)
