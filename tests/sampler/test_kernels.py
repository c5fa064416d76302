"""A kernel attends to what its table names, is asked only for what it can do, and is part of the program of its platform."""

import dataclasses
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from rljax.models.arch import Arch
from rljax.models.attention import AttentionOptions
from rljax.models.block import KeyValue
from rljax.sampler.cache import BLOCK, in_int8
from rljax.sampler.kernels import AttentionChoice, GpuKernel, Kernel, TpuKernel, choose_attention, tried
from tests.reference import decoder
from tests.sampler.interpreted import interpreted
from tests.tiny_model import ARCH

ATOL = {"float32": 3e-6, "bfloat16": 3e-2}
"""Of results of the order 1: float32 sums, or queries, weights and results of 8 significant bits."""
LENGTHS = (1, 32, 33, 100, 160)
PAGES = 23


def random_case(kernel: Kernel, arch: Arch, dtype: str) -> tuple[Any, Any, Any, np.ndarray, np.ndarray]:
    """Return queries, keys and values [p, k, t, c], their pages, a table of random pages, and lengths."""
    rng = np.random.default_rng(0)
    shape = PAGES, arch.num_kv_heads, BLOCK, arch.head_dim
    kept = KeyValue(*(jnp.asarray(rng.normal(size=shape), "float32" if dtype == "int8" else dtype) for _ in range(2)))
    kept = in_int8(kept) if dtype == "int8" else kept
    pages = kernel.empty(arch, 1, PAGES, jnp.dtype(dtype))
    packed = kernel.pack(kept, pages)
    assert [x.shape for x in packed] == [x.shape for x in pages]
    heads = arch.num_kv_heads, arch.queries_per_kv, arch.head_dim
    query = jnp.asarray(rng.normal(size=(len(LENGTHS), *heads)), "float32" if dtype == "int8" else dtype)
    table = rng.integers(0, PAGES, (len(LENGTHS), kernel.columns(5, pages)), np.int32)
    return query, kept, packed, table, np.array(LENGTHS, np.int32)


def by_hand(query: Any, kept: KeyValue, table: np.ndarray, lengths: np.ndarray, options: AttentionOptions) -> np.ndarray:
    """Attend one row and head after the other, in float64."""
    keys, values = (np.asarray(x, np.float64) for x in (kept.key, kept.value))
    if kept.scales is not None:
        keys, values = (x * np.asarray(s, np.float64)[..., None] for x, s in zip((keys, values), kept.scales, strict=True))
    rows = np.asarray(query, np.float64)
    out = np.zeros(rows.shape)
    for row, length in enumerate(lengths):
        first = 0 if options.window is None else max(0, length - options.window)
        for head in range(rows.shape[1]):
            key, value = (np.concatenate(list(x[table[row], head]))[first:length] for x in (keys, values))
            for group in range(rows.shape[2]):
                scores = key @ rows[row, head, group] * options.scale
                scores = scores if options.soft_cap is None else options.soft_cap * np.tanh(scores / options.soft_cap)
                weights = np.exp(scores - scores.max())
                out[row, head, group] = weights @ value / weights.sum()
    return out


def an_arch(heads: int = 4, kv_heads: int = 2, channels: int = 8, **changes: Any) -> Arch:
    return dataclasses.replace(ARCH, num_heads=heads, num_kv_heads=kv_heads, head_dim=channels, **changes)


CASES = [
    (TpuKernel(), an_arch(), "float32", None, None),
    (TpuKernel(), an_arch(9, 3, 64), "float32", 40, 2.0),  # SmolLM2's heads, which get a fourth one
    (TpuKernel(), an_arch(4, 2, 128), "bfloat16", 33, None),
    (GpuKernel(), an_arch(), "float32", None, 2.0),
    (GpuKernel(), an_arch(9, 3, 64), "bfloat16", None, None),
    (GpuKernel(), an_arch(4, 2, 24), "int8", None, None),
]


@pytest.mark.parametrize(("kernel", "arch", "dtype", "window", "cap"), CASES)
def test_attention_is_that_of_the_pages_one_after_the_other(
    kernel: Kernel, arch: Arch, dtype: str, window: int | None, cap: float | None
) -> None:
    query, kept, pages, table, lengths = random_case(kernel, arch, dtype)
    options = AttentionOptions(0.3, window, cap)
    with interpreted():
        found = jax.jit(lambda *arrays: kernel.attend(*arrays, options))(query, pages, table, lengths)
    expected = by_hand(query, kept, table, lengths, options)
    assert found.shape == expected.shape
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=ATOL.get(dtype, ATOL["float32"]))
    back = kernel.unpack(pages, arch.num_kv_heads, arch.head_dim)
    assert jax.tree.all(jax.tree.map(np.array_equal, back, kept))


def test_codes_stand_for_what_the_oracle_rounds_to() -> None:
    kernel, arch = GpuKernel(), an_arch()
    _, _, pages, _, _ = random_case(kernel, arch, "int8")
    back = kernel.unpack(pages, 2, 8)
    assert back.scales is not None
    rounded = np.asarray(back.key, np.float64) * np.asarray(back.scales.key, np.float64)[..., None]
    rng = np.random.default_rng(0)
    np.testing.assert_allclose(
        rounded, decoder.in_int8(rng.normal(size=rounded.shape).astype(np.float32)), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(
    ("platform", "kernel", "call"), [("tpu", TpuKernel(), "tpu_custom_call"), ("cuda", GpuKernel(), "xla.gpu.triton")]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_program_of_a_platform_has_its_kernel(platform: str, kernel: Kernel, call: str, dtype: str) -> None:
    query, _, pages, table, lengths = random_case(kernel, an_arch(32, 8, 128), dtype)
    options = AttentionOptions(0.3, None, 50.0)
    device = AbstractDevice(platform="tpu", device_kind="TPU v5 lite", num_cores=1)
    mesh = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,), abstract_device=device)
    with use_abstract_mesh(mesh):
        traced = jax.jit(lambda *arrays: kernel.attend(*arrays, options)).trace(query, pages, table, lengths)
        assert traced.lower(lowering_platforms=(platform,)).as_text().count(call) == 1


def wide(**changes: Any) -> Arch:
    return an_arch(32, 8, 128, **changes)


REFUSED = [
    ("tpu", wide(sinks=True), "bfloat16", "as-is", "no attention sinks"),
    ("gpu", wide(sinks=True), "bfloat16", "as-is", "no attention sinks"),
    ("tpu", wide(), "bfloat16", "int8", "set sampler.cache_dtype = 'as-is'"),
    ("tpu", an_arch(4, 2, 256), "bfloat16", "as-is", "at most 128 channels, and this model's have 256"),
    ("gpu", an_arch(4, 2, 512), "bfloat16", "as-is", "at most 256 channels, and this model's have 512"),
    ("tpu", an_arch(8, 8, 64), "float32", "as-is", "set sampler.dtype = 'bfloat16'"),
    ("gpu", wide(window=16, windowed_layers=(1,)), "bfloat16", "as-is", "no windows, which layers of this model have"),
    ("cpu", wide(), "float32", "as-is", "there is no kernel for devices of the kind cpu"),
]
ABLE = [
    ("tpu", wide(window=16, windowed_layers=(1,)), "bfloat16", "as-is"),
    ("tpu", an_arch(8, 8, 64), "bfloat16", "as-is"),
    ("gpu", an_arch(4, 2, 256), "float32", "as-is"),
    ("gpu", wide(attention_soft_cap=50.0), "bfloat16", "int8"),
]


@pytest.mark.parametrize(("platform", "arch", "dtype", "cache_dtype", "message"), REFUSED)
def test_what_a_kernel_cannot_do_is_xlas_or_refused(
    platform: str, arch: Arch, dtype: str, cache_dtype: str, message: str
) -> None:
    rest = arch, platform, 1, dtype, cache_dtype
    choice = choose_attention("auto", *rest)
    assert choice.kernel is None
    assert message in choice.why
    assert str(choice) == f"XLA: {choice.why}"
    with pytest.raises(ValueError, match=r"sampler.attention = 'kernel' cannot be: .*or set it to 'xla'") as refused:
        choose_attention("kernel", *rest)
    assert message in str(refused.value)


@pytest.mark.parametrize(("platform", "arch", "dtype", "cache_dtype"), ABLE)
def test_what_a_kernel_can_do_it_does_unless_xla_is_asked_for(platform: str, arch: Arch, dtype: str, cache_dtype: str) -> None:
    asked: Literal["auto", "kernel"]
    for asked in ("auto", "kernel"):
        choice = choose_attention(asked, arch, platform, 1, dtype, cache_dtype)
        assert choice.kernel == {"tpu": TpuKernel(), "gpu": GpuKernel()}[platform]
        assert str(choice).startswith("ragged paged attention" if platform == "tpu" else "paged attention")
    assert choose_attention("xla", arch, platform, 1, dtype, cache_dtype).kernel is None


class Zeros(GpuKernel):
    """A kernel that is wrong."""

    def attend(self, query: Any, pages: Any, table: Any, lengths: Any, options: AttentionOptions) -> Any:
        return jnp.zeros_like(query)


class Absent(GpuKernel):
    """A kernel that its device does not have."""

    def attend(self, query: Any, pages: Any, table: Any, lengths: Any, options: AttentionOptions) -> Any:
        raise NotImplementedError("no such instruction\nand more")


@pytest.mark.parametrize("kernel", [GpuKernel(), TpuKernel()])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kernel_that_is_right_when_it_is_tried_is_used(kernel: Kernel, dtype: str) -> None:
    choice = AttentionChoice(kernel, "it can do all layers of the model")
    with interpreted():
        assert tried(choice, "auto", an_arch(9, 3, 16), 3, dtype) is choice


def test_codes_are_tried_with_their_scales() -> None:
    choice = AttentionChoice(GpuKernel(), "")
    with interpreted():
        assert tried(choice, "kernel", an_arch(), 1, "int8") is choice


@pytest.mark.parametrize(("kernel", "reason"), [(Zeros(), "was wrong by up to"), (Absent(), r"failed \(no such instruction\)")])
def test_a_kernel_that_is_not_is_left_alone(kernel: Kernel, reason: str) -> None:
    choice = AttentionChoice(kernel, "")
    found = tried(choice, "auto", an_arch(), 1, "float32")
    assert found.kernel is None
    assert re.search(reason, str(found))
    with pytest.raises(ValueError, match=f"(?s){reason}.*set it to 'xla' or 'auto'"):
        tried(choice, "kernel", an_arch(), 1, "float32")
