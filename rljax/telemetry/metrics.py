"""Every metric a run may log: its name, unit, reduction and meaning.

Owns the table `METRICS`, from which docs/metrics.md is written, and the conversion of logged values to plain numbers.
Refuses to own where values go (`sinks.py`, `live.py`) and how seconds are counted (`profile.py`).
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

Reduction = Literal["mean", "std", "min", "max", "p95", "sum", "last"]
"""How the values of one step, over all processes, become one number."""

Bucket = Literal["sampling", "env_wait", "scoring", "update", "publish", "checkpoint", "compile", "restart", "idle"]
"""What a second of a run is spent on."""

BUCKETS: tuple[Bucket, ...] = get_args(Bucket)


@dataclass(frozen=True, slots=True)
class Metric:
    """One number per step.

    Example:
        Metric("loss/kl", "nats", "mean", "Estimated divergence from the reference policy, over trained tokens.")
    """

    name: str
    """Slash-grouped name; a last part in angle brackets stands for any name."""
    unit: str
    """Unit of the values; `1` for counts, shares and ratios."""
    reduction: Reduction
    """How the values of one step become one number."""
    meaning: str
    """One sentence: what is measured, over what."""


def declared(name: str) -> Metric:
    """Return the declaration of a metric.

    Raises:
        ValueError: no such metric is declared; the message names the nearest one.
    """
    metric = METRICS.get(name)
    for prefix in _PREFIXES:
        if name.startswith(prefix) and name != prefix:
            metric = METRICS[f"{prefix}<name>"]
    if metric is None:
        near = difflib.get_close_matches(name, METRICS, 1, 0.6)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"metric {name!r} is not declared{hint} Declare it in rljax/telemetry/metrics.py with its unit and meaning."
        )
    return metric


def as_numbers(values: Mapping[str, Any]) -> dict[str, int | float]:
    """Check that metrics are declared and turn their values (Python, numpy, bfloat16 or device scalars) into numbers.

    Raises:
        ValueError: a name is not declared, or a value is not one number.
    """
    return {name: _as_number(declared(name).name, value) for name, value in values.items()}


def metrics_table() -> str:
    """Write `METRICS` as the Markdown table of docs/metrics.md."""
    lines = ["| name | unit | reduction | meaning |", "|---|---|---|---|"]
    lines += [f"| `{metric.name}` | {metric.unit} | {metric.reduction} | {metric.meaning} |" for metric in METRICS.values()]
    return "\n".join(lines) + "\n"


def _as_number(name: str, value: Any) -> int | float:
    array = np.asarray(value)
    kind = array.dtype.kind
    # bfloat16 and its like have kind V, but unlike records they convert to float64.
    if array.size != 1 or kind not in "biufV" or (kind == "V" and array.dtype.names):
        raise ValueError(f"metric {name!r} needs one number per step, got {type(value).__name__} {value!r:.80}")
    return int(array.item()) if kind in "biu" else float(array.astype(np.float64).item())


_TIME = {
    "sampling": "generating tokens, scoring their log-probabilities under the sampler included",
    "env_wait": "waiting for environments while no token could be generated",
    "scoring": "scoring log-probabilities under the learner and a critic's values, and packing batches",
    "update": "forward, backward and optimizer update",
    "publish": "casting and resharding new weights for the sampler",
    "checkpoint": "saving, as far as the run had to wait for it",
    "compile": "compiling programs",
    "restart": "starting or resuming: loading weights, data and environments",
    "idle": "nothing of the above",
}

_ALL = (
    Metric("progress/step", "steps", "last", "Optimizer updates done since the run began, restarts included."),
    Metric("progress/version", "updates", "last", "Weight version the next rollouts are sampled from."),
    Metric("progress/prompt_position", "tasks", "last", "Tasks taken from the prompt stream so far, over all epochs."),
    Metric("reward/mean", "reward", "mean", "Reward of the rollouts that could be scored."),
    Metric("reward/std", "reward", "std", "Spread of those rewards."),
    Metric("reward/component/<name>", "reward", "mean", "One named part of the reward, before weighting."),
    Metric("reward/overlong_penalty", "reward", "mean", "What the length added to the reward of a rollout; 0 or less."),
    Metric("groups/sampled", "groups", "sum", "Groups sampled, those that dynamic sampling replaced included."),
    Metric(
        "groups/zero_variance_fraction",
        "1",
        "mean",
        "Share of groups whose rewards are all equal, which teach nothing without a critic.",
    ),
    Metric("groups/dropped", "groups", "sum", "Groups left out of training: too stale, or too few rollouts scored."),
    Metric("rollouts/error_fraction", "1", "mean", "Share of rollouts that could not be scored because of an error."),
    Metric("rollouts/timeout_fraction", "1", "mean", "Share of rollouts that could not be scored before the deadline."),
    Metric("completion/length_mean", "tokens", "mean", "Tokens the model wrote per rollout, truncated ones included."),
    Metric("completion/length_min", "tokens", "min", "Fewest tokens the model wrote in a rollout."),
    Metric("completion/length_max", "tokens", "max", "Most tokens the model wrote in a rollout."),
    Metric("completion/truncated_fraction", "1", "mean", "Share of rollouts that hit the length limit, trained on or not."),
    Metric("loss/total", "1", "mean", "Loss whose gradient was taken."),
    Metric("loss/policy", "1", "mean", "Policy part of the loss."),
    Metric("loss/kl", "nats", "mean", "Estimated divergence from the reference policy per trained token, before its weight."),
    Metric("loss/beta", "1", "last", "Weight of that divergence at this step."),
    Metric("policy/entropy", "nats", "mean", "Entropy of the next-token distribution at trained tokens."),
    Metric("policy/clip_fraction", "1", "mean", "Share of trained tokens whose importance ratio was clipped."),
    Metric("policy/clip_low_fraction", "1", "mean", "Share of them where the lower bound was in force."),
    Metric("policy/clip_high_fraction", "1", "mean", "Share of them where the upper bound was in force."),
    Metric("policy/clip_dual_fraction", "1", "mean", "Share of them where the dual bound was in force."),
    Metric("policy/ratio_mean", "1", "mean", "Importance ratio of the current to the proximal policy."),
    Metric("policy/ratio_max", "1", "max", "Largest such ratio."),
    Metric("gap/logp_mean", "nats", "mean", "Absolute difference of a token's log-probability in learner and sampler."),
    Metric("gap/logp_p95", "nats", "p95", "The same: what 95 % of the tokens stay below."),
    Metric("gap/logp_max", "nats", "max", "The same: the largest."),
    Metric("gap/outside_fraction", "1", "mean", "Share of tokens whose learner-to-sampler ratio is outside [0.9, 1.1]."),
    Metric(
        "gap/is_truncated_fraction", "1", "mean", "Share of tokens whose importance weight against the sampler was truncated."
    ),
    Metric(
        "gap/effective_sample_fraction",
        "1",
        "mean",
        "Effective sample size of those weights, as a share of the trained tokens.",
    ),
    Metric("gap/rejected_fraction", "1", "mean", "Share of loss tokens left out because they were too far from the sampler."),
    Metric("router/z_loss", "1", "mean", "Squared log partition sum of the routers' scores, before its weight."),
    Metric(
        "router/balance_loss",
        "1",
        "mean",
        "Unevenness of the experts' loads, before its weight: the choices per token at best.",
    ),
    Metric("router/max_load", "1", "max", "Largest share of a layer's choices that fell on one expert."),
    Metric("optimizer/grad_norm", "1", "last", "Global gradient norm before clipping."),
    Metric("optimizer/learning_rate", "1", "last", "Learning rate of this update."),
    Metric("critic/value_loss", "1", "mean", "Loss of the critic per trained token: half the squared error, clipped."),
    Metric("critic/clip_fraction", "1", "mean", "Share of trained tokens whose value was clipped."),
    Metric("critic/explained_variance", "1", "mean", "Share of the variance of the returns that the values explain."),
    Metric("critic/value_mean", "reward", "mean", "Value of the trained tokens before the first update on them."),
    Metric("critic/return_mean", "reward", "mean", "Return of the trained tokens, which the values should be."),
    Metric("critic/grad_norm", "1", "last", "Global gradient norm of the critic before clipping."),
    Metric("pack/padding_fraction", "1", "mean", "Share of the positions in packed rows that hold no token."),
    Metric(
        "pack/skipped_fraction", "1", "mean", "Share of the loss tokens without a row: all advantages of their rollout are 0."
    ),
    Metric("tokens/generated", "tokens", "sum", "Tokens sampled for this step."),
    Metric("tokens/trained", "tokens", "sum", "Tokens whose loss was computed in this step."),
    Metric(
        "cache/reused_fraction",
        "1",
        "mean",
        "Share of the prompt tokens of later turns whose keys and values were still in the cache.",
    ),
    Metric("cache/preempted", "rollouts", "sum", "Rollouts that the sampler sent back for want of room, to start again."),
    Metric("cache/evicted", "rollouts", "sum", "Caches of rollouts whose environments work that were given up for room."),
    Metric("cache/occupancy_max", "1", "max", "Largest share of the cache's blocks in use at once."),
    Metric("sampler/occupancy", "1", "mean", "Share of the rows of decode steps that drew a token."),
    Metric("throughput/generated_tokens_per_s", "tokens/s", "last", "Sampled tokens per second of sampling."),
    Metric("throughput/trained_tokens_per_s", "tokens/s", "last", "Trained tokens per second of the whole step."),
    Metric("time/step", "s", "last", "Wall time since the previous step was logged; the sum of the times below."),
    *(Metric(f"time/{bucket}", "s", "last", f"Part of it spent on {_TIME[bucket]}.") for bucket in BUCKETS),
    Metric("compile/programs", "1", "last", "Programs compiled, or read from the compilation cache, since the previous step."),
    Metric("eval/accuracy", "1", "mean", "Share of held-out tasks with the full reward."),
    Metric("eval/reward_mean", "reward", "mean", "Reward on held-out tasks."),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _ALL}

_PREFIXES = tuple(name.removesuffix("<name>") for name in METRICS if name.endswith("/<name>"))
