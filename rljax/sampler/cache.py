"""The sampler's slots: their keys and values, and where each rollout in progress stands.

Owns the device state of the sampler and its layout on the mesh. A slot holds one rollout: its tokens' keys and values
by position, the token to feed next, and what has been drawn so far. Refuses to own the model and the schedule.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from rljax.mesh import DATA_AXES, sharding
from rljax.models.arch import Arch
from rljax.models.decoder import KeyValue
from rljax.pytree import pytree, with_fields


@pytree
class Slots:
    """Everything a decode step reads and writes, one entry per slot."""

    cache: tuple[KeyValue, ...]
    """Per layer, keys and values of the tokens fed so far, by position; later positions are stale and never seen."""
    token: Int[Array, " b"]
    """Token to feed next."""
    position: Int[Array, " b"]
    """Position of that token in its sequence."""
    remaining: Int[Array, " b"]
    """Tokens this slot may still draw; 0 when it is idle or done."""
    draw_key: UInt32[Array, "b 2"]
    """Random key of the rollout; each draw folds in the position of the drawn token."""
    temperature: Float[Array, " b"]
    """Sampling temperature; 0 takes the most likely token."""
    out_tokens: Int[Array, "b o"]
    """Tokens drawn so far."""
    out_logp: Float[Array, "b o"]
    """Their log-probabilities under the distribution they were drawn from (nats)."""
    count: Int[Array, " b"]
    """How many tokens have been drawn."""


def empty_slots(arch: Arch, slots: int, positions: int, outputs: int, dtype: jnp.dtype, mesh: Mesh) -> Slots:
    """Allocate idle slots, laid out on the mesh.

    Args:
        arch: Model the cache is for.
        slots: Number of slots, split over the mesh's data axes; heads are split over `tensor`.
        positions: Cache positions per slot (tokens).
        outputs: Longest completion (tokens).
        dtype: Type of the cache.
        mesh: Devices.
    """
    shape = (slots, arch.num_kv_heads, positions, arch.head_dim)

    def build() -> Slots:
        return Slots(
            cache=tuple(KeyValue(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(arch.num_layers)),
            token=jnp.zeros(slots, jnp.int32),
            position=jnp.zeros(slots, jnp.int32),
            remaining=jnp.zeros(slots, jnp.int32),
            draw_key=jnp.zeros((slots, 2), jnp.uint32),
            temperature=jnp.zeros(slots, jnp.float32),
            out_tokens=jnp.zeros((slots, outputs), jnp.int32),
            out_logp=jnp.zeros((slots, outputs), jnp.float32),
            count=jnp.zeros(slots, jnp.int32),
        )

    return jax.jit(build, out_shardings=slots_sharding(mesh))()


def slots_sharding(mesh: Mesh) -> Any:
    """Return the sharding of `Slots`, as a prefix tree: all of the cache alike, all per-slot fields alike."""
    fields = dict.fromkeys(Slots.__dataclass_fields__, sharding(mesh, DATA_AXES))
    return with_fields(Slots, **{**fields, "cache": sharding(mesh, DATA_AXES, "tensor")})
