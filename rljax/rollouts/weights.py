"""Publishing: the learner's parameters become the sampler's.

Owns the compiled copy from the learner's layout (split over `fsdp`, master type) into the sampler's (whole on every
data shard, one array per block, output dims first, sampling type), and nothing else. It is a copy, made inside the mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.mesh import LEARNER_RULES, SAMPLER_RULES, param_shardings
from rljax.models.arch import Arch
from rljax.models.decoder import abstract_params, logical_axes, unstack
from rljax.pytree import Params


def learner_layout(mesh: Mesh) -> Callable[[Arch, Params], Params]:
    """Return the function from a model and its abstract parameters to the layout they are loaded in before publishing."""
    return lambda arch, shapes: param_shardings(mesh, shapes, logical_axes(arch), LEARNER_RULES)


def publisher(arch: Arch, mesh: Mesh, dtype: Any) -> Callable[[Params], Params]:
    """Return the compiled function from the learner's parameters to the sampler's.

    Args:
        arch: The model.
        mesh: Devices that both layouts lie on.
        dtype: Type of the sampler's parameters.

    Raises:
        ValueError: a dim does not divide over `mesh.tensor`.
    """
    layout = param_shardings(mesh, abstract_params(arch, stacked=False), logical_axes(arch, stacked=False), SAMPLER_RULES)

    def publish(params: Params) -> Params:
        return unstack(arch, jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(dtype)), params))

    return jax.jit(publish, out_shardings=layout)
