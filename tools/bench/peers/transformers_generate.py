"""Time transformers' generate on a CPU, for comparison with tools/bench/decode.py; needs torch and transformers.

Prints one JSON line per number of rows: the same prompts, groups and lengths, end tokens ignored.
"""

import time

import numpy as np
import torch
from decoding import make_prompts, parse_options, print_rates
from transformers import AutoModelForCausalLM


def main() -> None:
    """Run the benchmark."""
    options = parse_options(__doc__)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    rng = np.random.default_rng(0)
    for rows in options.rows:
        ids = torch.tensor(make_prompts(rng, model.config.vocab_size, rows, options))

        def call(tokens: int, ids: torch.Tensor = ids) -> float:
            exact = {"min_new_tokens": tokens, "max_new_tokens": tokens, "eos_token_id": None}
            start = time.perf_counter()
            with torch.inference_mode():
                found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, top_p=1.0, **exact)
            assert found.shape[1] == options.prompt + tokens
            return time.perf_counter() - start

        print_rates("transformers", rows, call, options)


if __name__ == "__main__":
    main()
