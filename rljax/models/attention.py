"""Grouped-query attention.

Owns the product of queries and keys, its masks and the softmax. Refuses to own projections, positions and the cache's
bookkeeping. One entry point, `attend`; the XLA form here is what every backend can run.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

_MASKED = -1e30  # finite, so that a row with nothing to attend to stays free of NaN


def segment_mask(
    positions: Int[Array, "b s"], segments: Int[Array, "b s"], parents: Int[Array, "b s"] | None = None
) -> Bool[Array, "b s s"]:
    """Return which keys each query may see: of its own segment or that segment's parent, and not later.

    Segment 0 is padding and sees nothing; parent 0 is no parent.
    """
    own = segments[:, :, None] == segments[:, None, :]
    if parents is not None:
        own |= (parents[:, :, None] == segments[:, None, :]) & (parents > 0)[:, :, None]
    return own & (segments > 0)[:, :, None] & (positions[:, :, None] >= positions[:, None, :])


def attend(
    query: Float[Array, "b s k m c"],
    key: Float[Array, "b k t c"],
    value: Float[Array, "b k t c"],
    mask: Bool[Array, "b s t"],
) -> Float[Array, "b s k m c"]:
    """Attend from each query to the keys its mask shows.

    softmax(q k / sqrt(c)) v, the softmax in float32 (arXiv:1706.03762 eq. 1, grouped as in arXiv:2305.13245). A query
    that may see nothing returns an average of the values: finite, and never used. Products are made in the type of the
    keys, which a cache may hold in a wider type than the queries.
    """
    b, s, k, m, c = query.shape
    # Queries of one key-value head become rows of one product.
    rows = jnp.moveaxis(query, 1, 3).reshape(b, k, m * s, c).astype(key.dtype)
    scores = jnp.einsum("bknc,bktc->bknt", rows, key, preferred_element_type=jnp.float32) * c**-0.5
    scores = jnp.where(jnp.tile(mask, (1, m, 1))[:, None], scores, _MASKED)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    out = jnp.einsum("bknt,bktc->bknc", weights, value, preferred_element_type=jnp.float32)
    return jnp.moveaxis(out.reshape(b, k, m, s, c), 3, 1).astype(query.dtype)
