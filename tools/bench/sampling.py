"""What several benchmarks do: time a call, and sample from an engine in which every rollout runs to its last token."""

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rljax.config import MeshConfig
from rljax.convert import read_checkpoint
from rljax.mesh import build_mesh
from rljax.models.arch import Arch
from rljax.pytree import Params
from rljax.records import SamplingParams
from rljax.rollouts.weights import learner_layout, publisher
from rljax.sampler.engine import Engine, Request, draw_key

CHECKPOINT = Path("checkpoints/smollm2-135m-instruct")
CHUNK = 8
"""Decode steps between two looks by the host."""


def timed(call: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a call, after one that may compile (seconds)."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def sampler_params(checkpoint: Path, dtype: str) -> tuple[Arch, Mesh, Params]:
    """Load a checkpoint on one device, as the sampler has it."""
    mesh = build_mesh(MeshConfig(), jax.devices()[:1])
    loaded = read_checkpoint(checkpoint, learner_layout(mesh))
    return loaded.arch, mesh, publisher(loaded.arch, mesh, dtype)(loaded.params)


def endless_engine(arch: Arch, mesh: Mesh, params: Params, *, slots: int, prompt: int, tokens: int, **options: Any) -> Engine:
    """Return an engine whose end token is never drawn."""
    engine = Engine(
        arch,
        mesh,
        (arch.vocab_size,),
        slots=slots,
        max_prompt_length=prompt,
        max_completion_length=tokens,
        decode_chunk_steps=CHUNK,
        dtype=params["embed"].dtype,
        **options,
    )
    engine.set_weights(params, 0)
    return engine


def make_requests(vocab: int, prompt: int, lengths: Sequence[int], group: int) -> list[Request]:
    """Return one request per completion length, `group` of them for each prompt of random tokens; the same ones every time."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, vocab, prompt).tolist()) for _ in range(-(-len(lengths) // group))]
    return [
        Request(row, prompts[row // group], draw_key(0, "bench", str(row), 0), SamplingParams(max_tokens=int(length)))
        for row, length in enumerate(lengths)
    ]


def sample(engine: Engine, requests: Sequence[Request]) -> int:
    """Sample the requests to their end; return the decode steps that took (the last chunk may stop early)."""
    engine.submit(requests)
    steps = 0
    while engine.pending:
        engine.step()
        engine.poll()
        steps += CHUNK
    return steps
