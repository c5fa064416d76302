"""Measure converting a large synthetic model in both directions: bytes per second next to `cp`, and peak memory.

    python tools/bench/convert.py --folder /somewhere/on/the/disk --gigabytes 8
    python tools/bench/convert.py --folder /somewhere/on/the/disk --gigabytes 1 --width 1024 --family all

Makes a model of that size, a Llama unless another family is named, with a tiny vocabulary and random bfloat16 weights, in a
folder that is deleted at the end. For each direction the source's pages are dropped from the cache, `cp` copies its bytes and
makes them durable; the pages are dropped again, and a process of its own converts. Prints JSON: seconds, bytes/s, the ratio to
`cp`, and the peak resident memory of that process next to the size of one layer and to what importing the package alone takes.
"""

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rljax.models import shards
from rljax.models.arch import Arch, Experts, Rope
from rljax.models.decoder import count
from rljax.models.hf_config import FAMILIES, config_from_arch
from rljax.models.layout import layer_bytes, slots, tensor_shapes
from tools.make_tiny_checkpoint import VOCAB_SIZE, tokenizer_files

ROOT = Path(__file__).resolve().parents[2]
DTYPE = "bfloat16"
SHARD_BYTES = 5_000_000_000

CHILD = """
import json, resource, sys, time
from pathlib import Path
import numpy as np, jax
from rljax.convert import convert
jax.devices()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, start = peak(), time.process_time()
source, target, to, verify = sys.argv[1:]
report = convert(Path(source), Path(target), to=to, dtype="bfloat16", verify=verify)
print(json.dumps({"seconds": round(report.seconds, 2), "peak_bytes": peak(), "peak_bytes_before": before,
                  "cpu_seconds": round(time.process_time() - start, 2)}))
"""


EXPERT_FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
"""Families whose layers have experts."""


def synthetic_arch(gigabytes: float, width: int, family: str = "llama") -> Arch:
    """Return a model of about that many bytes in bfloat16, with a tiny vocabulary."""
    one, two = (_arch(layers, width, family) for layers in (1, 2))
    per_layer = (count(two) - count(one)) * 2
    return _arch(max(1, round(gigabytes * 1e9 / per_layer)), width, family)


def _arch(layers: int, width: int, family: str) -> Arch:
    known = FAMILIES[family]
    switches = {"tie_embeddings": known.tied, **known.switches}
    if family in EXPERT_FAMILIES:
        biased = family == "gpt_oss"
        switches["experts"] = Experts(8, 2, width // 2, normalize=True, router_bias=biased, bias=biased)
        switches |= {"ffn_dim": width // 2, "qkv_bias": biased, "out_bias": biased}
    return dataclasses.replace(_llama(layers, width), family=family, **switches)


def _llama(layers: int, width: int) -> Arch:
    return Arch(
        vocab_size=VOCAB_SIZE,
        num_layers=layers,
        embed_dim=width,
        num_heads=width // 128,
        num_kv_heads=max(1, width // 512),
        head_dim=128,
        ffn_dim=width * 7 // 2,
        rope=Rope(theta=500_000.0),
        norm_eps=1e-5,
        tie_embeddings=False,
        max_position=8192,
    )


def write_source(folder: Path, arch: Arch) -> int:
    """Write a Hugging Face folder of random weights without rljax's own export; return its bytes of weights."""
    folder.mkdir(parents=True)
    rng, groups, filled = np.random.default_rng(0), [[]], 0
    for tensor, shape in tensor_shapes(slots(arch)).items():
        size = int(np.prod(shape)) * 2
        if groups[-1] and filled + size > SHARD_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append((tensor, shape))
        filled += size
    noise = (rng.integers(0, 1 << 16, 1 << 24, np.uint16) & 0x807F | 0x3C00).view(shards.DTYPES["BF16"])
    weight_map = {}
    for number, members in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        for tensor, entry in shards.create(folder / name, members, DTYPE).items():
            row = int(np.prod(entry.shape[1:]))
            step = max(1, (noise.size // 2) // row)
            for first in range(0, entry.shape[0], step):
                last = min(first + step, entry.shape[0])
                begin = int(rng.integers(0, noise.size // 2))  # no two tensors are alike
                values = noise[begin : begin + (last - first) * row]
                shards.write_rows(entry, first, values.reshape(last - first, *entry.shape[1:]))
            weight_map[tensor] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config_from_arch(arch, DTYPE, {})))
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    os.sync()
    return count(arch) * 2


def measure(source: Path, target: Path, to: str, verify: str, num_bytes: int) -> dict[str, Any]:
    """Copy the source, then convert it, each with a cold cache; the copy is deleted, the target stays."""
    drop_cache(source)
    copy = target.with_name("copy")
    start = time.monotonic()
    subprocess.run(["cp", "-r", source, copy], check=True)
    copied = time.monotonic() - start
    subprocess.run(["sync", *(path for path in copy.rglob("*") if path.is_file())], check=True)
    durable = time.monotonic() - start
    shutil.rmtree(copy)
    drop_cache(source)
    command = [sys.executable, "-c", CHILD, source, target, to, verify]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    child = json.loads(done.stdout.splitlines()[-1])
    return {
        "to": to,
        "verify": verify,
        "cp_seconds": round(copied, 2),
        "cp_and_sync_seconds": round(durable, 2),
        "convert_seconds": child["seconds"],
        "convert_cpu_seconds": child["cpu_seconds"],
        "bytes_per_second": round(num_bytes / child["seconds"]),
        "share_of_cp_and_sync": round(durable / child["seconds"], 3),
        "share_of_cp": round(copied / child["seconds"], 3),
        "peak_bytes": child["peak_bytes"],
        "peak_bytes_after_import": child["peak_bytes_before"],
    }


def drop_cache(folder: Path) -> None:
    """Ask the system to forget the contents of files that are on the disk."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main(argv: Sequence[str] | None = None) -> None:
    """Run both directions and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="folder to create, on the disk to be measured")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the model (default: 8); needs three times that")
    parser.add_argument("--width", type=int, default=4096, help="model width (default: 4096)")
    parser.add_argument("--family", choices=("all", *FAMILIES), default="llama", help="whose tensors it has (default: llama)")
    parser.add_argument("--verify", choices=("none", "bits"), default="none", help="what is measured with it (default: none)")
    args = parser.parse_args(argv)
    for family in FAMILIES if args.family == "all" else (args.family,):
        print(json.dumps({"family": family, **both_ways(args, synthetic_arch(args.gigabytes, args.width, family))}), flush=True)


def both_ways(args: argparse.Namespace, arch: Arch) -> dict[str, Any]:
    """Convert a model there and back."""
    args.folder.mkdir(parents=True)
    try:
        num_bytes = write_source(args.folder / "hf", arch)
        there = measure(args.folder / "hf", args.folder / "rljax", "orbax", args.verify, num_bytes)
        shutil.rmtree(args.folder / "hf")
        back = measure(args.folder / "rljax", args.folder / "exported", "hf", args.verify, num_bytes)
    finally:
        shutil.rmtree(args.folder)
    sizes = {"bytes": num_bytes, "layers": arch.num_layers, "layer_bytes": layer_bytes(arch, np.dtype(DTYPE))}
    return {**sizes, "runs": [there, back]}


if __name__ == "__main__":
    main()
