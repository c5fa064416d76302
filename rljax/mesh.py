"""The device mesh and how arrays lie on it.

Owns the five mesh axes, the two rule sets that map logical axes of parameters to mesh axes, and the shardings that
follow. Refuses to know any model: it works on trees of shapes and axis names.

    learner: parameters split over `fsdp` (their embed dim), `tensor` and `expert`; rows of a batch over `replica` and `fsdp`
    sampler: parameters split over `tensor` and `expert`, whole on every data shard; slots over `replica` and `fsdp`
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from rljax.config import MeshConfig

AXES = ("replica", "fsdp", "context", "expert", "tensor")
DATA_AXES = ("replica", "fsdp")
"""Mesh axes that split rows of a batch and slots of the sampler."""

Rules = Mapping[str, str | None]

SAMPLER_RULES: Rules = {"kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor", "experts": "expert"}
LEARNER_RULES: Rules = {**SAMPLER_RULES, "embed": "fsdp"}


def build_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange the devices in the configured mesh.

    Raises:
        ValueError: the axes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(size for size in sizes.values() if size > 0)
    if sizes["fsdp"] < 0:
        sizes["fsdp"] = max(1, len(devices) // fixed)
    if math.prod(sizes.values()) != len(devices):
        asked = " x ".join(f"mesh.{axis} {size}" for axis, size in sizes.items() if size != 1) or "a mesh of 1"
        raise ValueError(f"{asked} needs {math.prod(sizes.values())} devices, and there are {len(devices)}")
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def data_shards(mesh: Mesh) -> int:
    """Return into how many parts rows and slots are split."""
    return math.prod(mesh.shape[axis] for axis in DATA_AXES)


def sharding(mesh: Mesh, *spec: Any) -> NamedSharding:
    """Return the sharding that splits each dim over the named mesh axes (None: not split)."""
    return NamedSharding(mesh, PartitionSpec(*spec))


def param_shardings(mesh: Mesh, shapes: Any, axes: Any, rules: Rules) -> Any:
    """Return the sharding of every parameter, in the shape of `shapes`.

    Raises:
        ValueError: a dim is not a multiple of the mesh axis that should split it.
    """

    def place(path: Any, shape: Any, names: tuple[str, ...]) -> NamedSharding:
        spec = [rules.get(name) for name in names]
        for name, size, axis in zip(names, shape.shape, spec, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"mesh.{axis} ({mesh.shape[axis]}) must divide the {name} dim ({size}) of "
                    f"{jax.tree_util.keystr(path, simple=True, separator='.')}; choose another mesh.{axis}"
                )
        return sharding(mesh, *spec)

    return jax.tree_util.tree_map_with_path(place, shapes, axes, is_leaf=lambda leaf: hasattr(leaf, "shape"))


def bytes_per_device(tree: Any) -> int:
    """Return how much of a tree of arrays, or of shapes with shardings, lies on each device (bytes)."""

    def size(leaf: Any) -> int:
        kind = jnp.iinfo if jnp.issubdtype(leaf.dtype, jnp.integer) else jnp.finfo
        bits = 8 if leaf.dtype == bool else kind(leaf.dtype).bits
        return math.prod(leaf.sharding.shard_shape(leaf.shape)) * bits

    return sum(map(size, jax.tree.leaves(tree))) // 8


def constrain(x: Array, *spec: Any) -> Array:
    """Pin the layout of an intermediate array when a mesh is in use; without one, return it as it is."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))
