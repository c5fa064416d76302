"""The compiled programs of the learner: one optimizer step, and scoring.

Owns the loop over micro-batches inside the compiled step, the forward pass that loss and scoring share, and the
layout of a batch on the mesh. Refuses to own the loss itself, packing and the optimizer's rule.

    step:   for each micro-batch (a loop on the device, its trip count a value, not a shape):
                hidden -> the positions that predict scored tokens -> logp -> loss -> gradients, added up
                routers' choices and scores, where there are experts -> their losses
            clip, update, donate the old state
    score:  the same forward pass, without the loss

With an adapter, the state is the adapter's alone: gradients and moments exist for its factors only. The base it belongs
to is passed beside the state and never given up; without the adapter it is the reference policy.

An array of [rows, positions, vocabulary] never exists: log-probabilities are made in chunks.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from rljax.algorithms.kl import next_beta
from rljax.algorithms.logprobs import token_logprobs
from rljax.algorithms.losses import MAXIMA, Metrics, ScoredTokens, combine_metrics, empty_metrics, policy_loss
from rljax.config import Config
from rljax.data.packing import Batch
from rljax.learner.optimizer import Optimizer
from rljax.learner.routers import count_tokens, no_sums, router_loss, router_metrics, token_copies
from rljax.learner.state import (
    TrainState,
    abstract_state,
    critic_optimizer,
    first_critic,
    first_reference,
    learner_params,
    next_reference,
)
from rljax.mesh import DATA_AXES, by_replica, constrain, row_axes, sharding
from rljax.models.arch import Arch
from rljax.models.block import INPUTS
from rljax.models.decoder import Decoder, Forward, decaying, logical_axes, merge
from rljax.models.lora import adapter_axes, attach, dropout_key, init_adapter, merged, spec_of
from rljax.models.moe import RouterSums, Routing, chosen_sums, router_sums
from rljax.models.quantized import abstract_base, dequantised, quantised
from rljax.models.sums import summed, with_sums
from rljax.pytree import Params, pytree

_LOGIT_BYTES = 2**28
_MOST_LOGIT_POSITIONS = 1024  # more make products no faster


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
    choices: Int[Array, "m r s l e"] | None
    rollout: Int[Array, "m r j"]
    scored: Int[Array, " m"]
    num_micro: Int[Array, ""]

    def unrouted(self) -> "DeviceBatch":
        """Return the batch without the sampler's experts, for another policy: its routers decide."""
        return dataclasses.replace(self, choices=None)


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
    router: Metrics
    """Means over all tokens of the step, as `router_metrics` returns them; empty for models without experts."""


class Learner:
    """The compiled train and score programs of one model on one mesh."""

    def __init__(self, arch: Arch, mesh: Mesh, config: Config):
        """Prepare the programs; they compile on first use, once, whatever the rollouts' lengths.

        Raises:
            ValueError: the model does not divide over the mesh, or it has no experts and an option is about them.
        """
        if mesh.shape["expert"] > 1 and arch.experts is None:
            raise ValueError(f"mesh.expert is {mesh.shape['expert']}, and this model has no experts to split; set it to 1")
        algorithm = config.algorithm
        for name in ("routing_replay", "router_z_loss_coef", "router_balance_loss_coef"):
            if getattr(algorithm, name) and arch.experts is None:
                raise ValueError(f"algorithm.{name} is for models with experts, and this model has none; remove it")
        self.replayed = arch.choices_per_token if algorithm.routing_replay else None
        """Layers with experts, and choices in each of them, that its batches hold; None without replay."""
        self.arch, self.mesh, self.config = arch, mesh, config
        self.lora = spec_of(arch, config.lora)
        """What adapters are; None where the parameters themselves are trained."""
        axes = logical_axes(arch) if self.lora is None else adapter_axes(self.lora)
        self.optimizer = Optimizer(config.optimizer, self._decaying, axes)
        self.abstract_model = learner_params(arch, mesh, config.model.param_dtype)
        """Shapes, types and shardings of a whole model: of what is trained, or of the base of an adapter as it is loaded."""
        self.abstract_base = abstract_base(mesh, self.abstract_model, logical_axes(arch), config.lora.base_dtype)
        """The same of the base as it is kept: quantised, if `lora.base_dtype` says so."""
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

    def _decaying(self, params: Params) -> Params:
        """Return which of the trained parameters weight decay is for; of an adapter all, since they are matrices."""
        return decaying(self.arch) if self.lora is None else jax.tree.map(lambda _: True, params)

    def init(self, params: Params) -> TrainState:
        """Return the state before the first step; `params`, of a model or an adapter, become part of it."""
        reference, beta = self._init_reference(params)
        critic = None if self._layout.critic is None else self._init_critic(params)
        return TrainState(params, self._init(params), reference, beta, critic)

    def first_adapter(self) -> Params:
        """Return an adapter that changes nothing yet."""
        assert self.lora is not None, "there is an adapter only where lora.rank is above 0"
        draw = partial(init_adapter, self.arch, self.lora, self.config.run.seed)
        return jax.jit(draw, out_shardings=self._layout.params)()

    def kept(self, name: str, leaf: Array) -> Any:
        """Return a parameter of the base as it is kept: quantised, if it is one of those that are."""
        part, kind = name.removeprefix("layers."), self.config.lora.base_dtype
        if kind == "as-is" or part not in INPUTS:
            return leaf
        layout = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_base["layers"][part])
        return jax.jit(partial(quantised, part, kind=kind), out_shardings=layout)(leaf)

    def merged(self, adapter: Params, base: Params) -> Params:
        """Return a model of its own: the base, dequantised, with the adapter merged into it, in `model.param_dtype`."""
        assert self.lora is not None, "there is an adapter only where lora.rank is above 0"
        layout = jax.tree.map(lambda leaf: leaf.sharding, self.abstract_model)
        return jax.jit(partial(_merged, self), out_shardings=layout)(adapter, base)

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


def _merged(learner: Learner, adapter: Params, base: Params) -> Params:
    assert learner.lora is not None, "there is an adapter only where lora.rank is above 0"
    # In float32 until the end: what was quantised is rounded once, with the adapter in it.
    whole = {**base, "layers": dequantised(base["layers"], "float32")}
    found = merged(learner.arch, whole, adapter, learner.lora)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), found, learner.abstract_model)


def _decode(decoder: Decoder, micro: DeviceBatch, config: Config, dropout: float = 0.0) -> Forward:
    """Run a decoder over one micro-batch, with the sampler's experts where they are known."""
    model, choices = config.model, micro.choices
    return decoder.forward(
        *(micro.tokens, micro.positions, micro.segments),
        parents=micro.parents,
        dtype=jnp.dtype(model.compute_dtype),
        remat=model.remat,
        dropout=dropout,
        choices=None if choices is None else jnp.moveaxis(choices, 2, 0).astype(jnp.int32),
        record_routing=True,  # what nobody uses is not computed
    )


def scored_hidden(
    decoder: Decoder, micro: DeviceBatch, config: Config, dropout: float = 0.0
) -> tuple[Float[Array, "r j d"], Routing | None]:
    """Return the final hidden state before each scored token of one micro-batch is drawn, and the routing of all tokens."""
    hidden, _, routing = _decode(decoder, micro, config, dropout)
    return constrain(jnp.take_along_axis(hidden, micro.score_index[..., None], axis=1), row_axes()), routing


def _forward(learner: Learner, params: Params, micro: DeviceBatch, dropout: float = 0.0) -> tuple[Array, Array, Routing | None]:
    """Return log-probability and entropy of each scored token of one micro-batch, and the routing of all its tokens.

    Shared by loss and scoring.
    """
    config = learner.config
    decoder = merge(learner.arch, params)
    hidden, routing = scored_hidden(decoder, micro, config, dropout)
    logp, entropy = token_logprobs(
        hidden,
        decoder.head_table,
        micro.targets,
        temperature=config.sampler.temperature,
        valid_vocab=learner.arch.valid_vocab,
        soft_cap=learner.arch.final_soft_cap,
        chunk=max(1, logit_positions(learner.arch.vocab_size) // config.micro_batch_size_per_device),
        length=micro.scored,
        entropy_gradient=config.algorithm.entropy_coef > 0,
    )
    return logp, entropy, routing


def _chosen(learner: Learner, params: Params, batch: DeviceBatch) -> Float[Array, "l x"] | None:
    """Count the choices that fall on each expert in the whole step, by a forward pass of its own.

    The balance loss multiplies them with each token's probabilities, so they must be known before the first gradient. None
    where there is no such loss.
    """
    none = no_sums(learner.arch)
    if none is None or not learner.config.algorithm.router_balance_loss_coef:
        return None

    def body(index: Array, counts: Array) -> Array:
        micro = jax.tree.map(lambda leaf: micro_batch(leaf, index), batch)
        routing = _decode(merge(learner.arch, params), micro, learner.config).routing
        assert routing is not None, "it was asked for"
        return counts + chosen_sums(routing.choices, token_copies(micro.segments, micro.parents), counts.shape[1])

    return jax.lax.fori_loop(0, batch.num_micro, body, none.chosen)


class _Shared(NamedTuple):
    """What all micro-batches of a step share."""

    params: Params
    base: Params | None
    beta: Array | None
    updates: Array
    """Updates before this one."""
    tokens: Array
    chosen: Array | None


def _train_step(
    learner: Learner,
    state: TrainState,
    batch: DeviceBatch,
    logp_prox: Array | None,
    logp_ref: Array | None,
    base: Params | None = None,
) -> tuple[TrainState, StepOutput]:
    algorithm, beta = learner.config.algorithm, state.beta
    tokens, chosen = count_tokens(batch.segments, batch.parents), _chosen(learner, _policy(learner, state.params, base), batch)
    shared = _Shared(state.params, base, beta, state.optimizer.updates, tokens, chosen)
    loop, rows = partial(_accumulated, learner), (batch, logp_prox, logp_ref)
    # What dropout draws is for the rows of all replicas in one array, so that it does not depend on how they are split.
    found = loop(shared, rows) if learner.config.lora.dropout else by_replica(loop, shared, rows)
    (grads, added, router), largest, logps = found
    metrics = added | largest
    update = learner.optimizer.update(grads, state.optimizer, state.params)
    output = StepOutput(metrics, logps, update.grad_norm, update.learning_rate, router_metrics(router, tokens))
    reference = next_reference(state.reference, update.params, update.state.updates, algorithm)
    if beta is not None and algorithm.kl_target is not None:
        measured = metrics["kl_ref"] / metrics["tokens"]
        beta = jnp.where(metrics["tokens"] > 0, next_beta(beta, measured, algorithm.kl_target, algorithm.kl_gain), beta)
    return TrainState(update.params, update.state, reference, beta, state.critic), output


def _accumulated(
    learner: Learner, shared: _Shared, rows: tuple[DeviceBatch, Array | None, Array | None]
) -> tuple[tuple[Params, Metrics, RouterSums | None], Metrics, Float[Array, "m r j"]]:
    """Return what all micro-batches add up to (gradients, metrics, the routers' sums), the maxima among metrics, and logps."""
    algorithm, dropout, seed = learner.config.algorithm, learner.config.lora.dropout, learner.config.run.seed
    batch = rows[0]

    def loss(params: Params, index: Array, micro: DeviceBatch, prox: Array | None, ref: Array | None) -> tuple[Array, Any]:
        key = dropout_key(seed, shared.updates, index) if dropout else None
        logp, entropy, routing = _forward(learner, _policy(learner, params, shared.base, key), micro, dropout)
        current = jax.lax.stop_gradient(logp)
        prox = current if prox is None else prox
        known = (micro.mask, micro.advantage, micro.weight, micro.logp_behavior, prox, micro.rollout, ref)
        value, metrics = policy_loss(logp, entropy, ScoredTokens(*known), algorithm, shared.beta)
        if routing is None:
            return value, (metrics, current, None)
        sums = router_sums(routing, token_copies(micro.segments, micro.parents))
        value = value + router_loss(sums, shared.tokens, shared.chosen, algorithm)
        return value, jax.lax.stop_gradient((metrics | {"loss": value}, current, sums))

    def body(index: Array, carry: tuple[Any, Any, Array]) -> tuple[Any, Any, Array]:
        grads, (metrics, router), logps = carry
        micro, prox, ref = jax.tree.map(lambda leaf: micro_batch(leaf, index), rows)
        # An adapter's gradients are small, and not those of the layers.
        params = with_sums(shared.params, grads) if learner.lora is None else shared.params
        (_, (found, logp, sums)), fresh = jax.value_and_grad(loss, has_aux=True)(params, index, micro, prox, ref)
        logps = jax.lax.dynamic_update_index_in_dim(logps, logp, index, 0)
        added = combine_metrics(metrics, found), jax.tree.map(jnp.add, router, sums)
        return laid_out(summed(grads, fresh), learner.abstract_state.params), added, logps

    nothing = empty_metrics(), no_sums(learner.arch)
    start = (no_gradients(learner.abstract_state.params), nothing, jnp.zeros(batch.mask.shape))
    grads, (metrics, router), logps = jax.lax.fori_loop(0, batch.num_micro, body, start)
    largest = {name: metrics.pop(name) for name in MAXIMA}
    return (grads, metrics, router), largest, logps


def no_gradients(layout: Params) -> Params:
    """Return the sum of gradients before the first micro-batch: float32 zeros that lie like the parameters."""
    return laid_out(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), layout), layout)


def laid_out(grads: Params, layout: Params) -> Params:
    """Return gradients laid like the parameters."""
    return jax.tree.map(lambda grad, leaf: constrain(grad, *leaf.sharding.spec), grads, layout)


def _score(learner: Learner, trained: Params | None, batch: DeviceBatch, base: Params | None) -> Float[Array, "m r j"]:
    params = _policy(learner, trained, base)
    return of_scored_tokens(batch, lambda micro: _forward(learner, params, micro)[0])


def logit_positions(vocab: int) -> int:
    """Return for how many positions per device logits exist at the same time, in float32."""
    return max(1, min(_MOST_LOGIT_POSITIONS, _LOGIT_BYTES // (4 * vocab)))


def of_scored_tokens(batch: DeviceBatch, forward: Callable[[DeviceBatch], Float[Array, "r j"]]) -> Float[Array, "m r j"]:
    """Return what a forward pass says of every scored token of a batch, one micro-batch after the other; 0 in filler slots."""

    def body(index: Array, found: Array) -> Array:
        micro = jax.tree.map(lambda leaf: micro_batch(leaf, index), batch)
        return jax.lax.dynamic_update_index_in_dim(found, jnp.where(micro.mask, forward(micro), 0.0), index, 0)

    return jax.lax.fori_loop(0, batch.num_micro, body, jnp.zeros(batch.mask.shape))


def micro_batch(leaf: Array, index: Array) -> Array:
    """Return one micro-batch's part of a batch's array; scalars belong to all."""
    return leaf if leaf.ndim == 0 else jax.lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False)
