"""The configuration: one frozen tree of sections, read from a TOML recipe and `key.path=value` overrides.

Owns every option but those of the algorithm (`algorithm_config.py`), its default, its meaning and the rules between options.
Loading (files, overrides, errors with the place and the remedy) is in `recipe.py`. Refuses to own device facts: what depends
on the number of devices or on the model is checked where those are known. Imports no jax.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from rljax.algorithm_config import AlgorithmConfig
from rljax.section import Section, option

DType = Literal["float32", "bfloat16"]

_ROWS = 8
_LONGEST_CHOSEN_ROW = 512  # docs/benchmarks.md: longer rows cost more per token, since attention grows with them

PathOption = Annotated[Path, Field(strict=False)]


class RunConfig(Section):
    """Where a run lives and what seeds it."""

    dir: PathOption = option(Path("runs/default"), "Run directory: configuration, metrics, rollouts and checkpoints.")
    seed: int = option(0, "Root of every random draw of the run.", ge=0, lt=2**32)


class ModelConfig(Section):
    """The policy."""

    checkpoint: PathOption = option(Path("checkpoints/model"), "Checkpoint directory written by `rljax convert`.")
    param_dtype: DType = option("float32", "Type of the stored (master) parameters.")
    compute_dtype: DType = option("float32", "Type of the products in training and scoring; logits stay float32.")
    remat: Literal["none", "dots", "offload", "full"] = option(
        "dots",
        "What the backward pass recomputes: nothing, all but the large products, the same with those products kept in the "
        "memory of the host, or every layer.",
    )


class LoraConfig(Section):
    """Low-rank adapters: small factors are trained, and the model of `model.checkpoint` stays as it is."""

    rank: int = option(0, "Inner dim of the factors; 0 trains the model's own parameters.", ge=0)
    alpha: float = option(32.0, "Numerator of the scale of their product.", gt=0)
    rslora: bool = option(False, "Divide alpha by the square root of the rank instead of the rank (rsLoRA).")
    dropout: float = option(0.0, "Probability that the factors do not see a value of their input in training.", ge=0, lt=1)
    target_modules: tuple[str, ...] = option(
        ("all-linear",),
        "Projections with factors, of q_proj k_proj v_proj o_proj gate_proj up_proj down_proj; `all-linear` alone for all.",
        min_length=1,
    )
    base_dtype: Literal["as-is", "int8", "nf4"] = option(
        "as-is",
        "How the large weights of the frozen model are kept: in model.param_dtype, or quantised to 8 or 4 bits (QLoRA), which "
        "needs `pip install 'rljax[qlora]'`.",
    )
    adapter: PathOption | None = option(None, "Begin with this adapter of the same model: the adapter/ of another run.")

    def _broken_rules(self) -> Iterator[str]:
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            yield "lora.target_modules has 'all-linear' and other names; leave 'all-linear' alone, or leave it out"
        if self.rank == 0:
            for name, field in type(self).model_fields.items():
                if getattr(self, name) != field.default:
                    yield f"lora.{name} has no effect with lora.rank = 0; set a rank above 0, or remove it"


class MeshConfig(Section):
    """The device mesh shared by learner and sampler. The product of the axes must equal the number of devices."""

    replica: int = option(1, "Copies of the parameters that split the batch (devices).", ge=1)
    fsdp: int = option(-1, "Devices that split parameters and batch; -1 takes what the other axes leave.", ge=-1)
    context: int = option(1, "Devices that split the sequence (devices).", ge=1)
    expert: int = option(1, "Devices that split the experts (devices).", ge=1)
    tensor: int = option(1, "Devices that split heads, ffn and vocabulary (devices).", ge=1)

    def _broken_rules(self) -> Iterator[str]:
        if self.fsdp == 0:
            yield "mesh.fsdp is 0; set a positive number of devices, or -1 for all that are left"


class DataConfig(Section):
    """Where the tasks come from."""

    source: Literal["generated", "file"] = option("generated", "Tasks made by the environment, or read from `data.path`.")
    path: PathOption | None = option(None, "A .jsonl or .parquet file of tasks (`id`, `messages` or `prompt`, `answer`).")
    num_tasks: int = option(4096, "Number of generated tasks in one epoch.", ge=1)
    shuffle: bool = option(True, "Shuffle each epoch; the order is a pure function of (seed, epoch, index).")


class EnvConfig(Section):
    """The environment and the pool of CPU processes it runs in."""

    name: str = option("arithmetic", "Registered environment, or `package.module:Class`.")
    options: dict[str, Any] = option({}, "Options of that environment; checked by the environment itself.")
    workers: int = option(2, "Worker processes per host.", ge=1)
    reset_timeout: float = option(30.0, "Deadline of one reset (seconds); the worker is killed past it.", gt=0)
    step_timeout: float = option(30.0, "Deadline of one step, scoring included (seconds); the worker is killed past it.", gt=0)
    max_retries: int = option(1, "Further tries of a rollout whose environment failed before it was scored.", ge=0)
    max_failure_fraction: float = option(
        0.5, "Stop the run when more than this share of a batch's rollouts could not be scored.", ge=0, le=1
    )


class SamplerConfig(Section):
    """The compiled sampler."""

    slots: int = option(64, "Rollouts decoded at the same time, over all devices.", ge=1)
    max_prompt_length: int = option(128, "Longest templated prompt (tokens); longer tasks are dropped before the run.", ge=1)
    max_completion_length: int = option(128, "Longest completion (tokens).", ge=1)
    cache_tokens: int | None = option(
        None,
        "Tokens that the cache holds, over all slots and devices; default: every slot at its longest. With less, rollouts wait "
        "for room, and the youngest starts again when those that run outgrow it.",
        ge=2,
    )
    temperature: float = option(1.0, "Divides the logits before the draw; 0 takes the most likely token.", ge=0)
    stop: tuple[str, ...] = option(
        (),
        "Strings that end a message, in training and evaluation: its tokens end with the one that completes the string, its "
        "text before the string.",
    )
    decode_chunk: int = option(8, "Decode steps between two looks by the host (steps).", ge=1)
    prefill_chunk: int = option(
        256,
        "Tokens of one prompt that are computed between two chunks of decode steps; a long one would hold those up.",
        ge=1,
    )
    warm_up: bool = option(
        False, "Compile all programs of the sampler before the first rollout, so that no later one waits for a compiler."
    )
    reuse_cache: bool = option(
        True, "Keep a rollout's cache while its environment works, so that the next turn computes only what is new."
    )
    batch_invariant: bool = option(
        False,
        "Run every decode step at the largest shapes, so that not even the last bits of log-probabilities depend on which "
        "rollouts run together; slower, the more so the longer the longest rollout may be.",
    )
    dtype: DType = option("float32", "Type of the sampler's parameters, products and cache.")
    weights_dtype: Literal["as-is", "int8"] = option(
        "as-is",
        "How the sampler keeps projections and experts: in sampler.dtype, or as 8-bit integers with a scale per output. The "
        "policy that samples is then another one than the learner's: see the metrics gap/*.",
    )
    cache_dtype: Literal["as-is", "int8"] = option(
        "as-is",
        "How the sampler keeps keys and values: in sampler.dtype (float32 on CPUs), or as 8-bit integers with a scale for each "
        "token, layer and head. The policy that samples is then another one than the learner's: see the metrics gap/*.",
    )
    attention: Literal["auto", "xla", "kernel"] = option(
        "auto",
        "What attends in decode steps: the kernel that JAX has for TPUs or GPUs, or XLA's products block by block, as on CPUs. "
        "`auto` takes the kernel where it can do all layers of the model.",
    )
    lora: Literal["merged", "separate"] = option(
        "merged",
        "An adapter is published inside a merged copy of the weights, or on its own beside a copy that is made once.",
    )

    def _broken_rules(self) -> Iterator[str]:
        longest = self.max_prompt_length + self.max_completion_length
        if self.cache_tokens is not None and longest > self.cache_tokens:
            yield (
                f"sampler.max_prompt_length ({self.max_prompt_length}) + sampler.max_completion_length "
                f"({self.max_completion_length}) = {longest} exceed sampler.cache_tokens ({self.cache_tokens}); "
                "raise cache_tokens or lower one of the two"
            )
        if not all(self.stop):
            yield "sampler.stop holds an empty string, which would end every message at once; remove it"


class OptimizerConfig(Section):
    """The update rule, gradient clipping and the learning-rate schedule."""

    rule: Literal["adamw", "adafactor", "muon"] = option(
        "adamw",
        "AdamW; Adafactor, which keeps means of the squares of rows and columns instead of moments, and whose learning rate is "
        "relative to the size of each matrix; or Muon for matrices, with AdamW for the rest.",
    )
    moments_dtype: Literal["float32", "bfloat16", "int8"] = option(
        "float32",
        "Type in which moments are kept: bfloat16 takes half the memory; int8, for matrices codes of 8 bits with a scale per "
        "block of 64 to 127 numbers, a quarter. Both are rounded at random, so that averages go on moving.",
    )
    learning_rate: float = option(1e-6, "Peak learning rate.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = option("constant", "Shape after the warm-up.")
    warmup_steps: int = option(0, "Optimizer steps of linear warm-up (steps).", ge=0)
    decay_steps: int | None = option(None, "Optimizer steps from the start to the end of the decay (steps).", ge=1)
    min_learning_rate: float = option(0.0, "Learning rate at the end of the decay.", ge=0)
    critic_learning_rate: float | None = option(
        None, "Peak learning rate of the critic, on the same schedule; default: ten times learning_rate.", gt=0
    )
    b1: float = option(0.9, "Decay of AdamW's first moment.", ge=0, lt=1)
    b2: float = option(0.999, "Decay of AdamW's second moment.", ge=0, lt=1)
    eps: float = option(1e-8, "Added to the root of the second moment.", gt=0)
    muon_momentum: float = option(0.95, "Decay of Muon's average of gradients.", ge=0, lt=1)
    weight_decay: float = option(0.0, "Decoupled weight decay.", ge=0)
    max_grad_norm: float | None = option(1.0, "Clip the global gradient norm to this; `none` for no clipping.", gt=0)

    def _broken_rules(self) -> Iterator[str]:
        idle = {"adamw": ("muon_momentum",), "adafactor": ("b1", "b2", "eps", "muon_momentum", "moments_dtype"), "muon": ()}
        why = "which keeps no moments" if self.rule == "adafactor" else "which has no such average"
        for name in idle[self.rule]:
            if getattr(self, name) != type(self).model_fields[name].default:
                yield f"optimizer.{name} has no effect with optimizer.rule = '{self.rule}', {why}; remove one"
        if self.schedule == "constant":
            if self.decay_steps is not None:
                yield "optimizer.decay_steps has no effect with optimizer.schedule = 'constant'; remove one"
            if self.min_learning_rate > 0:
                yield "optimizer.min_learning_rate has no effect with optimizer.schedule = 'constant'; remove one"
        elif self.decay_steps is None:
            yield f"optimizer.schedule = '{self.schedule}' needs optimizer.decay_steps (steps until the decay ends)"
        elif self.decay_steps <= self.warmup_steps:
            yield f"optimizer.decay_steps ({self.decay_steps}) must be larger than optimizer.warmup_steps ({self.warmup_steps})"
        if self.min_learning_rate > self.learning_rate:
            yield (
                f"optimizer.min_learning_rate ({self.min_learning_rate}) exceeds optimizer.learning_rate ({self.learning_rate})"
            )


class TrainConfig(Section):
    """How much is trained, and in which portions."""

    steps: int = option(100, "Optimizer steps of the whole run (steps).", ge=1)
    rollout_batch_size: int = option(8, "Tasks sampled between two weight updates of the sampler, over all hosts.", ge=1)
    mini_batch_size: int | None = option(None, "Tasks per optimizer step; default: all of rollout_batch_size.", ge=1)
    micro_batch_tokens: int | None = option(
        None,
        "Most tokens per device in one forward and backward pass; what is not given of rows and their length follows from it.",
        ge=2,
    )
    micro_batch_size_per_device: int | None = option(
        None,
        "Packed rows per device in one forward and backward pass; default: as many as micro_batch_tokens hold, or 8.",
        ge=1,
    )
    pack_length: int | None = option(
        None,
        "Tokens of a packed row; default: the longest rollout, with micro_batch_tokens what two groups of such may need, up to "
        "512 tokens.",
        ge=2,
    )
    skip_zero_advantages: bool = option(
        True,
        "Leave rollouts whose advantages are all 0 out of forward and backward passes, where they change no gradient: without "
        "beta, entropy_coef, rollout_rs, lora.dropout, a critic and losses of routers.",
    )


class CheckpointConfig(Section):
    """When the run is saved, and what a restart does."""

    every: int = option(10, "Optimizer steps between two checkpoints (steps).", ge=1)
    keep: int = option(2, "Newest checkpoints kept.", ge=1)
    resume: Literal["auto", "never"] = option(
        "auto", "`auto` continues from the newest good checkpoint of the run directory; `never` refuses a used directory."
    )


class EvalConfig(Section):
    """Evaluation on held-out tasks; never touches the training state or its draws."""

    every: int = option(0, "Optimizer steps between two evaluations (steps); 0 evaluates only with `rljax eval`.", ge=0)
    num_tasks: int = option(200, "Held-out tasks per evaluation.", ge=1)
    path: PathOption | None = option(None, "File of held-out tasks when `data.source` is `file`.")
    temperature: float = option(0.0, "Sampling temperature of the evaluation; 0 is greedy.", ge=0)
    top_k: int = option(0, "Draw from so many most likely tokens only (tokens); 0 for all.", ge=0)
    top_p: float = option(1.0, "Draw from the fewest most likely tokens with this probability only; 1 for all.", gt=0, le=1)
    min_p: float = option(
        0.0, "Draw from tokens at least this likely only, relative to the most likely one; 0 for all.", ge=0, le=1
    )

    def _broken_rules(self) -> Iterator[str]:
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if self.temperature == 0 and getattr(self, name) != off:
                yield f"eval.{name} has no effect with eval.temperature = 0, which takes the most likely token; remove one"


class TelemetryConfig(Section):
    """What is shown and recorded."""

    live: Literal["auto", "plain", "off"] = option("auto", "Live view in a terminal, plain lines, or nothing on the screen.")
    rollouts: bool = option(True, "Keep every rollout as a JSON line under the run directory.")
    tensorboard: bool = option(False, "Write TensorBoard event files (needs `rljax[tensorboard]`).")


class Config(Section):
    """Everything a run is made of."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    mesh: MeshConfig = MeshConfig()
    data: DataConfig = DataConfig()
    env: EnvConfig = EnvConfig()
    sampler: SamplerConfig = SamplerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    telemetry: TelemetryConfig = TelemetryConfig()

    def _broken_rules(self) -> Iterator[str]:
        if self.lora.rank and self.algorithm.advantage == "gae":
            yield (
                "algorithm.advantage = 'gae' trains a whole network beside the policy, which lora.rank is there to avoid; "
                "set lora.rank = 0 or choose another algorithm.advantage"
            )
        yield from self._uneven_portions()
        yield from self._unfit_data()
        yield from self._unfit_critic()
        if self.sampler.temperature == 0:
            yield "sampler.temperature = 0 makes all rollouts of a group equal; set it above 0 (eval.temperature may be 0)"
        if self.lora.rank == 0 and self.sampler.lora != "merged":
            yield f"sampler.lora = '{self.sampler.lora}' has no effect with lora.rank = 0; remove one"
        if self.lora.base_dtype != "as-is" and self.model.remat == "none":
            yield (
                f"model.remat = 'none' would keep all weights of a base that lora.base_dtype = '{self.lora.base_dtype}' makes "
                "small for the backward pass, dequantised; set it to 'dots', 'offload' or 'full'"
            )
        if self.lora.rank and self.algorithm.reference_mixup_alpha < 1:
            yield (
                f"algorithm.reference_mixup_alpha ({self.algorithm.reference_mixup_alpha}) would average the factors of an "
                "adapter (lora.rank above 0), which is no average of policies; set it to 1"
            )

    def _uneven_portions(self) -> Iterator[str]:
        train, algorithm, sampler = self.train, self.algorithm, self.sampler
        if train.rollout_batch_size % self.mini_batch_size:
            yield (
                f"train.rollout_batch_size ({train.rollout_batch_size}) must be a multiple of "
                f"train.mini_batch_size ({self.mini_batch_size})"
            )
        else:
            yield from self._partial_batches()
        if sampler.slots % algorithm.num_generations:
            yield (
                f"sampler.slots ({sampler.slots}) must be a multiple of "
                f"algorithm.num_generations ({algorithm.num_generations}), so that groups share their prompt"
            )
        if self.overlong_buffer_len > sampler.max_completion_length:
            yield (
                f"algorithm.overlong_buffer_len ({self.overlong_buffer_len}) exceeds sampler.max_completion_length "
                f"({sampler.max_completion_length})"
            )
        longest = sampler.max_prompt_length + sampler.max_completion_length
        if self.pack_length < longest:
            yield (
                f"train.pack_length ({train.pack_length}) is shorter than sampler.max_prompt_length + "
                f"sampler.max_completion_length ({longest}); raise it or lower one of the two"
            )
        yield from self._unfit_budget()

    def _unfit_budget(self) -> Iterator[str]:
        train = self.train
        if train.micro_batch_tokens is None:
            return
        if train.pack_length is not None and train.micro_batch_size_per_device is not None:
            yield (
                "train.micro_batch_tokens has no effect with both train.pack_length and train.micro_batch_size_per_device; "
                "remove one of the three"
            )
        elif self.pack_length * (train.micro_batch_size_per_device or 1) > train.micro_batch_tokens:
            rows = "a row" if train.micro_batch_size_per_device is None else "train.micro_batch_size_per_device rows"
            yield (
                f"train.micro_batch_tokens ({train.micro_batch_tokens}) is less than {rows} of {self.pack_length} tokens; "
                "raise it, or lower what is too long"
            )

    def _partial_batches(self) -> Iterator[str]:
        updates = self.updates_per_batch
        for name, value in (
            ("train.steps", self.train.steps),
            ("checkpoint.every", self.checkpoint.every),
            ("eval.every", self.eval.every),
        ):
            if value % updates:
                yield (
                    f"{name} ({value}) must be a multiple of {updates}, the optimizer steps per batch of rollouts "
                    "(algorithm.num_iterations x train.rollout_batch_size / train.mini_batch_size)"
                )

    def _unfit_data(self) -> Iterator[str]:
        if self.data.source == "file":
            if self.data.path is None:
                yield "data.source = 'file' needs data.path, a .jsonl or .parquet file of tasks"
            if self.eval.every and self.eval.path is None:
                yield "eval.every needs eval.path, a file of held-out tasks, when data.source = 'file'"
            return
        for name, value in (("data.path", self.data.path), ("eval.path", self.eval.path)):
            if value is not None:
                yield f"{name} has no effect with data.source = 'generated'; set data.source = 'file' or remove it"
        if self.data.num_tasks < self.train.rollout_batch_size:
            yield (
                f"data.num_tasks ({self.data.num_tasks}) is smaller than "
                f"train.rollout_batch_size ({self.train.rollout_batch_size})"
            )

    def _unfit_critic(self) -> Iterator[str]:
        advantage, warmup = self.algorithm.advantage, self.algorithm.critic_warmup_steps
        if self.optimizer.critic_learning_rate is not None and advantage != "gae":
            yield f"optimizer.critic_learning_rate has no effect with algorithm.advantage = '{advantage}'; remove one"
        if warmup >= self.train.steps:
            yield (
                f"algorithm.critic_warmup_steps ({warmup}) leave none of train.steps ({self.train.steps}) for the policy; "
                "lower the first or raise the second"
            )

    @property
    def critic_learning_rate(self) -> float:
        """Peak learning rate of the critic. Ten times the policy's: it has a task of its own, and starts from nothing."""
        return self.optimizer.critic_learning_rate or 10 * self.optimizer.learning_rate

    @property
    def mini_batch_size(self) -> int:
        """Tasks per optimizer step."""
        return self.train.mini_batch_size or self.train.rollout_batch_size

    @property
    def overlong_buffer_len(self) -> int:
        """Tokens before the length limit in which the penalty grows; 0 for none. DAPO's 4096 of 20480 are a fifth."""
        asked = self.algorithm.overlong_buffer_len
        return max(1, self.sampler.max_completion_length // 5) if asked < 0 else asked

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps per batch of rollouts."""
        return self.algorithm.num_iterations * (self.train.rollout_batch_size // self.mini_batch_size)

    @property
    def pack_length(self) -> int:
        """Tokens of a packed row; it follows from the recipe alone, so it is the same on every mesh and in every process.

        By default it is that of the longest rollout. With a budget of tokens it is what two groups of such need, up to
        `_LONGEST_CHOSEN_ROW` and to the share of each row: a prompt is then stored once for all of its group, and shorter
        groups, as most are, leave less of a row empty.
        """
        prompt, completion = self.sampler.max_prompt_length, self.sampler.max_completion_length
        if self.train.pack_length is not None:
            return self.train.pack_length
        if self.train.micro_batch_tokens is None:
            return prompt + completion
        share = self.train.micro_batch_tokens // (self.train.micro_batch_size_per_device or 1)
        groups = 2 * (prompt + self.algorithm.num_generations * completion)
        return max(prompt + completion, min(groups, _LONGEST_CHOSEN_ROW, share))

    @property
    def micro_batch_size_per_device(self) -> int:
        """Packed rows per device in one forward and backward pass."""
        if self.train.micro_batch_size_per_device is not None:
            return self.train.micro_batch_size_per_device
        budget = self.train.micro_batch_tokens
        return _ROWS if budget is None else max(1, budget // self.pack_length)

    def hash(self) -> str:
        """Hash of the options that decide the trained parameters, so that a resume under another recipe is noticed.

        Where a run is stored, how it is watched, saved and evaluated, how long it runs and how many devices and
        workers it uses are left out: they may change between restarts.
        """
        return hashlib.sha256(json.dumps(self.deciding(), sort_keys=True).encode()).hexdigest()

    def deciding(self) -> dict[str, Any]:
        """Return the options that `hash` covers, as plain data by section."""
        return self.model_dump(mode="json", exclude=_FREE_BETWEEN_RESTARTS)


_FREE_BETWEEN_RESTARTS: Any = {
    "run": {"dir"},
    "model": {"checkpoint", "remat"},
    "lora": {"adapter"},  # the contents of model and adapter are guarded by the run's identity
    "mesh": True,
    "data": {"path"},  # the content is guarded by the dataset fingerprint
    "env": {"workers", "reset_timeout", "step_timeout", "max_retries", "max_failure_fraction"},
    "sampler": {
        "slots",
        "cache_tokens",
        "decode_chunk",
        "prefill_chunk",
        "warm_up",
        "reuse_cache",
        "batch_invariant",
        "attention",
    },
    # The preset is in the values it set; a run that used up its rounds was stopped, and may be given more.
    "algorithm": {"preset", "dynamic_sampling_max_rounds"},
    "train": {"steps", "micro_batch_size_per_device", "micro_batch_tokens", "pack_length", "skip_zero_advantages"},
    "checkpoint": True,
    "eval": True,
    "telemetry": True,
}
