"""A random model of two layers, the meshes it is tried on, and its parts, built once: compiling is most of their cost."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from rljax.config import Config, MeshConfig
from rljax.data.packing import Batch
from rljax.learner.state import TrainState, learner_params
from rljax.learner.step import Learner
from rljax.mesh import AXES, build_mesh, data_shards
from rljax.models.arch import Arch, Rope
from rljax.models.decoder import abstract_params
from rljax.models.lora import LoraSpec, abstract_adapter
from rljax.pytree import Params
from rljax.recipe import load
from rljax.records import Completion, Group, Provenance, Rollout, SamplingParams, Score, Task
from rljax.rollouts.batching import batch_shape, prepare
from rljax.rollouts.weights import publisher
from rljax.sampler.engine import Engine, Request, draw_key
from rljax.sampler.kernels import AttentionChoice
from rljax.sampler.stops import TextStream

ARCH = Arch(
    vocab_size=300,  # more than one block of the draw, and no multiple of it
    num_layers=2,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_dim=48,
    rope=Rope(theta=10_000.0),
    norm_eps=1e-5,
    tie_embeddings=False,
    max_position=512,
)
STOP_IDS = (2, 7, *range(200, 240))
BY_XLA = AttentionChoice(None, "a test")
ROW_FIELDS = (
    *("tokens", "positions", "segments", "parents", "score_index", "targets"),
    *("mask", "logp_behavior", "advantage", "weight", "rollout"),
)
LENGTHS = ((3, 16, 9, 1), (5, 12, 2, 7))
WITH_REFERENCE = {"algorithm": {"beta": 0.1}, "sampler": {"temperature": 1.0}}
"""Sections of a configuration whose steps need reference log-probabilities."""
SPREAD = 0.16
"""Standard deviation of the weights: attention and output are far from uniform, logits of the order 3."""

MESHES: Mapping[str, Mapping[str, int]] = {
    "one": {"fsdp": 1},
    "fsdp": {"fsdp": 8},
    "tensor": {"fsdp": 4, "tensor": 2},
    "replica": {"replica": 8, "fsdp": 1},
    "mixed": {"replica": 4, "fsdp": 2},
    "context": {"fsdp": 2, "context": 2, "tensor": 2},
}


def mesh_of(name: str) -> Mesh:
    """Return one of `MESHES` on the first devices; skip the test where there are too few."""
    config = MeshConfig(**MESHES[name])
    size = int(np.prod([getattr(config, axis) for axis in AXES]))
    if len(jax.devices()) < size:
        pytest.skip(f"needs {size} devices")
    return build_mesh(config, jax.devices()[:size])


@cache
def host_params(seed: int = 0) -> Params:
    """Return random parameters as numpy arrays; norm scales too, so that leaving one out shows."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        is_norm = "norm" in jax.tree_util.keystr(path)
        return rng.normal(*((1.0, 0.2) if is_norm else (0.0, SPREAD)), leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract_params(ARCH))


@cache
def host_adapter(spec: LoraSpec, seed: int = 0) -> Params:
    """Return random factors as numpy arrays, large enough that the model's tokens are others."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(0.0, SPREAD, leaf.shape).astype(np.float32), abstract_adapter(ARCH, spec))


def config_of(data_shards: int = 1, **sections: Mapping[str, Any]) -> Config:
    """Return a configuration for the tiny model: micro-batches of 8 rows over all devices, four of them at most."""
    options = {
        "sampler.slots": 8,
        "sampler.max_prompt_length": 24,
        "sampler.max_completion_length": 16,
        "sampler.temperature": 0.7,
        "algorithm.num_generations": 4,
        "train.rollout_batch_size": 8,
        "train.micro_batch_size_per_device": 8 // data_shards,
        # The gradient can be read off the first moment, and the step is a smooth function of it.
        "optimizer.learning_rate": 0.5,
        "optimizer.b1": 0.0,
        "optimizer.eps": 1.0,
        "optimizer.max_grad_norm": "none",
    }
    options |= {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    return load(None, [f"{name}={value}" for name, value in options.items()])


def learner_of(mesh: str = "one", **sections: Mapping[str, Any]) -> Learner:
    """Return the learner of the tiny model, the same one for the same arguments."""
    return _learner(mesh, json.dumps(sections, sort_keys=True))


@cache
def _learner(mesh: str, sections: str) -> Learner:
    devices = mesh_of(mesh)
    return Learner(ARCH, devices, config_of(data_shards(devices), **json.loads(sections)))


def placed(learner: Learner, params: Params) -> Params:
    """Return a fresh copy of a model's parameters, or of an adapter's, in the learner's layout and type."""
    layout = learner.abstract_model if "embed" in params else learner.abstract_state.params
    return jax.tree.map(lambda leaf, like: jax.device_put(jnp.array(leaf, like.dtype), like.sharding), params, layout)


def first_state(learner: Learner, params: Params | None = None) -> TrainState:
    """Return the state before the first step."""
    return learner.init(placed(learner, host_params() if params is None else params))


def some_groups(lengths: Sequence[Sequence[int]] = LENGTHS, seed: int = 0, prompt_length: int = 6) -> list[Group]:
    """Return one group per row of `lengths`, whose numbers are its rollouts' completion lengths (tokens).

    Rewards, tokens and `logp_behavior` are random. Rollouts of 9 and more tokens have a second turn after two tokens of the
    environment, and those of 16 are truncated.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for number, row in enumerate(lengths):
        prompt = rng.integers(8, ARCH.vocab_size, prompt_length + number)
        rollouts = tuple(_rollout(f"task {number}", attempt, prompt, length, rng) for attempt, length in enumerate(row))
        groups.append(Group(Task(f"task {number}", ()), rollouts))
    return groups


def _rollout(task: str, attempt: int, prompt: np.ndarray, length: int, rng: np.random.Generator) -> Rollout:
    written = [Provenance.MODEL] * length
    if length >= 9:
        written[4:4] = [Provenance.ENVIRONMENT] * 2
    provenance = np.array([Provenance.PROMPT] * len(prompt) + written, np.int8)
    tokens = np.concatenate([prompt, rng.integers(8, ARCH.vocab_size, len(written))]).astype(np.int32)
    by_model = provenance == Provenance.MODEL
    return Rollout(
        task_id=task,
        attempt=attempt,
        tokens=tokens,
        provenance=provenance,
        logp_behavior=np.where(by_model, rng.normal(-5.0, 1.0, len(tokens)), 0.0).astype(np.float32),
        versions=np.where(by_model, 0, -1).astype(np.int32),
        finish_reason="length" if length == 16 else "stop",
        score=Score("score", float(rng.normal())),
        turns=2 if length >= 9 else 1,
        text="",
    )


def batch_of(learner: Learner, groups: Sequence[Group]) -> Batch:
    """Pack groups as a run does."""
    return prepare(groups, learner.config, batch_shape(learner.config, data_shards(learner.mesh), learner.replayed)).batches[0]


def spread(batch: Batch, parts: int) -> Batch:
    """Return the same rows over so many micro-batches, as evenly as can be; the batch must have room for them."""
    rows = [(micro, row) for micro in range(batch.num_micro) for row in np.flatnonzero(batch.mask[micro].any(1))]
    fields = (*ROW_FIELDS, "choices") if batch.choices is not None else ROW_FIELDS
    moved: dict[str, Any] = {name: np.zeros_like(getattr(batch, name)) for name in fields}
    for index, (micro, row) in enumerate(rows):
        for name, array in moved.items():
            array[index % parts, index // parts] = getattr(batch, name)[micro, row]
    scored = moved["mask"].sum(2).max(1).astype(np.int32)
    return dataclasses.replace(batch, **moved, scored=scored, num_micro=parts)


def gradient(state: TrainState) -> Params:
    """Read the last step's gradient off the state: with b1 = 0 it is the first moment."""
    return jax.device_get(state.optimizer.moments[0].mu)


@cache
def warm_engine(mesh: str = "one", dtype: str = "float32", weights_dtype: str = "as-is", cache_dtype: str = "as-is") -> Engine:
    """Return an engine that other tests have used: its programs are compiled, its slots hold what they left."""
    return engine_of(mesh, dtype=dtype, weights_dtype=weights_dtype, cache_dtype=cache_dtype)


def engine_of(
    mesh: str = "one",
    *,
    dtype: str = "float32",
    weights_dtype: str = "as-is",
    cache_dtype: str = "as-is",
    slots: int = 8,
    max_prompt_length: int = 24,
    max_completion_length: int = 16,
    cache_tokens: int | None = None,
    readers: int = 2,
    decode_chunk_steps: int = 5,
    prefill_chunk: int | None = None,
    reuse_cache: bool = False,
    batch_invariant: bool = False,
    attention: AttentionChoice = BY_XLA,
    arch: Arch = ARCH,
    stop_ids: Sequence[int] = STOP_IDS,
    params: Params | None = None,
    version: int = 0,
    logprobs: int | None = None,
    open_text: Callable[[], TextStream] | None = None,
) -> Engine:
    """Return a new engine with weights."""
    engine = Engine(
        arch,
        mesh_of(mesh),
        stop_ids,
        slots=slots,
        max_prompt_length=max_prompt_length,
        max_completion_length=max_completion_length,
        cache_tokens=cache_tokens,
        readers=readers,
        decode_chunk_steps=decode_chunk_steps,
        prefill_chunk=prefill_chunk,
        reuse_cache=reuse_cache,
        batch_invariant=batch_invariant,
        attention=attention,
        dtype=dtype,
        cache_dtype=cache_dtype,
        logprobs=logprobs,
        open_text=open_text,
    )
    engine.set_weights(published(engine, host_params() if params is None else params, dtype, weights_dtype), version)
    return engine


def published(engine: Engine, params: Params, dtype: str = "float32", weights_dtype: str = "as-is") -> Params:
    """Return parameters as the learner would publish them to the engine."""
    layout = learner_params(engine.arch, engine.mesh, "float32")
    whole = jax.tree.map(lambda leaf, like: jax.device_put(jnp.array(leaf), like.sharding), params, layout)
    return publisher(engine.arch, engine.mesh, dtype, weights_dtype=weights_dtype)(whole)


def request(
    ticket: Any,
    prompt: Sequence[int],
    max_tokens: int = 16,
    temperature: float = 1.0,
    cache_key: Any = None,
    **sampling: Any,
) -> Request:
    """Return a request whose draws are keyed by its ticket: (task id, attempt)."""
    task, attempt = ticket
    params = SamplingParams(max_tokens, temperature, **sampling)
    return Request(ticket, tuple(prompt), draw_key(0, "test", task, attempt), params, cache_key)


def some_requests(count: int = 6, attempts: int = 2, temperature: float = 1.0, seed: int = 0) -> list[Request]:
    """Return requests with prompts and limits of many lengths, attempts at one prompt next to each other."""
    rng = np.random.default_rng(seed)
    lengths = [1, 24, *rng.integers(2, 24, count)][:count]
    limits = [16, 1, *rng.integers(2, 17, count)][:count]
    prompts = [rng.integers(8, ARCH.vocab_size, length).tolist() for length in lengths]
    return [
        request((f"task {index}", attempt), prompt, int(limit), temperature)
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        for attempt in range(attempts)
    ]


def run(engine: Engine, requests: Sequence[Request]) -> dict[Any, Completion]:
    """Sample the requests to their end."""
    engine.submit(requests)
    return drain(engine)


def drain(engine: Engine) -> dict[Any, Completion]:
    """Sample what is queued to its end."""
    done: dict[Any, Completion] = {}
    while engine.pending:
        engine.step()
        for ticket, completion in engine.poll():
            assert ticket not in done
            done[ticket] = completion
    return done


def rollouts_of(requests: Sequence[Request], completions: Mapping[Any, Completion]) -> list[Group]:
    """Turn completions into one group per task, with random rewards."""
    rng, members = np.random.default_rng(0), {}
    for asked in requests:
        done, (task, attempt) = completions[asked.ticket], asked.ticket
        prompt, drawn = len(asked.prompt), len(done.tokens)
        rollout = Rollout(
            task_id=task,
            attempt=attempt,
            tokens=np.array([*asked.prompt, *done.tokens], np.int32),
            provenance=np.repeat([Provenance.PROMPT, Provenance.MODEL], [prompt, drawn]).astype(np.int8),
            logp_behavior=np.concatenate([np.zeros(prompt, np.float32), done.logp]),
            versions=np.concatenate([np.full(prompt, -1, np.int32), done.versions]),
            finish_reason=done.finish_reason,
            score=Score("score", float(rng.normal())),
            turns=1,
            text="",
            choices=done.choices,
        )
        members.setdefault(task, []).append(rollout)
    return [Group(Task(task, ()), tuple(rollouts)) for task, rollouts in members.items()]


def bits(completions: Mapping[Any, Completion]) -> dict[Any, tuple[Any, ...]]:
    """Return what must be equal when completions are the same to the last bit."""
    return {
        ticket: (done.tokens.tolist(), done.logp.tobytes(), done.finish_reason, done.versions.tolist())
        for ticket, done in completions.items()
    }
