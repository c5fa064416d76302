"""The device mesh and how arrays lie on it.

Owns the five mesh axes, the two rule sets that map logical axes of parameters to mesh axes, the shardings that follow, and
how replicas work apart on their own rows. Refuses to know any model: it works on trees of shapes and axis names.

    learner: parameters split over `fsdp` (their embed dim), `tensor` and `expert`; rows of a batch over `replica` and `fsdp`
    sampler: parameters split over `tensor` and `expert`, whole on every data shard; slots over `replica` and `fsdp`
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from rljax.config import MeshConfig

AXES = ("replica", "fsdp", "context", "expert", "tensor")
DATA_AXES = ("replica", "fsdp")
"""Mesh axes that split rows of a batch and slots of the sampler."""

_APART = "replicas apart"
"""Name of the dim of replicas inside of `by_replica`."""

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


def row_axes() -> tuple[str, ...]:
    """Return the mesh axes that split rows here: `DATA_AXES`, or what is left of them inside of `by_replica`."""
    try:
        jax.lax.axis_size(_APART)
    except NameError:  # how JAX says that there is no such dim around
        return DATA_AXES
    return DATA_AXES[1:]


def on_cpu(mesh: Mesh) -> bool:
    """Return whether the devices are CPUs, whose memory is the host's."""
    return mesh.devices.flat[0].platform == "cpu"


def axis_size(axis: str) -> int:
    """Return the size of an axis of the mesh in use; 1 when none is."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else mesh.shape[axis]


def constrain(x: Array, *spec: Any) -> Array:
    """Pin the layout of an intermediate array when a mesh is in use; without one, return it as it is."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def by_replica(loop: Callable[[Any, Any], tuple[Any, Any, Any]], whole: Any, rows: Any) -> tuple[Any, Any, Any]:
    """Run a loop over micro-batches for the rows of each replica, and combine what the replicas found once, after it.

    Left to itself, XLA reduces gradients over the replicas in every micro-batch, since it keeps no sum that differs between
    devices. Here the sums have a leading dim of replicas, which lies on the axis of that name: each device holds its own
    part, which takes no more memory than the sum over all would. Without several replicas, it is the loop itself.

    Args:
        loop: From (whole, rows) to sums, maxima, and arrays [m, r, ...] of each row; called for one replica's rows.
        whole: What all replicas share.
        rows: What they split: arrays [m, r, ...], rows along their second dim; those with fewer dims are shared.
    """
    replicas = axis_size("replica")
    if replicas == 1:
        return loop(whole, rows)

    def apart(leaf: Array) -> Array:
        split = leaf.reshape(leaf.shape[0], replicas, -1, *leaf.shape[2:])
        return constrain(split, None, *DATA_AXES)

    split = jax.tree.map(lambda leaf: apart(leaf) if leaf.ndim > 1 else leaf, rows)
    axes = jax.tree.map(lambda leaf: 1 if leaf.ndim > 1 else None, rows)
    run = jax.vmap(loop, in_axes=(None, axes), out_axes=(0, 0, 1), axis_name=_APART, spmd_axis_name="replica")
    sums, largest, per_row = run(whole, split)
    return (
        jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), sums),
        jax.tree.map(lambda leaf: jnp.max(leaf, axis=0), largest),
        jax.tree.map(lambda leaf: leaf.reshape(leaf.shape[0], -1, *leaf.shape[3:]), per_row),
    )
