"""Time one optimizer step on rows without padding, next to the matrix products it consists of, timed alone.

Every token of every row is trained on: forward, backward, clipping, AdamW. Prints one JSON line per compute type: seconds,
tokens/s, the step's arithmetic over its time, the rate of its products alone at the same shapes (forward, input gradient and
weight gradient of every weight), the share of that rate the step reaches, compile time, and peak memory.
"""

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sampling import CHECKPOINT, timed

from rljax.convert import read_checkpoint
from rljax.data.packing import Batch
from rljax.learner.step import Learner
from rljax.matmul import contract_rows, product, product_transposed
from rljax.mesh import build_mesh
from rljax.models.arch import Arch
from rljax.models.decoder import count
from rljax.recipe import load
from rljax.rollouts.weights import learner_layout


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=128, help="tokens of a row")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of one forward and backward pass")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="section.option=value", help="further options")
    args = parser.parse_args(argv)
    for dtype in args.dtype:
        print(json.dumps({"system": "rljax", "dtype": dtype, **measure(args, dtype)}), flush=True)
    return 0


def measure(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    """Time steps and products of one type."""
    half = args.length // 2
    options = (
        f"model.checkpoint={args.checkpoint}",
        f"model.compute_dtype={dtype}",
        f"sampler.max_prompt_length={half}",
        f"sampler.max_completion_length={args.length - half}",
        f"train.pack_length={args.length}",
        f"train.micro_batch_size_per_device={args.micro_batch}",
        "optimizer.learning_rate=1e-9",
    )
    config = load(None, [*options, *args.overrides])
    mesh = build_mesh(config.mesh, jax.devices()[:1])
    loaded = read_checkpoint(args.checkpoint, learner_layout(mesh), config.model.param_dtype)
    learner = Learner(loaded.arch, mesh, config)
    batch = learner.put(full_batch(args, loaded.arch.vocab_size))
    state = learner.init(loaded.params)
    start = time.perf_counter()
    state, output = jax.block_until_ready(learner.step(state, batch))
    first, times = time.perf_counter() - start, []
    for _ in range(args.repeats):
        start = time.perf_counter()
        state, output = jax.block_until_ready(learner.step(state, batch))
        times.append(time.perf_counter() - start)
    assert bool(jnp.isfinite(output.grad_norm))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    del state
    seconds, tokens = statistics.median(times), args.rows * args.length
    work = 6 * count(loaded.arch) * tokens  # multiply-adds count twice; attention's own products are left out
    alone = products(loaded.arch, args, dtype)
    return {
        "step_s": round(seconds, 2),
        "tokens_per_s": round(tokens / seconds, 1),
        "gflop_per_s": round(work / seconds / 1e9, 1),
        "products_alone_s": round(alone, 2),
        "products_alone_gflop_per_s": round(work / alone / 1e9, 1),
        "share_of_products": round(alone / seconds, 3),
        "gemm_2048_gflop_per_s": round(square(dtype, args.repeats), 1),
        "compile_s": round(first - seconds, 1),
        "peak_rss_gb": round(peak / 1e9, 2),
    }


def full_batch(args: argparse.Namespace, vocab: int) -> Batch:
    """Return rows that are full of tokens, each of which is trained on."""
    micro, rows, length = args.rows // args.micro_batch, args.micro_batch, args.length
    shape = (micro, rows, length)
    rng = np.random.default_rng(0)
    index = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    mask = np.broadcast_to(np.arange(length) < length - 1, shape)  # nothing follows the last token
    tokens = rng.integers(0, vocab, shape).astype(np.int32)
    return Batch(
        tokens=tokens,
        positions=index,
        segments=np.ones(shape, np.int32),
        parents=np.zeros(shape, np.int32),
        score_index=index,
        targets=np.roll(tokens, -1, axis=2),
        mask=mask,
        logp_behavior=np.zeros(shape, np.float32),
        advantage=np.ones(shape, np.float32),
        weight=(mask / mask.sum()).astype(np.float32),
        rollout=np.broadcast_to(np.arange(micro * rows, dtype=np.int32).reshape(micro, rows, 1), shape),
        scored=np.full(micro, length - 1, np.int32),
        num_micro=micro,
        choices=None,
        num_rollouts=micro * rows,
        padding_fraction=0.0,
        skipped_fraction=0.0,
    )


def products(arch: Arch, args: argparse.Namespace, dtype: str) -> float:
    """Return the seconds of all products of a step, each kind alone: three per weight, micro-batch and layer."""
    d, f, c = arch.embed_dim, arch.ffn_dim, arch.head_dim
    heads = arch.num_heads + 2 * arch.num_kv_heads
    layers = arch.num_layers
    shapes = [
        (d, heads * c, layers),
        (arch.num_heads * c, d, layers),
        (d, 2 * f, layers),
        (f, d, layers),
        (d, arch.vocab_size, 1),
    ]
    total = 0.0
    for inputs, outputs, times in shapes:
        x = jnp.ones((args.micro_batch, args.length, inputs), dtype)
        g = jnp.ones((args.micro_batch, args.length, outputs), dtype)
        w = jnp.ones((inputs, outputs), jnp.float32)
        three = ((product, x, w), (product_transposed, g, w), (contract_rows, x, g))
        seconds = sum(timed(partial(jax.jit(kernel), left, right), max(3, args.repeats)) for kernel, left, right in three)
        total += seconds * times * (args.rows // args.micro_batch)
    return total


def square(dtype: str, repeats: int) -> float:
    """Return the rate of a 2048 x 2048 x 2048 product (GFLOP/s)."""
    x = jnp.ones((2048, 2048), dtype)
    return 2 * 2048**3 / timed(partial(jax.jit(product), x, x), max(3, repeats)) / 1e9


if __name__ == "__main__":
    sys.exit(main())
