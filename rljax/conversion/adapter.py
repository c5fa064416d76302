"""Adapter folders: low-rank factors, what they are, and which model they were trained beside.

Owns what such a folder contains and the identity of a base model. Refuses to own PEFT's format and what is done with the
factors.

    adapter/
        lora.json        the spec, and the identity of the base
        params/          the factors, named as in `models.lora.abstract_adapter`
        manifest.json    as in every checkpoint

An adapter is only taken together with the model it was trained beside. That also keeps it from being merged a second time:
a merged model has another identity.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from rljax.checkpoint import load_files, save_params
from rljax.conversion.sources import ADAPTER_FILE, ARCH_FILE, PARAMS, model_manifest
from rljax.models.lora import LoraSpec
from rljax.pytree import Params


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """What lora.json says.

    Example:
        AdapterCard(spec=LoraSpec(rank=16, alpha=32.0, rslora=False, targets=("q_proj",)), base="9f86d081884c7d65...")
    """

    spec: LoraSpec
    """The adapter's rank, scale and targets."""
    base: str
    """Identity of the model it was trained beside, from `base_identity`."""


def base_identity(checkpoint: Path) -> str:
    """Return a digest of a model's architecture and parameters, as its manifest knows them; no array is read.

    Raises:
        StorageError: The manifest is missing or damaged.
    """
    files = model_manifest(checkpoint)["files"]
    facts = sorted((name, fact["sha256"]) for name, fact in files.items() if name == ARCH_FILE or name.startswith(f"{PARAMS}/"))
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def write_adapter(directory: Path, adapter: Params, card: AdapterCard, *, overwrite: bool = False) -> None:
    """Write an adapter folder, complete or not at all; see `save_params`."""
    text = json.dumps({"spec": card.spec.to_json(), "base": card.base}, indent=1) + "\n"
    save_params(directory, adapter, {ADAPTER_FILE: text.encode()}, overwrite=overwrite)


def read_card(directory: Path) -> AdapterCard:
    """Read what an adapter is, without its factors.

    Raises:
        ValueError: There is no adapter.
        StorageError: The file is damaged.
    """
    if not (directory / ADAPTER_FILE).exists():
        raise ValueError(
            f"{directory} is no adapter ({ADAPTER_FILE} is missing); give the adapter/ folder of a run with [lora]"
        )
    text = load_files(directory)[ADAPTER_FILE]
    try:
        fields = json.loads(text)
        return AdapterCard(LoraSpec.from_json(fields["spec"]), fields["base"])
    except (ValueError, KeyError, TypeError) as err:
        raise ValueError(f"{directory / ADAPTER_FILE}: not the description of an adapter ({err})") from err


def check_adapter(directory: Path, spec: LoraSpec, checkpoint: Path) -> None:
    """Refuse an adapter of another kind than `spec`, or of another model than `checkpoint`.

    Raises:
        ValueError: It is; says in what they differ.
    """
    card = read_card(directory)
    if card.spec != spec:
        raise ValueError(
            f"the adapter {directory} has {_differences(card.spec, spec)}; set these in [lora], or begin with another adapter"
        )
    check_base(directory, card, checkpoint, base_identity(checkpoint))


def check_base(directory: Path, card: AdapterCard, checkpoint: Path, identity: str) -> None:
    """Refuse a model, of this identity, that an adapter was not trained beside.

    Raises:
        ValueError: It is another one.
    """
    if card.base != identity:
        raise ValueError(
            f"the adapter {directory} belongs to another model than {checkpoint}; name the model it was trained beside "
            "(lora: model.checkpoint, convert: --base). A merged model holds its adapter already"
        )


def _differences(found: LoraSpec, asked: LoraSpec) -> str:
    """Say which fields of two specs differ."""
    left, right = found.to_json(), asked.to_json()
    return ", ".join(f"{name} {left[name]}, not {right[name]}" for name in left if left[name] != right[name])
