"""The shape of a model: the switches that turn the one decoder into a family member.

Owns the numbers and choices of an architecture and the parameter shapes and logical axes that follow from them.
Refuses to know family names; `models/hf_config.py` and `models/gguf.py` translate checkpoints into an `Arch`.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: base frequency and how it is stretched.

    Example:
        Rope(theta=500_000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    """

    theta: float
    """Base of the geometric series of wavelengths."""
    kind: Literal["default", "linear", "llama3"] = "default"
    """`linear` divides every frequency by `factor`; `llama3` only the long wavelengths, with a blend in between."""
    factor: float = 1.0
    """Stretch of the context window."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are stretched fully."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor are kept."""
    original_max_position: int = 8192
    """llama3: context length before stretching (tokens)."""

    def inverse_frequencies(self, head_dim: int) -> np.ndarray:
        """Return radians per position of each channel pair, float32 [head_dim / 2].

        Source: RoFormer (arXiv:2104.09864) eq. 15 for the series; "The Llama 3 Herd of Models" release notes for `llama3`.
        """
        freq = self.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.kind == "linear":
            freq = freq / self.factor
        elif self.kind == "llama3":
            wavelength = 2 * math.pi / freq
            low, high = self.low_freq_factor, self.high_freq_factor
            smooth = np.clip((self.original_max_position / wavelength - low) / (high - low), 0.0, 1.0)
            freq = (1 - smooth) * freq / self.factor + smooth * freq
        return freq.astype(np.float32)


@dataclass(frozen=True, slots=True)
class Arch:
    """A decoder-only transformer: pre-norm blocks of grouped-query attention and a gated MLP.

    Example:
        Arch(vocab_size=49152, num_layers=30, embed_dim=576, num_heads=9, num_kv_heads=3, head_dim=64, ffn_dim=1536,
             rope=Rope(theta=100_000.0), norm_eps=1e-5, tie_embeddings=True, max_position=8192)
    """

    vocab_size: int
    """Rows of the embedding table (v)."""
    num_layers: int
    """Transformer blocks (l)."""
    embed_dim: int
    """Model width (d)."""
    num_heads: int
    """Query heads (h = k * m)."""
    num_kv_heads: int
    """Key and value heads (k)."""
    head_dim: int
    """Channels per head (c); need not be d / h."""
    ffn_dim: int
    """Width of the gated MLP (f)."""
    rope: Rope
    """Rotary position embedding."""
    norm_eps: float
    """Added to the mean square in RMS normalisation."""
    tie_embeddings: bool
    """Whether the output head is the embedding table."""
    max_position: int
    """Longest sequence the model was made for (tokens)."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"{field.name} is {value}; a decoder needs at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary position embedding")

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key and value head (m)."""
        return self.num_heads // self.num_kv_heads

    def to_json(self) -> str:
        """Return the architecture as JSON text, the content of a checkpoint's arch.json."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Arch":
        """Read what `to_json` wrote.

        Raises:
            ValueError: a field is missing or unknown.
        """
        fields: dict[str, Any] = json.loads(text)
        try:
            return cls(**{**fields, "rope": Rope(**fields["rope"])})
        except (KeyError, TypeError) as err:
            raise ValueError(f"arch.json describes no model this version can load ({err}); convert the model again") from err
