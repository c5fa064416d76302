"""Adapters and their bases: opened together, written as an adapter again or merged into a model.

Owns reading both formats of adapters into the factors they mean, and a base whose tensors have the adapter's products added
row by row. Refuses to own an adapter's own folder (`adapter.py`), PEFT's files (`models/peft.py`) and what an adapter
computes (`models/lora.py`).
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rljax.checkpoint import load_params
from rljax.conversion import adapter as folders
from rljax.conversion.adapter import AdapterCard, base_identity
from rljax.conversion.sources import Kind, open_source, source_kind
from rljax.leaves import named_leaves
from rljax.manifest import read_manifest, storage_errors
from rljax.models import peft
from rljax.models.arch import Arch
from rljax.models.layout import Outside, Slot, cast, slices
from rljax.models.lora import LoraSpec, abstract_adapter
from rljax.models.peft import Factors

ADAPTERS: tuple[Kind, ...] = ("adapter", "peft")
"""Formats that hold an adapter and not a model: of rljax, and of PEFT."""

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
        Adapter(spec=spec, factors={"q_proj": {"a": a, "b": b}}, base=Path("checkpoints/model"), model=opened, notices=())
    """

    spec: LoraSpec
    """What it is."""
    factors: Factors
    """Its factors, by target."""
    base: Path
    """The base it was opened with."""
    model: Outside
    """That base, opened."""
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
        base: The model it belongs to; None for the one that PEFT's file names, if it is here.

    Raises:
        ValueError: It is broken, is for another base, or the base is not here; names both.
        StorageError: A file of it is missing or damaged.
    """
    if base is None:
        named = peft.read_config(folder).base if kind == "peft" else None
        if named is None or not Path(named).exists():
            told = "" if named is None else f" for {named}, which is not here"
            raise ValueError(f"{folder} is an adapter{told}; name the folder of its base with --base")
        base = Path(named)
    base_kind = source_kind(base)
    if base_kind in ADAPTERS:
        raise ValueError(f"{base} is an adapter; --base is for the whole model that {folder} is an adapter of")
    model = open_source(base_kind, base)
    if kind == "peft":
        spec, factors, config = peft.read_peft(folder, model.arch, str(base))
        return Adapter(spec, factors, base, model, config.notices)
    card = folders.read_card(folder)
    folders.check_base(folder, card, base, identity_of(base))
    return Adapter(card.spec, _factors(folder, card.spec, model.arch, base), base, model, ())


def write_adapter(folder: Path, to: Kind, adapter: Adapter, dtype: str) -> None:
    """Write an adapter into a folder that does not exist.

    Raises:
        ValueError: Its base is no checkpoint of rljax, and `to` is the format of rljax.
        StorageError: Writing failed.
    """
    if to == "adapter":
        card = AdapterCard(adapter.spec, identity_of(adapter.base))
        params = jax.tree.map(lambda part: jnp.asarray(cast(part, np.dtype(dtype))), {"layers": adapter.factors})
        folders.write_adapter(folder, params, card)
        return
    with storage_errors(f"{folder} could not be written"):
        folder.mkdir()
        tensors = {name: values for name, _, values in adapter.tensors(dtype)}
        peft.write_peft(folder, adapter.spec, tensors, dtype, str(adapter.base))


def identity_of(base: Path) -> str:
    """Return the identity of a base by which adapters of rljax know it.

    Raises:
        ValueError: It is no checkpoint of rljax.
        StorageError: Its manifest is missing or damaged.
    """
    if source_kind(base) != "orbax":
        raise ValueError(
            f"{base} is no checkpoint of rljax, to which alone adapters of rljax belong; make one with "
            f"`rljax convert {base} NEW_FOLDER` and name that with --base"
        )
    return base_identity(base)


def merged(adapter: Adapter) -> Outside:
    """Return the base with scale * b a added to the weights, in float32, a few rows at a time."""
    model, spec = adapter.model, adapter.spec
    home = {slot.name: (slot, target) for slot, target in _adapted(model, spec)}
    wide = np.dtype(np.float32)

    def rows(name: str, first: int, last: int) -> np.ndarray:
        values = model.rows(name, first, last)
        if name not in home:
            return values
        slot, target = home[name]
        assert slot.layer is not None
        a, b = (peft.tensor(adapter.factors[target][side.lower()][slot.layer], side) for side in "AB")
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


def _factors(folder: Path, spec: LoraSpec, arch: Arch, base: Path) -> Factors:
    """Load the factors of an adapter of rljax onto the host, in bfloat16 if all are, else in float32."""
    shapes = abstract_adapter(arch, spec)
    leaves = read_manifest(folder)["leaves"]
    held = {name: tuple(leaf["shape"]) for name, leaf in leaves.items()}
    wanted = {name: leaf.shape for name, leaf in named_leaves(shapes).items()}
    if held != wanted:
        name = min(name for name in {*held, *wanted} if held.get(name) != wanted.get(name))
        raise ValueError(
            f"the adapter {folder} has {name} of shape {held.get(name)}, and rank {spec.rank} with the base {base} asks for "
            f"{wanted.get(name)}; convert the adapter again, or name another base with --base"
        )
    kind = jnp.dtype("bfloat16" if {leaf["dtype"] for leaf in leaves.values()} == {"bfloat16"} else "float32")
    place = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    loaded = load_params(folder, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, kind, sharding=place), shapes))
    return {target: {side: np.asarray(part) for side, part in pair.items()} for target, pair in loaded["layers"].items()}
