"""Log-probabilities and entropies of chosen tokens, without an array of [rows, positions, vocabulary].

Owns the chunked product of hidden states with the output head, its softmax, and the backward pass of both. Refuses to
own the decoder and the loss. Only positions whose targets are scored should be passed: the head is often a third of
the work.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.matmul import contract_rows, product, product_transposed
from rljax.mesh import LEARNER_RULES, constrain


class _Settings(NamedTuple):
    """What is fixed at compile time."""

    temperature: float
    valid_vocab: int
    soft_cap: float | None
    chunk: int
    entropy_gradient: bool


def token_logprobs(
    hidden: Float[Array, "b s d"],
    head: Float[Array, "v d"],
    targets: Int[Array, "b s"],
    *,
    temperature: float,
    valid_vocab: int | None = None,
    soft_cap: float | None = None,
    chunk: int,
    length: Int[Array, ""] | int | None = None,
    entropy_gradient: bool = False,
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Return the log-probability of each target and the entropy of its distribution, both float32, in nats.

    logp = z[target] - log(sum(exp(z))) and entropy = -sum(p log p), with z = hidden @ head.T / temperature in float32
    and p = softmax(z). The product runs in the dtype of `hidden`, with float32 sums. With a `soft_cap`, cap * tanh(product
    / cap) takes the product's place (arXiv:2408.00118 section 2). Vocabulary entries at `valid_vocab` and above are
    padding: they have probability 0.

    `chunk` positions of every row are worked on at a time, so that memory is b * chunk * v floats; the backward pass
    computes the logits again, except where one chunk is all: it keeps them, which takes no more memory. Chunks that start
    at or after `length` (a device value, the same on all devices) are skipped: their outputs are 0 and they give no gradient.
    Gradients flow to `hidden` and `head` through logp, and through the entropy only with `entropy_gradient`; else it is a
    measurement. Targets must lie in [0, valid_vocab).
    """
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probabilities need a temperature above 0")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least one position")
    positions = targets.shape[1]
    count = -(-positions // chunk)
    size = -(-positions // count)
    padding = count * size - positions
    valid = head.shape[0] if valid_vocab is None else valid_vocab
    settings = _Settings(temperature, valid, soft_cap, size, entropy_gradient)
    logp, entropy = _chunked(
        settings,
        jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))),
        head,
        jnp.pad(targets, ((0, 0), (0, padding))),
        jnp.asarray(positions if length is None else length, jnp.int32),
    )
    return logp[:, :positions], entropy[:, :positions]


def softmax_statistics(
    logits: Float[Array, "*b v"], targets: Int[Array, "*b"]
) -> tuple[Float[Array, "*b"], Float[Array, "*b"], Float[Array, "*b"]]:
    """Return logp of the targets, entropy and log of the partition sum; logits of -inf count as probability 0."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    centred = logits - top
    weights = jnp.exp(centred)
    # 0 * log 0 is 0, so the factor is selected before the product. Two sums in one pass: XLA:CPU computes every
    # exponential once for each pass that it goes into.
    surprises = weights * jnp.where(weights > 0, centred, 0.0)
    zeros, last = (jnp.float32(0), jnp.float32(0)), (logits.ndim - 1,)
    total, weighted = jax.lax.reduce((weights, surprises), zeros, lambda sums, parts: tuple(map(jnp.add, sums, parts)), last)
    chosen = jnp.squeeze(jnp.take_along_axis(centred, targets[..., None], axis=-1), -1)
    log_total = jnp.log(total)
    return chosen - log_total, log_total - weighted / total, log_total + jnp.squeeze(top, -1)


def _outputs(settings: _Settings, hidden: Array, head: Array, targets: Array, length: Array) -> tuple[Array, Array]:
    return _chunked_forward(settings, hidden, head, targets, length)[0]


def _chunked_forward(
    settings: _Settings, hidden: Array, head: Array, targets: Array, length: Array
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    compute_head = _compute_head(head, hidden)

    def body(index: Array, outputs: tuple[Array, Array, Array]) -> tuple[Array, ...]:
        scores = product_transposed(_take(hidden, index, settings), compute_head)
        parts = softmax_statistics(_logits(settings, scores)[0], _take(targets, index, settings))
        return tuple(_put(out, part, index, settings) for out, part in zip(outputs, parts, strict=True))

    if targets.shape[1] == settings.chunk:
        scores = product_transposed(hidden, compute_head)
        parts = softmax_statistics(_logits(settings, scores)[0], targets)
        logp, entropy, log_total = (jnp.where(length > 0, part, 0.0) for part in parts)
    else:
        scores, empty = None, jnp.zeros(targets.shape, jnp.float32)
        logp, entropy, log_total = jax.lax.fori_loop(0, _chunks(settings, targets, length), body, (empty, empty, empty))
    return (logp, entropy), (hidden, head, targets, length, log_total, entropy, scores)


def _chunked_backward(
    settings: _Settings, residuals: tuple[Any, ...], cotangents: tuple[Array, Array]
) -> tuple[Array, Array, None, None]:
    hidden, head, targets, length, log_total, entropy, kept = residuals
    compute_head = _compute_head(head, hidden)
    scaled, of_entropy = (cotangent / settings.temperature for cotangent in cotangents)

    def body(index: Array, gradients: tuple[Array, Array]) -> tuple[Array, Array]:
        d_hidden, d_head = gradients
        rows = _take(hidden, index, settings)
        logits, slope = _logits(settings, product_transposed(rows, compute_head) if kept is None else kept)
        probability = jnp.exp(logits - _take(log_total, index, settings)[..., None])
        chosen = _is_target(_take(targets, index, settings), head.shape[0])
        d_logits = _take(scaled, index, settings)[..., None] * (chosen - probability)
        if settings.entropy_gradient:
            # d entropy / d z = -p (log p + entropy); 0 where p is 0, as 0 log 0 is.
            log_p = jnp.where(probability > 0, logits - _take(log_total, index, settings)[..., None], 0.0)
            surprise = probability * (log_p + _take(entropy, index, settings)[..., None])
            d_logits -= _take(of_entropy, index, settings)[..., None] * surprise
        d_logits = d_logits if slope is None else d_logits * slope
        # In the compute dtype, so that both products have operands of one dtype and use its fast kernels.
        d_logits = d_logits.astype(hidden.dtype)
        d_rows = product(d_logits, compute_head).astype(hidden.dtype)
        return _put(d_hidden, d_rows, index, settings), d_head + contract_rows(rows, d_logits)

    start = (jnp.zeros_like(hidden), jnp.zeros((head.shape[1], head.shape[0]), jnp.float32))
    d_hidden, d_head = jax.lax.fori_loop(0, _chunks(settings, targets, length), body, start)
    return d_hidden, d_head.T.astype(head.dtype), None, None


_chunked = jax.custom_vjp(_outputs, nondiff_argnums=(0,))
_chunked.defvjp(_chunked_forward, _chunked_backward)


def _compute_head(head: Array, hidden: Array) -> Array:
    # Gathered over the devices that split its width here, once and in the compute dtype, not in every chunk.
    return constrain(head.astype(hidden.dtype), LEARNER_RULES["vocab"], None)


def _logits(settings: _Settings, scores: Array) -> tuple[Array, Array | None]:
    """Return the logits that products with the head become, and with a soft cap its slope where they are."""
    slope, vocab = None, scores.shape[-1]
    if settings.soft_cap is not None:
        bounded = jnp.tanh(scores / settings.soft_cap)
        scores, slope = settings.soft_cap * bounded, 1 - bounded * bounded
    logits = scores / settings.temperature
    if settings.valid_vocab == vocab:
        return logits, slope
    return jnp.where(_columns(logits.ndim, vocab) < settings.valid_vocab, logits, -jnp.inf), slope


def _columns(ndim: int, vocab: int) -> Array:
    return jnp.arange(vocab, dtype=jnp.int32).reshape((1,) * (ndim - 1) + (vocab,))


def _is_target(targets: Array, vocab: int) -> Array:
    return targets[..., None] == _columns(targets.ndim + 1, vocab)


def _chunks(settings: _Settings, targets: Array, length: Array) -> Array:
    """Count the chunks that hold positions below `length`."""
    return jnp.clip(-(-length // settings.chunk), 0, targets.shape[1] // settings.chunk)


def _take(array: Array, index: Array, settings: _Settings) -> Array:
    return jax.lax.dynamic_slice_in_dim(array, index * settings.chunk, settings.chunk, axis=1)


def _put(array: Array, part: Array, index: Array, settings: _Settings) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(array, part, index * settings.chunk, axis=1)
