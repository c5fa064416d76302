"""The shape of a model: the switches that turn the one decoder into a family member.

Owns the numbers and choices of an architecture and the parameter shapes that follow from them. Families are names to
it: what one means is told by `models/hf_config.py` and `models/gguf.py`, which translate checkpoints into an `Arch`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
QkNorm = Literal["head", "all"]
Gate = Literal["silu", "gelu_tanh", "clamped"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: base frequency and how it is stretched.

    Example:
        Rope(theta=500_000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    """

    theta: float
    """Base of the geometric series of wavelengths."""
    kind: RopeKind = "default"
    """`linear` divides every frequency by `factor`; `llama3` and `yarn` only those of long wavelengths, with a blend in
    between; `dynamic` raises theta with the length; `longrope` divides each frequency by a factor of its own."""
    factor: float = 1.0
    """Stretch of the context window."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position / low_freq_factor are stretched fully."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position / high_freq_factor are kept."""
    original_max_position: int = 8192
    """llama3, yarn, longrope, dynamic: context length before stretching (tokens)."""
    rotary_fraction: float = 1.0
    """Part of a head's channels that is rotated: the first ones."""
    beta_fast: float = 32.0
    """yarn: channels that turn more often than this within the original length are kept."""
    beta_slow: float = 1.0
    """yarn: channels that turn less often than this are stretched fully."""
    truncate: bool = True
    """yarn: whether the bounds of the blend are rounded to whole channels."""
    attention_factor: float = 1.0
    """yarn, longrope: factor of rotated queries and of rotated keys."""
    short_factors: tuple[float, ...] = ()
    """longrope: divisors of the frequencies for sequences up to original_max_position."""
    long_factors: tuple[float, ...] = ()
    """longrope: divisors for longer ones."""

    def __post_init__(self) -> None:
        if self.kind == "longrope" and (not self.short_factors or len(self.short_factors) != len(self.long_factors)):
            raise ValueError("longrope needs as many short_factors as long_factors, one per rotated channel pair")

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many channels of a head are rotated."""
        return int(head_dim * self.rotary_fraction)

    def inverse_frequencies(self, head_dim: int, length: int = 0) -> np.ndarray:
        """Return radians per position of each rotated channel pair, float32 [rotary_dim / 2].

        `length` is the longest sequence the model is used for (tokens). `dynamic` and `longrope` depend on it: the
        reference implementation takes the length of the sequences at hand, but a policy must stay the same function
        while its rollouts grow, so it is fixed here.

        Source: RoFormer (arXiv:2104.09864) eq. 15 for the series; "The Llama 3 Herd of Models" release notes for `llama3`;
        YaRN (arXiv:2309.00071) section 3.2 for `yarn` and its appendix on dynamic scaling; LongRoPE (arXiv:2402.13753).
        """
        dim = self.rotary_dim(head_dim)
        theta = self.theta
        if self.kind == "dynamic" and length > self.original_max_position:
            stretch = self.factor * length / self.original_max_position - (self.factor - 1)
            theta = theta * stretch ** (dim / (dim - 2))
        freq = theta ** -(np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.kind == "linear":
            freq = freq / self.factor
        elif self.kind == "llama3":
            wavelength = 2 * math.pi / freq
            low, high = self.low_freq_factor, self.high_freq_factor
            smooth = np.clip((self.original_max_position / wavelength - low) / (high - low), 0.0, 1.0)
            freq = (1 - smooth) * freq / self.factor + smooth * freq
        elif self.kind == "yarn":
            stretched = self._yarn_share(dim)
            freq = stretched * freq / self.factor + (1 - stretched) * freq
        elif self.kind == "longrope":
            factors = self.long_factors if length > self.original_max_position else self.short_factors
            if len(factors) != dim // 2:
                raise ValueError(f"longrope has {len(factors)} factors, and {dim // 2} channel pairs are rotated")
            freq = freq / np.asarray(factors, np.float64)
        return freq.astype(np.float32)

    def _yarn_share(self, dim: int) -> np.ndarray:
        """Return how much of each frequency is stretched: 0 for fast channels, 1 for slow ones (arXiv:2309.00071 eq. 18)."""

        def channel(turns: float) -> float:
            return dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = channel(self.beta_fast), channel(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        return np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in the place of the MLP: how many there are, and how a token chooses among them.

    Example:
        Experts(count=128, per_token=8, ffn_dim=768, normalize=True)
    """

    count: int
    """Experts of a layer (x)."""
    per_token: int
    """Experts that each token goes to."""
    ffn_dim: int
    """Width of one expert (f)."""
    normalize: bool
    """Whether the weights of a token's experts add up to 1: a softmax over the chosen ones instead of over all."""
    router_bias: bool = False
    """Whether the router has a bias."""
    bias: bool = False
    """Whether the experts' projections have biases."""

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise ValueError(f"a token cannot go to {self.per_token} of {self.count} experts")

    @property
    def choice_dtype(self) -> np.dtype:
        """Type of recorded choices: the smallest that numbers all experts."""
        return np.min_scalar_type(self.count - 1)


@dataclass(frozen=True, slots=True)
class Arch:
    """A decoder-only transformer: blocks of grouped-query attention and a gated MLP or experts.

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
    """Longest sequence the model is used for (tokens)."""
    family: str = "llama"
    """Whose names a checkpoint uses for keys and tensors; no computation depends on it."""
    valid_vocab: int | None = None
    """Rows of the embedding table at and above this are padding that is never drawn; None when all are tokens."""
    embed_scale: bool = False
    """Whether embeddings are multiplied by the square root of the model width."""
    pre_norm: bool = True
    """Whether what goes into attention and MLP is normalised."""
    post_norm: bool = False
    """Whether what comes out of them is normalised before it is added."""
    norm_offset: bool = False
    """Whether norms multiply by 1 + their scale."""
    qk_norm: QkNorm | None = None
    """Normalisation of queries and keys before rotation: each `head`, or `all` heads of a token together."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias."""
    out_bias: bool = False
    """Whether attention's output projection has a bias."""
    query_scalar: float | None = None
    """Scores are divided by the square root of this; of head_dim when it is None."""
    attention_soft_cap: float | None = None
    """Bound of attention scores: cap * tanh(score / cap)."""
    final_soft_cap: float | None = None
    """Bound of logits, in the same way."""
    sinks: bool = False
    """Whether each query head has a learned score that takes part in the softmax and attends to nothing."""
    window: int | None = None
    """Latest positions, its own included, that a query of a windowed layer sees (tokens)."""
    windowed_layers: tuple[int, ...] = ()
    """Layers with that window; the others see everything before."""
    windowed_rope: Rope | None = None
    """Rotary embedding of windowed layers, where it differs from that of the others."""
    unrotated_layers: tuple[int, ...] = ()
    """Layers without rotary position embedding."""
    gate: Gate = "silu"
    """Activation of the gated MLP; `clamped` is silu with a steepness, between bounds, times up + 1."""
    gate_limit: float = 7.0
    """clamped: upper bound of the gate, and both bounds of up."""
    gate_steepness: float = 1.702
    """clamped: factor of the gate inside the sigmoid."""
    experts: Experts | None = None
    """Experts in the place of the MLP."""
    dense_layers: tuple[int, ...] = ()
    """Layers of a model with experts that have an MLP instead."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"{field.name} is {value}; a decoder needs at least 1")
            if field.type == tuple[int, ...] and (sorted(set(value)) != list(value) or not set(value) <= set(self.layers)):
                raise ValueError(f"{field.name} must list layers from 0 to {self.num_layers - 1} in order, got {value}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even for rotary position embedding")
        for rope in (self.rope, self.windowed_rope):
            if rope is not None and (rope.rotary_dim(self.head_dim) % 2 or not 0 < rope.rotary_fraction <= 1):
                raise ValueError(f"rotary_fraction ({rope.rotary_fraction}) must leave an even number of rotated channels")
        if bool(self.windowed_layers) != (self.window is not None) or (self.window is not None and self.window < 1):
            raise ValueError(f"window ({self.window}) must be at least 1 where layers are windowed, and absent elsewhere")
        if self.valid_vocab is not None and not 1 <= self.valid_vocab <= self.vocab_size:
            raise ValueError(f"valid_vocab ({self.valid_vocab}) must lie between 1 and vocab_size ({self.vocab_size})")
        if self.dense_layers and self.experts is None:
            raise ValueError("dense_layers are the exceptions of a model with experts, and this one has none")

    @property
    def layers(self) -> range:
        """Indices of the blocks."""
        return range(self.num_layers)

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key and value head (m)."""
        return self.num_heads // self.num_kv_heads

    def has_experts(self, layer: int) -> bool:
        """Say whether a layer has experts in the place of its MLP."""
        return self.experts is not None and layer not in self.dense_layers

    @property
    def choices_per_token(self) -> tuple[int, int] | None:
        """What a token's routing is made of: layers with experts, and choices in each of them; None without experts."""
        return None if self.experts is None else (self.num_layers - len(self.dense_layers), self.experts.per_token)

    def to_json(self) -> str:
        """Return the architecture as JSON text, the content of a checkpoint's arch.json."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Arch":
        """Read what `to_json` wrote; switches that are not listed have their defaults.

        Raises:
            ValueError: a field is missing or unknown.
        """
        fields: dict[str, Any] = json.loads(text)
        try:
            return _record(cls, fields)
        except (KeyError, TypeError) as err:
            raise ValueError(f"arch.json describes no model this version can load ({err}); convert the model again") from err


def _record(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Build a record from JSON: lists become tuples, tables the records of their fields."""
    nested = {"rope": Rope, "windowed_rope": Rope, "experts": Experts}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return kind(**{k: _record(nested[k], v) if k in nested and isinstance(v, Mapping) else v for k, v in values.items()})
