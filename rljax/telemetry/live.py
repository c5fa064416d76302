"""What a run shows while it runs: a live view in a terminal, plain lines everywhere else.

Owns the screen. Refuses to own numbers: it is one more sink of the metrics that are logged anyway.

    loop --write(step, values)--> LiveView --twice a second--> terminal
    clock.phase ------------------^
"""

import itertools
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rljax.telemetry.metrics import BUCKETS, as_numbers

HISTORY = 512
"""Steps the reward curve looks back."""

ETA_STEPS = 20
"""Newest steps the remaining time is estimated from."""

_SHOWN = (  # label in the live view, label in plain lines (none: not shown there), metric, format
    ("reward", "reward", "reward/mean", ".3f"),
    ("length", "length", "completion/length_mean", ".1f"),
    ("truncated", "", "completion/truncated_fraction", ".1%"),
    ("entropy", "entropy", "policy/entropy", ".3f"),
    ("kl", "kl", "loss/kl", ".4f"),
    ("clip fraction", "clip", "policy/clip_fraction", ".1%"),
    ("grad norm", "grad", "optimizer/grad_norm", ".3g"),
    ("gap p95", "gap", "gap/logp_p95", ".4f"),
    ("generated tok/s", "tok/s", "throughput/generated_tokens_per_s", ",.0f"),
    ("trained tok/s", "", "throughput/trained_tokens_per_s", ",.0f"),
    ("eval accuracy", "eval", "eval/accuracy", ".3f"),
)
_LABEL_WIDTH, _VALUE_WIDTH = 15, 8
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow", "bright_black")
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-=+*#@"


class LiveView:
    """Shows the newest metrics: redrawn in place in a terminal, one plain line per step elsewhere.

    Warnings and log lines that are printed meanwhile appear above the view. Closing it, which the context manager does
    on errors and Ctrl-C too, leaves the last state on the screen and gives the terminal back.

    Example:
        with LiveView(total_steps=100, phase=lambda: clock.phase) as view:
            view.write(1, {"reward/mean": 0.25})
    """

    def __init__(
        self,
        total_steps: int,
        mode: Literal["auto", "plain", "off"] = "auto",
        phase: Callable[[], str] = lambda: "",
        stream: Any = None,
    ) -> None:
        """Start showing.

        Args:
            total_steps: Steps of the whole run, for the bar and the remaining time.
            mode: `auto` draws in place if the stream is a terminal, `plain` writes lines, `off` shows nothing.
            phase: Tells what the run is doing now.
            stream: Text stream to write to; standard output if not given.
        """
        self._total = total_steps
        self._phase = phase
        self._stream = stream or sys.stdout
        self._values: dict[str, int | float] = {}
        self._step = 0
        self._rewards: deque[int | float] = deque(maxlen=HISTORY)
        self._step_times: deque[int | float] = deque(maxlen=ETA_STEPS)
        self._spent: dict[str, float] = dict.fromkeys(BUCKETS, 0.0)
        self._plain = mode == "plain" or (mode == "auto" and not _can_redraw(self._stream))
        self._lock = threading.Lock()  # rich draws from a thread of its own
        self._console = Console(file=self._stream)
        self._live: Live | None = None
        self._rerouted: list[tuple[logging.StreamHandler[Any], Any]] = []
        if mode == "auto" and not self._plain:
            self._start()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Show the metrics of one step."""
        numbers = as_numbers(values)
        with self._lock:
            self._take(step, numbers)
        if self._live:
            self._live.refresh()
        elif self._plain:
            self._stream.write(self._line(numbers) + "\n")
            self._stream.flush()

    def close(self) -> None:
        """Leave the last state on the screen and give the terminal back; may be called twice."""
        if self._live:
            live, self._live = self._live, None
            for handler, stream in self._rerouted:
                handler.setStream(stream)
            live.stop()

    def __enter__(self) -> "LiveView":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, step: int, numbers: Mapping[str, int | float]) -> None:
        self._step = step
        self._values.update(numbers)
        if "reward/mean" in numbers:
            self._rewards.append(numbers["reward/mean"])
        if "time/step" in numbers:  # compilation and restarts do not come again
            self._step_times.append(
                numbers["time/step"] - sum(numbers.get(f"time/{once}", 0) for once in ("compile", "restart"))
            )
        for bucket in BUCKETS:
            self._spent[bucket] += numbers.get(f"time/{bucket}", 0)

    def _start(self) -> None:
        error_stream = sys.stderr
        # Errors that go to a file must still go there; only what would land inside the view is moved above it.
        above = error_stream.isatty()
        self._live = live = Live(
            get_renderable=self._view,
            console=self._console,
            refresh_per_second=2,
            redirect_stdout=self._stream is sys.stdout,
            redirect_stderr=above,
            vertical_overflow="crop",
        )
        live.start(refresh=True)
        if above:
            for handler in _stream_handlers(error_stream):
                handler.setStream(sys.stderr)
                self._rerouted.append((handler, error_stream))

    def _eta(self) -> str:
        if not self._step_times:
            return "?"
        return _duration(sum(self._step_times) / len(self._step_times) * max(self._total - self._step, 0))

    def _line(self, numbers: Mapping[str, int | float]) -> str:
        parts = [f"step {self._step}/{self._total}"]
        parts += [f"{label} {format(numbers[name], form)}" for _, label, name, form in _SHOWN if label and name in numbers]
        if "time/step" in numbers:
            parts += [f"time {numbers['time/step']:.2f}s", f"eta {self._eta()}"]
        return "  ".join(parts)

    def _view(self) -> Group:
        """Draw the view; called by rich from its own thread, twice a second."""
        with self._lock:
            return Group(self._head(), self._numbers(), self._split())

    def _head(self) -> Table:
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True)
        head.add_column(no_wrap=True, justify="right", width=max(map(len, BUCKETS)))
        head.add_row(
            Text(f"step {self._step}/{self._total}", style="bold"),
            ProgressBar(total=self._total, completed=self._step),
            Text(f"ETA {self._eta()}"),
            Text(self._phase(), style="bold cyan"),
        )
        return head

    def _numbers(self) -> Table:
        table = Table.grid(padding=(0, 1), expand=True)
        for side in ("left", "right"):
            table.add_column(no_wrap=True, style="dim", width=_LABEL_WIDTH)
            table.add_column(no_wrap=True, justify="right", width=_VALUE_WIDTH)
            if side == "left":
                table.add_column(no_wrap=True, ratio=1)
        cells = [(label, format(self._values[name], form) if name in self._values else "-") for label, _, name, form in _SHOWN]
        cells += [("", "")] * (len(cells) % 2)
        half = len(cells) // 2
        for row, (left, right) in enumerate(zip(cells[:half], cells[half:], strict=True)):
            table.add_row(*left, self._curve() if row == 0 else "", *right)
        return table

    def _curve(self) -> str:
        """Draw the history of the reward, which comes first in `_SHOWN`."""
        width = max(8, min(64, self._console.width - 2 * (_LABEL_WIDTH + _VALUE_WIDTH) - 6))
        return sparkline(list(self._rewards), width, _BLOCKS if self._unicode() else _ASCII_BLOCKS)

    def _split(self) -> Group:
        total = sum(self._spent.values())
        shares = [(bucket, self._spent[bucket] / total) for bucket in BUCKETS] if total else []
        legend, bar = Text(), Text()
        width = max(self._console.width - 1, 10)
        block = "█" if self._unicode() else "#"
        end, drawn = 0.0, 0
        for (bucket, share), colour in zip(shares, _COLOURS, strict=False):
            end += share
            cells = round(end * width) - drawn
            drawn += cells
            bar.append(block * cells, style=colour)
            if share >= 0.005:
                legend.append(f"{bucket} ", style=colour)
                legend.append(f"{share:.0%}  ")
        return Group(bar, legend)

    def _unicode(self) -> bool:
        return self._console.encoding.startswith("utf")


def sparkline(values: Sequence[int | float], width: int, blocks: str = _BLOCKS) -> str:
    """Draw values as a line of blocks, the smallest as the lowest and the largest as the highest.

    More values than columns are averaged per column; values that are not finite are left out.
    """
    finite = [value for value in values if abs(value) < float("inf")]
    columns = min(width, len(finite))
    edges = [index * len(finite) // columns for index in range(columns + 1)] if columns else []
    means = [sum(finite[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    if not means:
        return ""
    low, span = min(means), max(means) - min(means)
    return "".join(blocks[round((mean - low) / span * (len(blocks) - 1)) if span else 0] for mean in means)


def _duration(seconds: float) -> str:
    if not seconds < 10**8:
        return "?"  # also when it is not a number
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _can_redraw(stream: Any) -> bool:
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _stream_handlers(stream: Any) -> list[logging.StreamHandler[Any]]:
    """List the handlers, of all loggers, that hold on to a stream."""
    loggers = [logging.root, *(each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger))]
    handlers = {handler for logger in loggers for handler in logger.handlers}
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler) and handler.stream is stream]
