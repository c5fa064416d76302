"""What a run will need, told before its first compilation: tokens per step, and bytes on each device.

Owns the arithmetic, the sentence that says which options to lower, and giving back what the host no longer needs. Refuses to
measure anything: parameters, states and the cache are counted exactly from their shapes and layouts; gradients and activations
follow from what the step keeps.
"""

import ctypes
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from rljax.config import Config
from rljax.learner.step import Learner, logit_positions
from rljax.mesh import bytes_per_device, data_shards, on_cpu
from rljax.models.attention import queries_together
from rljax.rollouts.batching import batch_shape
from rljax.rollouts.weights import published_params
from rljax.sampler.engine import Engine

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that takes memory.

    Example:
        Part("sampler cache", 1_610_612_736, ("sampler.slots", "sampler.cache_tokens"))
    """

    name: str
    """What it is."""
    size: int
    """Bytes on each device."""
    options: tuple[str, ...]
    """What makes it smaller."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run will need.

    Example:
        Estimate(most_tokens=16384, expected_tokens=8192, parts=(Part("parameters", 4096, ()),), available=None)
    """

    most_tokens: int
    """Tokens that an optimizer step computes when every rollout is as long as it may be."""
    expected_tokens: int
    """The same when prompts and completions are half as long as they may be, and a group's prompt is computed once."""
    parts: tuple[Part, ...]
    """What takes memory."""
    available: int | None
    """Bytes of memory of a device; None where JAX does not tell."""

    @property
    def total(self) -> int:
        """Bytes on each device, if all parts are there at the same time."""
        return sum(part.size for part in self.parts)

    def lines(self) -> list[str]:
        """Return the estimate as text, with a warning where it exceeds the memory of a device."""
        counts = f"tokens per step: {self.most_tokens:,} at most, {self.expected_tokens:,} if rollouts are half as long"
        shown = [f"memory: {part.name} {_megabytes(part.size)}" for part in self.parts if part.size]
        beside = "" if self.available is None else f" of {_megabytes(self.available)}"
        lines = [counts, *shown, f"memory: total {_megabytes(self.total)}{beside} on each device, estimated"]
        if self.available is not None and self.total > self.available:
            largest = sorted(self.parts, key=lambda part: part.size, reverse=True)[:3]
            remedies = "; ".join(f"{part.name}: {', '.join(part.options)}" for part in largest if part.options)
            lines.append(f"warning: this is more than a device has. What can make the largest parts smaller: {remedies}")
        return lines


def estimate(config: Config, learner: Learner, engine: Engine) -> Estimate:
    """Return what a run of this learner and this engine will need."""
    state, model = learner.abstract_state, config.model
    trained = bytes_per_device(state.params)
    copies = {
        "parameters": (trained + _base(learner), ("mesh.fsdp", "mesh.tensor", "lora.rank", "lora.base_dtype")),
        "gradients": (_gradient_bytes(learner), ("mesh.fsdp", "mesh.tensor", "lora.rank")),
        "optimizer state": (bytes_per_device(state.optimizer), ("optimizer.moments_dtype", "optimizer.rule", "mesh.fsdp")),
        "reference": (_reference(config, learner), ("algorithm.beta", "model.param_dtype")),
        "critic": (0 if state.critic is None else bytes_per_device(state.critic), ("algorithm.advantage", "mesh.fsdp")),
        "sampler's weights": (_published(config, learner), ("sampler.dtype", "sampler.weights_dtype", "mesh.tensor")),
        "sampler's cache": (
            engine.num_bytes,
            ("sampler.cache_tokens", "sampler.cache_dtype", "sampler.slots", "sampler.dtype"),
        ),
        "activations of a micro-batch": (
            activation_bytes(learner),
            (
                "train.micro_batch_tokens",
                "train.micro_batch_size_per_device",
                *(("model.remat",) if model.remat != "full" else ()),
                "train.pack_length",
            ),
        ),
    }
    parts = tuple(Part(name, size, options) for name, (size, options) in copies.items())
    stats = learner.mesh.local_devices[0].memory_stats() or {}
    return Estimate(*_tokens(config, learner), parts, stats.get("bytes_limit"))


def give_back_freed() -> None:
    """Return memory of the host that this process has freed to the system, where the C library can (glibc).

    Compiling from several threads leaves hundreds of megabytes in free lists, from which large arrays take nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _tokens(config: Config, learner: Learner) -> tuple[int, int]:
    """Return the most and the expected tokens of an optimizer step."""
    sampler, groups, rollouts = config.sampler, config.mini_batch_size, config.algorithm.num_generations
    prompt, completion = sampler.max_prompt_length, sampler.max_completion_length
    shape = batch_shape(config, data_shards(learner.mesh), learner.replayed)
    positions = shape.micro_batches * shape.rows * shape.length
    return min(positions, groups * rollouts * (prompt + completion)), groups * (prompt + rollouts * completion) // 2


def _base(learner: Learner) -> int:
    return 0 if learner.lora is None else bytes_per_device(learner.abstract_base)


def _reference(config: Config, learner: Learner) -> int:
    """Count the reference policy where it is a copy; an adapter is compared with its base, or with the adapter it began as."""
    algorithm, lora, state = config.algorithm, config.lora, learner.abstract_state
    if state.reference is not None:
        return bytes_per_device(state.reference)
    copied = algorithm.beta > 0 and (not lora.rank or lora.adapter is not None)
    return bytes_per_device(state.params) if copied else 0


def _published(config: Config, learner: Learner) -> int:
    return bytes_per_device(published_params(learner.arch, learner.mesh, config.sampler.dtype, config.sampler.weights_dtype))


def _gradient_bytes(learner: Learner) -> int:
    """Count the sum over micro-batches, in float32, and what is not added to it in place (`_train_step`).

    A model's layers add their gradients to the sum one by one (`models/sums.py`); those of other parameters, and of an
    adapter, exist beside it.
    """
    params = learner.abstract_state.params
    summed = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding), params)
    apart = params if learner.lora else {name: part for name, part in params.items() if name != "layers"}
    return bytes_per_device(summed) + bytes_per_device(apart)


def activation_bytes(learner: Learner) -> int:
    """Estimate what one micro-batch takes on a device: what all layers keep, and what a layer or the output head works with.

    Bytes per token and layer, w per number in `model.compute_dtype`, of dims that `tensor` splits a device's part:
    - kept: the residual stream, 4 d (the carry of the scan over layers); with `dots` what `remat.keep` marks in `Block` and
      `Moe`, w (qkv + heads + d + 2 f), which `offload` keeps on the host (a CPU is its own); with `none` also what norms,
      rotations, softmax (two arrays of pairs, see below) and gates give.
    - one layer at a time: what was not kept, three float32 arrays of the pairs of positions that are attended (scores, their
      softmax, its gradient: `attention.attend_in_order`, of all of its parts), the gradients of the MLP and the residual
      stream, and weights gathered over `fsdp`.
    - instead of a layer: logits and their gradient of `logit_positions` tokens, the output head and its gradient
      (`algorithms/logprobs`).
    """
    config, arch, mesh = learner.config, learner.arch, learner.mesh.shape
    w, split, d = jnp.dtype(config.model.compute_dtype).itemsize, mesh["tensor"], arch.embed_dim
    length = config.pack_length
    tokens = config.micro_batch_size_per_device * length
    heads, pairs = arch.num_heads * arch.head_dim // split, arch.num_heads * _keys(length, mesh["context"]) // split
    qkv = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim // split
    experts = arch.experts
    copies = 1 if experts is None else experts.per_token
    f = copies * (arch.ffn_dim if experts is None else experts.ffn_dim) // split
    marked = w * (qkv + heads + d + 2 * f)
    softmax = (2 * _FLOAT32 if w == _FLOAT32 else 2 * _FLOAT32 + w) * pairs
    rest = 2 * (_FLOAT32 + w) * d + 2 * w * qkv + softmax + (2 * _FLOAT32 + w) * f
    offloaded = marked if on_cpu(learner.mesh) else 0
    kept = _FLOAT32 * d + {"full": 0, "offload": offloaded, "dots": marked, "none": marked + rest}[config.model.remat]
    again = marked if kept == _FLOAT32 * d else 0
    one_layer = tokens * (again + _FLOAT32 * (3 * pairs + 2 * f + (1 + copies) * d)) + _gathered(learner, w)
    vocab = arch.vocab_size // split
    head = 2 * _FLOAT32 * min(tokens, logit_positions(arch.vocab_size)) * vocab + (w + _FLOAT32) * vocab * d
    return tokens * arch.num_layers * kept + max(one_layer, head)


def _keys(length: int, context: int) -> int:
    """Return the mean number of keys that have a score with a query; all of the row's where `context` splits it."""
    return sum((end - start) * end for start, end in queries_together(length)) // length if context == 1 else length


def _gathered(learner: Learner, itemsize: int) -> int:
    """Count the weights of one layer while they are whole on each device of `fsdp`, in the compute dtype."""
    mesh, arch = learner.mesh.shape, learner.arch
    layers = sum(leaf.size for leaf in jax.tree.leaves(learner.abstract_model["layers"]))
    return itemsize * layers // (arch.num_layers * mesh["tensor"] * mesh["expert"]) if mesh["fsdp"] > 1 else 0


def _megabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 1e9 else f"{math.ceil(size / 1e4) / 100:,.2f} MB"
