"""The loop as a function: what `train` returns and leaves behind, and what `check` finds before anything is compiled."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from rljax.checkpoint import load_params
from rljax.conversion.adapter import base_identity, read_card
from rljax.convert import read_arch, read_checkpoint
from rljax.data.tokenizer import Tokenizer
from rljax.evaluate import evaluate
from rljax.loop import TrainResult, check, train
from rljax.models.decoder import count
from rljax.models.lora import TARGETS, abstract_adapter, merged
from rljax.telemetry.metrics import METRICS
from tests.models.test_quantized import dequantised_by_hand, quantised_layers
from tests.tiny_run import (
    compiled_once,
    config,
    metric_rows,
    param_bits,
    rollout_rows,
    state_bits,
    step_metrics,
    tiny_checkpoint,
)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, list[str]]:
    """Train for two epochs of one step each; return the result and what was reported."""
    said: list[str] = []
    settings = config(tmp_path_factory.mktemp("trained") / "run", "train.steps=2", "data.num_tasks=4")
    return train(settings, said.append), said


def test_a_run_says_how_it_went(trained: tuple[TrainResult, list[str]]) -> None:
    result, said = trained
    assert (result.step, result.trained, result.stopped) == (2, 2, False)
    assert result.metrics["progress/prompt_position"] == 8
    plan = "train: all 4 tasks fit max_prompt_length = 48 (longest: 16 tokens)"
    attention, *estimate = said[said.index(plan) + 1 : -1]
    assert attention == "attention in decode steps: XLA: there is no kernel for devices of the kind cpu"
    assert estimate[0].startswith("tokens per step: ")
    assert estimate[-1].startswith("memory: total ")
    assert said[-1] == f"start: {tiny_checkpoint()}"


def test_a_run_leaves_everything_behind(trained: tuple[TrainResult, list[str]]) -> None:
    run = trained[0].run_dir
    names = {path.name for path in run.iterdir()}
    assert names == {"checkpoints", "config.json", "logs", "metrics.jsonl", "model", "rollouts", "run.json"}
    assert read_arch(run / "model") == read_arch(tiny_checkpoint())
    assert Tokenizer.load(run / "model").stop_ids == Tokenizer.load(tiny_checkpoint()).stop_ids
    params = {name.removeprefix("params."): bits for name, bits in state_bits(run, 2).items() if name.startswith("params.")}
    assert params == param_bits(run / "model")
    (launch,) = json.loads((run / "run.json").read_text())["launches"]
    assert len(launch["devices"]) >= 1


def test_every_step_has_its_metrics(trained: tuple[TrainResult, list[str]]) -> None:
    run = trained[0].run_dir
    steps = step_metrics(run)
    assert list(steps) == [1, 2]
    for step, row in steps.items():
        missing = {name for name in METRICS if "<" not in name} - set(row)
        elsewhere = {name for name in METRICS if name.split("/")[0] in ("eval", "critic", "router")}
        assert missing <= elsewhere | {"cache/reused_fraction"}, "no critic, no experts, no later turns"
        assert row["progress/step"] == row["progress/version"] == step
        assert row["progress/prompt_position"] == 4 * step
        assert (row["policy/ratio_mean"], row["policy/ratio_max"], row["policy/clip_fraction"]) == (1.0, 1.0, 0.0)
        assert row["gap/outside_fraction"] == 0.0
        buckets = [value for name, value in row.items() if name.startswith("time/") and name != "time/step"]
        assert sum(buckets) == pytest.approx(row["time/step"])


def test_a_task_that_comes_again_is_attempted_anew(trained: tuple[TrainResult, list[str]]) -> None:
    first, second = rollout_rows(trained[0].run_dir).values()
    assert {row["task_id"] for row in first} == {row["task_id"] for row in second}
    assert {row["attempt"] for row in first} == {0, 1, 2, 3}
    assert {row["attempt"] for row in second} == {4, 5, 6, 7}
    texts = [row["text"] for row in (*first, *second)]
    assert len(set(texts)) == len(texts)
    versions = [{version for row in rows for version in row["versions"]} for rows in (first, second)]
    assert versions == [{-1, 0}, {-1, 1}]


def test_a_run_is_continued_and_then_complete(trained: tuple[TrainResult, list[str]]) -> None:
    run = trained[0].run_dir
    said: list[str] = []
    longer = config(run, "train.steps=3", "checkpoint.every=3", "data.num_tasks=4")
    result = train(longer, said.append)
    assert (result.step, result.trained) == (3, 1)
    assert said[-1] == f"resume: step 2 of {run}"
    again = train(longer, said.append)
    assert (again.step, again.trained, again.metrics) == (3, 0, {})
    assert "is complete (3 steps)" in said[-1]
    assert [row["step"] for row in metric_rows(run)] == [1, 2, 3]


@pytest.mark.parametrize("skips", [True, False])
def test_equal_rewards_move_nothing(skips: bool, tmp_path: Path) -> None:
    options = ("train.steps=1", "checkpoint.every=1", "env.name=tests.worlds:Constant")
    result = train(config(tmp_path / "run", *options, f"train.skip_zero_advantages={str(skips).lower()}"))
    assert result.metrics["groups/zero_variance_fraction"] == 1.0
    assert result.metrics["optimizer/grad_norm"] == 0.0
    assert (result.metrics["tokens/trained"] == 0, result.metrics["pack/skipped_fraction"]) == (skips, float(skips))
    assert ("policy/entropy" in result.metrics) != skips, "what nobody computed has no number"
    assert param_bits(tmp_path / "run" / "model") == param_bits(tiny_checkpoint())


MOVING = (
    *("env.name=tests.worlds:Choosy", "algorithm.preset=dapo", "algorithm.num_iterations=2", "data.num_tasks=64"),
    *("algorithm.beta=0.1", "algorithm.kl_target=0.01", "algorithm.reference_sync_steps=1"),
    *("algorithm.reference_mixup_alpha=0.25", "checkpoint.every=4"),
)
"""All that a checkpoint has to remember besides parameters and moments: tasks used up, a reference and a weight that move."""


def test_a_run_with_everything_that_moves_continues_to_the_same_bits(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    result = train(config(whole, *MOVING, "train.steps=8"))
    for steps in (4, 8):
        train(config(parts, *MOVING, f"train.steps={steps}"))
    assert state_bits(parts, 8) == state_bits(whole, 8)
    assert metric_rows(parts) == metric_rows(whole)
    assert rollout_rows(parts) == rollout_rows(whole)
    names = set(state_bits(whole, 8))
    assert "beta" in names
    assert any(name.startswith("reference.") for name in names)
    rows = step_metrics(whole)
    sampled = [row["groups/sampled"] for row in rows.values() if "groups/sampled" in row]
    assert max(sampled) > 4, "some groups had to be replaced, or nothing is shown"
    assert result.metrics["progress/prompt_position"] == sum(sampled)
    assert [row["groups/zero_variance_fraction"] > 0 for row in rows.values() if "groups/sampled" in row] == [
        count > 4 for count in sampled
    ]
    assert rows[1]["loss/kl"] == 0.0, "the reference starts as the policy"
    assert rows[1]["loss/beta"] == pytest.approx(0.1)
    assert rows[2]["loss/beta"] == pytest.approx(0.098)
    task_ids = [row["task_id"] for file in rollout_rows(whole).values() for row in file]
    assert len(set(task_ids)) == sum(sampled), "no task is sampled twice in an epoch, none is skipped"


CRITIC = (
    *("algorithm.preset=ppo", "algorithm.num_generations=1", "train.rollout_batch_size=16", "train.mini_batch_size=8"),
    *("algorithm.critic_warmup_steps=2", "checkpoint.every=2", "checkpoint.keep=9"),
    "optimizer.critic_learning_rate=0.001",  # small enough that not every value is clipped at the second update
)
"""PPO on single rollouts: two mini-batches, the first batch for the critic alone."""


def test_a_critic_is_warmed_up_trained_and_continued_to_the_same_bits(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(config(whole, *CRITIC, "train.steps=6"))
    for steps in (4, 6):
        train(config(parts, *CRITIC, f"train.steps={steps}"))
    bits = {step: state_bits(whole, step) for step in (2, 4, 6)}
    assert state_bits(parts, 6) == bits[6]
    assert metric_rows(parts) == metric_rows(whole)
    assert rollout_rows(parts) == rollout_rows(whole)

    first = param_bits(tiny_checkpoint())
    policy = {step: {name: found[f"params.{name}"] for name in first} for step, found in bits.items()}
    assert policy[2] == first, "warming up leaves the policy alone"
    assert policy[4] != first
    values = {name for name in bits[2] if name.startswith("critic.")}
    assert {"critic.params.value", "critic.params.trunk.embed"} <= values
    assert all(bits[2][name] != bits[4][name] for name in values if name.startswith("critic.params"))
    assert policy[2]["embed"] != bits[2]["critic.params.trunk.embed"], "they share nothing"

    rows = step_metrics(whole)
    assert ["loss/total" in row for row in rows.values()] == [False, False, True, True, True, True]
    assert [row["critic/value_mean"] == 0.0 for row in rows.values()] == [True, True, False, False, False, False]
    assert rows[1]["critic/explained_variance"] == 0.0
    assert all(row["critic/grad_norm"] > 0 for row in rows.values())
    assert rows[1]["groups/dropped"] == 0, "a rollout alone is compared with the critic"


def test_without_an_informative_group_a_run_stops_with_the_cause(tmp_path: Path) -> None:
    options = ("env.name=tests.worlds:Constant", "algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling_max_rounds=2")
    with pytest.raises(ValueError, match=r"0 of 4 groups .* in 8 groups and 2 rounds .*8 of reward 0\.5"):
        train(config(tmp_path / "run", *options, "train.steps=1", "checkpoint.every=1"))
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_thread_can_train(tmp_path: Path) -> None:
    """Notebooks and servers do; only signals are not heard there."""
    found: list[TrainResult] = []
    settings = config(tmp_path / "run", "train.steps=1", "checkpoint.every=1")
    thread = threading.Thread(target=lambda: found.append(train(settings)))
    thread.start()
    thread.join()
    assert [result.step for result in found] == [1]


def test_a_check_tells_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    check(config(tmp_path / "run", "eval.every=2", "eval.num_tasks=3"), said.append)
    assert not (tmp_path / "run").exists()
    assert said[:2] == [
        "train: all 16 tasks fit max_prompt_length = 48 (longest: 21 tokens)",
        "eval: all 3 tasks fit max_prompt_length = 48 (longest: 16 tokens)",
    ]
    assert said[2] == "algorithm: grpo advantages, clip surrogate, token-mean, no KL"
    assert said[-1] == "epochs: 1.00"


@pytest.mark.parametrize(
    ("able", "option", "told"),
    [
        (False, "model.compute_dtype=bfloat16", True),
        (False, "sampler.dtype=bfloat16", True),
        (False, "run.seed=1", False),
        (True, "sampler.dtype=bfloat16", False),
        (None, "sampler.dtype=bfloat16", False),
    ],
)
def test_bfloat16_on_a_cpu_without_it_is_told(
    able: bool | None, option: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rljax.loop.multiplies_bfloat16", lambda: able)
    said: list[str] = []
    check(config(tmp_path / "run", option), said.append)
    lines = [line for line in said if line.startswith("bfloat16: ")]
    assert (
        lines
        == [
            "bfloat16: this CPU has no products of that type, and converts; on it "
            "`model.compute_dtype=float32 sampler.dtype=float32` is faster"
        ]
        * told
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.checkpoint=nowhere", "nowhere is no checkpoint of rljax"),
        ("mesh.tensor=3", "mesh.tensor 3 needs"),
        ("env.name=tests.worlds:Letter", "did you mean 'Letters'"),
        ("env.options.loud=true", "env.options.loud is unknown"),
        ("sampler.max_completion_length=500", "548 tokens, and the model was made for at most 512"),
        ("sampler.max_prompt_length=12", "tasks are left, fewer than the batch of 4"),
    ],
)
def test_a_check_finds_what_does_not_fit(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(config(tmp_path / "run", override))


def test_a_check_looks_at_the_environment_of_tasks_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"Say {index}"}) + "\n" for index in range(4)))
    settings = config(tmp_path / "run", "data.source=file", f"data.path={path}", "env.options.loud=true")
    with pytest.raises(ValueError, match=r"env.options.loud is unknown"):
        check(settings)


LORA = ("lora.rank=2", "lora.alpha=8", "lora.dropout=0.1", "algorithm.beta=0.1", "algorithm.kl_in_reward=true")
"""An adapter with dropout, and its base as the reference."""


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train an adapter for four steps and return the run directory."""
    run = tmp_path_factory.mktemp("adapted") / "run"
    train(config(run, *LORA, "train.steps=4"))
    return run


def test_an_adapter_alone_is_trained_and_saved(adapted: Path) -> None:
    assert (adapted / "adapter" / "lora.json").exists()
    state = state_bits(adapted, 4)
    factors = {f"layers.{target}.{side}" for target in TARGETS for side in "ab"}
    assert {name.removeprefix("params.") for name in state if name.startswith("params.")} == factors
    size = sum(len(state[f"params.{name}"]) for name in factors)
    assert sum(map(len, state.values())) == 3 * size + 8, "the adapter, two moments and two counters"
    assert param_bits(adapted / "adapter") == {name: state[f"params.{name}"] for name in factors}
    rows = step_metrics(adapted)
    assert rows[1]["loss/kl"] == 0.0, "the base is the reference, and the first adapter changes nothing"
    assert rows[4]["loss/kl"] != 0.0


def test_the_model_of_a_run_is_base_and_adapter_merged_once(adapted: Path) -> None:
    loaded = read_checkpoint(tiny_checkpoint())
    spec = read_card(adapted / "adapter").spec
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = abstract_adapter(loaded.arch, spec)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), shapes)
    expected = jax.jit(partial(merged, loaded.arch, spec=spec))(
        params=loaded.params, adapter=load_params(adapted / "adapter", like)
    )
    found = read_checkpoint(adapted / "model").params
    for left, right in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-7)
    assert param_bits(adapted / "model") != param_bits(tiny_checkpoint())
    again = ("lora.rank=2", "lora.alpha=8", f"lora.adapter={adapted / 'adapter'}", f"model.checkpoint={adapted / 'model'}")
    with pytest.raises(ValueError, match=r"belongs to another model.*A merged model holds its adapter already"):
        check(config(adapted.parent / "twice", *again))


def test_a_run_of_an_adapter_continues_to_the_same_bits(adapted: Path, tmp_path: Path) -> None:
    for steps in (2, 4):
        train(config(tmp_path / "parts", *LORA, f"train.steps={steps}"))
    assert state_bits(tmp_path / "parts", 4) == state_bits(adapted, 4)
    assert param_bits(tmp_path / "parts" / "model") == param_bits(adapted / "model")
    assert metric_rows(tmp_path / "parts") == metric_rows(adapted)
    assert rollout_rows(tmp_path / "parts") == rollout_rows(adapted)


def test_an_adapter_sampled_beside_its_base_trains_alike(adapted: Path, tmp_path: Path) -> None:
    train(config(tmp_path / "run", *LORA, "train.steps=4", "sampler.lora=separate"))
    for name, rows in rollout_rows(tmp_path / "run").items():
        for row, other in zip(rows, rollout_rows(adapted)[name], strict=True):
            assert row["tokens"] == other["tokens"]
            assert row["logp_behavior"] == pytest.approx(other["logp_behavior"], abs=2e-5)
    assert step_metrics(tmp_path / "run")[4]["gap/logp_max"] == pytest.approx(step_metrics(adapted)[4]["gap/logp_max"], rel=0.1)


def test_a_run_beside_a_quantised_base(tmp_path: Path) -> None:
    options = (*LORA, "lora.base_dtype=nf4", "checkpoint.every=1")
    whole = tmp_path / "whole"
    result = train(config(whole, *options, "train.steps=2"))
    assert result.metrics["gap/logp_max"] < 1e-4, "the sampler draws from the base that the learner has"
    assert read_card(whole / "adapter").base == base_identity(tiny_checkpoint())
    for steps in (1, 2):
        train(config(tmp_path / "parts", *options, f"train.steps={steps}"))
    assert state_bits(tmp_path / "parts", 2) == state_bits(whole, 2)
    assert param_bits(tmp_path / "parts" / "model") == param_bits(whole / "model")
    assert metric_rows(tmp_path / "parts") == metric_rows(whole)
    with pytest.raises(ValueError, match=r"another configuration.*lora\.base_dtype"):
        train(config(whole, *LORA, "lora.base_dtype=int8", "checkpoint.every=1", "train.steps=3"))

    loaded, spec = read_checkpoint(tiny_checkpoint()), read_card(whole / "adapter").spec
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = abstract_adapter(loaded.arch, spec)
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), shapes)
    base = dequantised_by_hand(quantised_layers(loaded.params, "nf4"))
    expected = merged(loaded.arch, base, load_params(whole / "adapter", like), spec)
    for left, right in zip(*map(jax.tree.leaves, (read_checkpoint(whole / "model").params, expected)), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-6)


def test_a_run_begins_with_a_given_adapter(adapted: Path, tmp_path: Path) -> None:
    begin = ("lora.rank=2", "lora.alpha=8", f"lora.adapter={adapted / 'adapter'}", "algorithm.beta=0.1", "train.steps=1")
    result = train(config(tmp_path / "run", *begin, "checkpoint.every=1", "env.name=tests.worlds:Constant"))
    assert param_bits(tmp_path / "run" / "adapter") == param_bits(adapted / "adapter"), "equal rewards move nothing"
    assert param_bits(tmp_path / "run" / "model") == param_bits(adapted / "model")
    assert result.metrics["loss/kl"] == 0.0, "the policy that a run begins with is its reference"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.target_modules=['query']", "lora.target_modules: query matches no projection"),
        ("lora.adapter=nowhere", "nowhere is no adapter"),
    ],
)
def test_a_check_finds_an_adapter_that_does_not_fit(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(config(tmp_path / "run", "lora.rank=2", override))


def test_a_check_tells_how_much_is_trained(tmp_path: Path) -> None:
    said: list[str] = []
    check(config(tmp_path / "run", "lora.rank=2", "lora.alpha=8", "lora.target_modules=['q_proj']"), said.append)
    line = re.compile(r"adapter: [\d,]+ parameters beside [\d,]+ in 0\.1 MB \(as-is\), scale 4, q_proj")
    assert any(map(line.match, said))


def test_a_check_tells_how_large_a_quantised_base_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options, said = ("lora.rank=2", "lora.base_dtype=nf4"), []
    check(config(tmp_path / "run", *options), said.append)
    arch = read_arch(tiny_checkpoint())
    weights = arch.num_layers * (32 * 2 * 4 * 8 + 32 * 32 + 32 * 2 * 64 + 64 * 32)
    scales = arch.num_layers * (2 * 4 * 8 + 4 * 32 + 2 * 64 + 32)
    others = 4 * (count(arch) - weights)
    assert f" in {(weights / 2 + 4 * scales + others) / 1e6:,.1f} MB (nf4)" in " ".join(said)
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ValueError, match=r"pip install 'rljax\[qlora\]'"):
        check(config(tmp_path / "run", *options))


def test_a_run_whose_sampler_is_quantised_shows_the_gap_and_continues_exactly(
    trained: tuple[TrainResult, list[str]], tmp_path: Path
) -> None:
    options = ("data.num_tasks=4", "sampler.weights_dtype=int8", "algorithm.rollout_is_threshold=1.0001")
    train(config(tmp_path / "whole", "train.steps=4", *options))
    train(config(tmp_path / "cut", "train.steps=2", *options))
    assert train(config(tmp_path / "cut", "train.steps=4", *options)).trained == 2
    assert state_bits(tmp_path / "cut", 4) == state_bits(tmp_path / "whole", 4)
    assert rollout_rows(tmp_path / "cut") == rollout_rows(tmp_path / "whole")
    plain, small = step_metrics(trained[0].run_dir), step_metrics(tmp_path / "whole")
    for step, row in small.items():
        # The model is random and its logits are small, so the gap is too; in float32 there is none but rounding.
        assert 1e-4 < row["gap/logp_mean"] < 0.1
        assert row["gap/logp_mean"] > 30 * plain[min(step, 2)]["gap/logp_mean"]
        assert row["gap/is_truncated_fraction"] > 0, "the weights against the sampler are no longer 1"
    assert all(row["gap/logp_max"] < 1e-4 for row in plain.values()), "without codes the same bound truncates none"


def test_a_run_whose_cache_is_quantised_shows_the_gap(trained: tuple[TrainResult, list[str]], tmp_path: Path) -> None:
    train(config(tmp_path / "run", "train.steps=2", "data.num_tasks=4", "sampler.cache_dtype=int8"))
    plain, small = step_metrics(trained[0].run_dir), step_metrics(tmp_path / "run")
    for step, row in small.items():
        assert 30 * plain[step]["gap/logp_mean"] < row["gap/logp_mean"] < 0.1


def test_an_evaluation_has_the_codes_of_the_run(tmp_path: Path) -> None:
    types = ("sampler.weights_dtype=int8", "sampler.cache_dtype=int8", "sampler.dtype=bfloat16")
    assert evaluate(config(tmp_path / "run", *types, "eval.num_tasks=4")).tasks == 4
