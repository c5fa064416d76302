"""Update rules for matrices: Muon and Adafactor.

Owns what one matrix is: parameters are stacks over layers and experts, and fused projections (`qkv`, `gate_up`) hold several
matrices; each is updated by itself, as if it were a parameter of its own. Refuses to own AdamW, the clip, weight decay and the
learning rate (optimizer.py), and how what a rule remembers is kept (moments.py).

Whatever a rule remembers has the dims of its parameter, of size 1 where a mean was taken, so it lies on the mesh like it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from rljax.pytree import leaf_names

Names = tuple[str, ...]
"""Logical axis names of a parameter."""

_STACKED = {"layers", "experts"}
_WIDTHS = {"embed", "rank"}  # one side of every matrix is one of these
_FUSED: Mapping[str, Callable[[int], tuple[int, ...]]] = {
    "qkv": lambda size: (size - 2, 1, 1),
    "gate_up": lambda size: (1,) * size,
}
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_ADAFACTOR_FLOORS = (1e-30, 1e-3)


class Dims(NamedTuple):
    """Where the dims of one matrix, or of one vector, are among those of its parameter."""

    inputs: tuple[int, ...]
    """From the end; none for a vector."""
    outputs: tuple[int, ...]
    """From the end: those that the sum over inputs leaves, or all of a vector."""


def dims_of(names: Names) -> Dims:
    """Read off the names of a parameter's dims what is a matrix of it.

    Dims of layers and experts count matrices; of the others, `embed` or `rank`, first or last, is one side. What has no such
    side is a vector: a bias, a scale.
    """
    own = tuple(name for name in names if name not in _STACKED)
    size, inputs = len(own), 0
    if size > 1 and own[0] in _WIDTHS:
        inputs = 1
    elif size > 1 and own[-1] in _WIDTHS:
        inputs = size - 1
    return Dims(tuple(range(-size, inputs - size)), tuple(range(inputs - size, 0)))


def is_hidden_matrix(names: Names) -> bool:
    """Say whether Muon is for a parameter: matrices, but neither embedding nor output head."""
    return bool(dims_of(names).inputs) and "vocab" not in names


def _sizes(names: Names, x: Array) -> tuple[int, ...]:
    """Return how the last dim but one is divided into matrices; nothing where the parameter is not fused."""
    fused = [name for name in names if name in _FUSED]
    return _FUSED[fused[0]](x.shape[-2]) if fused else ()


def _split(x: Array, sizes: Sequence[int]) -> list[Array]:
    """Take a fused parameter apart, or what is remembered about it, with one entry per matrix where it has been averaged."""
    if not sizes:
        return [x]
    sizes = sizes if x.shape[-2] == sum(sizes) else [1] * len(sizes)
    return jnp.split(x, [sum(sizes[:end]) for end in range(1, len(sizes))], axis=-2)


def _join(pieces: Sequence[Array]) -> Array:
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=-2)


class Rule(NamedTuple):
    """The two functions of an optax transformation."""

    init: Callable[[Any], Any]
    """From parameters to what is remembered."""
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    """From gradients, what is remembered and parameters to directions and what is then remembered."""


class MuonState(NamedTuple):
    """What Muon remembers."""

    momentum: Any
    """Average of the gradients."""


def muon(axes: Any, momentum: float) -> Rule:
    """Return Muon with Nesterov momentum, scaled as AdamW's updates are (arXiv:2502.16982 section 2.2).

    M = beta M + (1 - beta) G and O = NewtonSchulz(beta M + (1 - beta) G); direction 0.2 sqrt(max(inputs, outputs)) O, so
    that its root mean square is about 0.2, AdamW's, and one learning rate serves both. `axes` are the names of every parameter.
    """
    names = by_path(axes)

    def init(params: Any) -> MuonState:
        return MuonState(jax.tree.map(jnp.zeros_like, params))

    def direction(name: str, average: Array, grad: Array) -> Array:
        ahead, dims = momentum * average + (1 - momentum) * grad, dims_of(names[name])
        pieces = _split(ahead, _sizes(names[name], ahead))
        return _join([_orthogonal_piece(piece, dims) for piece in pieces])

    def update(grads: Any, state: MuonState, _: Any) -> tuple[Any, MuonState]:
        average = jax.tree.map(lambda old, grad: momentum * old + (1 - momentum) * grad, state.momentum, grads)
        return _map_named(direction, average, grads), MuonState(average)

    return Rule(init, update)


def _orthogonal_piece(x: Array, dims: Dims) -> Array:
    inputs, outputs = (math.prod(x.shape[dim] for dim in side) for side in dims)
    found = orthogonalised(x.reshape(-1, inputs, outputs))
    return 0.2 * math.sqrt(max(inputs, outputs)) * found.reshape(x.shape)


def orthogonalised(x: Float[Array, "n i o"]) -> Float[Array, "n i o"]:
    """Bring the singular values of each matrix near 1: five steps of Muon's Newton-Schulz iteration.

    X / |X|, then X = a X + (b A + c A A) X with A = X X^T (Jordan et al. 2024, kellerjordan.github.io/posts/muon).
    """
    a, b, c = _NEWTON_SCHULZ
    wide = x.shape[1] > x.shape[2]
    x = jnp.swapaxes(x, 1, 2) if wide else x  # the smaller of the two Gram matrices
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + 1e-7)

    def step(_: Array, x: Array) -> Array:
        gram = jnp.einsum("nio,njo->nij", x, x)
        return a * x + jnp.einsum("nij,njo->nio", b * gram + c * jnp.einsum("nij,njk->nik", gram, gram), x)

    x = jax.lax.fori_loop(0, 5, step, x)
    return jnp.swapaxes(x, 1, 2) if wide else x


class AdafactorState(NamedTuple):
    """What Adafactor remembers."""

    updates: Int[Array, ""]
    """Updates done, int32."""
    rows: Any
    """Averages of squared gradients over the outputs of each matrix; of vectors, averages of the squares themselves."""
    columns: Any
    """The same over the inputs; None for vectors."""


def adafactor(axes: Any) -> Rule:
    """Return Adafactor without momentum (arXiv:1804.04235 algorithms 4 and 5, with the constants of section 9).

    With b = 1 - t^-0.8: R, C average G^2 + 1e-30 over outputs and over inputs; U = G / sqrt(R C / mean(R)), divided by
    max(1, rms(U)), times max(1e-3, rms(parameter)). So learning rates are relative to the size of a matrix; the
    schedule alone decides them, without the paper's bound of 1 / sqrt(t).
    """
    names = by_path(axes)

    def init(params: Any) -> AdafactorState:
        zeros = _map_named(lambda name, leaf: jax.tree.map(jnp.zeros_like, _squares(names[name], leaf)), params)
        return AdafactorState(jnp.zeros((), jnp.int32), *_unzip(params, zeros, 2))

    def update(grads: Any, state: AdafactorState, params: Any) -> tuple[Any, AdafactorState]:
        updates = state.updates + 1
        fresh = updates.astype(jnp.float32) ** -0.8

        def one(name: str, grad: Array, rows: Array, columns: Array | None, param: Array) -> tuple[Array, Array, Array | None]:
            found = _squares(names[name], grad)
            row, column = jax.tree.map(lambda old, new: old + fresh * (new - old), (rows, columns), found)
            return _adafactor_direction(names[name], grad, row, column, param), row, column

        parts = _map_named(one, grads, state.rows, state.columns, params)
        directions, rows, columns = _unzip(grads, parts, 3)
        return directions, AdafactorState(updates, rows, columns)

    return Rule(init, update)


def _squares(names: Names, grad: Array) -> tuple[Array, Array | None]:
    """Average the squares of each matrix over its outputs, and over its inputs; keep those of a vector."""
    squares, dims = grad * grad + _ADAFACTOR_FLOORS[0], dims_of(names)
    if not dims.inputs:
        return squares, None
    rows = [jnp.mean(piece, axis=dims.outputs, keepdims=True) for piece in _split(squares, _sizes(names, grad))]
    return _join(rows), jnp.mean(squares, axis=dims.inputs, keepdims=True)


def _adafactor_direction(names: Names, grad: Array, row: Array, column: Array | None, param: Array) -> Array:
    dims, sizes = dims_of(names), _sizes(names, grad)
    every = (*dims.inputs, *dims.outputs)

    def root_mean_square(x: Array) -> Array:
        return jnp.sqrt(jnp.mean(x * x, axis=every, keepdims=True))

    def one(grad: Array, row: Array, column: Array | None, param: Array) -> Array:
        if column is None:
            scale = jax.lax.rsqrt(row)
        else:  # the quotient first: a product of two floors would be 0
            scale = jax.lax.rsqrt(row / jnp.mean(row, axis=dims.inputs, keepdims=True)) * jax.lax.rsqrt(column)
        step = grad * scale
        return step / jnp.maximum(1.0, root_mean_square(step)) * jnp.maximum(_ADAFACTOR_FLOORS[1], root_mean_square(param))

    split = [_split(x, sizes) for x in (grad, row, param)]
    columns = [None] * len(split[0]) if column is None else _split(column, sizes)
    return _join([one(*parts) for parts in zip(split[0], split[1], columns, split[2], strict=True)])


def by_path(axes: Any) -> dict[str, Names]:
    """Return the names of every parameter by its path."""

    def is_leaf(node: Any) -> bool:
        return isinstance(node, tuple)

    return dict(zip(leaf_names(axes, is_leaf), jax.tree.leaves(axes, is_leaf=is_leaf), strict=True))


def _map_named(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply a function to the name of each leaf of a tree, the leaf, and what others have in its place."""
    structure = jax.tree.structure(tree)
    columns = [leaf_names(tree), jax.tree.leaves(tree), *(structure.flatten_up_to(other) for other in others)]
    return jax.tree.unflatten(structure, [function(*row) for row in zip(*columns, strict=True)])


def _unzip(like: Any, tree: Any, count: int) -> list[Any]:
    """Turn a tree of tuples into a tuple of trees, all in the structure of `like`."""
    structure = jax.tree.structure(like)
    rows = structure.flatten_up_to(tree)
    return [jax.tree.unflatten(structure, [row[index] for row in rows]) for index in range(count)]
