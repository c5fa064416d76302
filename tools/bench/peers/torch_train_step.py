"""Time the same optimizer step in torch, for comparison with tools/bench/train_step.py; needs torch and transformers."""

import argparse
import json
import resource
import statistics
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: autocast")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    tokens = torch.randint(0, model.config.vocab_size, (args.rows, args.length), generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        for part in tokens.split(args.micro_batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
                loss = model(input_ids=part, labels=part).loss
            (loss * len(part) / args.rows).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[1:])
    found = {
        "step_s": round(seconds, 2),
        "tokens_per_s": round(tokens.numel() / seconds, 1),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 2),
    }
    print(json.dumps({"system": "torch", "dtype": args.dtype, **found}), flush=True)


if __name__ == "__main__":
    main()
