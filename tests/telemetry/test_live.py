"""The live view shows the run, in a terminal and without one, and gives the terminal back."""

import io
import logging
import os
import pty
import re
import subprocess
import sys

import pytest

from rljax.telemetry.live import LiveView, sparkline
from rljax.telemetry.metrics import METRICS

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"

VALUES = {
    "reward/mean": 0.523,
    "completion/length_mean": 18.25,
    "policy/entropy": 1.25,
    "policy/clip_fraction": 0.03,
    "loss/kl": 0.0012,
    "optimizer/grad_norm": 0.84,
    "gap/logp_p95": 0.0123,
    "throughput/generated_tokens_per_s": 1234.5,
    "time/step": 2.0,
    "time/sampling": 1.5,
    "time/update": 0.5,
}


def test_plain_lines_say_everything_once() -> None:
    stream = io.StringIO()
    with LiveView(100, "plain", stream=stream) as view:
        view.write(12, VALUES)
        view.write(13, {"reward/mean": 0.6, "eval/accuracy": 0.75})
    assert stream.getvalue() == (
        "step 12/100  reward 0.523  length 18.2  entropy 1.250  kl 0.0012  clip 3.0%  grad 0.84  gap 0.0123  tok/s 1,234"
        "  time 2.00s  eta 2:56\n"
        "step 13/100  reward 0.600  eval 0.750\n"
    )


def test_what_is_no_terminal_gets_plain_lines_and_off_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with LiveView(2, "auto", stream=stream) as view:
        view.write(1, {"reward/mean": 0.5})
    assert stream.getvalue() == "step 1/2  reward 0.500\n"
    with LiveView(2, "off") as view:
        view.write(1, VALUES)
    assert capsys.readouterr() == ("", "")


def test_compilation_does_not_enter_the_remaining_time() -> None:
    stream = io.StringIO()
    with LiveView(11, "plain", stream=stream) as view:
        view.write(1, {"time/step": 62.0, "time/compile": 50.0, "time/restart": 10.0, "time/update": 2.0})
    assert stream.getvalue().endswith("eta 0:20\n")


def test_odd_numbers_are_shown() -> None:
    stream = io.StringIO()
    with LiveView(2, "plain", stream=stream) as view:
        view.write(1, {"reward/mean": float("nan"), "optimizer/grad_norm": float("inf"), "time/step": float("nan")})
    assert stream.getvalue() == "step 1/2  reward nan  grad inf  time nans  eta ?\n"


def test_every_shown_metric_is_declared() -> None:
    from rljax.telemetry.live import _SHOWN

    assert {name for _, _, name, _ in _SHOWN} <= METRICS.keys()


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 8, ""),
        ([1.0], 8, "▁"),
        ([1, 1, 1], 8, "▁▁▁"),
        ([0, 1], 8, "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 7, 7], 2, "▁█"),
        ([0, float("nan"), float("inf"), 1], 8, "▁█"),
        ([-1e9, 1e9], 8, "▁█"),
    ],
)
def test_sparklines(values: list[int | float], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_view_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    stream = Terminal()
    with LiveView(100, phase=lambda: "sampling", stream=stream) as view:
        for step in range(1, 40):
            view.write(step, VALUES | {"reward/mean": step / 40})
        stream.seek(stream.truncate(0))
        view.write(40, VALUES | {"eval/accuracy": 0.75})
        shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue()).replace("\r", "")
    lines = shown.split("\n")
    assert max(map(len, lines)) <= columns
    assert len(lines) == 9
    assert lines[0].startswith("step 40/100 ")
    assert "ETA 2:00" in lines[0]
    assert "sampling" in lines[0]
    for text in (
        "reward",
        "0.523",
        "18.2",
        "1.250",
        "0.0012",
        "3.0%",
        "0.84",
        "0.0123",
        "1,234",
        "0.750",
        "sampling 75%  update 25%",
    ):
        assert text in shown
    assert re.search("▁[▁▂▃▄▅▆▇█]{6,}", shown), "the curve of the reward"
    assert SHOW_CURSOR in stream.getvalue()


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with LiveView(2, stream=stream) as view:
        view.write(1, {"reward/mean": 0.5})
    assert stream.getvalue() == "step 1/2  reward 0.500\n"


PROGRAM = """
import logging, os, signal, sys, warnings
logging.basicConfig(); signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from rljax.telemetry.live import LiveView
with LiveView(3, phase=lambda: "update") as view:
    view.write(1, {"reward/mean": 0.25})
    warnings.warn("mind the gap")
    logging.warning("mind the log")
    print("mind the print")
    view.write(2, {"reward/mean": 0.5})
    %s
"""


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("pass", 0, None),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken"),
        ("os.kill(os.getpid(), signal.SIGINT)", -2, "KeyboardInterrupt"),
    ],
    ids=["finished", "error", "ctrl-c"],
)
def test_the_terminal_is_given_back_and_warnings_stay_readable(end: str, code: int, last: str | None) -> None:
    leader, follower = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(
        [sys.executable, "-W", "default", "-c", PROGRAM % end],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
    ) as process:
        os.close(follower)
        output = b""
        while chunk := read_terminal(leader):
            output += chunk
        os.close(leader)
        assert process.wait(timeout=30) == code
    text = output.decode()
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert text.index(HIDE_CURSOR) < text.index(SHOW_CURSOR)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n")
    for line in ("<string>:7: UserWarning: mind the gap", "WARNING:root:mind the log", "mind the print"):
        assert line in plain.split("\n"), "a line of its own, not in the middle of the view"
    if last:
        assert last in text[text.index(SHOW_CURSOR) :], "the error is printed below the view"


def read_terminal(leader: int) -> bytes:
    try:
        return os.read(leader, 65536)
    except OSError:  # how Linux says that the other side is closed
        return b""


def test_logging_goes_back_to_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    errors = Terminal()
    monkeypatch.setattr(sys, "stderr", errors)
    handler = logging.StreamHandler(errors)
    logger = logging.getLogger("rljax.test_live")
    logger.addHandler(handler)
    try:
        with LiveView(2, stream=Terminal()) as view:
            assert handler.stream is not errors
            view.write(1, {"reward/mean": 0.5})
        view.close()
        assert handler.stream is errors
        assert sys.stderr is errors
    finally:
        logger.removeHandler(handler)
