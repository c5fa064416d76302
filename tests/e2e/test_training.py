"""What whole runs do: several updates per batch, evaluation on the side, worlds that fail, gradients that explode."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.processes import Server
from tests.tiny_run import metric_rows, overrides, param_bits, rollout_rows, state_bits, step_metrics, tiny_experts_checkpoint


def trained(server: Server, run: Path, *options: str, code: int = 0) -> Path:
    assert server.run(["train", *overrides(run, *options)]) == code, server.output
    return run


def test_later_updates_on_a_batch_are_against_the_policy_at_its_start(server: Server, tmp_path: Path) -> None:
    options = ("algorithm.num_iterations=2", "optimizer.learning_rate=0.05", "algorithm.epsilon=0.05", "train.steps=6")
    run = trained(server, tmp_path / "run", *options)
    steps = step_metrics(run)
    for step, row in steps.items():
        if step % 2:
            assert (row["policy/ratio_mean"], row["policy/ratio_max"], row["policy/clip_fraction"]) == (1.0, 1.0, 0.0)
            assert "reward/mean" in row
        else:
            assert row["policy/ratio_mean"] != 1.0
            assert "reward/mean" not in row, "rollouts are counted once"
    assert any(steps[step]["policy/clip_fraction"] > 0 for step in (2, 4, 6))
    # The position counts tasks and not updates.
    assert [row["progress/prompt_position"] for row in steps.values()] == [0, 4, 4, 8, 8, 12]
    assert list(rollout_rows(run)) == [f"step_{step:08d}.jsonl" for step in (1, 3, 5)]
    versions = {version for rows in rollout_rows(run).values() for row in rows for version in row["versions"]}
    assert versions == {-1, 0, 2, 4}


@pytest.mark.slow
def test_experts_are_replayed_in_conversations_and_their_routers_are_watched(server: Server, tmp_path: Path) -> None:
    options = (
        *(f"model.checkpoint={tiny_experts_checkpoint()}", "env.name=tests.worlds:Dialogue", "sampler.max_prompt_length=96"),
        *("algorithm.routing_replay=true", "algorithm.router_z_loss_coef=0.01", "algorithm.router_balance_loss_coef=0.01"),
        *("algorithm.num_iterations=2", "algorithm.beta=0.1", "sampler.cache_tokens=640"),
        # In so small a cache, which conversations run together, and whose cache is given up, depends on the environments.
        *("sampler.reuse_cache=false", "sampler.batch_invariant=true"),
    )
    run = trained(server, tmp_path / "run", *options)
    again = trained(server, tmp_path / "again", *options, "train.steps=2")
    trained(server, again, *options)  # continues
    assert param_bits(again / "model") == param_bits(run / "model")
    for row in step_metrics(run).values():
        assert row["gap/logp_max"] < 1e-4
        assert 1.9 < row["router/balance_loss"] < 4.0
        assert 0.25 <= row["router/max_load"] <= 0.5
        assert row["loss/total"] != row["loss/policy"]
    assert {row["turns"] for rows in rollout_rows(run).values() for row in rows} == {2}


def test_evaluation_changes_nothing(server: Server, tmp_path: Path) -> None:
    plain = trained(server, tmp_path / "plain")
    rows = metric_rows(plain)
    for name, options in {
        "every 2": ("eval.every=2", "eval.num_tasks=5"),
        "every step, warm": ("eval.every=1", "eval.num_tasks=9", "eval.temperature=1.0"),
    }.items():
        run = trained(server, tmp_path / name, *options)
        assert param_bits(run / "model") == param_bits(plain / "model")
        assert rollout_rows(run) == rollout_rows(plain)
        assert [row for row in metric_rows(run) if "eval/accuracy" not in row] == rows
    cold = {step: row["eval/reward_mean"] for step, row in step_metrics(tmp_path / "every 2").items() if step % 2 == 0}
    assert list(cold) == [0, 2, 4]


def test_an_evaluation_of_its_own_finds_what_the_run_found(server: Server, tmp_path: Path) -> None:
    options = ("eval.every=4", "eval.num_tasks=9", "eval.temperature=1.0")
    run = trained(server, tmp_path / "run", *options)
    command = ["eval", *overrides(run, *options), "--checkpoint", str(run / "model"), "--json"]
    assert server.run(command) == 0, server.output
    found = json.loads(server.output)
    assert found["reward_mean"] == step_metrics(run)[4]["eval/reward_mean"]
    assert (found["tasks"], found["failed"]) == (9, 0)


def troubled(**options: object) -> Sequence[str]:
    values = {name: json.dumps(value) for name, value in options.items()}
    return ("env.name=tests.worlds:Troubled", *(f"env.options.{name}={value}" for name, value in values.items()))


@pytest.mark.parametrize("kind", ["error", "hang"])
def test_some_failures_are_masked_and_the_run_goes_on(server: Server, tmp_path: Path, kind: str) -> None:
    options = [*troubled(kind=kind, share=0.15), "env.max_retries=0", "env.step_timeout=0.3", "train.steps=2"]
    run = trained(server, tmp_path / "run", *options)
    name = "rollouts/timeout_fraction" if kind == "hang" else "rollouts/error_fraction"
    for step, row in step_metrics(run).items():
        rows = rollout_rows(run)[f"step_{step:08d}.jsonl"]
        failed = [row for row in rows if row["status"] != "score"]
        assert row[name] == len(failed) / 16
        assert all(row["reward"] is None and row["detail"] for row in failed)
        scored = [row for row in rows if row["status"] == "score"]
        assert row["reward/mean"] == pytest.approx(sum(row["reward"] for row in scored) / len(scored))
        sampled = sum(sum(who == 1 for who in row["provenance"]) for row in scored)
        assert row["tokens/trained"] == sampled - dropped_tokens(rows)
    assert sum(row[name] for row in step_metrics(run).values()) > 0


def dropped_tokens(rows: Sequence[dict]) -> int:
    """Count the scored tokens of groups with fewer than two scores."""
    total = 0
    for task in {row["task_id"] for row in rows}:
        scored = [row for row in rows if row["task_id"] == task and row["status"] == "score"]
        total += sum(sum(who == 1 for who in row["provenance"]) for row in scored) if len(scored) < 2 else 0
    return total


def test_failures_that_are_retried_leave_no_trace(server: Server, tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    sound = trained(server, tmp_path / "sound", "train.steps=2")
    shaky = trained(server, tmp_path / "shaky", *troubled(share=0.3, tries=1, trace=str(tmp_path / "trace")), "train.steps=2")
    assert param_bits(shaky / "model") == param_bits(sound / "model")
    assert rollout_rows(shaky) == rollout_rows(sound)
    tries = [len(path.read_text().splitlines()) for path in (tmp_path / "trace").iterdir()]
    assert set(tries) == {1, 2}


def test_when_nothing_can_be_scored_the_run_stops_and_says_why(server: Server, tmp_path: Path) -> None:
    run = tmp_path / "run"
    sound = trained(server, tmp_path / "sound", "train.steps=2")
    trained(server, run, *troubled(), code=75)
    assert "16 of 16 rollouts could not be scored" in server.output
    assert "ConnectionError: the judge is out" in server.output
    assert metric_rows(run) == [], "nothing was trained on it"
    # The judge is back: nothing of the attempt is left in the result.
    trained(server, run, *troubled(share=0.0), "train.steps=2")
    assert param_bits(run / "model") == param_bits(sound / "model")


def test_a_gradient_that_is_not_finite_ends_the_run_before_it_is_saved(server: Server, tmp_path: Path) -> None:
    run = trained(server, tmp_path / "run", "optimizer.learning_rate=1e30", "checkpoint.every=1", code=70)
    assert "the gradient of step 2 is not finite" in server.output
    assert [row["step"] for row in metric_rows(run)] == [1, 2]
    assert "optimizer/grad_norm" in metric_rows(run)[1]["nonfinite"]
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000001"]
    assert state_bits(run, 1)


def test_a_conversation_is_trained_on_the_models_words_alone(server: Server, tmp_path: Path) -> None:
    options = ("env.name=tests.worlds:Dialogue", "env.options.answer=Go on.", "train.steps=2")
    run = trained(server, tmp_path / "run", *options)
    for step, row in step_metrics(run).items():
        rows = rollout_rows(run)[f"step_{step:08d}.jsonl"]
        assert {row["turns"] for row in rows} == {2}
        assert all({0, 1, 2} == set(row["provenance"]) for row in rows)
        assert row["tokens/trained"] == sum(row["provenance"].count(1) for row in rows)
        assert row["gap/logp_max"] < 1e-4, "the learner sees every token in the context it was sampled in"
        assert row["cache/reused_fraction"] > 0.5, "second turns computed only what was new"
        assert 0 < row["cache/occupancy_max"] <= 1
    assert step_metrics(run)[1]["compile/programs"] > 0
