"""The compiled programs of the learner: one optimizer step, and scoring.

Owns the loop over micro-batches inside the compiled step, the forward pass that loss and scoring share, and the
layout of a batch on the mesh. Refuses to own the loss itself, packing and the optimizer's rule.

    step:   for each micro-batch (a loop on the device, its trip count a value, not a shape):
                hidden -> the positions that predict scored tokens -> logp -> loss -> gradients, added up
            clip, update, donate the old state
    score:  the same forward pass, without the loss

With an adapter, the state is the adapter's alone: gradients and moments exist for its factors only. The base it belongs
to is passed beside the state and never given up; without the adapter it is the reference policy.

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
from rljax.learner.state import TrainState, abstract_state, first_reference, learner_params, next_reference
from rljax.mesh import DATA_AXES, constrain, sharding
from rljax.models.arch import Arch
from rljax.models.decoder import decaying, merge
from rljax.models.lora import attach, dropout_key, init_adapter, merged, spec_of
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
        self.lora = spec_of(arch, config.lora)
        """What adapters are; None where the parameters themselves are trained."""
        self.optimizer = Optimizer(config.optimizer, self._decaying)
        self.abstract_model = learner_params(arch, mesh, config.model.param_dtype)
        """Shapes, types and shardings of a whole model: of what is trained, or of the base of an adapter."""
        self.abstract_state = abstract_state(arch, mesh, config, self.optimizer)
        layout = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)
        self._layout = layout
        self._init = jax.jit(self.optimizer.init, out_shardings=layout.optimizer)
        self._init_reference = jax.jit(
            partial(first_reference, config=config.algorithm), out_shardings=(layout.reference, layout.beta)
        )
        self._step = jax.jit(partial(_train_step, self), donate_argnums=0, out_shardings=(layout, None))
        self._score = jax.jit(partial(_score, self))

    def _decaying(self, params: Params) -> Params:
        """Return which of the trained parameters weight decay is for; of an adapter all, since they are matrices."""
        return decaying(self.arch) if self.lora is None else jax.tree.map(lambda _: True, params)

    def init(self, params: Params) -> TrainState:
        """Return the state before the first step; `params`, of a model or an adapter, become part of it."""
        return TrainState(params, self._init(params), *self._init_reference(params))

    def first_adapter(self) -> Params:
        """Return an adapter that changes nothing yet."""
        assert self.lora is not None, "there is an adapter only where lora.rank is above 0"
        draw = partial(init_adapter, self.arch, self.lora, self.config.run.seed)
        return jax.jit(draw, out_shardings=self._layout.params)()

    def merged(self, adapter: Params, base: Params) -> Params:
        """Return a model of its own: the base with the adapter merged into it, in the type of the base."""
        assert self.lora is not None, "there is an adapter only where lora.rank is above 0"
        layout = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_model)
        return jax.jit(partial(merged, self.arch, spec=self.lora), out_shardings=layout)(params=base, adapter=adapter)

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
        base: Params | None = None,
    ) -> tuple[TrainState, StepOutput]:
        """Update the state (which is donated) on one batch.

        Args:
            state: State before the step.
            batch: Packed rollouts.
            logp_prox: Log-probabilities under the policy at the start of the update, from `score`. None when the batch
                is used for a single update: then they are the current ones, and every ratio is 1 by construction.
            logp_ref: Log-probabilities under the reference policy; needed when `beta` is above 0.
            base: The model that the state is an adapter of; it stays as it is.
        """
        assert (base is None) == (self.lora is None), "an adapter is trained beside its base, a model on its own"
        with jax.set_mesh(self.mesh):
            return self._step(state, batch, logp_prox, logp_ref, base)

    def score(self, trained: Params | None, batch: DeviceBatch, base: Params | None = None) -> Float[Array, "m r j"]:
        """Return the log-probability of every scored token of the batch (nats); 0 in filler slots.

        Args:
            trained: The policy's parameters, or its adapter of `base`; None for the base as it is.
            batch: Packed rollouts.
            base: The model that an adapter belongs to.
        """
        with jax.set_mesh(self.mesh):
            return self._score(trained, batch, base)


def _policy(learner: Learner, trained: Params | None, base: Params | None, key: Array | None = None) -> Params:
    """Return the parameters that the decoder takes, with an adapter unmerged."""
    if base is None or trained is None:
        policy = trained if base is None else base
        assert policy is not None, "a policy has parameters, or a base"
        return policy
    assert learner.lora is not None, "a base has adapters where lora.rank is above 0"
    return attach(base, trained, learner.lora, key)


def _forward(learner: Learner, params: Params, micro: DeviceBatch, dropout: float = 0.0) -> tuple[Array, Array]:
    """Return log-probability and entropy of each scored token of one micro-batch; shared by loss and scoring."""
    config = learner.config
    decoder = merge(learner.arch, params)
    dtype = jnp.dtype(config.model.compute_dtype)
    rows = (micro.tokens, micro.positions, micro.segments)
    hidden, _ = decoder(*rows, parents=micro.parents, dtype=dtype, remat=config.model.remat, dropout=dropout)
    picked = constrain(jnp.take_along_axis(hidden, micro.score_index[..., None], axis=1), DATA_AXES)
    return token_logprobs(
        picked,
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
    learner: Learner,
    state: TrainState,
    batch: DeviceBatch,
    logp_prox: Array | None,
    logp_ref: Array | None,
    base: Params | None = None,
) -> tuple[TrainState, StepOutput]:
    algorithm, dropout, seed = learner.config.algorithm, learner.config.lora.dropout, learner.config.run.seed

    def loss(params: Params, index: Array, micro: DeviceBatch, prox: Array | None, ref: Array | None) -> tuple[Array, Any]:
        key = dropout_key(seed, state.optimizer.updates, index) if dropout else None
        logp, entropy = _forward(learner, _policy(learner, params, base, key), micro, dropout)
        current = jax.lax.stop_gradient(logp)
        prox = current if prox is None else prox
        known = (micro.mask, micro.advantage, micro.weight, micro.logp_behavior, prox, micro.rollout, ref)
        value, metrics = policy_loss(logp, entropy, ScoredTokens(*known), algorithm, state.beta)
        return value, (metrics, current)

    def body(index: Array, carry: tuple[Any, Metrics, Array]) -> tuple[Any, Metrics, Array]:
        grads, metrics, logps = carry
        micro, prox, ref = jax.tree.map(lambda leaf: _micro(leaf, index), (batch, logp_prox, logp_ref))
        (_, (found, logp)), fresh = jax.value_and_grad(loss, has_aux=True)(state.params, index, micro, prox, ref)
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
    return TrainState(update.params, update.state, reference, beta), output


def _score(learner: Learner, trained: Params | None, batch: DeviceBatch, base: Params | None) -> Float[Array, "m r j"]:
    params = _policy(learner, trained, base)

    def body(index: Array, logps: Array) -> Array:
        micro = jax.tree.map(lambda leaf: _micro(leaf, index), batch)
        logp, _ = _forward(learner, params, micro)
        return jax.lax.dynamic_update_index_in_dim(logps, jnp.where(micro.mask, logp, 0.0), index, 0)

    return jax.lax.fori_loop(0, batch.num_micro, body, jnp.zeros(batch.mask.shape))


def _micro(leaf: Array, index: Array) -> Array:
    """Return one micro-batch's part of a batch's array; scalars belong to all."""
    return leaf if leaf.ndim == 0 else jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)
