"""Kernels without their devices: JAX interprets them on CPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu


@contextmanager
def interpreted() -> Iterator[None]:
    """Interpret every Pallas kernel that is traced here, that for GPUs included."""

    def store(ref: Any, value: jax.Array, *, mask: jax.Array) -> None:
        # JAX 0.10 does not interpret a masked store into a part of a buffer; nobody else writes between these two.
        ref[...] = jnp.where(mask, value, ref[...])

    # The interpreter is asked for by a flag. Its other form, which simulates the memories of a TPU, does not know buffers that
    # are read in another shape, as this kernel does.
    with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode(True):  # pyright: ignore[reportArgumentType]
        patch.setattr(pltpu, "store", store)
        yield
