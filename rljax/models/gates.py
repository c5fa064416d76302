"""Gated activations: what an MLP or an expert makes of its two halves.

Owns the formulas. Refuses to own the products before and after.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.models.arch import Arch


def gated(gate_up: Float[Array, "*b 2 f"], arch: Arch) -> Float[Array, "*b f"]:
    """Return the activation of the architecture's `gate`, in float32 inside."""
    if arch.gate == "silu":
        return swiglu(gate_up)
    gate, up = _halves(gate_up)
    if arch.gate == "gelu_tanh":
        return (jax.nn.gelu(gate, approximate=True) * up).astype(gate_up.dtype)
    gate, up = jnp.minimum(gate, arch.gate_limit), jnp.clip(up, -arch.gate_limit, arch.gate_limit)
    return (gate * jax.nn.sigmoid(arch.gate_steepness * gate) * (up + 1)).astype(gate_up.dtype)


@jax.custom_vjp
def swiglu(gate_up: Float[Array, "*b 2 f"]) -> Float[Array, "*b f"]:
    """Return silu(gate) * up, in float32 inside (arXiv:2002.05202 eq. 6, SwiGLU)."""
    gate, up = _halves(gate_up)
    return (gate * jax.nn.sigmoid(gate) * up).astype(gate_up.dtype)


def _swiglu_forward(gate_up: Array) -> tuple[Array, Array]:
    return swiglu(gate_up), gate_up


def _swiglu_backward(gate_up: Array, cotangent: Array) -> tuple[Array]:
    # Written out, so that both halves are made in one pass instead of being padded and added.
    gate, up = _halves(gate_up)
    share, cotangent = jax.nn.sigmoid(gate), cotangent.astype(jnp.float32)
    d_gate = cotangent * up * share * (1 + gate * (1 - share))
    return (jnp.stack([d_gate, cotangent * gate * share], axis=-2).astype(gate_up.dtype),)


def _halves(gate_up: Array) -> tuple[Array, Array]:
    return gate_up[..., 0, :].astype(jnp.float32), gate_up[..., 1, :].astype(jnp.float32)


swiglu.defvjp(_swiglu_forward, _swiglu_backward)
