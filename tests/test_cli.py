"""The command line: exit codes, help, messages, and that mistakes are found before any device is touched."""

import functools
import io
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from rljax import __version__, chat, cli, loop
from rljax.cli import main
from rljax.evaluate import EvalResult
from rljax.manifest import StorageError
from rljax.records import SamplingParams
from rljax.rollouts.collector import EnvironmentFailure
from tests.tiny_run import compiled_once, overrides, param_bits, tiny_checkpoint

ROOT = Path(__file__).resolve().parents[1]
VERBS = ("train", "eval", "sample", "convert", "config")


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    with compiled_once() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))  # not in the home folder of whoever runs the tests
        yield


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text("[train]\nsteps = 12\n")
    return path


def ended(argv: list[str]) -> int:
    """Run a command that argparse ends."""
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_help_shows_the_verbs_and_each_teaches_by_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n    {verb} " in shown
        assert ended([verb, "--help"]) == 0
        text = capsys.readouterr().out
        assert f"examples:\n  rljax {verb}" in text
        for line in text.split("examples:\n")[1].splitlines():
            assert line.startswith(f"  rljax {verb}") or not line.startswith("  rljax"), line


def test_without_a_command_help_is_shown_and_that_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "rljax train recipe.toml" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--version"]) == 0
    assert capsys.readouterr().out == f"rljax {__version__}\n"


@pytest.mark.parametrize("argv", [["trian"], ["train", "--dryrun"], ["convert", "one"], ["eval", "a.toml", "stray"]])
def test_wrong_arguments_are_an_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = ended(argv) if argv[0] != "eval" else main(argv)
    assert code == 2
    assert capsys.readouterr().err


WRONG_OPTIONS = {
    "train.learning_rat=1": "optimizer.learning_rate",
    "learning_rate=1": "learning_rate belongs in [optimizer]",
    "train.num-iterations=2": "num_iterations",
    "optimizer.learning_rate=fast": "optimizer.learning_rate",
    "sampler.top_p=0.9": "training draws from the whole tempered distribution",
    "sampler.top_k=5": "importance ratios would be wrong; eval.top_k sets it for evaluations",
    "sampler.min_tokens=5": "importance ratios would be wrong; `SamplingParams` has it for sampling alone",
    "sampler.stop=['']": "sampler.stop holds an empty string",
    "eval.top_p=0.9": "eval.top_p has no effect with eval.temperature = 0",
    "sampler.temperature=0": "sampler.temperature = 0 makes all rollouts of a group equal",
}


@pytest.mark.parametrize("override", WRONG_OPTIONS)
@pytest.mark.parametrize("verb", ["train", "eval", "config"])
def test_wrong_options_are_named(verb: str, override: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, override]) == 2
    assert WRONG_OPTIONS[override] in capsys.readouterr().err


def test_mistakes_are_found_before_jax_is_imported(tmp_path: Path) -> None:
    """Which also keeps help and `config` quick."""
    program = "import sys; from rljax.cli import main; code = main(sys.argv[1:]); print('jax' in sys.modules, code)"
    for argv in (
        ["train", "train.stps=1"],
        ["train", str(tmp_path / "nowhere.toml")],
        ["config"],
        ["config", "--describe"],
        [],
    ):
        found = subprocess.run([sys.executable, "-c", program, *argv], cwd=ROOT, capture_output=True, text=True, check=True)
        assert found.stdout.splitlines()[-1] == f"False {0 if argv[:1] == ['config'] else 2}", (argv, found.stderr)


def test_config_shows_every_value_and_its_source(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(recipe), "optimizer.learning_rate=5e-6"]) == 0
    shown = capsys.readouterr().out
    tree = tomllib.loads(shown)
    assert (tree["train"]["steps"], tree["optimizer"]["learning_rate"]) == (12, 5e-6)
    lines = {line.split(" = ")[0]: line for line in shown.splitlines()}
    assert lines["steps"].endswith(f"# {recipe}:2") or lines["steps"].endswith("# recipe.toml:2")
    assert lines["learning_rate"].endswith("# command line")
    assert lines["seed"].endswith("# default")


def test_config_for_programs_and_for_readers(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", str(recipe), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["train"]["steps"] == 12
    assert main(["config", "--describe"]) == 0
    assert "- `learning_rate` (" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["{recipe}", "train.seed=1"],
        ["{recipe}", "run.seed=1", "--json"],
        ["{recipe}", "--json", "run.seed=1"],
        ["--json", "{recipe}", "run.seed=1"],
        ["--json", "run.seed=1"],
        ["run.seed=1", "--json"],
    ],
)
def test_overrides_stand_anywhere(words: list[str], recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["config", *(word.format(recipe=recipe) for word in words)])
    if "train.seed=1" in words:
        assert code == 2
        return
    assert code == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["run"]["seed"] == 1
    assert shown["train"]["steps"] == (12 if "{recipe}" in words else 100)


ENDS = {
    "usage": (ValueError("train.steps is 4"), 2, "rljax: train.steps is 4\n"),
    "no file": (FileNotFoundError(2, "No such file", "x.toml"), 2, "x.toml"),
    "storage": (StorageError("the checkpoint of step 2 could not be saved"), 74, "the checkpoint of step 2"),
    "disk": (OSError(28, "No space left on device"), 74, "No space left on device"),
    "environment": (EnvironmentFailure("8 of 8 rollouts could not be scored"), 75, "8 of 8 rollouts"),
    "interrupted": (KeyboardInterrupt(), 130, "rljax: interrupted"),
    "internal": (ZeroDivisionError("oops"), 70, "please report it"),
}


@pytest.mark.parametrize("case", ENDS)
def test_every_way_to_end_has_its_code(case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error, code, message = ENDS[case]

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(loop, "train", broken)
    assert main(["train"]) == code
    shown = capsys.readouterr().err
    assert message in shown
    assert ("Traceback" in shown) == (case == "internal"), "a person who made a mistake needs no traceback"
    if case not in ("interrupted", "internal"):
        assert main(["train", "--traceback"]) == code
        assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(("stopped", "code"), [(False, 0), (True, 75)])
def test_a_stopped_run_is_worth_retrying(
    stopped: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = loop.TrainResult(Path("runs/x"), step=4, trained=4, stopped=stopped, metrics={})
    monkeypatch.setattr(loop, "train", lambda config, report: result)
    assert main(["train", "train.steps=8"]) == code
    expected = "stopped at step 4 of 8; the same command continues" if stopped else "done: 4 steps; the trained model is in"
    assert expected in capsys.readouterr().out
    assert main(["train", "train.steps=8", "telemetry.live=off"]) == code
    assert capsys.readouterr().out == ""


def test_a_dry_run_trains_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = overrides(tmp_path / "run", "telemetry.live=auto")
    assert main(["train", "--dry-run", *options]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith("the configuration fits; nothing was compiled or trained\n")
    assert "micro-batches of" in shown
    assert not (tmp_path / "run").exists()
    assert main(["train", *options, "--dry-run", "mesh.tensor=3"]) == 2
    assert "mesh.tensor 3" in capsys.readouterr().err


RESULT = EvalResult(0.5, 0.625, 8, 2, 0.25, 6.5, ())


def test_eval_prints_a_line_for_people_or_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []

    def found(config: object, checkpoint: Path | None, report: object) -> EvalResult:
        asked.append(checkpoint)
        return RESULT

    monkeypatch.setattr(sys.modules["rljax.evaluate"], "evaluate", found)
    assert main(["eval", "--checkpoint", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        "accuracy 0.500  reward 0.625  on 8 tasks (2 not scored, 25% truncated, 6.5 tokens on average)\n"
    )
    assert main(["eval", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "accuracy": 0.5,
        "reward_mean": 0.625,
        "tasks": 8,
        "failed": 2,
        "truncated_fraction": 0.25,
        "length_mean": 6.5,
    }
    assert asked == [tmp_path, None]


def test_eval_of_nothing_scored_is_strict_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = EvalResult(float("nan"), float("nan"), 2, 2, float("nan"), float("nan"), ())
    monkeypatch.setattr(sys.modules["rljax.evaluate"], "evaluate", lambda *_: nothing)
    assert main(["eval", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(name))
    assert (shown["accuracy"], shown["failed"]) == (None, 2)


SAMPLE = ["--temperature", "1", "--max-tokens", "8", "--context", "64", "--seed", "3"]


def test_sample_answers_a_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(tiny_checkpoint()), "--prompt", "What is 3 + 4?", *SAMPLE]) == 0
    first = capsys.readouterr().out
    assert first.strip()
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3 + 4?"))
    assert main(["sample", str(tiny_checkpoint()), "--prompt", "-", *SAMPLE]) == 0
    assert capsys.readouterr().out == first
    options = chat.ChatOptions(SamplingParams(max_tokens=8), context=64, seed=3)
    assert chat.sample(tiny_checkpoint(), "What is 3 + 4?", options)[0].text + "\n" == first
    assert main(["sample", str(tiny_checkpoint()), "--prompt", "z" * 100, *SAMPLE]) == 2
    assert "raise --context" in capsys.readouterr().err


RULE = ["--top-k", "50", "--top-p", "0.9", "--min-p", "0.01", "--logit-bias", "5=-inf", "--min-tokens", "2", "--stop", "zz"]
REPORT = ["--n", "2", "--json", "--logprobs", "2", "--prompt-logprobs"]


def test_sample_shows_answers_with_their_log_probabilities(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["sample", str(tiny_checkpoint()), "--prompt", "Hi", *SAMPLE]
    assert main([*argv, *RULE, *REPORT]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2
    for row in rows:
        n = len(row["tokens"])
        assert 5 not in row["tokens"]
        assert len(row["logp"]) == len(row["logp_raw"]) == len(row["top_ids"]) == n >= 2
        assert row["prompt_logp"][0] is None
        assert all(kept >= raw for kept, raw in zip(row["logp"], row["logp_raw"], strict=True)), "fewer share the probability"
    assert main([*argv, "--allow", "70", "--allow", "71", "--max-tokens", "4", "--ignore-eos", "--stop-id", "70"]) == 0
    said = capsys.readouterr().out.strip()
    assert len(said) in range(1, 5)
    assert len(set(said)) in (1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", "2"], "--n and --json are for one answer at a time; add --prompt"),
        (["--prompt", "Hi", "--logprobs", "2"], "--logprobs and --prompt-logprobs are shown with --json"),
        (["--prompt", "Hi", "--top-p", "0"], "top_p is 0.0; it must be above 0 and at most 1"),
        (["--prompt", "Hi", "--stop", ""], "stop is ('',); it must be strings that are not empty"),
        (["--prompt", "Hi", "--allow", "999", *SAMPLE], "allowed_token_ids has the ids [999]; the model has ids from 0 to 319"),
    ],
)
def test_sample_refuses_what_cannot_be_done(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(tiny_checkpoint()), *options]) == 2
    assert message in capsys.readouterr().err


def test_sample_talks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["What is 3 + 4?", "/quit"])
    talk = functools.partial(chat.converse, read=lambda prompt: next(lines))
    monkeypatch.setattr(chat, "converse", talk)
    assert main(["sample", str(tiny_checkpoint()), *SAMPLE]) == 0
    assert "model> " in capsys.readouterr().out


def test_a_model_goes_to_the_outside_format_and_back_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tiny_checkpoint()), str(tmp_path / "hf"), "--to", "hf"]) == 0
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    assert param_bits(tmp_path / "back") == param_bits(tiny_checkpoint())
    for name in ("arch.json", "tokenizer.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads((tiny_checkpoint() / name).read_text()), name
    assert "read back and compared bit by bit" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back")]) == 2
    assert "already holds a model" in capsys.readouterr().err


def test_the_compilation_cache_is_the_users_unless_jax_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = jax.config.jax_compilation_cache_dir
    try:
        cli.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == before, "JAX's own variable is set here"
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        cli.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "rljax" / "compilation")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
