"""Time sampling alone, next to the sum of its kernels timed alone: every rollout runs to its last token.

Prints one JSON line per number of rows: tokens/s of the whole call and of the decode phase, seconds to the first token,
milliseconds per decode step, and the kernel floor: the milliseconds that the products, the attention and the draw of one step
take when each is run by itself at the same shapes, one layer's after the other's. Prompts are shared by groups.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from sampling import CHECKPOINT, endless_engine, make_requests, sample, sampler_params, timed

from rljax.models.arch import Arch
from rljax.models.block import INPUTS, KeyValue, layer_kinds, project_outputs_first
from rljax.pytree import Params
from rljax.records import SamplingParams
from rljax.sampler.draw import draw, uniforms
from rljax.sampler.engine import Engine, Request
from rljax.sampler.paged import Tables, paged_attention


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256], help="rollouts decoded together")
    parser.add_argument("--group", type=int, default=8, help="rollouts per prompt, at most as many as rows")
    parser.add_argument("--prompt", type=int, default=46, help="prompt length (tokens)")
    parser.add_argument("--tokens", type=int, default=64, help="completion length (tokens)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    for dtype in args.dtype:
        arch, mesh, params = sampler_params(args.checkpoint, dtype)
        for rows in args.rows:
            found = measure(args, arch, mesh, params, rows)
            print(json.dumps({"system": "rljax", "dtype": dtype, "rows": rows, **found}), flush=True)
    return 0


def measure(args: argparse.Namespace, arch: Arch, mesh: Mesh, params: Params, rows: int) -> dict[str, Any]:
    """Sample some times and return the medians."""
    group = min(args.group, rows)
    engine = endless_engine(arch, mesh, params, slots=rows, prompt=args.prompt, tokens=args.tokens, readers=group)
    requests = make_requests(arch.vocab_size, args.prompt, [args.tokens] * rows, group)
    one = [replace(request, params=SamplingParams(max_tokens=1)) for request in requests]
    floor = kernel_floor(engine, params, requests, args.repeats)
    whole, first = (timed(lambda asked=asked: sample(engine, asked), args.repeats) for asked in (requests, one))
    step = (whole - first) / (args.tokens - 1)
    return {
        "tokens_per_s": round(rows * args.tokens / whole, 1),
        "decode_tokens_per_s": round(rows / step, 1),
        "first_token_s": round(first, 3),
        "step_ms": round(1e3 * step, 2),
        "floor_ms": {name: round(1e3 * seconds, 2) for name, seconds in floor.items()},
        "share_of_floor": round(sum(floor.values()) / step, 3),
    }


def kernel_floor(engine: Engine, params: Params, requests: Sequence[Request], repeats: int) -> dict[str, float]:
    """Time the kernels of a decode step alone, in the middle of the completions (seconds)."""
    arch, rows, dtype = engine.arch, engine.slots, params["embed"].dtype
    engine.submit(requests)
    for _ in range(max(1, requests[0].params.max_tokens // 16)):
        engine.step()
        engine.poll()
    size = engine._size()  # that a step really has
    (tables, _), state = engine._tables(size), engine._state
    assert isinstance(tables, Tables), "without a kernel"
    assert size.rows == rows, "all slots are busy"
    engine.clear()
    layers = [params["layers"][layer] for layer in arch.layers]
    floor = {}
    for name, inputs in INPUTS.items():
        weights = [layer[name] for layer in layers]
        x = jnp.ones((rows, 1, *weights[0].shape[weights[0].ndim - inputs :]), dtype)
        floor[name] = timed_chain(lambda x, w, inputs=inputs: project_outputs_first(x, w, inputs), x, weights, repeats)
    head = params["embed"] if arch.tie_embeddings else params["head"]
    hidden = jnp.ones((rows, arch.embed_dim), dtype)
    scores_of = partial(jnp.einsum, "bd,vd->bv", preferred_element_type=jnp.float32)
    floor["head"] = timed_chain(scores_of, hidden, [head], repeats)
    now = state.progress
    at = paged_attention(arch, engine.mesh, tables, now.position, now.origin, now.remaining > 0)
    kinds = layer_kinds(arch)
    query = jnp.ones((rows, 1, arch.num_kv_heads, arch.queries_per_kv, arch.head_dim), dtype)
    one = jnp.ones((rows, arch.num_kv_heads, 1, arch.head_dim), dtype)
    fresh = KeyValue(one, one)

    def attend(query: Any, fresh: KeyValue, cache: Any) -> Any:
        kept, outs = [], []
        for kind, layer in zip(kinds, cache, strict=True):
            out, layer = at(query, fresh, layer, kind.attention, None)
            query, out = jax.lax.optimization_barrier((query, out))
            kept.append(layer)
            outs.append(out)
        return outs, tuple(kept)

    with jax.set_mesh(engine.mesh):
        run = jax.jit(attend, donate_argnums=2)
        cache = jax.tree.map(jnp.copy, state.cache)
        _, cache = run(query, fresh, cache)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            _, cache = jax.block_until_ready(run(query, fresh, cache))
            times.append(time.perf_counter() - start)
    floor["attention"] = statistics.median(times)
    scores = jnp.asarray(np.random.default_rng(0).normal(size=(rows, arch.vocab_size)), jnp.float32)
    keys, position = jnp.ones((rows, 2), jnp.uint32), jnp.arange(rows)
    choose = jax.jit(lambda scores: draw(scores, jnp.ones(rows), uniforms(keys, position)))
    floor["draw"] = timed(lambda: choose(scores), repeats)
    return floor


def timed_chain(kernel: Callable[[Any, Any], Any], x: Any, weights: Sequence[Any], repeats: int) -> float:
    """Return the median time of a kernel's runs over all weights, one after the other (seconds)."""

    def chain(x: Any, weights: Sequence[Any]) -> Any:
        outs = []
        for weight in weights:
            x, out = jax.lax.optimization_barrier((x, kernel(x, weight)))
            outs.append(out)
        return outs

    run = jax.jit(chain)
    return timed(lambda: run(x, weights), repeats)


if __name__ == "__main__":
    sys.exit(main())
