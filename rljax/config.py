"""The configuration: one frozen tree of sections, read from a TOML recipe and `key.path=value` overrides.

Owns every option, its default, its meaning and the rules between options. Loading (files, overrides, errors with
the place and the remedy) is in `recipe.py`. Refuses to own device facts: what depends on the number of devices or
on the model is checked where those are known. Imports no jax, and of rljax the table of presets alone.
"""

import hashlib
import json
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rljax.presets import PRESETS

DType = Literal["float32", "bfloat16"]

CHECKING_RULES: ContextVar[bool] = ContextVar("checking_rules", default=False)
"""Whether a section is checking its rules: reading an option for that is no use of it (see `recipe.record_reads`)."""


def _option(default: Any, text: str, **limits: Any) -> Any:
    """Declare one option: its default, its one-sentence meaning with the unit, and its limits."""
    return Field(default, description=text, **limits)


class Section(BaseModel):
    """A frozen group of options; an unknown key or a value of the wrong type is an error, never a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="after")
    def _keep_rules(self) -> "Section":
        checking = CHECKING_RULES.set(True)
        try:
            broken = list(self._broken_rules())
        finally:
            CHECKING_RULES.reset(checking)
        if broken:
            raise ValueError("\n".join(broken))
        return self

    def _broken_rules(self) -> Iterator[str]:
        """Yield one sentence per broken rule between options, naming each option as `section.name`."""
        yield from ()


PathOption = Annotated[Path, Field(strict=False)]


class RunConfig(Section):
    """Where a run lives and what seeds it."""

    dir: PathOption = _option(Path("runs/default"), "Run directory: configuration, metrics, rollouts and checkpoints.")
    seed: int = _option(0, "Root of every random draw of the run.", ge=0, lt=2**32)


class ModelConfig(Section):
    """The policy."""

    checkpoint: PathOption = _option(Path("checkpoints/model"), "Checkpoint directory written by `rljax convert`.")
    param_dtype: DType = _option("float32", "Type of the stored (master) parameters.")
    compute_dtype: DType = _option("float32", "Type of the products in training and scoring; logits stay float32.")
    remat: Literal["none", "dots", "full"] = _option(
        "dots", "What the backward pass recomputes: nothing, all but the large products, or every layer."
    )


class LoraConfig(Section):
    """Low-rank adapters: small factors are trained, and the model of `model.checkpoint` stays as it is."""

    rank: int = _option(0, "Inner dim of the factors; 0 trains the model's own parameters.", ge=0)
    alpha: float = _option(32.0, "Numerator of the scale of their product.", gt=0)
    rslora: bool = _option(False, "Divide alpha by the square root of the rank instead of the rank (rsLoRA).")
    dropout: float = _option(0.0, "Probability that the factors do not see a value of their input in training.", ge=0, lt=1)
    target_modules: tuple[str, ...] = _option(
        ("all-linear",),
        "Projections with factors, of q_proj k_proj v_proj o_proj gate_proj up_proj down_proj; `all-linear` alone for all.",
        min_length=1,
    )
    base_dtype: Literal["as-is", "int8", "nf4"] = _option(
        "as-is",
        "How the large weights of the frozen model are kept: in model.param_dtype, or quantised to 8 or 4 bits (QLoRA), which "
        "needs `pip install 'rljax[qlora]'`.",
    )
    adapter: PathOption | None = _option(None, "Begin with this adapter of the same model: the adapter/ of another run.")

    def _broken_rules(self) -> Iterator[str]:
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            yield "lora.target_modules has 'all-linear' and other names; leave 'all-linear' alone, or leave it out"
        if self.rank == 0:
            for name, field in type(self).model_fields.items():
                if getattr(self, name) != field.default:
                    yield f"lora.{name} has no effect with lora.rank = 0; set a rank above 0, or remove it"


class MeshConfig(Section):
    """The device mesh shared by learner and sampler. The product of the axes must equal the number of devices."""

    replica: int = _option(1, "Copies of the parameters that split the batch (devices).", ge=1)
    fsdp: int = _option(-1, "Devices that split parameters and batch; -1 takes what the other axes leave.", ge=-1)
    context: int = _option(1, "Devices that split the sequence (devices).", ge=1)
    expert: int = _option(1, "Devices that split the experts (devices).", ge=1)
    tensor: int = _option(1, "Devices that split heads, ffn and vocabulary (devices).", ge=1)

    def _broken_rules(self) -> Iterator[str]:
        if self.fsdp == 0:
            yield "mesh.fsdp is 0; set a positive number of devices, or -1 for all that are left"


class DataConfig(Section):
    """Where the tasks come from."""

    source: Literal["generated", "file"] = _option("generated", "Tasks made by the environment, or read from `data.path`.")
    path: PathOption | None = _option(None, "A .jsonl or .parquet file of tasks (`id`, `messages` or `prompt`, `answer`).")
    num_tasks: int = _option(4096, "Number of generated tasks in one epoch.", ge=1)
    shuffle: bool = _option(True, "Shuffle each epoch; the order is a pure function of (seed, epoch, index).")


class EnvConfig(Section):
    """The environment and the pool of CPU processes it runs in."""

    name: str = _option("arithmetic", "Registered environment, or `package.module:Class`.")
    options: dict[str, Any] = _option({}, "Options of that environment; checked by the environment itself.")
    workers: int = _option(2, "Worker processes per host.", ge=1)
    reset_timeout: float = _option(30.0, "Deadline of one reset (seconds); the worker is killed past it.", gt=0)
    step_timeout: float = _option(30.0, "Deadline of one step, scoring included (seconds); the worker is killed past it.", gt=0)
    max_retries: int = _option(1, "Further tries of a rollout whose environment failed before it was scored.", ge=0)
    max_failure_fraction: float = _option(
        0.5, "Stop the run when more than this share of a batch's rollouts could not be scored.", ge=0, le=1
    )


class SamplerConfig(Section):
    """The compiled sampler."""

    slots: int = _option(64, "Rollouts decoded at the same time, over all devices.", ge=1)
    max_prompt_length: int = _option(128, "Longest templated prompt (tokens); longer tasks are dropped before the run.", ge=1)
    max_completion_length: int = _option(128, "Longest completion (tokens).", ge=1)
    cache_tokens: int | None = _option(
        None,
        "Tokens that the cache holds, over all slots and devices; default: every slot at its longest. With less, rollouts wait "
        "for room, and the youngest starts again when those that run outgrow it.",
        ge=2,
    )
    temperature: float = _option(1.0, "Divides the logits before the draw; 0 takes the most likely token.", ge=0)
    stop: tuple[str, ...] = _option(
        (),
        "Strings that end a message, in training and evaluation: its tokens end with the one that completes the string, its "
        "text before the string.",
    )
    decode_chunk: int = _option(8, "Decode steps between two looks by the host (steps).", ge=1)
    dtype: DType = _option("float32", "Type of the sampler's parameters, products and cache.")
    lora: Literal["merged", "separate"] = _option(
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


class AlgorithmConfig(Section):
    """The policy gradient, as rows of advantage, surrogate, aggregation, KL and correction; formulas in docs/math.md."""

    preset: Literal[
        "none",
        "grpo",
        "dr_grpo",
        "rloo",
        "reinforce_pp",
        "reinforce_pp_baseline",
        "dapo",
        "gspo",
        "gspo_token",
        "cispo",
        "sapo",
        "maxrl",
        "gdpo",
    ] = _option("none", "Named algorithm, which sets the defaults of this section; an option that is set wins.")
    num_generations: int = _option(8, "Rollouts per Task.", ge=2)
    advantage: Literal["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "gdpo"] = _option(
        "grpo", "How rewards become advantages: against the group, the other rollouts, or the batch."
    )
    scale_rewards: Literal["group", "batch", "none"] = _option(
        "group", "Divide centred rewards by the standard deviation of the group, of the batch, or not at all (grpo, rloo)."
    )
    reward_weights: dict[str, float] = _option({}, "Weight of each named reward of the environment (gdpo).")
    overlong_buffer_len: int = _option(
        0, "Tokens before the length limit in which a penalty grows; 0 for none, -1 for a fifth of the limit.", ge=-1
    )
    overlong_penalty_factor: float = _option(1.0, "Penalty of a message that reaches the length limit (reward).", gt=0)
    dynamic_sampling: bool = _option(False, "Replace groups whose rewards are all equal by groups of new tasks.")
    dynamic_sampling_max_rounds: int = _option(
        10, "Stop the run when so many rounds of sampling have not filled a batch (rounds).", ge=1
    )
    surrogate: Literal["clip", "cispo", "sapo", "reinforce"] = _option("clip", "Per-token loss of the policy.")
    importance_sampling_level: Literal["token", "sequence", "sequence-token"] = _option(
        "token", "Importance ratio per token, per rollout, or per rollout with the gradient of each token."
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = _option(
        "token-mean", "How per-token losses become one number; each denominator is global to the optimizer step."
    )
    epsilon: float = _option(0.2, "Lower clip range of the importance ratio (clip, cispo); 1 for no lower bound.", ge=0, le=1)
    epsilon_high: float = _option(0.28, "Upper clip range of the importance ratio (clip, cispo).", ge=0)
    epsilon_c: float | None = _option(
        None, "Dual clip: bound of the importance ratio where the advantage is negative (clip); `none` for no bound.", gt=1
    )
    sapo_temperature_pos: float = _option(1.0, "Steepness of the soft gate where the advantage is positive (sapo).", gt=0)
    sapo_temperature_neg: float = _option(1.05, "Steepness of the soft gate where the advantage is not positive (sapo).", gt=0)
    entropy_coef: float = _option(0.0, "Weight of the entropy bonus.", ge=0)
    beta: float = _option(0.0, "Weight of the KL divergence to the reference policy.", ge=0)
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "k3-ratio"] = _option("k3", "Estimator of that divergence.")
    kl_in_reward: bool = _option(False, "Take the divergence off the reward instead of adding it to the loss.")
    kl_target: float | None = _option(
        None, "Adapt the weight so that the divergence per token comes to this (nats); `none` keeps the weight.", gt=0
    )
    kl_gain: float = _option(0.1, "How fast the weight adapts: its largest relative change per step is a fifth of this.", gt=0)
    reference_sync_steps: int = _option(
        0, "Optimizer steps between two updates of the reference policy (steps); 0 keeps the initial one.", ge=0
    )
    reference_mixup_alpha: float = _option(
        1.0, "Share of the current policy in the updated reference: 1 replaces it, less makes it an average.", gt=0, le=1
    )
    num_iterations: int = _option(1, "Passes over each batch of rollouts.", ge=1)
    proximal: Literal["learner", "behavior"] = _option(
        "learner", "Policy that the importance ratio is against: the learner's at the start of the update, or the sampler's."
    )
    rollout_is: Literal["none", "token", "sequence", "geometric"] = _option(
        "token", "Level of the importance weights that correct for the sampler-learner gap."
    )
    rollout_is_mode: Literal["truncate", "mask"] = _option(
        "truncate", "Cut weights at their bounds, or give tokens outside of them the weight 0."
    )
    rollout_is_threshold: float = _option(2.0, "Upper bound of those weights.", gt=0)
    rollout_is_threshold_lower: float = _option(0.0, "Lower bound of those weights.", ge=0)
    rollout_rs: Literal["none", "token", "sequence", "geometric"] = _option(
        "none", "Level at which tokens or rollouts too far from the sampler leave the loss and its denominators."
    )
    rollout_rs_threshold: float = _option(2.0, "Largest ratio of learner to sampler that stays.", gt=0)
    rollout_rs_threshold_lower: float = _option(0.5, "Smallest ratio of learner to sampler that stays.", ge=0)
    routing_replay: bool = _option(
        False, "Send tokens to the same experts in the learner as in the sampler (models with experts)."
    )
    router_z_loss_coef: float = _option(0.0, "Weight of the loss that keeps routers' scores small (models with experts).", ge=0)
    router_balance_loss_coef: float = _option(
        0.0, "Weight of the loss that spreads tokens over experts (models with experts); costs a forward pass per step.", ge=0
    )
    mask_truncated_completions: bool = _option(False, "Leave rollouts that hit the length limit out of the loss.")

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, options: Any) -> Any:
        """Put the preset's values where nothing was set."""
        preset = options.get("preset") if isinstance(options, dict) else None
        return {**PRESETS[preset], **options} if isinstance(preset, str) and preset in PRESETS else options

    def describe(self) -> str:
        """Say in a line what is combined, for people."""
        kl = f"KL {self.kl_estimator} in the {'reward' if self.kl_in_reward else 'loss'}" if self.beta > 0 else "no KL"
        named = "" if self.preset == "none" else f"{self.preset}: "
        return f"{named}{self.advantage} advantages, {self.surrogate} surrogate, {self.loss_agg_mode}, {kl}"

    def _broken_rules(self) -> Iterator[str]:
        yield from self._broken_advantage_rules()
        yield from self._broken_kl_rules()
        if self.surrogate != "clip" and self.epsilon_c is not None:
            yield f"algorithm.epsilon_c has no effect with algorithm.surrogate = '{self.surrogate}'; remove one"
        if self.proximal == "behavior" and self.rollout_is != "none":
            yield (
                "algorithm.proximal = 'behavior' puts the sampler into the importance ratio, and algorithm.rollout_is = "
                f"'{self.rollout_is}' would correct for it a second time; set algorithm.rollout_is = 'none'"
            )
        for name in ("rollout_is", "rollout_rs"):
            low, high = getattr(self, f"{name}_threshold_lower"), getattr(self, f"{name}_threshold")
            if low > high:
                yield f"algorithm.{name}_threshold_lower ({low}) exceeds algorithm.{name}_threshold ({high})"

    def _broken_advantage_rules(self) -> Iterator[str]:
        if self.scale_rewards != "group" and self.advantage not in ("grpo", "rloo"):
            yield f"algorithm.scale_rewards has no effect with algorithm.advantage = '{self.advantage}'; remove one"
        if self.advantage == "gdpo":
            if not self.reward_weights:
                yield "algorithm.advantage = 'gdpo' needs algorithm.reward_weights, a weight for each named reward"
            if self.overlong_buffer_len or (self.kl_in_reward and self.beta > 0):
                yield (
                    "algorithm.advantage = 'gdpo' normalises named rewards, to which algorithm.overlong_buffer_len and "
                    "algorithm.kl_in_reward have nothing to add; remove them, or let the environment name such a reward"
                )
        elif self.reward_weights:
            yield f"algorithm.reward_weights has no effect with algorithm.advantage = '{self.advantage}'; set it to 'gdpo'"
        if self.advantage == "maxrl" and (self.overlong_buffer_len or (self.kl_in_reward and self.beta > 0)):
            yield (
                "algorithm.advantage = 'maxrl' divides by the mean reward, which algorithm.overlong_buffer_len and "
                "algorithm.kl_in_reward can make negative; remove them"
            )

    def _broken_kl_rules(self) -> Iterator[str]:
        if self.kl_in_reward and self.kl_estimator in ("k3+", "k3-ratio"):
            yield (
                f"algorithm.kl_estimator = '{self.kl_estimator}' differs from 'k3' in its gradient alone, and with "
                "algorithm.kl_in_reward there is none; use k3"
            )
        if self.beta == 0:
            for name in ("kl_target", "reference_sync_steps"):
                if getattr(self, name):
                    yield f"algorithm.{name} has no effect with algorithm.beta = 0; set a weight above 0, or remove it"
        if self.reference_mixup_alpha < 1 and not self.reference_sync_steps:
            yield "algorithm.reference_mixup_alpha has no effect with algorithm.reference_sync_steps = 0; remove one"


class OptimizerConfig(Section):
    """AdamW, gradient clipping and the learning-rate schedule."""

    learning_rate: float = _option(1e-6, "Peak learning rate.", gt=0)
    schedule: Literal["constant", "linear", "cosine"] = _option("constant", "Shape after the warm-up.")
    warmup_steps: int = _option(0, "Optimizer steps of linear warm-up (steps).", ge=0)
    decay_steps: int | None = _option(None, "Optimizer steps from the start to the end of the decay (steps).", ge=1)
    min_learning_rate: float = _option(0.0, "Learning rate at the end of the decay.", ge=0)
    b1: float = _option(0.9, "Decay of AdamW's first moment.", ge=0, lt=1)
    b2: float = _option(0.999, "Decay of AdamW's second moment.", ge=0, lt=1)
    eps: float = _option(1e-8, "Added to the root of the second moment.", gt=0)
    weight_decay: float = _option(0.0, "Decoupled weight decay.", ge=0)
    max_grad_norm: float | None = _option(1.0, "Clip the global gradient norm to this; `none` for no clipping.", gt=0)

    def _broken_rules(self) -> Iterator[str]:
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

    steps: int = _option(100, "Optimizer steps of the whole run (steps).", ge=1)
    rollout_batch_size: int = _option(8, "Tasks sampled between two weight updates of the sampler, over all hosts.", ge=1)
    mini_batch_size: int | None = _option(None, "Tasks per optimizer step; default: all of rollout_batch_size.", ge=1)
    micro_batch_size_per_device: int = _option(8, "Packed rows per device in one forward and backward pass.", ge=1)
    pack_length: int | None = _option(None, "Tokens of a packed row; default: the longest rollout.", ge=2)


class CheckpointConfig(Section):
    """When the run is saved, and what a restart does."""

    every: int = _option(10, "Optimizer steps between two checkpoints (steps).", ge=1)
    keep: int = _option(2, "Newest checkpoints kept.", ge=1)
    resume: Literal["auto", "never"] = _option(
        "auto", "`auto` continues from the newest good checkpoint of the run directory; `never` refuses a used directory."
    )


class EvalConfig(Section):
    """Evaluation on held-out tasks; never touches the training state or its draws."""

    every: int = _option(0, "Optimizer steps between two evaluations (steps); 0 evaluates only with `rljax eval`.", ge=0)
    num_tasks: int = _option(200, "Held-out tasks per evaluation.", ge=1)
    path: PathOption | None = _option(None, "File of held-out tasks when `data.source` is `file`.")
    temperature: float = _option(0.0, "Sampling temperature of the evaluation; 0 is greedy.", ge=0)
    top_k: int = _option(0, "Draw from so many most likely tokens only (tokens); 0 for all.", ge=0)
    top_p: float = _option(1.0, "Draw from the fewest most likely tokens with this probability only; 1 for all.", gt=0, le=1)
    min_p: float = _option(
        0.0, "Draw from tokens at least this likely only, relative to the most likely one; 0 for all.", ge=0, le=1
    )

    def _broken_rules(self) -> Iterator[str]:
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if self.temperature == 0 and getattr(self, name) != off:
                yield f"eval.{name} has no effect with eval.temperature = 0, which takes the most likely token; remove one"


class TelemetryConfig(Section):
    """What is shown and recorded."""

    live: Literal["auto", "plain", "off"] = _option("auto", "Live view in a terminal, plain lines, or nothing on the screen.")
    rollouts: bool = _option(True, "Keep every rollout as a JSON line under the run directory.")
    tensorboard: bool = _option(False, "Write TensorBoard event files (needs `rljax[tensorboard]`).")


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
        yield from self._uneven_portions()
        yield from self._unfit_data()
        if self.sampler.temperature == 0:
            yield "sampler.temperature = 0 makes all rollouts of a group equal; set it above 0 (eval.temperature may be 0)"
        if self.lora.rank == 0 and self.sampler.lora != "merged":
            yield f"sampler.lora = '{self.sampler.lora}' has no effect with lora.rank = 0; remove one"
        if self.lora.base_dtype != "as-is" and self.model.remat == "none":
            yield (
                f"model.remat = 'none' would keep all weights of a base that lora.base_dtype = '{self.lora.base_dtype}' makes "
                "small for the backward pass, dequantised; set it to 'dots' or 'full'"
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
        """Tokens of a packed row."""
        return self.train.pack_length or self.sampler.max_prompt_length + self.sampler.max_completion_length

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
    "sampler": {"slots", "cache_tokens", "decode_chunk"},
    # The preset is in the values it set; a run that used up its rounds was stopped, and may be given more.
    "algorithm": {"preset", "dynamic_sampling_max_rounds"},
    "train": {"steps", "micro_batch_size_per_device"},
    "checkpoint": True,
    "eval": True,
    "telemetry": True,
}
