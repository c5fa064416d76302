"""The drawing of metrics shows the values that the runs have."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.plot_metrics import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, main, smoothed, ticks

SVG = "{http://www.w3.org/2000/svg}"


def run(folder: Path, rewards: list[float | None]) -> Path:
    folder.mkdir()
    lines = [json.dumps({"step": step, "reward/mean": value}) for step, value in enumerate(rewards, start=1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_lines_go_through_the_values(tmp_path: Path) -> None:
    one, two = run(tmp_path / "one", [0.0, 1.0, 0.5]), run(tmp_path / "two", [1.0, None, 1.0])
    output = tmp_path / "curve.svg"
    assert main([str(output), f"a <b>={one}", f"c={two}", "--window", "1"]) == 0
    root = ElementTree.fromstring(output.read_text())
    lines = [
        [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()] for line in root.iter(f"{SVG}polyline")
    ]
    middle, right, bottom, top = LEFT + (WIDTH - LEFT - RIGHT) / 2, WIDTH - RIGHT, HEIGHT - BOTTOM, TOP
    assert lines[0] == [(LEFT, bottom), (middle, top), (right, (bottom + top) / 2)]
    assert lines[1] == [(LEFT, top), (right, top)], "a value that is not finite is left out"
    assert len(list(root.iter(f"{SVG}circle"))) == 5
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a <b>", "c", "reward/mean", "step", "0.2"} <= set(texts)


def test_runs_of_one_label_have_one_colour_and_one_caption(tmp_path: Path) -> None:
    output = tmp_path / "curve.svg"
    runs = [f"{label}={run(tmp_path / str(index), [0.1, 0.2])}" for index, label in enumerate(["x", "x", "y"])]
    assert main([str(output), *runs]) == 0
    root = ElementTree.fromstring(output.read_text())
    colours = [line.attrib["stroke"] for line in root.iter(f"{SVG}polyline")]
    assert colours[0] == colours[1] != colours[2]
    assert [text.text for text in root.iter(f"{SVG}text")].count("x") == 1


def test_a_line_is_the_mean_of_the_last_steps() -> None:
    assert smoothed([(1, 1.0), (2, 3.0), (4, 5.0)], 2) == [(1, 1.0), (2, 2.0), (4, 4.0)]


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1.0, 30.0, [5, 10, 15, 20, 25, 30]),
        (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1]),
        (3.0, 3.0, [3]),
    ],
)
def test_marks_are_round_numbers(low: float, high: float, want: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(want)


def test_what_cannot_be_drawn_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, folder = str(tmp_path / "curve.svg"), run(tmp_path / "one", [None])
    for words, told in {
        (f"a={tmp_path / 'none'}",): "name the folder of a run",
        (f"a={folder}", "--metric", "reward"): "has no metric 'reward'; it has reward/mean",
        (f"a={folder}",): "no run has a finite value",
        (str(folder),): "is not LABEL=RUN",
        (f"a={folder}", "--window", "0"): "--window",
    }.items():
        assert main([output, *words]) == 2
        assert told in capsys.readouterr().err
