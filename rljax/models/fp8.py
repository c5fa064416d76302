"""Weights stored in 8 bits with scales beside them, as float32.

Owns the published forms: float8 e4m3 tensors whose product with a scale per tensor, per row or per block of rows and columns
is the weight. Refuses every other quantisation, by the key of the configuration that asks for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rljax.models.shards import Entry, read_rows

_FP8 = "F8_E4M3"
_SUFFIXES = ("_scale_inv", "_scale")  # of the weight's name; despite its name the first is a factor too
_ACTIVATIONS = (".input_scale", ".activation_scale", ".input_activation_scale", ".output_scale")
_METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")


@dataclass(frozen=True, slots=True)
class Scale:
    """The factors of one 8-bit tensor.

    Example:
        Scale(factors=np.ones((2, 4), np.float32), block=(128, 128), columns=512)
    """

    factors: np.ndarray
    """One factor per block, [blocks of rows, blocks of columns], float32."""
    block: tuple[int, int]
    """Rows and columns that share a factor."""
    columns: int
    """Columns of the tensor."""

    def apply(self, values: np.ndarray, first: int) -> np.ndarray:
        """Return rows of the tensor, of which `first` is the first, times their factors, in float32."""
        rows = np.arange(first, first + len(values)) // self.block[0]
        factors = np.repeat(self.factors, self.block[1], axis=1)[:, : self.columns]
        return values.astype(np.float32) * factors[rows]


def split_scales(
    config: Mapping[str, Any], found: Mapping[str, Entry], where: str
) -> tuple[dict[str, Any], dict[str, Entry], dict[str, Scale], list[str]]:
    """Separate the scales of 8-bit weights from the weights.

    Args:
        config: Content of config.json.
        found: Every stored tensor.
        where: The configuration, for messages.

    Returns:
        The configuration without what was dealt with, the tensors that are weights, the scale of each 8-bit one, notices.

    Raises:
        ValueError: a weight lacks its scale, a scale its weight, or its shape fits neither tensor, rows nor blocks.
    """
    quantised = config.get("quantization_config")
    if not isinstance(quantised, Mapping) or quantised.get("quant_method") not in _METHODS:
        return dict(config), dict(found), {}, []
    weights = {name: entry for name, entry in found.items() if not name.endswith((*_SUFFIXES, *_ACTIVATIONS))}
    scales: dict[str, Scale] = {}
    for name in (name for name in found if name.endswith(_SUFFIXES) and not name.endswith(_ACTIVATIONS)):
        weight = name.removesuffix(next(suffix for suffix in _SUFFIXES if name.endswith(suffix)))
        if weight not in weights or weights[weight].dtype != _FP8:
            raise ValueError(f"{where}: {name} scales no tensor of type {_FP8}; download the checkpoint again")
        scales[weight] = _scale(name, found[name], weights[weight], quantised.get("weight_block_size"), where)
    for name, entry in weights.items():
        if entry.dtype == _FP8 and name not in scales:
            raise ValueError(f"{where}: {name} is of type {_FP8} and has no {name}_scale_inv; download the checkpoint again")
    if not scales:
        raise ValueError(f"{where}: quantization_config asks for {quantised['quant_method']}, and no tensor is of type {_FP8}")
    notices = [f"{len(scales)} tensors of type {_FP8} were multiplied by their scales"]
    if dropped := [name for name in found if name.endswith(_ACTIVATIONS)]:
        notices.append(f"left out {len(dropped)} scales of activations ({dropped[0]}, ...): activations are not quantised")
    return {key: value for key, value in config.items() if key != "quantization_config"}, weights, scales, notices


def _scale(name: str, entry: Entry, weight: Entry, block: Any, where: str) -> Scale:
    if entry.dtype not in ("F32", "BF16", "F16") or len(weight.shape) != 2:
        raise ValueError(f"{where}: {name} is of type {entry.dtype}, for a weight of shape {weight.shape}; it is no scale")
    factors = read_rows(entry, 0, entry.shape[0] if entry.shape else 1).astype(np.float32)
    rows, columns = weight.shape
    if factors.size == 1:
        return Scale(factors.reshape(1, 1), (rows, columns), columns)
    if factors.shape in ((rows,), (rows, 1)):
        return Scale(factors.reshape(rows, 1), (1, columns), columns)
    blocks = isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    if blocks and factors.shape == (-(-rows // block[0]), -(-columns // block[1])):
        return Scale(factors, (block[0], block[1]), columns)
    raise ValueError(
        f"{where}: {name} has shape {entry.shape}, which is neither one scale, nor one per row, nor one per block of "
        f"weight_block_size {block} for a weight of shape {weight.shape}"
    )
