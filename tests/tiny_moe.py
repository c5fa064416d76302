"""A random model with experts in some of its layers, its parts, and what it samples, each made once."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rljax.config import MeshConfig
from rljax.learner.step import Learner
from rljax.mesh import build_mesh, data_shards
from rljax.models.arch import Experts
from rljax.models.decoder import abstract_params
from rljax.pytree import Params
from rljax.sampler.cache import BLOCK
from rljax.sampler.engine import Engine
from tests.tiny_model import ARCH as PLAIN
from tests.tiny_model import config_of, published, run, some_requests

ARCH = dataclasses.replace(
    PLAIN,
    num_layers=3,
    dense_layers=(0,),
    qk_norm="head",
    experts=Experts(count=6, per_token=2, ffn_dim=16, normalize=True),
)
MESHES = {
    "one": {"fsdp": 1},
    "expert": {"fsdp": 2, "expert": 2, "tensor": 2},
    "replica": {"replica": 2, "fsdp": 2, "expert": 2},
}


@cache
def params(seed: int = 0) -> Params:
    """Return random parameters."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(0, 0.25, leaf.shape).astype(np.float32), abstract_params(ARCH))


def mesh_of(name: str) -> Mesh:
    """Return one of `MESHES`."""
    return build_mesh(MeshConfig(**MESHES[name]), jax.devices()[: 1 if name == "one" else 8])


def engine_of(mesh: str = "one", dtype: str = "float32", **options: Any) -> Engine:
    """Return an engine that records routing, with weights; its end token is never drawn."""
    settings = {"slots": 8, "max_prompt_length": 24, "max_completion_length": 40, "readers": 4, "decode_chunk_steps": 5}
    engine = Engine(ARCH, mesh_of(mesh), (ARCH.vocab_size,), **{**settings, **options}, dtype=dtype, record_routing=True)
    engine.set_weights(published(engine, params(), dtype), 0)
    return engine


@cache
def sampled(mesh: str = "one", dtype: str = "float32") -> Any:
    """Return requests, completions and how many were sent back: 4 tasks of 8 rollouts, of many lengths.

    On one device the cache is too small for all slots.
    """
    requests = [
        dataclasses.replace(asked, params=dataclasses.replace(asked.params, max_tokens=40)) if index % 4 == 0 else asked
        for index, asked in enumerate(some_requests(4, 8))
    ]
    engine = engine_of(mesh, dtype, cache_tokens=9 * BLOCK if mesh == "one" else None)
    return requests, run(engine, requests), engine.take_metrics()["cache/preempted"]


def learner_of(mesh: str = "one", **sections: Mapping[str, Any]) -> Learner:
    """Return a learner of this model."""
    devices = mesh_of(mesh)
    return Learner(
        ARCH,
        devices,
        config_of(
            data_shards(devices),
            **{"sampler": {"temperature": 1.0, "max_completion_length": 40}, "model": {"remat": "none"}, **sections},
        ),
    )
