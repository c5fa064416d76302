"""Draw one metric of one or several runs as a small SVG.

Owns reading the runs' metrics and the drawing. Refuses to own what the metrics mean (docs/metrics.md).

    python tools/plot_metrics.py docs/curves.svg --metric reward/mean critic=runs/ppo-0 critic=runs/ppo-1 none=runs/return-0

Runs of one label have one colour. A line is the mean of the last `--window` steps, the dots are the steps.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rljax.telemetry.sinks import read_metrics  # noqa: E402 (the path has to be there first)

COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#787774")
WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 28, 44

Points = list[tuple[int, float]]
"""Values by step, in the order of steps."""


def values_of(run: Path, metric: str) -> Points:
    """Return the finite values of a metric by step.

    Raises ValueError when the run has no metrics, or not this one.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} is not there; name the folder of a run (its run.dir)")
    steps = read_metrics(path)
    known = sorted({name for values in steps.values() for name in values})
    if metric not in known:
        raise ValueError(f"{path} has no metric {metric!r}; it has {', '.join(known)}")
    return [(step, float(values[metric])) for step, values in steps.items() if math.isfinite(values.get(metric, math.nan))]


def smoothed(points: Points, window: int) -> Points:
    """Return the mean of each value and those before it, `window` in all or as many as there are."""
    recent = [[value for _, value in points[max(0, end - window) : end]] for end in range(1, len(points) + 1)]
    return [(step, math.fsum(values) / len(values)) for (step, _), values in zip(points, recent, strict=True)]


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return the multiples of the smallest of 1, 2, 5 times a power of ten of which at most `most` lie in [low, high]."""
    if high <= low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power, 2 * power, 5 * power, 10 * power, 20 * power):
        found = [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        if len(found) <= most:
            return found
    raise AssertionError("a tenth of the span is always wide enough")


def draw(runs: Sequence[tuple[str, Points]], metric: str, window: int) -> str:
    """Return the SVG text of labelled runs; the vertical axis begins at 0 unless a value is below it.

    Raises ValueError when there is nothing to draw.
    """
    steps = [step for _, points in runs for step, _ in points]
    values = [value for _, points in runs for _, value in points]
    if not values:
        raise ValueError(f"no run has a finite value of {metric!r}")
    first, last, low, high = min(steps), max(steps), min(0.0, *values), max(values)

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - first) / max(last - first, 1) * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (value - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    labels = list(dict.fromkeys(label for label, _ in runs))
    colours = {label: COLOURS[index % len(COLOURS)] for index, label in enumerate(labels)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for value in ticks(low, high):
        _, y = place(first, value)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="#e3e2e0"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end" fill="#555555">{value:g}</text>')
    for step in ticks(first, last, most=10):
        x, _ = place(step, low)
        parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#555555">{step:g}</text>')
    for label, points in runs:
        for point in points:
            x, y = place(*point)
            parts.append(f'<circle cx="{x}" cy="{y}" r="1.8" fill="{colours[label]}" fill-opacity="0.35"/>')
        line = " ".join("{},{}".format(*place(*point)) for point in smoothed(points, window))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colours[label]}" stroke-width="2"/>')
    parts += _captions(metric, colours)
    return "\n".join([*parts, "</svg>", ""])


def _captions(metric: str, colours: Mapping[str, str]) -> list[str]:
    parts = [
        f'<text x="{LEFT}" y="16" fill="#333333">{escape(metric)}</text>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle" fill="#333333">step</text>',
    ]
    for index, (label, colour) in enumerate(colours.items()):
        y = HEIGHT - BOTTOM - 12 - 18 * (len(colours) - 1 - index)
        parts.append(f'<rect x="{WIDTH - 190}" y="{y - 8}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - 170}" y="{y}" fill="#333333">{escape(label)}</text>')
    return parts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the SVG file to write")
    parser.add_argument("runs", nargs="+", metavar="LABEL=RUN", help="a label and the folder of a run")
    parser.add_argument("--metric", default="reward/mean", help="name of the metric (default: reward/mean)")
    parser.add_argument("--window", type=int, default=5, help="steps that a line averages over (default: 5)")
    options = parser.parse_args(argv)
    try:
        if options.window < 1:
            raise ValueError("--window must be at least 1")
        runs = []
        for text in options.runs:
            label, equals, folder = text.partition("=")
            if not (label and equals and folder):
                raise ValueError(f"{text!r} is not LABEL=RUN, a label and the folder of a run")
            runs.append((label, values_of(Path(folder), options.metric)))
        options.output.write_text(draw(runs, options.metric, options.window), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"plot_metrics: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
