"""The matrix product every linear layer and the language-model head share.

Owns the types of the product: inputs in the compute dtype, sums in float32, and the same for both products of the
backward pass. Refuses to own layers, parameters and shardings.

Differentiating a bfloat16 product that returns float32 gives products of a float32 cotangent with a bfloat16
operand, which backends run as float32 products. `matmul` casts the cotangent to the compute dtype first.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rljax.mesh import axis_size

_ROW_SPLIT = 8
"""Inner length when rows are split in two dims before they are contracted; see `contract_rows`."""


def product(x: Float[Array, "*rows k"], w: Float[Array, "k *n"]) -> Float[Array, "*rows_and_n"]:
    """Multiply `x` by `w` in the dtype of `x`, with float32 sums and a float32 result. No custom derivative."""
    return _dot(x, w.astype(x.dtype), (x.ndim - 1,), (0,))


def product_outputs_first(x: Float[Array, "*rows k"], w: Float[Array, "*n k"]) -> Float[Array, "*rows_and_n"]:
    """Multiply `x` by the transpose of `w`, whose output dims come first, with float32 sums and a float32 result.

    The weight is the left side: for few rows XLA:CPU is then faster, by a tenth to a half, the transposes of the small
    operand and result included. No custom derivative.
    """
    out = _dot(w, x, (w.ndim - 1,), (x.ndim - 1,))
    return jnp.moveaxis(out, range(w.ndim - 1), range(x.ndim - 1, out.ndim))


def product_transposed(g: Float[Array, "*rows_and_n"], w: Float[Array, "k *n"]) -> Float[Array, "*rows k"]:
    """Multiply `g` by the transpose of `w` in the dtype of `g`, with float32 sums and a float32 result.

    Output dims become one, unless `tensor` may split one of them: for a contraction over several, XLA:CPU writes the transpose
    of the weight first.
    """
    outputs = w.ndim - 1
    if axis_size("tensor") == 1:
        g, w, outputs = g.reshape(*g.shape[: g.ndim - outputs], -1), w.reshape(w.shape[0], -1), 1
    return _dot(g, w.astype(g.dtype), tuple(range(g.ndim - outputs, g.ndim)), tuple(range(1, w.ndim)))


def contract_rows(x: Float[Array, "*rows k"], g: Float[Array, "*rows_and_n"]) -> Float[Array, "k *n"]:
    """Sum the outer products of the rows of `x` and `g`, the weight gradient of `x @ w`, in float32.

    `x` and `g` have the same dtype. The last row dim is split in two: XLA:CPU has fast bfloat16 kernels for a product
    whose left side is row-major [k, rows], and brings a contraction over several dims into that form, but runs one
    over a single leading dim in float32 (a factor 2 to 4). Other backends merge the dims again at no cost.

    What is brought into that form is written with a stride of all rows, and what it is computed from is read with one: for the
    hidden states of an MLP that takes longer than their product. So the smaller of both is the left side.

    Rows are not split when the length of their last dim is not a multiple of 8; the result is the same.
    """
    rows = x.ndim - 1
    if g.ndim == x.ndim and x.shape[-1] > g.shape[-1]:
        return contract_rows(g, x).T
    if x.shape[rows - 1] % _ROW_SPLIT == 0 and x.shape[rows - 1] > _ROW_SPLIT:
        x, g = (_split_rows(array, rows) for array in (x, g))
        rows += 1
    contracted = tuple(range(rows))
    out = _dot(x, g, contracted, contracted)
    # A transpose right after this product would be folded into it: its sides would change places again, and of a tied head
    # XLA:CPU would pick a bfloat16 form that it cannot run ("Unsupported element type for DotThunk").
    return jax.lax.optimization_barrier(out)


@jax.custom_vjp
def matmul(x: Float[Array, "*rows k"], w: Float[Array, "k *n"]) -> Float[Array, "*rows_and_n"]:
    """Multiply activations by a weight: the result, and the products of the backward pass, in the dtype of `x`.

    `w` is cast to the dtype of `x`; sums are float32. The gradient of `x` has the dtype of `x`; the gradient of `w` is
    summed in float32 and returned in the dtype of `w`, so that float32 master weights get a float32 gradient.
    Needs at least one row dim. A weight with several output dims is not flattened, so that any of them may be split
    over devices.
    """
    return product(x, w).astype(x.dtype)


def _matmul_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return matmul(x, w), (x, w)


def _matmul_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = residuals
    return product_transposed(g, w).astype(x.dtype), contract_rows(x, g).astype(w.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)


def _split_rows(array: Array, rows: int) -> Array:
    """Split the last of the `rows` leading dims in two."""
    length = array.shape[rows - 1]
    return array.reshape(*array.shape[: rows - 1], length // _ROW_SPLIT, _ROW_SPLIT, *array.shape[rows:])


def _dot(x: Array, w: Array, x_dims: tuple[int, ...], w_dims: tuple[int, ...]) -> Array:
    return jax.lax.dot_general(x, w, ((x_dims, w_dims), ((), ())), preferred_element_type=jnp.float32)
