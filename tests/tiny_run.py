"""Runs of a tiny model in a small world: their checkpoint, their configuration, and what they leave behind."""

import atexit
import dataclasses
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.compilation_cache import compilation_cache

from rljax.checkpoint import save_params
from rljax.config import Config
from rljax.conversion.sources import ARCH_FILE
from rljax.manifest import read_manifest
from rljax.models.arch import Experts
from rljax.recipe import load
from rljax.telemetry.sinks import read_metrics, read_rollouts
from tools.make_tiny_checkpoint import make_tiny_checkpoint, tiny_arch, tiny_params, tokenizer_files

NOT_REPEATED = ("time/", "throughput/", "cache/", "sampler/", "compile/")
"""Metrics that two equal runs do not share."""


@cache
def scratch() -> Path:
    """Return a folder that lives as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="rljax-tiny-"))
    owner = os.getpid()
    # A forked child that ends as a program does runs its parent's exit handlers too.
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return folder


@cache
def tiny_checkpoint() -> Path:
    """Make the tiny checkpoint, once per process."""
    return make_tiny_checkpoint(scratch() / "tiny")


@cache
def tiny_experts_checkpoint() -> Path:
    """Make a tiny checkpoint of a model with experts in two of its three layers, once per process."""
    experts = Experts(count=4, per_token=2, ffn_dim=32, normalize=True)
    arch = dataclasses.replace(tiny_arch(), num_layers=3, experts=experts, dense_layers=(0,))
    files = {ARCH_FILE: arch.to_json().encode(), **tokenizer_files()}
    save_params(scratch() / "experts", tiny_params(arch, 0), files, overwrite=False)
    return scratch() / "experts"


@contextmanager
def compiled_once() -> Iterator[Path]:
    """Keep compiled programs, so that the second run of a configuration costs a fraction of the first."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    folder = scratch() / "compiled"
    for name, value in zip(names, (str(folder), 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # whether there is a cache is decided at the first compilation, and remembered
    try:
        yield folder
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def overrides(run_dir: Path, *more: str) -> list[str]:
    """Return the options of a run of seconds: 4 steps of 4 groups of 4, on one device or eight."""
    return [
        f"run.dir={run_dir}",
        f"model.checkpoint={tiny_checkpoint()}",
        "env.name=tests.worlds:Letters",
        "env.workers=2",
        "data.num_tasks=16",
        "sampler.slots=16",
        "sampler.max_prompt_length=48",
        "sampler.max_completion_length=8",
        "sampler.decode_chunk=4",
        "algorithm.num_generations=4",
        "optimizer.learning_rate=0.01",
        "train.steps=4",
        "train.rollout_batch_size=4",
        "train.micro_batch_size_per_device=2",
        "checkpoint.every=2",
        "telemetry.live=off",
        *more,
    ]


def config(run_dir: Path, *more: str) -> Config:
    """Return the configuration of such a run; later options win."""
    return load(None, overrides(run_dir, *more))


def param_bits(model: Path) -> dict[str, bytes]:
    """Read every parameter of a model checkpoint."""
    return _bits(model, "params")


def state_bits(run_dir: Path, step: int) -> dict[str, bytes]:
    """Read every array of a checkpoint of a run: parameters and optimizer."""
    return _bits(run_dir / "checkpoints" / f"step-{step:08d}", "arrays")


def _bits(folder: Path, arrays: str) -> dict[str, bytes]:
    names = read_manifest(folder)["leaves"]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reading:
        args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names}
        found = reading.restore(folder / arrays, args=ocp.args.PyTreeRestore(restore_args=args))
    assert set(found) == set(names)
    return {name: np.asarray(leaf).tobytes() for name, leaf in found.items()}


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Read the raw rows of a metrics file, without what two equal runs do not share."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(NOT_REPEATED)} for row in rows]


def step_metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """Read the metrics of each step."""
    return read_metrics(run_dir / "metrics.jsonl")


def rollout_rows(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    """Read every rollout of a run, by file."""
    return {path.name: list(read_rollouts(path)) for path in sorted((run_dir / "rollouts").glob("*"))}
