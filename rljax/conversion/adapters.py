"""Adapters: opening one with the base it belongs to, joining the two, and writing an adapter on its own.

Owns the folder of an adapter of rljax, what tells one base from another, and the base with the adapter's products added
row by row. Refuses to own PEFT's files (`models/peft.py`) and what an adapter computes (`models/lora.py`).

    lora.json         rank, alpha, targets, and the base: its name and its identity
    params/           the factors, as `lora.abstract_adapter` has them
    manifest.json     as in every checkpoint
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.checkpoint import load_files, load_params, save_params
from rljax.conversion.sources import ADAPTER_FILE, Kind, open_source, source_kind
from rljax.leaves import named_leaves
from rljax.manifest import read_manifest, storage_errors
from rljax.models import peft
from rljax.models.arch import Arch
from rljax.models.layout import Outside, Slot, cast, slices
from rljax.models.lora import LoraSpec, abstract_adapter
from rljax.models.peft import Factors

ADAPTERS: tuple[Kind, ...] = ("adapter", "peft")
"""Formats that hold an adapter and not a model: of rljax, and of PEFT."""

_ROWS = 64  # of a tensor that the identity of a model looks at
_PROJECTIONS = {
    **{("layers.qkv", part): f"{part[0]}_proj" for part in ("query", "key", "value")},
    ("layers.out", "out"): "o_proj",
    ("layers.gate_up", "gate"): "gate_proj",
    ("layers.gate_up", "up"): "up_proj",
    ("layers.down", "down"): "down_proj",
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that was read and fits its base.

    Example:
        Adapter(spec=spec, factors={"q_proj": {"a": a, "b": b}}, base=Path("checkpoints/model"), model=base, config=None,
                notices=())
    """

    spec: LoraSpec
    """What it is."""
    factors: Factors
    """Its factors, by target."""
    base: Path
    """The base it was opened with."""
    model: Outside
    """That base, opened."""
    config: bytes | None
    """The adapter_config.json it came with, if it did."""
    notices: tuple[str, ...]
    """What was assumed or left out."""

    @property
    def arch(self) -> Arch:
        """The architecture of the base."""
        return self.model.arch

    @property
    def types(self) -> set[str]:
        """The types of its factors, as numpy calls them."""
        return {factor.dtype.name for pair in self.factors.values() for factor in pair.values()}

    def tensors(self, dtype: str) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield the parts that both formats have: name in PEFT's, name in ours, and values as PEFT arranges them."""
        for target in self.spec.targets:
            for side in "AB":
                for layer, factor in enumerate(self.factors[target][side.lower()]):
                    values = cast(np.ascontiguousarray(peft.tensor(factor, side)), np.dtype(dtype))
                    yield peft.tensor_name(layer, target, side), f"layers.{target}.{side.lower()}[{layer}]", values


def open_adapter(kind: Kind, folder: Path, base: Path | None) -> Adapter:
    """Read an adapter and open its base.

    Args:
        kind: Its format.
        folder: Its folder.
        base: The model it belongs to; None for the one it names, if that is here.

    Raises:
        ValueError: It is broken, is for another base, or the base is not here; names both.
        StorageError: A file of it is missing or damaged.
    """
    named, identity = _recorded(kind, folder)
    if base is None:
        if named is None or not Path(named).exists():
            raise ValueError(f"{folder} is an adapter for {named}, which is not here; name the folder of its base with --base")
        base = Path(named)
    base_kind = source_kind(base)
    if base_kind in ADAPTERS:
        raise ValueError(f"{base} is an adapter; --base is for the whole model that {folder} is an adapter of")
    model = open_source(base_kind, base)
    if identity is not None and identity != model_identity(model):
        raise ValueError(
            f"{folder} is an adapter for {named}, and {base} is another model (its weights differ, perhaps because the adapter "
            "is in them already); name the right base with --base"
        )
    if kind == "peft":
        spec, factors, config = peft.read_peft(folder, model.arch, str(base))
        stored, notices = (folder / peft.CONFIG).read_bytes(), config.notices
    else:
        (spec, factors, stored), notices = _read(folder, model, base, named), ()
    return Adapter(spec, factors, base, model, stored, notices)


def write_adapter(folder: Path, to: Kind, adapter: Adapter, dtype: str) -> None:
    """Write an adapter into a folder that does not exist.

    Raises:
        StorageError: Writing failed.
    """
    with storage_errors(f"{folder} could not be written"):
        if to == "peft":
            folder.mkdir()
            config = adapter.config or peft.config_of(adapter.spec, str(adapter.base))
            peft.write_peft(folder, adapter.spec, adapter.factors, dtype, config)
        else:
            params = jax.tree.map(lambda part: jnp.asarray(cast(part, np.dtype(dtype))), {"layers": adapter.factors})
            files = adapter_files(adapter.spec, adapter.base, adapter.model)
            save_params(folder, params, files | ({} if adapter.config is None else {peft.CONFIG: adapter.config}))


def adapter_files(spec: LoraSpec, base: Path, model: Outside) -> dict[str, bytes]:
    """Return the files that `checkpoint.save_params` needs to make factors an adapter of rljax for a base.

    Args:
        spec: What the adapter is.
        base: The base.
        model: The base, opened.
    """
    recorded = {"name": str(base.resolve()), "identity": model_identity(model)}
    return {ADAPTER_FILE: (json.dumps({**spec.to_json(), "base": recorded}, indent=2) + "\n").encode()}


def model_identity(model: Outside) -> str:
    """Return what tells a model from others of its shape, whatever its format and type.

    A digest of the first rows of every tensor that is not inside a layer, and of the first and the last layer, rounded to
    bfloat16: that is where a model in several types is still the same.
    """
    digest = hashlib.sha256()
    layers = {0, model.arch.num_layers - 1}
    for slot in (slot for piece in slices(model.arch) for slot in piece.slots):
        if slot.expert is None and slot.layer in {None, *layers}:
            # Of several experts in one tensor, a row is a whole expert.
            last = min(slot.shape[0], _ROWS if len(slot.shape) < 3 else 1)
            rows = cast(cast(model.rows(slot.name, 0, last), np.dtype("float32")), np.dtype("bfloat16"))
            digest.update(slot.name.encode() + rows.tobytes())
    return digest.hexdigest()


def merged(adapter: Adapter) -> Outside:
    """Return the base with scale * b a added to the weights, in float32, a few rows at a time."""
    model, spec = adapter.model, adapter.spec
    home = {slot.name: (slot, target) for slot, target in _adapted(model, spec)}

    def rows(name: str, first: int, last: int) -> np.ndarray:
        values = model.rows(name, first, last)
        if name not in home:
            return values
        slot, target = home[name]
        assert slot.layer is not None
        a, b = (peft.tensor(adapter.factors[target][side.lower()][slot.layer], side) for side in "AB")
        wide = np.dtype("float32")
        return cast(values, wide) + np.float32(spec.scale) * (cast(b[first:last], wide) @ cast(a, wide))

    origins = {
        name: dataclasses.replace(origin, name=f"{origin.name} + {home[name][1]}") if name in home else origin
        for name, origin in model.origins.items()
    }
    return dataclasses.replace(model, origins=origins, rows=rows, notices=(*model.notices, *adapter.notices))


def _adapted(model: Outside, spec: LoraSpec) -> Iterator[tuple[Slot, str]]:
    """Yield the slots that have factors, and the target whose they are."""
    for slot in (slot for piece in slices(model.arch) for slot in piece.slots):
        target = _PROJECTIONS.get((slot.target, slot.part))
        if target in spec.targets:
            yield slot, target


def _recorded(kind: Kind, folder: Path) -> tuple[str | None, str | None]:
    """Return name and identity of the base that an adapter says it is for."""
    if kind == "peft":
        return peft.read_config(folder).base, None
    base: Mapping[str, Any] = _lora_json(folder).get("base") or {}
    return base.get("name"), base.get("identity")


def _lora_json(folder: Path) -> dict[str, Any]:
    try:
        fields = json.loads(load_files(folder)[ADAPTER_FILE])
    except ValueError as err:
        raise ValueError(f"{folder / ADAPTER_FILE}: not valid JSON ({err}); copy the adapter again") from err
    return fields


def _read(folder: Path, model: Outside, base: Path, named: str | None) -> tuple[LoraSpec, Factors, bytes | None]:
    """Read an adapter of rljax, after comparing its shapes with those the base asks for."""
    fields = _lora_json(folder)
    fields.pop("base", None)
    spec = LoraSpec.from_json(fields)
    shapes = abstract_adapter(model.arch, spec)
    held = {name: tuple(leaf["shape"]) for name, leaf in read_manifest(folder)["leaves"].items()}
    wanted = {name: leaf.shape for name, leaf in named_leaves(shapes).items()}
    if held != wanted:
        name = min(name for name in {*held, *wanted} if held.get(name) != wanted.get(name))
        raise ValueError(
            f"{folder} is an adapter for {named}: {name} has shape {held.get(name)}, and rank {spec.rank} with the base {base} "
            f"asks for {wanted.get(name)}; name the right base with --base"
        )
    place = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    narrow = {leaf["dtype"] for leaf in read_manifest(folder)["leaves"].values()} == {"bfloat16"}
    kind = jnp.dtype("bfloat16" if narrow else "float32")
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, kind, sharding=place), shapes)
    loaded = load_params(folder, abstract)["layers"]
    factors = {target: {side: np.asarray(part) for side, part in pair.items()} for target, pair in loaded.items()}
    return spec, factors, load_files(folder).get(peft.CONFIG)
