"""What the backward pass keeps of a block, and what it computes again.

Owns the four policies and the mark on values that `dots` and `offload` keep. Refuses to know what is in a block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

Remat = Literal["none", "dots", "offload", "full"]
"""What the backward pass recomputes."""

_SAVED = "product"  # name of the products that are kept


def keep(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Mark a value that `dots` keeps for the backward pass, and `offload` in the memory of the host; changes nothing.

    A bfloat16 value is kept as integers: XLA:CPU stacks bfloat16 values of scanned layers by rewriting the whole stack
    for each layer.
    """
    return _keep_bits(x) if x.dtype == jnp.bfloat16 else checkpoint_name(x, _SAVED)


def _named_bits(x: Array) -> Array:
    bits = checkpoint_name(jax.lax.bitcast_convert_type(x, jnp.uint16), _SAVED)
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


_keep_bits = jax.custom_jvp(_named_bits)
_keep_bits.defjvp(lambda primals, tangents: (_named_bits(*primals), tangents[0]))


REMAT: dict[Remat, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "none": lambda block: block,
    # Norms, rotations, softmax and activations cost little to compute again and much to keep.
    "dots": partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_SAVED)),
    "offload": partial(
        jax.checkpoint,
        policy=jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_SAVED],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ),
    "full": jax.checkpoint,
}
