"""Everything that turns tasks into rollouts, built from a configuration: mesh, model, tokenizer, engine, pool.

Owns the order in which these are opened and closed; training, evaluation and chat build on the same one. Refuses to
own what is done with the rollouts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from jax.sharding import Mesh

from rljax.config import Config
from rljax.data.tokenizer import Tokenizer
from rljax.envs.pool import LocalPool
from rljax.mesh import build_mesh
from rljax.models.arch import Arch
from rljax.models.lora import spec_of
from rljax.rollouts.collector import Collector
from rljax.rollouts.weights import Publish, publisher
from rljax.sampler.engine import Engine
from rljax.sampler.kernels import AttentionChoice, choose_attention, tried
from rljax.telemetry.profile import Clock


@dataclass(frozen=True, slots=True)
class Stack:
    """The open parts of a run that samples.

    Example:
        with open_stack(config, arch, tokenizer_dir, clock) as stack:
            stack.engine.set_weights(stack.publish(params), version=0)
            groups = stack.collector.collect(jobs, 8, "train", train_params(config))
    """

    mesh: Mesh
    """The devices."""
    tokenizer: Tokenizer
    """Between messages and tokens."""
    engine: Engine
    """Samples completions."""
    publish: Publish
    """From the learner's parameters to the sampler's."""
    collector: Collector
    """Runs episodes."""


def build_engine(config: Config, arch: Arch, mesh: Mesh, tokenizer: Tokenizer) -> Engine:
    """Return the sampler that the configuration describes, for a tokenizer's end tokens and text.

    Raises:
        ValueError: slots, lengths or the model do not fit each other or the mesh, or a kernel is asked for that cannot be used.
    """
    sampler = config.sampler
    longest = sampler.max_prompt_length + sampler.max_completion_length
    if longest > arch.max_position:
        raise ValueError(
            f"sampler.max_prompt_length + sampler.max_completion_length is {longest} tokens, and the model was made for at "
            f"most {arch.max_position}; lower one of the two"
        )
    return Engine(
        arch,
        mesh,
        sorted(tokenizer.stop_ids),
        slots=sampler.slots,
        max_prompt_length=sampler.max_prompt_length,
        max_completion_length=sampler.max_completion_length,
        cache_tokens=sampler.cache_tokens,
        readers=config.algorithm.num_generations,
        decode_chunk_steps=sampler.decode_chunk,
        prefill_chunk=sampler.prefill_chunk,
        reuse_cache=sampler.reuse_cache,
        batch_invariant=sampler.batch_invariant,
        dtype=sampler.dtype,
        cache_dtype=sampler.cache_dtype,
        attention=_attention(config, arch, mesh),
        record_routing=config.algorithm.routing_replay,
        open_text=tokenizer.decode_stream,
    )


def _attention(config: Config, arch: Arch, mesh: Mesh) -> AttentionChoice:
    """Return what attends in decode steps; a kernel only if it is right when it is tried."""
    sampler, tensor, platform = config.sampler, mesh.shape["tensor"], mesh.devices.flat[0].platform
    choice = choose_attention(sampler.attention, arch, platform, tensor, sampler.dtype, sampler.cache_dtype)
    return tried(choice, sampler.attention, arch, tensor, "int8" if sampler.cache_dtype == "int8" else sampler.dtype)


@contextmanager
def open_stack(
    config: Config,
    arch: Arch,
    tokenizer_dir: Path,
    clock: Clock,
    stop: Callable[[], bool] = lambda: False,
    now: datetime | None = None,
    log_dir: Path | None = None,
) -> Iterator[Stack]:
    """Open the mesh, the tokenizer, the engine and the environment workers; close the workers in the end.

    Args:
        config: The run.
        arch: The model.
        tokenizer_dir: Folder with the tokenizer's files.
        clock: Counts sampling and waiting.
        stop: Asked often while rollouts are collected; see `Collector`.
        now: The date that chat templates may print; a resumed run passes the date it began.
        log_dir: Where the environment workers' output goes; default: a temporary folder.

    Raises:
        ValueError: the configuration does not fit the devices, the model or the environment.
    """
    mesh = build_mesh(config.mesh)
    tokenizer = Tokenizer.load(tokenizer_dir, now)
    env = config.env
    with LocalPool(
        env.name,
        env.options,
        workers=env.workers,
        reset_timeout=env.reset_timeout,
        step_timeout=env.step_timeout,
        log_dir=log_dir,
    ) as pool:
        engine = build_engine(config, arch, mesh, tokenizer)
        collector = Collector(config, engine, pool, tokenizer, clock, stop)
        publish = publisher(
            arch,
            mesh,
            config.sampler.dtype,
            spec_of(arch, config.lora),
            separate=config.sampler.lora == "separate",
            weights_dtype=config.sampler.weights_dtype,
        )
        yield Stack(mesh, tokenizer, engine, publish, collector)
