"""Rotary embeddings in a config.json: the old keys, the new ones, and what each kind needs.

Owns the translation between those keys and `Rope`. Refuses to own the other keys of a configuration.

Old: `rope_theta`, `rope_scaling` with `type` or `rope_type`, and next to them `partial_rotary_factor` and
`original_max_position_embeddings`. New: all of it in `rope_parameters`. When both are there, they must agree.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljax.models.arch import Rope

# Keys that mean something for each kind: needed ones, and ones that may be absent.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "yarn": (
        ("factor",),
        (
            *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        ),
    ),
    "longrope": (
        ("short_factor", "long_factor"),
        ("original_max_position_embeddings", "attention_factor", "factor"),
    ),
}
_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Keys that may stand next to the tables as well as in them."""


@dataclass(frozen=True, slots=True)
class RopeFacts:
    """What the rest of a configuration says about its rotary embedding."""

    where: str
    """The file, for messages."""
    max_position: int
    """max_position_embeddings (tokens)."""
    theta: float | None
    """What the family takes without `rope_theta`; None when it must be there."""
    renamed: Mapping[str, str]
    """Kinds that the family calls by another name."""
    partial: bool
    """Whether the family can rotate a part of each head."""


def read_rope(tables: Mapping[str, Any], facts: RopeFacts) -> tuple[Rope, int, list[str]]:
    """Read a rotary embedding from the keys and tables of a configuration that speak of it.

    Returns:
        The embedding, the longest sequence it can be used for (tokens), and notices of what was assumed.

    Raises:
        ValueError: keys contradict each other, are missing, have no meaning, or are of a kind rljax lacks.
    """
    merged, origin = _merge(tables, facts.where)
    kind = merged.pop("rope_type", "default")
    kind = facts.renamed.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in _KEYS:
        raise ValueError(f"{facts.where}: rope_type {kind!r} is not supported; rljax knows {', '.join(_KEYS)}")
    notices = []
    theta = merged.pop("rope_theta", None)
    if theta is None:
        if facts.theta is None:
            raise ValueError(f"{facts.where}: rope_theta is missing, and this family has no one value for it; add it")
        theta = facts.theta
        notices.append(f"{facts.where} names no rope_theta; took the family's {theta:g}")
    fraction = merged.pop("partial_rotary_factor", 1.0)
    if fraction != 1 and not facts.partial:
        raise ValueError(f"{facts.where}: partial_rotary_factor other than 1 is not supported for this family")
    needed, optional = _KEYS[kind]
    for key in list(merged):
        if key not in (*needed, *optional):
            # Next to the tables it is a fact about the model that this kind has no use for; inside, it is a mistake.
            if origin[key] != key:
                raise ValueError(f"{facts.where}: {origin[key]}.{key} has no meaning for rope_type {kind!r}; remove it")
            del merged[key]
    _check(
        {"rope_theta": theta, "partial_rotary_factor": fraction, **{k: merged.get(k) for k in needed}, **merged}, kind, facts
    )
    values: dict[str, Any] = {key: float(merged[key]) for key in _SIMPLE if key in merged}
    original = int(merged.get("original_max_position_embeddings", facts.max_position))
    stretch, longest = _stretch(kind, merged, original, facts, notices)
    rope = Rope(theta=float(theta), rotary_fraction=float(fraction), **{"kind": kind, **values, **stretch})
    return rope, longest, notices


# Keys that are numbers of the same name in `Rope`.
_SIMPLE = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")


def write_rope(rope: Rope) -> dict[str, Any]:
    """Return the table that means `rope`, without theta and the rotated part."""
    table: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind in ("linear", "dynamic", "llama3", "yarn"):
        table["factor"] = rope.factor
    if rope.kind == "llama3":
        table |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        table |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
    if rope.kind == "longrope":
        table |= {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}
    if rope.kind in ("yarn", "longrope"):
        table["attention_factor"] = rope.attention_factor
    if rope.kind in ("llama3", "yarn", "longrope"):
        table["original_max_position_embeddings"] = rope.original_max_position
    return table


def configured_length(rope: Rope, max_position: int) -> int:
    """Return the max_position_embeddings that `read_rope` made `max_position` of."""
    if rope.kind == "dynamic":
        return rope.original_max_position
    return round(rope.original_max_position * rope.factor) if rope.kind == "longrope" else max_position


def _merge(tables: Mapping[str, Any], where: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Put the keys of all places together, and say where each is from."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for place, entry in tables.items():
        entry = {place: entry} if place in _BESIDE else entry
        if not isinstance(entry, Mapping):
            raise ValueError(f"{where}: {place} must be a table or null, got {entry!r}")
        for old, value in entry.items():
            key = "rope_type" if old == "type" else old
            if value is None:
                continue
            if key in merged and merged[key] != value:
                raise ValueError(
                    f"{where}: {place} says {key} = {value!r}, but {origin[key]} says {merged[key]!r}; remove the wrong one"
                )
            merged[key], origin[key] = value, place
    return merged, origin


def _check(values: Mapping[str, Any], kind: str, facts: RopeFacts) -> None:
    for key, value in values.items():
        if key == "truncate":
            fits = isinstance(value, bool)
        elif key in ("short_factor", "long_factor"):
            fits = isinstance(value, Sequence) and bool(value) and all(map(_positive, value))
        else:
            fits = _positive(value)
        if not fits:
            what = {"truncate": "true or false for", "short_factor": "a list of", "long_factor": "a list of"}.get(
                key, "a positive"
            )
            raise ValueError(f"{facts.where}: rotary embedding of type {kind!r} needs {what} {key}, got {value!r}")
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ValueError(f"{facts.where}: low_freq_factor must be below high_freq_factor in rope_scaling")


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _stretch(
    kind: str, merged: Mapping[str, Any], original: int, facts: RopeFacts, notices: list[str]
) -> tuple[dict[str, Any], int]:
    """Return the fields that a kind derives, and the longest sequence (tokens)."""
    if kind == "llama3":
        return {"original_max_position": original}, facts.max_position
    if kind == "dynamic":
        return {"original_max_position": facts.max_position}, facts.max_position
    if kind == "yarn":
        return {
            "original_max_position": original,
            "truncate": merged.get("truncate", True),
            "attention_factor": float(merged.get("attention_factor", _yarn_attention(merged))),
        }, facts.max_position
    if kind == "longrope":
        ratio = facts.max_position / original
        factor = merged.get("factor", ratio)
        # LongRoPE (arXiv:2402.13753), the scaling of its released code.
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        if facts.max_position > original:
            notices.append(
                f"{facts.where}: longrope has factors for sequences up to {original} tokens and others for longer ones; "
                f"took the first, so the model is good for {original} tokens"
            )
        return {
            "original_max_position": original,
            "factor": ratio,
            "attention_factor": float(merged.get("attention_factor", attention)),
            "short_factors": tuple(map(float, merged["short_factor"])),
            "long_factors": tuple(map(float, merged["long_factor"])),
        }, min(original, facts.max_position)
    return {}, facts.max_position


def _yarn_attention(merged: Mapping[str, Any]) -> float:
    """Return the factor of rotated vectors (arXiv:2309.00071 section 3.4; the two mscale keys are DeepSeek-V2's)."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(merged["factor"]) + 1.0 if merged["factor"] > 1 else 1.0

    if "mscale" in merged and "mscale_all_dim" in merged:
        return mscale(merged["mscale"]) / mscale(merged["mscale_all_dim"])
    return mscale(1.0)
