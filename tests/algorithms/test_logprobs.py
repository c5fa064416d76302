import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rljax.algorithms.logprobs import softmax_statistics, token_logprobs

FLOAT32 = 2e-5
"""Rounding of a float32 product of a few hundred terms, and of sums in another order."""
BFLOAT16 = 3e-2
"""Relative rounding of bfloat16 operands (2^-8), over products of a few dozen terms."""

B, S, D, V = 3, 10, 16, 37


def inputs(dtype=np.float32, b=B, s=S, d=D, v=V):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(b, s, d)), dtype)
    head = jnp.asarray(rng.normal(size=(v, d)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, v - 5, (b, s)), jnp.int32)
    return hidden, head, targets


def oracle(hidden, head, targets, temperature=1.0, valid_vocab=None):
    """Return logp and entropy from whole logits, in float64."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)[:valid_vocab].T / temperature
    logp = (
        logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True)) - logits.max(-1, keepdims=True)
    )
    return np.take_along_axis(logp, np.asarray(targets)[..., None], -1)[..., 0], -(np.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize(
    ("chunk", "temperature", "valid_vocab"),
    [(1, 1.0, None), (3, 0.7, V - 5), (4, 1.0, V - 5), (10, 0.7, None), (100, 1.0, None)],
)
def test_chunks_give_the_values_of_the_whole_logits(chunk, temperature, valid_vocab):
    hidden, head, targets = inputs()
    got = token_logprobs(hidden, head, targets, temperature=temperature, valid_vocab=valid_vocab, chunk=chunk)
    for part, want in zip(got, oracle(hidden, head, targets, temperature, valid_vocab), strict=True):
        assert part.dtype == jnp.float32
        np.testing.assert_allclose(part, want, rtol=FLOAT32, atol=FLOAT32)


def whole_loss(hidden, head, targets, weights, temperature, valid_vocab):
    logits = jnp.einsum("bsd,vd->bsv", hidden, head[:valid_vocab]) / temperature
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
    return jnp.sum(weights * logp)


@pytest.mark.parametrize(("chunk", "valid_vocab"), [(1, None), (4, V - 5), (10, None)])
def test_gradients_are_those_of_the_whole_logits(chunk, valid_vocab):
    hidden, head, targets = inputs()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(B, S)), jnp.float32)

    def loss(h, w):
        logp, entropy = token_logprobs(h, w, targets, temperature=0.7, valid_vocab=valid_vocab, chunk=chunk)
        return jnp.sum(weights * logp) + 100 * jnp.sum(entropy)  # the entropy is a measurement: no gradient

    got = jax.jit(jax.grad(loss, (0, 1)))(hidden, head)
    want = jax.jit(jax.grad(whole_loss, (0, 1)), static_argnums=(4, 5))(hidden, head, targets, weights, 0.7, valid_vocab)
    for left, right in zip(got, want, strict=True):
        np.testing.assert_allclose(left, right, rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.parametrize("chunk", [4, S])
def test_a_soft_cap_bounds_the_logits_and_their_gradient(chunk):
    hidden, head, targets = inputs()
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(B, S)), jnp.float32)
    cap, valid = 3.0, V - 5

    def whole(h, w):
        logits = cap * jnp.tanh(jnp.einsum("bsd,vd->bsv", h, w[:valid]) / cap) / 0.7
        return jnp.sum(weights * jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0])

    def chunked(h, w):
        got = token_logprobs(h, w, targets, temperature=0.7, valid_vocab=valid, soft_cap=cap, chunk=chunk)
        return jnp.sum(weights * got[0])

    (want, want_grads), (got, got_grads) = (jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, head) for f in (whole, chunked))
    assert float(got) == pytest.approx(float(want), rel=FLOAT32)
    assert abs(float(got) - float(whole_loss(hidden, head, targets, weights, 0.7, valid))) > 1
    for left, right in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(left, right, rtol=FLOAT32, atol=FLOAT32)


@pytest.mark.parametrize(("chunk", "valid_vocab"), [(4, V - 5), (10, None)])
def test_on_request_the_entropy_has_the_gradient_of_the_whole_logits(chunk, valid_vocab):
    hidden, head, targets = inputs()
    weights, bonus = jnp.asarray(np.random.default_rng(1).normal(size=(2, B, S)), jnp.float32)

    def loss(h, w):
        options = {"temperature": 0.7, "valid_vocab": valid_vocab, "chunk": chunk, "entropy_gradient": True}
        logp, entropy = token_logprobs(h, w, targets, **options)
        return jnp.sum(weights * logp + bonus * entropy)

    def whole(h, w):
        log_p = jax.nn.log_softmax(jnp.einsum("bsd,vd->bsv", h, w[:valid_vocab]) / 0.7)
        chosen = jnp.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        return jnp.sum(weights * chosen - bonus * jnp.sum(jnp.exp(log_p) * log_p, -1))

    got, want = (jax.jit(jax.grad(f, (0, 1)))(hidden, head) for f in (loss, whole))
    for left, right in zip(got, want, strict=True):
        np.testing.assert_allclose(left, right, rtol=FLOAT32, atol=FLOAT32)


def test_bfloat16_hidden_states_give_float32_results_and_a_float32_head_gradient():
    hidden, head, targets = inputs(jnp.bfloat16, s=16)
    weights = jnp.ones(targets.shape)
    rounded = head.astype(jnp.bfloat16).astype(jnp.float32)

    def loss(h, w):
        return jnp.sum(token_logprobs(h, w, targets, temperature=1.0, chunk=8)[0])

    value, got = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)
    assert (value.dtype, got[0].dtype, got[1].dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    wide = hidden.astype(jnp.float32)
    assert float(value) == pytest.approx(oracle(wide, rounded, targets)[0].sum(), rel=FLOAT32)  # the sums are float32
    want = jax.jit(jax.grad(whole_loss, (0, 1)), static_argnums=(4, 5))(wide, rounded, targets, weights, 1.0, None)
    for left, right in zip(got, want, strict=True):
        np.testing.assert_allclose(left.astype(jnp.float32), right, rtol=BFLOAT16, atol=BFLOAT16)


def test_chunks_past_the_length_are_skipped():
    hidden, head, targets = inputs(s=12)

    @partial(jax.jit, static_argnums=0)
    def run(chunk, h, w, length):
        def loss(h, w):
            logp, entropy = token_logprobs(h, w, targets, temperature=1.0, chunk=chunk, length=length)
            return jnp.sum(logp), (logp, entropy)

        return jax.grad(loss, (0, 1), has_aux=True)(h, w)

    whole = token_logprobs(hidden, head, targets, temperature=1.0, chunk=4)
    # One chunk is all of the positions, or none of them.
    cases = [(4, 0, 0), (4, 1, 4), (4, 4, 4), (4, 5, 8), (4, 12, 12), (4, 99, 12), (12, 0, 0), (12, 1, 12), (12, 12, 12)]
    for chunk, length, done in cases:
        poisoned = hidden.at[:, done:].set(jnp.nan)
        (d_hidden, d_head), outputs = run(chunk, poisoned, head, jnp.int32(length))
        for part, want in zip(outputs, whole, strict=True):
            np.testing.assert_allclose(part[:, :done], want[:, :done], rtol=FLOAT32)
            assert (part[:, done:] == 0).all()
        assert (d_hidden[:, done:] == 0).all()
        assert np.isfinite(d_head).all()
        assert bool((d_head != 0).any()) == (done > 0)


def test_temperature_divides_the_logits():
    hidden, head = jnp.ones((1, 1, 1)), jnp.array([[2.0], [0.0]])
    for temperature, want in ((0.5, -0.018150), (1.0, -0.126928)):
        logp, _ = token_logprobs(hidden, head, jnp.zeros((1, 1), jnp.int32), temperature=temperature, chunk=1)
        assert float(logp[0, 0]) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(("logits", "want"), [([0, 0, -math.inf], math.log(2)), ([0, -math.inf], 0.0), ([65504, -65504], 0.0)])
def test_entropy_of_impossible_tokens_is_finite(logits, want):
    logp, entropy, total = softmax_statistics(jnp.asarray([logits], jnp.float32), jnp.zeros(1, jnp.int32))
    assert float(entropy[0]) == pytest.approx(want, abs=1e-6)
    assert np.isfinite([logp[0], total[0]]).all()


def test_no_buffer_holds_the_logits_of_all_positions():
    s, d, v, chunk = 4096, 8, 5000, 128
    hidden, head, targets = inputs(b=1, s=s, d=d, v=v)

    def loss(h, w):
        logp, entropy = token_logprobs(h, w, targets, temperature=1.0, chunk=chunk)
        return jnp.sum(logp), entropy

    whole = s * v * 4
    for function in (loss, jax.grad(loss, (0, 1), has_aux=True)):
        compiled = jax.jit(function).lower(hidden, head).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None
        assert text is not None
        assert memory.temp_size_in_bytes < whole / 4
        assert f"[1,{s},{v}]" not in text
        assert f"[{s},{v}]" not in text


def test_rows_vocabulary_and_width_may_be_split_over_devices():
    if len(jax.devices()) < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    hidden, head, targets = inputs(b=4, s=16, v=38)

    def loss(h, w, t):
        return jnp.sum(token_logprobs(h, w, t, temperature=1.0, chunk=4)[0])

    grad = jax.jit(jax.value_and_grad(loss, (0, 1)))
    one = grad(hidden, head, targets)
    specs = (PartitionSpec("fsdp"), PartitionSpec("tensor", "fsdp"), PartitionSpec("fsdp"))
    placed = [jax.device_put(x, NamedSharding(mesh, p)) for x, p in zip((hidden, head, targets), specs, strict=True)]
    with jax.set_mesh(mesh):
        compiled = grad.lower(*placed).compile()
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(compiled(*placed)), strict=True):
        np.testing.assert_allclose(left, right, rtol=FLOAT32, atol=FLOAT32)
    text = compiled.as_text()
    assert text is not None
    gathers = [line for line in text.splitlines() if " all-gather(" in line and "op_name" in line]
    assert gathers
    # The head is gathered once; in every chunk only its sums are: one number per row, position and part of the vocabulary.
    assert all("= f32[2,4,2]{" in line for line in gathers if "while/body" in line)


@pytest.mark.parametrize(("option", "value"), [("temperature", 0.0), ("chunk", 0)])
def test_values_without_meaning_are_refused(option, value):
    hidden, head, targets = inputs()
    with pytest.raises(ValueError, match=option):
        token_logprobs(hidden, head, targets, **({"temperature": 1.0, "chunk": 4} | {option: value}))
