"""GGUF files: metadata, dequantised tensors and tokenizer, read as a model.

Owns the translation of one .gguf file: its metadata into an `Arch`, its tensor names and values into those of Hugging Face
checkpoints. Refuses to own tokenizers (`gguf_tokenizer.py`) and writing. What the file does not say, or rljax cannot do, is
an error that names the metadata key.

Some families are stored otherwise than in their original: query and key rows of Llama so that the two channels of a rotated
pair are neighbours (see `interleaved_to_half`), and norm scales of Gemma with the 1 that its formula adds.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rljax.models.arch import Arch, Rope
from rljax.models.gguf_tokenizer import tokenizer_files
from rljax.models.hf_config import FAMILIES
from rljax.models.layout import Origin, Outside, interleaved_to_half, mismatches, refuse, slots

_ROPE_FACTORS = "rope_freqs.weight"

# What the published llama3 models use; a file keeps only the resulting factors, which are checked against these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
_FACTOR_RTOL = 1e-5  # the factors are stored as float32


def open_gguf(path: Path) -> Outside:
    """Open a .gguf file and check it against its metadata; tensors are dequantised later, one at a time.

    Raises:
        ValueError: the file is broken, not of a supported family, or holds what rljax cannot represent; or `gguf` is
            not installed.
    """
    try:
        import gguf  # optional: most conversions do without
    except ModuleNotFoundError as err:
        raise ValueError(f"{path}: reading GGUF needs the package gguf; install rljax[gguf]") from err
    try:
        reader = gguf.GGUFReader(path)
        meta = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError) as err:
        raise ValueError(f"{path}: not a complete GGUF file ({type(err).__name__}: {err}); download it again") from err
    stored = {tensor.name: tensor for tensor in reader.tensors}
    if len(stored) != len(reader.tensors):
        listed = [tensor.name for tensor in reader.tensors]
        twice = next(name for name in listed if listed.count(name) > 1)
        raise ValueError(f"{path}: {twice} is stored twice; download it again")
    convertible = tuple(
        sorted({tensor.tensor_type.name for tensor in reader.tensors if _dequantizes(gguf, tensor.tensor_type)})
    )

    def dequantize(name: str, first: int, last: int) -> np.ndarray:
        tensor = stored[name]
        shape = [int(size) for size in reversed(tensor.shape)]
        row = int(tensor.n_bytes) // shape[0]
        # Read rather than mapped, so that what has been read does not count as memory of the process.
        raw = np.fromfile(path, np.uint8, (last - first) * row, offset=int(tensor.data_offset) + first * row)
        values = gguf.dequantize(raw.reshape(last - first, -1), tensor.tensor_type)
        return values.reshape(last - first, *shape[1:])

    tied = "output.weight" not in stored
    factors = None
    if _ROPE_FACTORS in stored:
        factors = dequantize(_ROPE_FACTORS, 0, int(stored[_ROPE_FACTORS].shape[-1]))
    arch = _arch(meta, str(path), tied, factors)
    names = _names(gguf, meta["general.architecture"], arch)
    origins = {
        names.get(name, name): Origin(path, name, tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name)
        for name, tensor in stored.items()
        if name != _ROPE_FACTORS
    }
    refuse(path, mismatches(slots(arch), origins, convertible), "convert the model from its original format instead")

    style = STYLES[meta["general.architecture"]]

    def rows(name: str, first: int, last: int) -> np.ndarray:
        if style.shifted and name.endswith("norm.weight"):
            return dequantize(origins[name].name, first, last) - np.float32(1)
        if not style.interleaved or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return dequantize(origins[name].name, first, last)
        c = arch.head_dim  # rows are reordered inside a head, so whole heads are read
        start, stop = first // c * c, -(-last // c) * c
        heads = dequantize(origins[name].name, start, stop)
        return interleaved_to_half(heads, len(heads) // c)[first - start : last - start]

    key = f"{meta['general.architecture']}.rope.freq_base"
    notices = () if key in meta else (f"{path} names no {key}; took {arch.rope.theta:g}",)
    return Outside(arch, origins, rows, tokenizer_files(meta, str(path)), notices)


class _Keys:
    """The metadata keys of one file's architecture."""

    def __init__(self, meta: Mapping[str, Any], where: str):
        self.meta, self.where, self.name = meta, where, meta["general.architecture"]

    def given(self, key: str) -> Any:
        """Return a value or None."""
        return self.meta.get(f"{self.name}.{key}")

    def number(self, key: str, default: Any = None) -> Any:
        """Return a positive number."""
        value = default if self.given(key) is None else self.given(key)
        if value is None:
            raise ValueError(f"{self.where}: {self.name}.{key} is missing; convert the model from its original format instead")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ValueError(f"{self.where}: {self.name}.{key} must be one positive number, got {value!r}")
        return value

    def real(self, key: str, default: Any = None) -> float:
        """Return a positive number that is stored as float32."""
        return _shortest(self.number(key, default))


class Style(NamedTuple):
    """How a family is stored."""

    family: str
    """Name of its row of `hf_config.FAMILIES`."""
    theta: float = 10_000.0
    """Base of the rotary embedding when the file names none."""
    interleaved: bool = False
    """Whether the two channels of a rotated pair are neighbours."""
    shifted: bool = False
    """Whether norm scales have the 1 in them that the family adds."""
    period: int = 0
    """Every so many layers one has no window; 0 for families without windows."""
    largest: int = 0
    """Blocks of the member whose scores are divided by the square root of width / heads (as llama.cpp tells it apart)."""


STYLES = {
    "llama": Style("llama", interleaved=True),
    "qwen2": Style("qwen2"),
    "qwen3": Style("qwen3"),
    "gemma2": Style("gemma2", shifted=True, period=2, largest=46),
    "gemma3": Style("gemma3_text", theta=1e6, shifted=True, period=6, largest=62),
}


def _arch(meta: Mapping[str, Any], where: str, tied: bool, rope_factors: np.ndarray | None) -> Arch:
    """Translate the metadata into an architecture."""
    if meta.get("general.architecture") not in STYLES:
        found, known = meta.get("general.architecture"), ", ".join(STYLES)
        raise ValueError(f"{where}: general.architecture is {found!r}; rljax loads {known}, so convert the original model")
    if meta.get("split.count", 1) > 1:
        raise ValueError(f"{where}: split.count is {meta['split.count']}; merge the parts into one file first")
    keys = _Keys(meta, where)
    style = STYLES[keys.name]
    windowed = ("attention.sliding_window",) if not style.period else ()
    for key in ("expert_count", "attention.clamp_kqv", "logit_scale", "attention.scale", *windowed):
        if keys.given(key):
            raise ValueError(f"{where}: {keys.name}.{key} is {keys.given(key)}; rljax does not support it")
    width, heads = keys.number("embedding_length"), keys.number("attention.head_count")
    head_dim = keys.number("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.number(key, head_dim) != head_dim:
            raise ValueError(
                f"{where}: {keys.name}.{key} is {keys.number(key)}, but heads have {head_dim} channels; rljax needs both equal"
            )
    fields: dict[str, Any] = {
        "family": style.family,
        "vocab_size": keys.number("vocab_size", len(meta.get("tokenizer.ggml.tokens", ())) or None),
        "num_layers": keys.number("block_count"),
        "embed_dim": width,
        "num_heads": heads,
        "num_kv_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "ffn_dim": keys.number("feed_forward_length"),
        "rope": _rope(keys, style, head_dim, rope_factors),
        "norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "tie_embeddings": tied,
        "max_position": keys.number("context_length"),
        **FAMILIES[style.family].switches,
    }
    return Arch(**fields, **(_windows(keys, style, fields) if style.period else {}))


def _windows(keys: _Keys, style: Style, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return what families with windows have: which layers, their rotary embedding, scores and soft caps."""
    old, layers = style.family == "gemma2", fields["num_layers"]
    period = keys.number("attention.sliding_window_pattern", style.period)
    windowed = tuple(layer for layer in range(layers) if (layer + 1) % period)
    if not old and keys.given("attention.sliding_window") is None:
        windowed = ()
    scalar = fields["embed_dim"] // fields["num_heads"] if layers == style.largest else fields["head_dim"]
    caps = {"attention_soft_cap": "attn_logit_softcapping", "final_soft_cap": "final_logit_softcapping"}
    return {
        "window": keys.number("attention.sliding_window") if windowed else None,
        "windowed_layers": windowed,
        # The file names the base of the layers without window; that of the others is the family's own.
        "windowed_rope": None if old else Rope(keys.real("rope.freq_base_swa", 10_000.0)),
        "query_scalar": float(scalar),
        **{field: keys.real(key) if old or keys.given(key) else None for field, key in caps.items()},
    }


def _rope(keys: _Keys, style: Style, head_dim: int, factors: np.ndarray | None) -> Rope:
    theta, old = keys.real("rope.freq_base", style.theta), keys.given("rope.scale_linear")
    kind = keys.given("rope.scaling.type") or ("none" if old is None else "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{keys.where}: {keys.name}.rope.scaling.type is {kind!r}; rljax supports none, linear and yarn")
    for key in (
        "attn_factor",
        "yarn_log_multiplier",
        "yarn_ext_factor",
        "yarn_attn_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
    ):
        if keys.given(f"rope.scaling.{key}") is not None:
            raise ValueError(f"{keys.where}: {keys.name}.rope.scaling.{key} is set, and rljax does not read it from GGUF")
    if factors is None and kind == "none":
        return Rope(theta)
    if factors is None and kind == "linear":
        return Rope(theta, "linear", keys.real("rope.scaling.factor", old))
    if factors is None:
        factor = keys.real("rope.scaling.factor")
        length = keys.number("rope.scaling.original_context_length")
        # YaRN (arXiv:2309.00071) section 3.4.
        attention = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        return Rope(theta, "yarn", factor, original_max_position=length, attention_factor=attention)
    rope = Rope(theta, "llama3", _shortest(float(factors.max())), **_LLAMA3)
    implied = Rope(theta).inverse_frequencies(head_dim) / rope.inverse_frequencies(head_dim)
    if kind != "none" or factors.shape != implied.shape or not np.allclose(factors, implied, rtol=_FACTOR_RTOL):
        raise ValueError(
            f"{keys.where}: {_ROPE_FACTORS} is not the llama3 stretch rljax knows; convert the original model instead"
        )
    return rope


def _names(gguf: Any, architecture: str, arch: Arch) -> dict[str, str]:
    """Return the name of every tensor in a Hugging Face checkpoint by its name in the file, as the package maps them."""
    known = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(known, arch.num_layers)
    return {table.get_name(slot.tensor, try_suffixes=(".weight", ".bias")): slot.tensor for slot in slots(arch)}


def _dequantizes(gguf: Any, kind: Any) -> bool:
    """Tell whether the package can dequantise a type, by giving it one block of zeros."""
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-05 for 9.99999974e-06."""
    return float(str(np.float32(value)))
