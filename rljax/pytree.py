"""Pytrees: the parameter type and frozen dataclasses that jax can traverse.

Owns the `@pytree` decorator and naming of leaves. Knows nothing of models, meshes or files.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, dataclass_transform

import jax

Params = dict[str, Any]
"""Nested dict of arrays (or shapes, shardings, names): one entry per parameter of a model."""

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Make a frozen dataclass whose fields jax traverses.

    Unflattening fills the fields without calling `__init__`, because jax also puts shapes, shardings and
    placeholders where arrays were, which checks on the constructor would reject.
    """
    data: Any = dataclasses.dataclass(frozen=True)(cls)
    names = tuple(field.name for field in dataclasses.fields(data))

    def flatten(record: Any) -> tuple[list[tuple[Any, Any]], None]:
        return [(jax.tree_util.GetAttrKey(name), getattr(record, name)) for name in names], None

    def unflatten(_: None, children: Any) -> Any:
        return with_fields(data, **dict(zip(names, children, strict=True)))

    jax.tree_util.register_pytree_with_keys(data, flatten, unflatten)
    return data


def with_fields(cls: type[T], **fields: Any) -> T:
    """Build a record of a `@pytree` class whose fields hold something else than arrays: shapes, shardings, names."""
    record = object.__new__(cls)
    for name, value in fields.items():
        object.__setattr__(record, name, value)
    return record


def leaf_names(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the dotted path of every leaf, in traversal order."""
    paths = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


def owner_of(path: Any, owners: Mapping[str, T]) -> T | None:
    """Return what is kept under the longest name that a path of tree keys ends with; None where it ends with none of them."""
    names = (jax.tree_util.keystr(tuple(path[start:]), simple=True, separator=".") for start in range(len(path)))
    return next((owners[name] for name in names if name in owners), None)
