"""The options of the algorithm, and the rules between them.

Owns the section `[algorithm]`. Refuses to own the other sections and the rules across sections (`config.py`), and the values
that a preset sets (`presets.py`).
"""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import model_validator

from rljax.presets import PRESETS
from rljax.section import Section, option


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
        "ppo",
    ] = option("none", "Named algorithm, which sets the defaults of this section; an option that is set wins.")
    num_generations: int = option(8, "Rollouts per Task; at least 2, or 1 where they are not compared (gae, return).", ge=1)
    advantage: Literal["grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "gdpo", "gae", "return"] = option(
        "grpo",
        "How rewards become advantages: against the group, the other rollouts, the batch, a learned critic (gae), or nothing "
        "(return).",
    )
    credit: Literal["rollout", "turn"] = option(
        "rollout", "What is compared within a group: whole rollouts, or their turns of the same number (grpo, rloo)."
    )
    gamma: float = option(1.0, "Discount of later rewards: per token (gae), or per turn (credit = turn).", gt=0, le=1)
    gae_lambda: float = option(
        0.95, "How far advantages trust returns: 1 to the end of the rollout, 0 to the next token's value (gae).", ge=0, le=1
    )
    whiten_advantages: bool = option(True, "Give the advantages of a batch mean 0 and standard deviation 1 over tokens (gae).")
    cliprange_value: float | None = option(
        None, "How far a value may move from the one at the start of the update; `none` for any distance (gae).", gt=0
    )
    critic_warmup_steps: int = option(
        0, "Optimizer steps at the start of the run that train the critic alone (steps, gae).", ge=0
    )
    scale_rewards: Literal["group", "batch", "none"] = option(
        "group", "Divide centred rewards by the standard deviation of the group, of the batch, or not at all (grpo, rloo)."
    )
    reward_weights: dict[str, float] = option({}, "Weight of each named reward of the environment (gdpo).")
    overlong_buffer_len: int = option(
        0, "Tokens before the length limit in which a penalty grows; 0 for none, -1 for a fifth of the limit.", ge=-1
    )
    overlong_penalty_factor: float = option(1.0, "Penalty of a message that reaches the length limit (reward).", gt=0)
    dynamic_sampling: bool = option(False, "Replace groups whose rewards are all equal by groups of new tasks.")
    dynamic_sampling_max_rounds: int = option(
        10, "Stop the run when so many rounds of sampling have not filled a batch (rounds).", ge=1
    )
    surrogate: Literal["clip", "cispo", "sapo", "reinforce"] = option("clip", "Per-token loss of the policy.")
    importance_sampling_level: Literal["token", "sequence", "sequence-token"] = option(
        "token", "Importance ratio per token, per rollout, or per rollout with the gradient of each token."
    )
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = option(
        "token-mean", "How per-token losses become one number; each denominator is global to the optimizer step."
    )
    epsilon: float = option(0.2, "Lower clip range of the importance ratio (clip, cispo); 1 for no lower bound.", ge=0, le=1)
    epsilon_high: float = option(0.28, "Upper clip range of the importance ratio (clip, cispo).", ge=0)
    epsilon_c: float | None = option(
        None, "Dual clip: bound of the importance ratio where the advantage is negative (clip); `none` for no bound.", gt=1
    )
    sapo_temperature_pos: float = option(1.0, "Steepness of the soft gate where the advantage is positive (sapo).", gt=0)
    sapo_temperature_neg: float = option(1.05, "Steepness of the soft gate where the advantage is not positive (sapo).", gt=0)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", ge=0)
    beta: float = option(0.0, "Weight of the KL divergence to the reference policy.", ge=0)
    kl_estimator: Literal["k1", "k2", "k3", "k3+", "k3-ratio"] = option("k3", "Estimator of that divergence.")
    kl_in_reward: bool = option(False, "Take the divergence off the reward instead of adding it to the loss.")
    kl_target: float | None = option(
        None, "Adapt the weight so that the divergence per token comes to this (nats); `none` keeps the weight.", gt=0
    )
    kl_gain: float = option(0.1, "How fast the weight adapts: its largest relative change per step is a fifth of this.", gt=0)
    reference_sync_steps: int = option(
        0, "Optimizer steps between two updates of the reference policy (steps); 0 keeps the initial one.", ge=0
    )
    reference_mixup_alpha: float = option(
        1.0, "Share of the current policy in the updated reference: 1 replaces it, less makes it an average.", gt=0, le=1
    )
    num_iterations: int = option(1, "Passes over each batch of rollouts.", ge=1)
    proximal: Literal["learner", "behavior"] = option(
        "learner", "Policy that the importance ratio is against: the learner's at the start of the update, or the sampler's."
    )
    rollout_is: Literal["none", "token", "sequence", "geometric"] = option(
        "token", "Level of the importance weights that correct for the sampler-learner gap."
    )
    rollout_is_mode: Literal["truncate", "mask"] = option(
        "truncate", "Cut weights at their bounds, or give tokens outside of them the weight 0."
    )
    rollout_is_threshold: float = option(2.0, "Upper bound of those weights.", gt=0)
    rollout_is_threshold_lower: float = option(0.0, "Lower bound of those weights.", ge=0)
    rollout_rs: Literal["none", "token", "sequence", "geometric"] = option(
        "none", "Level at which tokens or rollouts too far from the sampler leave the loss and its denominators."
    )
    rollout_rs_threshold: float = option(2.0, "Largest ratio of learner to sampler that stays.", gt=0)
    rollout_rs_threshold_lower: float = option(0.5, "Smallest ratio of learner to sampler that stays.", ge=0)
    routing_replay: bool = option(
        False, "Send tokens to the same experts in the learner as in the sampler (models with experts)."
    )
    router_z_loss_coef: float = option(0.0, "Weight of the loss that keeps routers' scores small (models with experts).", ge=0)
    router_balance_loss_coef: float = option(
        0.0, "Weight of the loss that spreads tokens over experts (models with experts); costs a forward pass per step.", ge=0
    )
    mask_truncated_completions: bool = option(False, "Leave rollouts that hit the length limit out of the loss.")

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
        turns = " by turn" if self.credit == "turn" else ""
        return f"{named}{self.advantage} advantages{turns}, {self.surrogate} surrogate, {self.loss_agg_mode}, {kl}"

    def _broken_rules(self) -> Iterator[str]:
        yield from self._broken_advantage_rules()
        yield from self._broken_credit_rules()
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

    def _broken_credit_rules(self) -> Iterator[str]:
        critic, turns = self.advantage == "gae", self.credit == "turn"
        grouped = self.advantage not in ("gae", "return")
        if self.num_generations < 2 and grouped:
            yield (
                f"algorithm.num_generations = 1 leaves nothing to compare a rollout with by algorithm.advantage = "
                f"'{self.advantage}'; set at least 2, or algorithm.advantage = 'gae'"
            )
        if self.dynamic_sampling and not grouped:
            yield (
                "algorithm.dynamic_sampling replaces groups that teach nothing compared with themselves, and with "
                f"algorithm.advantage = '{self.advantage}' no rollout is compared with its group; remove one"
            )
        names = [] if critic else ["gae_lambda", "whiten_advantages", "cliprange_value", "critic_warmup_steps"]
        for name in [*names, *([] if critic or turns else ["gamma"])]:
            if getattr(self, name) != type(self).model_fields[name].default:
                needed = "algorithm.advantage = 'gae'" + (" or algorithm.credit = 'turn'" if name == "gamma" else "")
                yield f"algorithm.{name} has no effect without {needed}; remove it"
        if turns and self.advantage not in ("grpo", "rloo"):
            yield f"algorithm.credit = 'turn' is for algorithm.advantage = 'grpo' or 'rloo', not '{self.advantage}'; remove one"
        elif turns and (self.overlong_buffer_len or (self.kl_in_reward and self.beta > 0)):
            yield (
                "algorithm.credit = 'turn' compares what the environment gave each turn, to which "
                "algorithm.overlong_buffer_len and algorithm.kl_in_reward have nothing to add; remove them"
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
