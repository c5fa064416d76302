"""google-tunix's GRPOLearner with its own sampler on the work of grpo_step.py; prints the same JSON line.

In an environment of its own (Python 3.12): pip install google-tunix transformers
The model is a Hugging Face folder: rljax convert checkpoints/smollm2-135m-instruct models/smollm2-hf --to hf

Two things are set right for the comparison: tunix 0.1.7 ignores the model's rope theta, and it builds its masks by
comparing ids with the pad id, so the pad token must differ from the end token.
"""

import argparse
import json
import resource
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tunix.models.llama3.model as llama
import tunix.models.llama3.params as llama_params
from flax import nnx
from sums import last_number, tasks
from transformers import AutoTokenizer
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout import base_rollout

GROUPS, GENERATIONS, MAX_TOKENS, PROMPT_TOKENS = 8, 8, 32, 46


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--micro-batch", type=int, default=2, help="prompts per training micro-batch")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokenizer.pad_token = "<|endoftext|>"
    devices = np.array(jax.devices()[:1]).reshape(1, 1)
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        model = load_model(args.model, mesh, jnp.dtype(args.dtype))

    def reward(prompts: Any, completions: Any, answer: Any, **_: Any) -> list[float]:
        return [last_number(said, int(right)) for said, right in zip(completions, answer, strict=True)]

    cluster = make_cluster(model, mesh, tokenizer, args.micro_batch, args.steps)
    learner = GRPOLearner(
        rl_cluster=cluster,
        algo_config=GRPOConfig(num_generations=GENERATIONS, num_iterations=1, beta=0.0, epsilon=0.2),
        reward_fns=reward,
    )
    sampling, tokens, steps = [], [], []
    generate, step = cluster.generate, learner._run_global_step

    def timed_generate(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = generate(*args, **kwargs)
        sampling.append(time.perf_counter() - start)
        # The end token is stripped from what it returns; it was generated all the same.
        tokens.append(sum(len(row) + (len(row) < MAX_TOKENS) for row in result.tokens))
        return result

    def timed_step(*args: Any, **kwargs: Any) -> None:
        start = time.perf_counter()
        step(*args, **kwargs)
        jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
        steps.append(time.perf_counter() - start)

    cluster.generate, learner._run_global_step = timed_generate, timed_step
    with mesh:
        learner.train(make_batches(tokenizer, args.steps))
    learning = [whole - part for whole, part in zip(steps[1:], sampling[1:], strict=True)]
    speeds = [count / seconds for count, seconds in zip(tokens[1:], sampling[1:], strict=True)]
    result = {
        "system": "tunix",
        "dtype": args.dtype,
        "sampling_s": round(statistics.median(sampling[1:]), 2),
        "learning_s": round(statistics.median(learning), 2),
        "step_s": round(statistics.median(steps[1:]), 2),
        "generated_tokens": statistics.median(tokens[1:]),
        "generated_tokens_per_s": round(statistics.median(speeds), 1),
        "first_step_s": round(steps[0], 1),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
    }
    print(json.dumps(result))


def load_model(folder: str, mesh: Any, dtype: Any) -> Any:
    """Load SmolLM2-135M with its own rope theta."""
    plain_rope = llama.apply_rope
    llama.apply_rope = lambda x, at, head_dim, rope_theta=100_000: plain_rope(x, at, head_dim, rope_theta)
    arch = llama.ModelConfig(
        num_layers=30,
        vocab_size=49152,
        embed_dim=576,
        hidden_dim=1536,
        num_heads=9,
        head_dim=64,
        num_kv_heads=3,
        rope_theta=100_000,
        norm_eps=1e-5,
        weight_tying=True,
    )
    return llama_params.create_model_from_safe_tensors(folder, arch, mesh, dtype=dtype)


def make_batches(tokenizer: Any, steps: int) -> list[dict[str, Any]]:
    """Return the templated prompts and answers of each step."""
    batches = []
    all_tasks = tasks(GROUPS * steps)
    for first in range(0, len(all_tasks), GROUPS):
        part = all_tasks[first : first + GROUPS]
        prompts = [tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True) for said, _ in part]
        batches.append({"prompts": np.array(prompts), "answer": np.array([right for _, right in part])})
    return batches


def make_cluster(model: Any, mesh: Any, tokenizer: Any, micro_batch: int, steps: int) -> rl_cluster.RLCluster:
    """Return the cluster: actor and sampler on one mesh, no reference."""
    roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-6, weight_decay=0.0),
        eval_every_n_steps=10**9,
        max_steps=steps,
        mini_batch_size=GROUPS,
        train_micro_batch_size=micro_batch,
        rollout_micro_batch_size=GROUPS,
        compute_logps_micro_batch_size=GROUPS,
    )
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=MAX_TOKENS,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        max_prompt_length=PROMPT_TOKENS,
        kv_cache_size=PROMPT_TOKENS + MAX_TOKENS + 2,
    )
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        offload_to_cpu=False,
        training_config=training,
        rollout_config=rollout,
    )
    return rl_cluster.RLCluster(actor=model, reference=None, tokenizer=tokenizer, cluster_config=config)


if __name__ == "__main__":
    main()
