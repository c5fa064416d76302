"""One optimizer update: clip, rule, weight decay and learning-rate schedule.

Owns the choice of the rule, AdamW, and the only use of optax. Refuses to own the rules for matrices (rules.py), the types in
which moments are kept (moments.py), gradients (they arrive summed over the whole optimizer step) and the decision which
parameters decay (the model knows which are vectors).
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from rljax.config import OptimizerConfig
from rljax.learner.moments import kept, restored, wide
from rljax.learner.rules import adafactor, is_hidden_matrix, muon

DecayMask = Callable[[Any], Any]
"""From a tree of parameters to a tree of the same structure with True where weight decay applies."""


class OptimizerState(NamedTuple):
    """What the update rule remembers; saved in checkpoints."""

    updates: Int[Array, ""]
    """Optimizer updates done, int32."""
    moments: Any
    """State of the rule: its averages, as `moments_dtype` says, and its counter."""


class Update(NamedTuple):
    """The outcome of one optimizer update."""

    params: Any
    """Parameters after the update, in their own dtypes."""
    state: OptimizerState
    """Optimizer state after the update."""
    grad_norm: Float[Array, ""]
    """Global norm of the gradients before the clip, float32; not finite when a gradient is not."""
    learning_rate: Float[Array, ""]
    """Learning rate of this update, float32."""


class Optimizer:
    """The rule of the configuration, with what is common to all of them.

    Example:
        optimizer = Optimizer(config.optimizer, lambda params: jax.tree.map(lambda p: p.ndim > 1, params), axes)
        state = optimizer.init(params)
        params, state, grad_norm, learning_rate = optimizer.update(grads, state, params)
    """

    def __init__(self, config: OptimizerConfig, decay_mask: DecayMask, axes: Any) -> None:
        """Build the update rule.

        Args:
            config: Its options.
            decay_mask: Says which parameters weight decay applies to.
            axes: Logical axis names of every parameter, from which the rules for matrices know what is one.
        """
        self.config, self._axes = config, axes
        decay = optax.add_decayed_weights(config.weight_decay, mask=decay_mask)
        self._rule = optax.chain(_RULES[config.rule](config, axes), decay)

    def init(self, params: Any) -> OptimizerState:
        """Return the state before the first update: zeros shaped like the parameters, or like means of them, and counters."""
        updates = jnp.zeros((), jnp.int32)

        def start(params: Any) -> Any:
            return self._kept(self._rule.init(wide(params)), updates)

        # Every rule begins with zeros. To round them as moments are would have XLA fold constants for minutes.
        moments = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(start, params))
        return OptimizerState(updates, moments)

    def update(self, grads: Any, state: OptimizerState, params: Any) -> Update:
        """Clip the gradients to `max_grad_norm` and apply one update; pure, for use under jit.

        Arithmetic is float32 whatever the dtypes of parameters and moments.
        """
        grads, grad_norm = clip_by_global_norm(wide(grads), self.config.max_grad_norm)
        masters = wide(params)
        directions, moments = self._rule.update(grads, restored(state.moments), masters)
        updates = state.updates + 1
        rate = _schedule(self.config, updates)
        new = jax.tree.map(lambda old, at, by: (at - rate * by).astype(old.dtype), params, masters, directions)
        return Update(new, OptimizerState(updates, self._kept(moments, updates)), grad_norm, rate)

    def _kept(self, moments: Any, updates: Array) -> Any:
        return kept(moments, self.config.moments_dtype, updates, self._axes)


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Return the learning rate of optimizer update number `step`, counted from 1, for logs.

    Warm-up is linear: update n of `warmup_steps` W uses peak * n / W, so the first one already moves. After it, with
    t = (n - W) / (decay_steps - W) in [0, 1]: `constant` peak; `linear` peak + (min - peak) t; `cosine`
    min + (peak - min) (1 + cos(pi t)) / 2. It stays at `min_learning_rate` after `decay_steps`.
    """
    return float(_schedule(config, jnp.asarray(step, jnp.int32)))


def clip_by_global_norm(grads: Any, max_norm: float | None) -> tuple[Any, Float[Array, ""]]:
    """Scale the gradients to global norm `max_norm` where they exceed it; return them with the norm they had.

    None never clips (arXiv:1211.5063 algorithm 1).
    """
    norm = optax.tree_utils.tree_norm(grads)
    if max_norm is None:
        return grads, norm
    scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)
    return jax.tree.map(lambda grad: grad * scale, grads), norm


def _schedule(config: OptimizerConfig, step: Int[Array, ""]) -> Float[Array, ""]:
    peak, lowest, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    step = step.astype(jnp.float32)
    after = jnp.asarray(peak, jnp.float32)
    if config.schedule != "constant":
        assert config.decay_steps is not None
        part = jnp.clip((step - warmup) / (config.decay_steps - warmup), 0.0, 1.0)
        left = 1.0 - part if config.schedule == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * part))
        after = lowest + (peak - lowest) * left
    return jnp.where(step < warmup, peak * step / max(warmup, 1), after)


def _adamw(config: OptimizerConfig, _: Any) -> Any:
    """Adam (arXiv:1412.6980 algorithm 1); with the weight decay of all rules it is AdamW (arXiv:1711.05101 algorithm 2)."""
    return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)


def _muon(config: OptimizerConfig, axes: Any) -> Any:
    """Muon for matrices, AdamW for embedding, output head, scales and biases."""
    labels = jax.tree.map(
        lambda names: "muon" if is_hidden_matrix(names) else "adamw", axes, is_leaf=lambda node: isinstance(node, tuple)
    )
    rules: dict[Hashable, Any] = {"muon": _for_optax(muon(axes, config.muon_momentum)), "adamw": _adamw(config, axes)}
    return optax.partition(rules, labels)


def _adafactor(_: OptimizerConfig, axes: Any) -> Any:
    return _for_optax(adafactor(axes))


def _for_optax(rule: Any) -> optax.GradientTransformation:
    init, update = rule
    return optax.GradientTransformation(init, update)


_RULES: Mapping[str, Callable[[OptimizerConfig, Any], Any]] = {"adamw": _adamw, "adafactor": _adafactor, "muon": _muon}
