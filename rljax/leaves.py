"""The leaves of a tree by name: what can be stored, how it is described, and whether two sides agree.

Owns the comparison that stands between a file and a training state. Refuses to own files.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from rljax.pytree import leaf_names

_MAX_LISTED_PROBLEMS = 8


def named_leaves(tree: PyTree) -> dict[str, Any]:
    """Name every leaf by its path, as in `params.layers.attention.query`.

    Raises:
        ValueError: Two leaves have the same name.
    """
    leaves: dict[str, Any] = {}
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        if name in leaves:
            raise ValueError(f"two leaves of the tree are called {name!r}; rename one of them")
        leaves[name or "root"] = leaf
    return leaves


def live_leaves(tree: PyTree) -> dict[str, jax.Array]:
    """Name every leaf of a tree that is to be saved.

    Raises:
        ValueError: A leaf is not a jax array, was donated, or is empty; or there is none. Names the leaf.
    """
    leaves = named_leaves(tree)
    if not leaves:
        raise ValueError("the tree to be saved has no leaves")
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise ValueError(f"leaf {name!r} is a {type(leaf).__name__}; only jax arrays can be saved")
        if leaf.is_deleted():
            raise ValueError(f"leaf {name!r} has been donated or deleted; save the arrays the update returned")
        if leaf.size == 0:
            raise ValueError(f"leaf {name!r} is empty (shape {leaf.shape}); leave it out of the tree")
    return leaves


def wanted_leaves(abstract: PyTree) -> dict[str, jax.ShapeDtypeStruct]:
    """Name every leaf of the tree that is to be restored.

    Raises:
        ValueError: A leaf is not a shape with a sharding; names it.
    """
    leaves = named_leaves(abstract)
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(leaf.sharding, jax.sharding.Sharding):
            raise ValueError(f"leaf {name!r} of the abstract tree must be a jax.ShapeDtypeStruct with a sharding, got {leaf!r}")
    return leaves


def is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Say whether a leaf holds typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(leaves: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> dict[str, dict[str, Any]]:
    """Describe leaves for the manifest: shape, type, and for typed random keys the name of their generator."""
    facts: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        facts[name] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        if is_key(leaf):
            assert isinstance(leaf, jax.Array), f"the generator of {name} is not known from its shape"
            facts[name]["generator"] = str(jax.random.key_impl(leaf))
    return facts


def check_leaves(
    saved: Mapping[str, Mapping[str, Any]],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    what: str,
    *,
    convert: bool = False,
) -> None:
    """Compare what a checkpoint holds with what is asked of it.

    Args:
        saved: What `describe` said when it was saved.
        wanted: The leaves asked for.
        what: The checkpoint, for the message.
        convert: Let floating-point types differ.

    Raises:
        ValueError: A leaf is missing, left over, or of another shape or type; names the leaves.
    """
    problems = [f"leaf {name!r} is missing from the checkpoint" for name in wanted if name not in saved]
    problems += [f"leaf {name!r} is in the checkpoint only" for name in saved if name not in wanted]
    for name, leaf in wanted.items():
        if name not in saved:
            continue
        shape, dtype = tuple(saved[name]["shape"]), saved[name]["dtype"]
        both_float = convert and "generator" not in saved[name] and _is_float(dtype) and _is_float(leaf.dtype)
        if shape != leaf.shape or (dtype != str(leaf.dtype) and not both_float):
            problems.append(f"leaf {name!r} was saved as {dtype}{list(shape)}, expected {leaf.dtype}{list(leaf.shape)}")
    if problems:
        listed = "; ".join(problems[:_MAX_LISTED_PROBLEMS])
        rest = f"; and {len(problems) - _MAX_LISTED_PROBLEMS} more" if len(problems) > _MAX_LISTED_PROBLEMS else ""
        raise ValueError(f"{what} does not fit the model and optimizer of this configuration: {listed}{rest}")


def _is_float(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def like(abstract: PyTree, leaves: Mapping[str, Any]) -> PyTree:
    """Put named leaves, or what took their place, back into the structure of `abstract`."""
    return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in named_leaves(abstract)])
