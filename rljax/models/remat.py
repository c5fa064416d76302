"""What the backward pass keeps of a block, and what it computes again.

Owns the three policies and the mark on values that `dots` keeps. Refuses to know what is in a block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

Remat = Literal["none", "dots", "full"]
"""What the backward pass recomputes."""

_SAVED = "product"  # name of the products that `dots` keeps


def keep(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Mark a value that the `dots` policy keeps for the backward pass; changes nothing.

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
    "full": jax.checkpoint,
}
