"""Every smoke recipe runs, on the checkpoint and by the command that its header names."""

from pathlib import Path

import pytest

from rljax.recipe import load
from tests.e2e.processes import ROOT, Server
from tests.tiny_run import metric_rows, tiny_checkpoint
from tools.make_tiny_checkpoint import main as make_tiny_checkpoint

RECIPES = sorted((ROOT / "configs" / "smoke").glob("*.toml"))


def test_there_are_smoke_recipes() -> None:
    assert RECIPES


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_smoke_recipe_runs(server: Server, tmp_path: Path, recipe: Path) -> None:
    run = tmp_path / "run"
    elsewhere = [f"model.checkpoint={tiny_checkpoint()}", f"run.dir={run}"]
    assert server.run(["train", str(recipe), *elsewhere, "--dry-run"]) == 0, server.output
    assert "nothing was compiled or trained" in server.output
    assert not run.exists()
    assert server.run(["train", str(recipe), *elsewhere]) == 0, server.output
    steps = [row["step"] for row in metric_rows(run) if "loss/total" in row]
    assert steps == list(range(1, load(recipe).train.steps + 1))
    assert f"done: {steps[-1]} steps; the trained model is in {run / 'model'}" in server.output
    assert f"step 1/{steps[-1]}  reward" in server.output, "plain lines, since no terminal watches"
    assert "\x1b" not in server.output


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_its_header_says_how_to_run_it(recipe: Path) -> None:
    name = recipe.relative_to(ROOT)
    header = recipe.read_text().split("\n\n")[0]
    assert f"#   rljax train {name}\n" in header
    assert "#   python tools/make_tiny_checkpoint.py checkpoints/tiny\n" in header
    assert load(recipe).model.checkpoint == ROOT / "checkpoints" / "tiny"


def test_the_tiny_checkpoint_is_made_by_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert make_tiny_checkpoint([str(tmp_path / "tiny")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'tiny'}\n"
    files = {path.name for path in (tmp_path / "tiny").iterdir()}
    assert files == {
        "arch.json",
        "generation_config.json",
        "manifest.json",
        "params",
        "tokenizer.json",
        "tokenizer_config.json",
    }
