"""A `@pytree` record is a frozen dataclass that jax takes apart and puts together again, whatever stands in its fields."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from rljax.pytree import leaf_names, pytree, with_fields


@pytree
class Point:
    """Two arrays of one length."""

    x: Float[Array, " n"]
    y: Float[Array, " n"]

    def __post_init__(self) -> None:
        if self.x.shape != self.y.shape:
            raise ValueError("x and y differ")


@pytree
class Pair:
    """Records may hold records, containers and nothing."""

    first: Point
    rest: dict[str, Any]
    missing: Array | None = None


def pair() -> Pair:
    return Pair(Point(jnp.arange(2.0), jnp.ones(2)), {"b": jnp.zeros(3), "a": (jnp.zeros(1),)})


def test_leaves_are_the_fields_in_order_with_dotted_names() -> None:
    assert leaf_names(pair()) == ["first.x", "first.y", "rest.a.0", "rest.b"]
    assert [leaf.shape for leaf in jax.tree.leaves(pair())] == [(2,), (2,), (1,), (3,)]


def test_names_stop_where_asked() -> None:
    assert leaf_names(pair(), is_leaf=lambda node: isinstance(node, Point)) == ["first", "rest.a.0", "rest.b"]


def test_records_pass_through_transformations() -> None:
    def double(record: Pair) -> Pair:
        return jax.tree.map(lambda leaf: 2 * leaf, record)

    out = jax.jit(double)(pair())
    assert isinstance(out, Pair)
    assert out.first.x.tolist() == [0.0, 2.0]
    assert out.missing is None
    _, stacked = jax.lax.scan(lambda carry, _: (carry, carry), pair().first, length=3)
    assert isinstance(stacked, Point)
    assert stacked.x.shape == (3, 2)
    grads = jax.grad(lambda point: (point.x * point.y).sum())(pair().first)
    assert grads.x.tolist() == [1.0, 1.0]


def test_putting_together_does_not_check_what_the_constructor_checks() -> None:
    with pytest.raises(ValueError, match="differ"):
        Point(jnp.zeros(1), jnp.zeros(2))
    shapes = jax.tree.map(lambda leaf: leaf.shape[0] * "x", pair())
    assert (shapes.first.x, shapes.rest["b"]) == ("xx", "xxx")
    abstract = jax.eval_shape(lambda record: record, pair())
    assert isinstance(abstract.first.x, jax.ShapeDtypeStruct)
    assert with_fields(Point, x="axis", y=None).x == "axis"


def test_records_cannot_be_changed() -> None:
    point: Any = pair().first
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = np.zeros(2)


def test_records_of_one_class_have_one_structure() -> None:
    assert jax.tree.structure(pair()) == jax.tree.structure(pair())
    other = Pair(pair().first, {"a": jnp.zeros(1)})
    assert jax.tree.structure(pair()) != jax.tree.structure(other)
