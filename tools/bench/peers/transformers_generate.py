"""Time transformers' generate on a CPU, for comparison with tools/bench/decode.py; needs torch and transformers.

Prints one JSON line per number of rows: the same prompts, groups and lengths, end tokens ignored. The decode phase is the whole
call less a call for one token.
"""

import argparse
import json
import statistics
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=46)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    rng = np.random.default_rng(0)
    for rows in args.rows:
        prompts = [rng.integers(0, model.config.vocab_size, args.prompt).tolist() for _ in range(-(-rows // args.group))]
        ids = torch.tensor([prompts[row // args.group] for row in range(rows)])

        def call(tokens: int, ids: torch.Tensor = ids) -> float:
            exact = {"min_new_tokens": tokens, "max_new_tokens": tokens, "eos_token_id": None}
            start = time.perf_counter()
            with torch.inference_mode():
                found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, **exact)
            assert found.shape[1] == args.prompt + tokens
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
        print(json.dumps({"system": "transformers", "dtype": args.dtype, "rows": rows, **found}), flush=True)


if __name__ == "__main__":
    main()
