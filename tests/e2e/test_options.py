"""No option is accepted and ignored: every one is read, and those that should change the result do."""

import json
from pathlib import Path

import pytest

from rljax.presets import PRESETS
from tests.e2e.processes import Server
from tests.tiny_run import metric_rows, overrides, param_bits, rollout_rows, step_metrics, tiny_experts_checkpoint


def test_every_option_is_read(server: Server, tmp_path: Path) -> None:
    assert server.run([str(tmp_path)], main="tests.e2e.option_reads:main") == 0, server.output
    assert json.loads(server.output.splitlines()[-1]) == []


STEPS = 3
COMMON = (f"train.steps={STEPS}", "checkpoint.every=3")
FROM = {  # what a case is compared with, when it needs more than the common options
    "kl": ("algorithm.beta=0.5",),
    "twice": ("algorithm.num_iterations=3", "optimizer.learning_rate=0.05"),
    "gap": ("sampler.dtype=bfloat16",),
    "sapo": ("algorithm.surrogate=sapo", "algorithm.num_iterations=3", "optimizer.learning_rate=0.05"),
    "named": ("algorithm.advantage=gdpo", "algorithm.reward_weights.letters=1.0"),
    "long": ("algorithm.overlong_buffer_len=4",),
    "choosy": ("env.name=tests.worlds:Choosy", "data.num_tasks=64"),
    "target": ("algorithm.beta=0.5", "algorithm.kl_target=0.01"),
    "synced": ("algorithm.beta=0.5", "algorithm.reference_sync_steps=1"),
    "uncorrected": ("sampler.dtype=bfloat16", "algorithm.rollout_is=none"),
    "tight": ("sampler.dtype=bfloat16", "algorithm.rollout_is_threshold=1.001"),
    "rejected": (
        *("sampler.dtype=bfloat16", "algorithm.rollout_rs=token"),
        *("algorithm.rollout_rs_threshold=1.0005", "algorithm.rollout_rs_threshold_lower=0.9995"),
    ),
    "experts": (),
    "experts-gap": ("sampler.dtype=bfloat16",),
    "lora": ("lora.rank=2",),
    # Two batches of two updates: what the first does to the critic shows in the second.
    "critic": ("algorithm.advantage=gae", "algorithm.num_iterations=2", "train.steps=4", "checkpoint.every=2"),
    "turns": ("env.name=tests.worlds:Dialogue", "env.options.judged=true", "env.options.answer=Go on."),
    "by turn": (
        *("env.name=tests.worlds:Dialogue", "env.options.judged=true", "env.options.answer=Go on."),
        "algorithm.credit=turn",
    ),
    "muon": ("optimizer.rule=muon",),
    "cosine": ("optimizer.schedule=cosine", "optimizer.decay_steps=4"),
}
CHANGES = {
    "run.seed=1": "",
    "model.param_dtype=bfloat16": "",
    "model.compute_dtype=bfloat16": "",
    "lora.rank=2": "",
    "lora.rank=3": "lora",
    "lora.alpha=8": "lora",
    "lora.rslora=true": "lora",
    "lora.dropout=0.5": "lora",
    "lora.target_modules=['q_proj']": "lora",
    "lora.base_dtype=nf4": "lora",
    "data.shuffle=false": "",
    "data.num_tasks=15": "",
    "sampler.temperature=0.7": "",
    "sampler.max_completion_length=7": "",
    "sampler.dtype=bfloat16": "",
    "sampler.weights_dtype=int8": "",
    "sampler.cache_dtype=int8": "",
    "sampler.stop=['e']": "",
    "algorithm.num_generations=2": "",
    "algorithm.scale_rewards=batch": "",
    "algorithm.scale_rewards=none": "",
    "algorithm.loss_agg_mode=seq-mean-token-sum": "",
    "algorithm.loss_agg_mode=seq-mean-token-mean": "",
    "algorithm.loss_agg_mode=seq-mean-token-sum-norm": "",
    "algorithm.beta=0.5": "",
    "algorithm.beta=0.1": "kl",
    "algorithm.kl_estimator=k1": "kl",
    "algorithm.kl_estimator=k2": "kl",
    **{f"algorithm.preset={preset}": "twice" for preset in PRESETS if preset not in ("none", "gdpo")},
    **{f"algorithm.advantage={row}": "" for row in ("rloo", "reinforce_pp", "reinforce_pp_baseline", "maxrl", "return")},
    "algorithm.advantage=gae": "",
    "algorithm.gamma=0.5": "critic",
    "algorithm.gae_lambda=0.5": "critic",
    "algorithm.whiten_advantages=false": "critic",
    "algorithm.cliprange_value=0.0001": "critic",
    "algorithm.critic_warmup_steps=2": "critic",
    "optimizer.critic_learning_rate=0.5": "critic",
    "algorithm.credit=turn": "turns",
    "algorithm.gamma=0.25": "by turn",
    "algorithm.reward_weights.characters=0.5": "named",
    "algorithm.overlong_buffer_len=4": "",
    "algorithm.overlong_penalty_factor=0.5": "long",
    "algorithm.dynamic_sampling=true": "choosy",
    "algorithm.surrogate=cispo": "twice",
    "algorithm.surrogate=sapo": "twice",
    "algorithm.surrogate=reinforce": "twice",
    "algorithm.sapo_temperature_pos=2.0": "sapo",
    "algorithm.sapo_temperature_neg=2.0": "sapo",
    "algorithm.importance_sampling_level=sequence": "twice",
    "algorithm.importance_sampling_level=sequence-token": "twice",
    "algorithm.epsilon_c=1.01": "twice",
    "algorithm.entropy_coef=0.1": "",
    "algorithm.kl_estimator=k3+": "kl",
    "algorithm.kl_estimator=k3-ratio": "kl",
    "algorithm.kl_in_reward=true": "kl",
    "algorithm.kl_target=0.01": "kl",
    "algorithm.kl_gain=0.5": "target",
    "algorithm.reference_sync_steps=1": "kl",
    "algorithm.reference_mixup_alpha=0.5": "synced",
    "algorithm.proximal=behavior": "uncorrected",
    "algorithm.rollout_is=sequence": "gap",
    "algorithm.rollout_is=geometric": "gap",
    "algorithm.rollout_is_mode=mask": "tight",
    "algorithm.rollout_is_threshold_lower=0.999": "gap",
    "algorithm.rollout_rs=sequence": "rejected",
    "algorithm.rollout_rs=geometric": "rejected",
    "algorithm.rollout_rs=none": "rejected",
    "algorithm.rollout_rs_threshold=1.01": "rejected",
    "algorithm.rollout_rs_threshold_lower=0.99": "rejected",
    "algorithm.epsilon=0.01": "twice",
    "algorithm.epsilon_high=0.01": "twice",
    "algorithm.num_iterations=3": "",
    "algorithm.rollout_is=none": "gap",
    "algorithm.rollout_is_threshold=0.5": "gap",
    "algorithm.mask_truncated_completions=true": "",
    "algorithm.routing_replay=true": "experts-gap",
    "algorithm.router_z_loss_coef=0.1": "experts",
    "algorithm.router_balance_loss_coef=0.1": "experts",
    "optimizer.learning_rate=0.02": "",
    "optimizer.schedule=linear": "cosine",
    "optimizer.decay_steps=5": "cosine",
    "optimizer.min_learning_rate=0.005": "cosine",
    "optimizer.warmup_steps=2": "",
    "optimizer.rule=adafactor": "",
    "optimizer.rule=muon": "",
    "optimizer.moments_dtype=bfloat16": "",
    "optimizer.moments_dtype=int8": "",
    "optimizer.muon_momentum=0.5": "muon",
    "optimizer.b1=0.5": "",
    "optimizer.b2=0.9": "",
    "optimizer.eps=0.001": "",
    "optimizer.weight_decay=0.1": "",
    "optimizer.max_grad_norm=0.1": "",
    "train.rollout_batch_size=2": "",
    "train.mini_batch_size=2": "",
}


@pytest.fixture(scope="module")
def baselines() -> dict[str, Path]:
    """Runs to compare with, by name, made when they are first asked for."""
    return {}


def options_of(name: str) -> tuple[str, ...]:
    """Return the options that the runs of a comparison share."""
    experts = (f"model.checkpoint={tiny_experts_checkpoint()}",) if name.startswith("experts") else ()
    return *FROM.get(name, ()), *experts


def run_of(server: Server, folder: Path, *options: str) -> Path:
    assert server.run(["train", *overrides(folder, *COMMON, *options)]) == 0, server.output
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_an_option_changes_what_is_trained(
    server: Server, baselines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, change: str
) -> None:
    name = CHANGES[change]
    if name not in baselines:
        baselines[name] = run_of(server, tmp_path_factory.mktemp("from") / "run", *options_of(name))
    more = ["train.steps=4", "checkpoint.every=2"] if "mini_batch" in change else []
    changed = run_of(server, tmp_path_factory.mktemp("to") / "run", *options_of(name), change, *more)
    assert param_bits(changed / "model") != param_bits(baselines[name] / "model")
    if not change.startswith(
        (
            "algorithm.dynamic",
            "algorithm.preset=dapo",
            "run",
            "model.param",
            "lora.base_dtype",
            "data",
            "sampler",
            "algorithm.num_generations",
            "train.rollout",
        )
    ):
        # These act on updates alone, and the first rollouts come before any.
        first = "step_00000001.jsonl"
        assert rollout_rows(changed)[first] == rollout_rows(baselines[name])[first]


UNCHANGED = (
    "model.remat=none",
    "model.remat=full",
    "sampler.slots=8",
    "sampler.cache_tokens=160",
    "sampler.decode_chunk=1",
    "sampler.prefill_chunk=16",
    "sampler.reuse_cache=false",
    "sampler.batch_invariant=true",
    "sampler.attention=xla",
    "sampler.warm_up=true",
    "env.workers=1",
    "train.micro_batch_size_per_device=1",
    "train.pack_length=120",
    "train.micro_batch_tokens=160",
    "train.skip_zero_advantages=false",
    "eval.every=1",
    "telemetry.tensorboard=true",
    "telemetry.rollouts=false",
)
CLOSE = 2e-5
"""Nats. Other programs round otherwise; the log-probabilities of a policy of three updates stay this close."""


@pytest.mark.slow
@pytest.mark.parametrize("change", UNCHANGED)
def test_an_option_of_the_machinery_changes_no_result(
    server: Server, baselines: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, change: str
) -> None:
    if "" not in baselines:
        baselines[""] = run_of(server, tmp_path_factory.mktemp("from") / "run")
    changed = run_of(server, tmp_path_factory.mktemp("to") / "run", change)
    rows, expected = (rollout_rows(run) for run in (changed, baselines[""]))
    assert len(rows) == (0 if change == "telemetry.rollouts=false" else STEPS)
    for name in rows:
        for row, other in zip(rows[name], expected[name], strict=True):
            assert row["tokens"] == other["tokens"]
            assert row["logp_behavior"] == pytest.approx(other["logp_behavior"], abs=CLOSE)
    names = ("loss/total", "reward/mean", "optimizer/grad_norm")
    for step, row in step_metrics(baselines[""]).items():
        for name in names:
            assert step_metrics(changed)[step][name] == pytest.approx(row[name], rel=1e-3, abs=1e-6)
    assert (changed / "tensorboard").exists() == (change == "telemetry.tensorboard=true")
    assert len(metric_rows(changed)) == (2 * STEPS + 1 if change == "eval.every=1" else STEPS)
