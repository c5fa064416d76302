"""Metrics and rollouts reach the disk whole, strict and once."""

import gc
import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rljax.records import Group, Rollout, Score, Task
from rljax.telemetry import sinks
from rljax.telemetry.sinks import MetricsFile, RolloutLog, Sinks, TensorBoardSink, read_metrics, read_rollouts


def strict(line: str | bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def rollout(text: str = "7", attempt: int = 0, score: Score | None = None) -> Rollout:
    return Rollout(
        task_id="t",
        attempt=attempt,
        tokens=np.array([1, 5, 6, 2], np.int32),
        provenance=np.array([0, 0, 1, 1], np.int8),
        logp_behavior=np.array([0, 0, -0.5, -0.1], np.float32),
        versions=np.array([-1, -1, 3, 3], np.int32),
        finish_reason="stop",
        score=score or Score("score", 1.0, {"answer": 1.0}),
        turns=1,
        text=text,
        turn_rewards=(None if score and score.value is None else 1.0,),
    )


def group(*rollouts: Rollout, answer: Any = "7", content: str = "What is 3 + 4?") -> Group:
    return Group(Task("t", ({"role": "user", "content": content},), answer), rollouts)


def test_metrics_are_strict_json_numbers(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    sink = MetricsFile(path)
    values = {
        "loss/total": float("nan"),
        "loss/kl": np.float32("inf"),
        "tokens/trained": np.int64(3),
        "policy/entropy": ml_dtypes.bfloat16(0.5),
        "reward/mean": -math.inf,
    }
    sink.write(1, values)
    sink.write(2, {"loss/total": 1.5})
    sink.close()
    first, second = map(strict, path.read_text().splitlines())
    assert first == {
        "step": 1,
        "loss/total": None,
        "loss/kl": None,
        "tokens/trained": 3,
        "policy/entropy": 0.5,
        "reward/mean": None,
        "nonfinite": ["loss/total", "loss/kl", "reward/mean"],
    }
    assert second == {"step": 2, "loss/total": 1.5}


def test_an_undeclared_metric_writes_nothing(tmp_path: Path) -> None:
    sink = MetricsFile(tmp_path / "m.jsonl")
    with pytest.raises(ValueError, match="not declared"):
        sink.write(1, {"reward/mean": 1.0, "reward/mode": 2.0})
    sink.close()
    assert (tmp_path / "m.jsonl").read_bytes() == b""


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink = MetricsFile(path)
    for step in range(1, 6):
        sink.write(step, {"reward/mean": step})
    sink.close()
    with path.open("ab") as file:
        file.write(b'{"step": 6, "rew')  # torn by a crash
    sink = MetricsFile(path)
    sink.truncate_after(3)
    assert list(read_metrics(path)) == [1, 2, 3]
    for step in (4, 5, 6):
        sink.write(step, {"reward/mean": 10 * step})
    sink.close()
    rows = [strict(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 1), (2, 2), (3, 3), (4, 40), (5, 50), (6, 60)]
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"], "nothing temporary is left"


def test_opening_drops_a_torn_line_so_that_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    sink = MetricsFile(path)
    sink.write(2, {"reward/mean": 1})
    sink.close()
    assert [strict(line)["step"] for line in path.read_bytes().splitlines()] == [1, 2]


def test_late_values_join_their_own_step_when_read(tmp_path: Path) -> None:
    sink = MetricsFile(tmp_path / "m.jsonl")
    for step in (3, 4, 5):
        sink.write(step, {"reward/mean": step, "loss/kl": math.nan})
    sink.write(3, {"eval/accuracy": 0.5})
    sink.close()
    rows = read_metrics(tmp_path / "m.jsonl")
    assert list(rows) == [3, 4, 5]
    assert rows[3].keys() == {"reward/mean", "loss/kl", "eval/accuracy"}
    assert rows[3]["eval/accuracy"] == 0.5
    assert math.isnan(rows[4]["loss/kl"])
    assert "eval/accuracy" not in rows[5]


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\n')
    with pytest.raises(ValueError, match=r"m\.jsonl:2: not a JSON line"):
        read_metrics(path)


def test_a_full_disk_is_an_error_and_leaves_no_torn_line(tmp_path: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from rljax.telemetry.sinks import MetricsFile
sink = MetricsFile(Path(sys.argv[1]))
sink.write(1, {"reward/mean": 1.0})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = Path(sys.argv[1]).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, size + 9))  # room for a part of the next line
try:
    sink.write(2, {"reward/mean": 1.0})
except OSError as error:
    print("refused", Path(sys.argv[1]).read_text().count("step"))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "m.jsonl")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["refused", "1"]


def test_the_file_is_whole_after_a_kill(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from rljax.telemetry.sinks import MetricsFile
sink = MetricsFile(Path(sys.argv[1]))
step = 0
while True:
    step += 1
    sink.write(step, {"reward/mean": step, "reward/component/" + "x" * 3000: 0.5})
"""
    path = tmp_path / "m.jsonl"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while process.poll() is None and not (path.exists() and path.stat().st_size > 10**6):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    content = path.read_bytes()
    assert content.endswith(b"\n")
    steps = [strict(line)["step"] for line in content.splitlines()]
    assert steps == list(range(1, len(steps) + 1))


def test_rollouts_are_logged_exactly(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "rollouts")
    failed = rollout(attempt=1, score=Score("error", None, detail="ZeroDivisionError"))
    path = log.write(
        12, [group(rollout(), failed), group(rollout("8"), answer={"value": np.float32(0.5), "set": {3}, "bad": math.nan})]
    )
    assert path == tmp_path / "rollouts" / "step_00000012.jsonl"
    rows = [strict(line) for line in path.read_bytes().splitlines()]
    assert rows == list(read_rollouts(path))
    assert rows[0] == {
        "task_id": "t",
        "attempt": 0,
        "text": "7",
        "reward": 1.0,
        "status": "score",
        "components": {"answer": 1.0},
        "detail": "",
        "finish_reason": "stop",
        "turns": 1,
        "turn_rewards": [1.0],
        "messages": [{"role": "user", "content": "What is 3 + 4?"}],
        "answer": "7",
        "tokens": [1, 5, 6, 2],
        "provenance": [0, 0, 1, 1],
        "logp_behavior": [0.0, 0.0, -0.5, float(np.float32(-0.1))],
        "versions": [-1, -1, 3, 3],
    }
    assert (rows[1]["reward"], rows[1]["status"], rows[1]["detail"]) == (None, "error", "ZeroDivisionError")
    assert rows[2]["answer"] == {"value": 0.5, "set": [3], "bad": None}


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        ("a\ud800b", "a\ufffdb"),
        ("\udc00", "\ufffd"),
        ("\ud83c\udf78", "\U0001f378"),
        ("nul \0 and \x7f and \u2028", "nul \0 and \x7f and \u2028"),
        ('"quotes" \\ud83c\n\r', '"quotes" \\ud83c\n\r'),
        (b"\xff\xfe".decode("utf-8", "surrogateescape"), "\ufffd\ufffd"),
        ("x" * 5_000_000, "x" * 5_000_000),
    ],
    ids=["lone high", "lone low", "pair", "control", "escapes", "bytes", "long"],
)
def test_any_text_becomes_one_valid_line(tmp_path: Path, text: str, logged: str) -> None:
    path = RolloutLog(tmp_path).write(1, [group(rollout(text), content=text, answer=[text])])
    content = path.read_bytes()
    assert content.count(b"\n") == 1
    row = strict(content.decode("utf-8"))
    assert row["text"] == logged
    assert row["messages"][0]["content"] == logged
    assert row["answer"] == [logged]
    assert row["tokens"] == [1, 5, 6, 2]
    assert list(read_rollouts(path)) == [row]


def test_a_failed_write_leaves_the_earlier_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RolloutLog(tmp_path)
    path = log.write(1, [group(rollout("first"))])

    def fail(fd: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(sinks.os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        log.write(1, [group(rollout("second"))])
    assert [row["text"] for row in read_rollouts(path)] == ["first"]
    log.truncate_after(1)
    assert list(tmp_path.iterdir()) == [path], "what was left unfinished is swept on resume"


def test_resuming_drops_later_rollouts_of_this_process_only(tmp_path: Path) -> None:
    logs = [RolloutLog(tmp_path, process, 2) for process in (0, 1)]
    for step in (9, 10, 11):
        for log in logs:
            log.write(step, [group(rollout())])
    logs[1].truncate_after(9)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "step_00000009_p0000.jsonl",
        "step_00000009_p0001.jsonl",
        "step_00000010_p0000.jsonl",
        "step_00000011_p0000.jsonl",
    ]


def test_tensorboard_holds_every_value(tmp_path: Path) -> None:
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    sink = TensorBoardSink(tmp_path)
    sink.write(1, {"reward/mean": 0.5, "loss/kl": np.float32(0.25)})
    (path,) = tmp_path.iterdir()
    deadline = time.monotonic() + 10
    while not scalars(path, event_pb2) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert scalars(path, event_pb2) == [("reward/mean", 1, 0.5), ("loss/kl", 1, 0.25)], "on disk without closing"
    sink.write(2, {"reward/mean": 0.75})
    sink.close()
    sink.close()
    assert scalars(path, event_pb2)[-1] == ("reward/mean", 2, 0.75)


def scalars(path: Path, event_pb2: Any) -> list[tuple[str, int, float]]:
    content, position, found = path.read_bytes(), 0, []
    while position < len(content):  # a TFRecord: length, its checksum, data, its checksum
        (length,) = struct.unpack_from("<Q", content, position)
        event = event_pb2.Event.FromString(content[position + 12 : position + 12 + length])
        found += [(value.tag, event.step, value.simple_value) for value in event.summary.value]
        position += 16 + length
    return found


def test_a_missing_tensorboard_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"pip install 'rljax\[tensorboard\]'"):
        TensorBoardSink(tmp_path)


class Recorder:
    def __init__(self, fail: bool = False) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.closed = False
        self.fail = fail

    def write(self, step: int, values: Any) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True
        if self.fail:
            raise OSError("cannot close")


def test_all_sinks_get_every_row_and_are_closed_even_when_one_fails() -> None:
    recorders = [Recorder(), Recorder(fail=True), Recorder()]
    together = Sinks(*recorders)
    together.write(1, {"reward/mean": np.float32(0.5)})
    with pytest.raises(ValueError, match="not declared"):
        together.write(2, {"reward/mena": 0.5})
    with pytest.raises(OSError, match="cannot close"):
        together.close()
    for recorder in recorders:
        assert recorder.closed
        assert recorder.rows == [(1, {"reward/mean": 0.5})]


def test_a_closed_file_takes_no_rows_and_leaks_no_descriptor(tmp_path: Path) -> None:
    sink = MetricsFile(tmp_path / "m.jsonl")
    gc.collect()  # else descriptors that others left behind may be closed in between
    before = len(os.listdir("/proc/self/fd"))
    sink.truncate_after(0)
    assert len(os.listdir("/proc/self/fd")) == before
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="is closed"):
        sink.write(1, {"reward/mean": 1})
