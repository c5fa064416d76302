import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.matmul import contract_rows, matmul, product, product_transposed

FLOAT32 = 1e-5
"""Rounding of float32 sums in another order."""
BFLOAT16 = 2**-7
"""Two roundings to bfloat16: one of the cotangent, one of the result."""

SHAPES = [((1,), 1, 1), ((3,), 5, 7), ((16,), 8, 24), ((1, 16), 8, 24), ((2, 8), 16, 32), ((4, 6), 33, 65), ((2, 3, 16), 16, 8)]


def operands(rows, k, n, dtype):
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=shape) for shape in ((*rows, k), (k, n), (*rows, n)))
    return jnp.asarray(x, dtype), jnp.asarray(w, jnp.float32), jnp.asarray(g, dtype)


def flat(array):
    return np.asarray(array, np.float64).reshape(-1, array.shape[-1])


@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_value_and_gradients_are_those_of_the_plain_product(rows, k, n, dtype):
    x, w, g = operands(rows, k, n, dtype)
    rounded = np.asarray(w.astype(dtype), np.float64)

    @jax.jit
    def run(x, w, g):
        out, pull = jax.vjp(matmul, x, w)
        return out, *pull(g)

    out, d_x, d_w = run(x, w, g)
    assert (out.dtype, d_x.dtype, d_w.dtype) == (dtype, dtype, jnp.float32)
    assert (out.shape, d_x.shape, d_w.shape) == ((*rows, n), x.shape, w.shape)
    rounding = FLOAT32 if dtype == jnp.float32 else BFLOAT16
    for got, want in ((out, flat(x) @ rounded), (d_x, flat(g) @ rounded.T)):
        np.testing.assert_allclose(flat(got), want, rtol=rounding, atol=rounding * np.abs(want).max())
    # The gradient of the weight is summed and kept in float32.
    np.testing.assert_allclose(d_w, flat(x).T @ flat(g), rtol=FLOAT32, atol=FLOAT32 * 10)


def test_products_of_bfloat16_return_float32_sums():
    x, w, g = operands((4, 16), 24, 40, jnp.bfloat16)
    rounded = np.asarray(w.astype(jnp.bfloat16), np.float64)
    for got, want in ((product(x, w), flat(x) @ rounded), (product_transposed(g, w), flat(g) @ rounded.T)):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(flat(got), want, rtol=FLOAT32, atol=FLOAT32 * 10)


@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_a_transpose_after_any_product_runs(rows, k, n):
    """XLA:CPU folds a transpose into a bfloat16 product and then may not be able to run it."""
    x, w, _ = operands(rows, k, n, jnp.bfloat16)

    @jax.jit
    def run(x, w):
        gradients = jax.grad(lambda x, w: jnp.sum(matmul(x, w).astype(jnp.float32) ** 2), (0, 1))(x, w)
        return [jnp.moveaxis(array, -1, 0) for array in (*gradients, matmul(x, w), contract_rows(x, matmul(x, w)))]

    for array in run(x, w):
        assert np.isfinite(np.asarray(array, np.float32)).all()


def test_no_product_of_the_backward_pass_mixes_dtypes():
    x, w, _ = operands((2, 16), 8, 24, jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: jnp.sum(matmul(x, w).astype(jnp.float32) ** 2), (0, 1)))(x, w)
    products = [eqn for eqn in _equations(jaxpr.jaxpr) if eqn.primitive.name == "dot_general"]
    assert len(products) == 3
    for eqn in products:
        assert [str(operand.aval.dtype) for operand in eqn.invars] == ["bfloat16", "bfloat16"]
        assert str(eqn.outvars[0].aval.dtype) == "float32"


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("k", "n"), [(24, 8), (8, 24)])
def test_the_left_side_of_a_weight_gradient_is_the_smaller(k, n, dtype):
    """XLA:CPU brings it into another layout, and computes it again while it does."""
    x, _, g = operands((2, 16), k, n, dtype)
    jaxpr = jax.make_jaxpr(contract_rows)(x, g)
    (dot,) = [eqn for eqn in _equations(jaxpr.jaxpr) if eqn.primitive.name == "dot_general"]
    assert dot.invars[0].aval.shape[-1] == 8
    np.testing.assert_allclose(contract_rows(x, g), flat(x).T @ flat(g), rtol=FLOAT32, atol=FLOAT32 * 10)


def _equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)
