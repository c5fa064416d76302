"""TRL's GRPOTrainer on the work of grpo_step.py; prints the same JSON line, with the mean reward of every step.

With `--steps 25 --learning-rate 1e-5 --dtype autocast` it is the work of time_to_reward.py.

In an environment of its own: pip install torch==2.13.0 transformers trl==1.16 datasets accelerate
The model is a Hugging Face folder: rljax convert checkpoints/smollm2-135m-instruct models/smollm2-hf --to hf
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from sums import last_number, tasks
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

GROUPS, GENERATIONS, MAX_TOKENS = 8, 8, 32


class TimedTrainer(GRPOTrainer):
    """The trainer, with a stopwatch around sampling and around everything before the loss."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.sampling: list[float] = []
        self.rollouts: list[float] = []
        self.tokens: list[int] = []

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_single_turn(*args, **kwargs)
        self.sampling.append(time.perf_counter() - start)
        return result

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = time.perf_counter()
        result = super()._generate_and_score_completions(inputs)
        self.rollouts.append(time.perf_counter() - start)
        self.tokens.append(int(result["completion_mask"].sum()))
        return result


class Stopwatch(TrainerCallback):
    """Times whole steps."""

    def __init__(self) -> None:
        self.last, self.steps = time.perf_counter(), []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Take the time of the step that ended."""
        now = time.perf_counter()
        self.steps.append(now - self.last)
        self.last = now


def trainer_config(args: argparse.Namespace) -> GRPOConfig:
    """Return the trainer's options for this work."""
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=args.dtype == "autocast",
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=GROUPS * GENERATIONS // args.micro_batch,
        num_generations=GENERATIONS,
        max_completion_length=MAX_TOKENS,
        temperature=1.0,
        beta=0.0,
        learning_rate=args.learning_rate,
        seed=args.seed,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
        disable_tqdm=True,
        optim="adamw_torch",
    )


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "autocast", "bfloat16"), default="float32")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0, help="of the questions, their order and the draws")
    args = parser.parse_args()
    dtype = torch.bfloat16 if args.dtype == "bfloat16" else torch.float32
    data = Dataset.from_list(
        [{"prompt": prompt, "answer": answer} for prompt, answer in tasks(GROUPS * (args.steps + 1), args.seed)]
    )
    config = trainer_config(args)
    rewards: list[float] = []

    def reward(completions: Any, answer: Any, **_: Any) -> list[float]:
        found = [last_number(said[0]["content"], right) for said, right in zip(completions, answer, strict=True)]
        rewards.append(statistics.mean(found))
        print(f"  step {len(rewards)}: reward {rewards[-1]:.3f}", file=sys.stderr, flush=True)
        return found

    watch = Stopwatch()
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype),
        reward_funcs=reward,
        args=config,
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[watch],
    )
    trainer.train()
    sampling, tokens = trainer.sampling[1:], trainer.tokens[1:]
    learning = [step - before for step, before in zip(watch.steps[1:], trainer.rollouts[1:], strict=True)]
    print(
        json.dumps(
            {
                "system": "trl",
                "dtype": args.dtype,
                "sampling_s": round(statistics.median(sampling), 2),
                "learning_s": round(statistics.median(learning), 2),
                "step_s": round(statistics.median(watch.steps[1:]), 2),
                "generated_tokens": statistics.median(tokens),
                "generated_tokens_per_s": round(statistics.median(n / s for n, s in zip(tokens, sampling, strict=True)), 1),
                "first_step_s": round(watch.steps[0], 1),
                "rewards": [round(mean, 3) for mean in rewards],
                "training_s": round(sum(watch.steps), 1),
                "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
