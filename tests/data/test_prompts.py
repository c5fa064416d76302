"""The prompt stream is a pure function of the position; files are checked as a whole before anything starts."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rljax.data.prompts import (
    GeneratedTasks,
    PromptStream,
    TaskSource,
    check_fingerprint,
    filter_by_length,
    load_tasks,
    require_batch,
)
from rljax.data.tokenizer import Tokenizer
from rljax.records import Task


def number_task(index: int) -> Task:
    return Task(id=str(index), messages=({"role": "user", "content": f"What is {index} + 1?"},), answer=index + 1)


def numbers(count: int) -> GeneratedTasks:
    return GeneratedTasks(make=number_task, length=count)


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def write(path: Path, *lines: str | dict[str, Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_bytes("".join(text + "\n" for text in texts).encode("utf-8", "surrogatepass"))
    return path


# --- the order --------------------------------------------------------------------------------------------------------


def test_each_epoch_holds_every_task_once_in_another_order() -> None:
    stream = PromptStream(numbers(10), seed=0, shuffle=True)
    epochs = [ids(stream.take(10 * epoch, 10)) for epoch in range(3)]
    assert all(sorted(epoch) == sorted(map(str, range(10))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert [stream.epoch_of(position) for position in (0, 9, 10, 25)] == [0, 0, 1, 2]
    assert ids(PromptStream(numbers(10), seed=1).take(0, 10)) != epochs[0]


def test_the_order_of_a_seed_never_changes() -> None:
    """Checkpoints hold a position only, so another order for the same seed would break every resumed run."""
    assert ids(PromptStream(numbers(10), seed=3).take(0, 20)) == list("46975318208137905426")


def test_unshuffled_tasks_come_in_their_own_order() -> None:
    assert ids(PromptStream(numbers(3), seed=0, shuffle=False).take(1, 5)) == ["1", "2", "0", "1", "2"]


@pytest.mark.parametrize("stop", [13, 10, 20, 0, 5])
def test_a_new_stream_continues_where_the_old_one_stopped(stop: int) -> None:
    straight = ids(PromptStream(numbers(10), seed=0).take(0, 30))
    first = ids(PromptStream(numbers(10), seed=0).take(0, stop))
    rest = ids(PromptStream(numbers(10), seed=0).take(stop, 30 - stop))
    assert first + rest == straight


def test_fresh_and_used_streams_give_the_same_tasks() -> None:
    used = PromptStream(numbers(50), seed=0)
    for position in range(0, 40, 8):
        used.take(position, 8)
    assert ids(used.take(5, 1)) == ids(PromptStream(numbers(50), seed=0).take(5, 1))


def test_the_position_counts_consumed_tasks_not_updates() -> None:
    """Two updates per batch of rollouts consume each task once: after 3 tasks the next is number 3."""
    stream = PromptStream(numbers(10), seed=0, shuffle=False)
    position = updates = 0
    for _ in range(3):
        position += len(stream.take(position, 1))
        updates += 2
    assert (position, updates) == (3, 6)
    assert ids(stream.take(position, 1)) == ["3"]


@pytest.mark.parametrize("count", [8, 7, 3])
def test_any_number_of_processes_shares_each_batch_exactly_once(count: int) -> None:
    whole = ids(PromptStream(numbers(10), seed=0).take(16, count))
    for processes in (1, 2, 3, 8):
        shares = [PromptStream(numbers(10), 0, True, index, processes).take(16, count) for index in range(processes)]
        assert [task for share in shares for task in ids(share)] == whole
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_another_number_of_processes_continues_mid_epoch() -> None:
    two = [PromptStream(numbers(10), 0, True, index, 2).take(0, 4) for index in range(2)]
    one = PromptStream(numbers(10), seed=0).take(4, 6)
    assert sorted(ids([*two[0], *two[1], *one])) == sorted(map(str, range(10)))


def test_impossible_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="no tasks to train on"):
        PromptStream([], seed=0)
    with pytest.raises(ValueError, match="process_index 2 is not one of 2"):
        PromptStream(numbers(3), 0, True, 2, 2)
    with pytest.raises(ValueError, match="must not be negative"):
        PromptStream(numbers(3), seed=0).take(-1, 2)
    for index in (-1, 3):
        with pytest.raises(IndexError):
            numbers(3)[index]


def test_importing_and_streaming_print_nothing() -> None:
    program = (
        "from rljax.data.prompts import PromptStream; from rljax.records import Task; "
        "PromptStream([Task('a', ({'role': 'user', 'content': 'x'},))], seed=0).take(0, 3)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


# --- the fingerprint --------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_of_content_and_order() -> None:
    def print_of(tasks: TaskSource) -> str:
        return PromptStream(tasks, seed=0).fingerprint

    base = [number_task(index) for index in range(5)]
    edited = [*base[:4], Task(id="4", messages=base[4].messages, answer=6)]
    retold = [Task(id="0", messages=({"content": "What is 0 + 1?", "role": "user"},), answer=1), *base[1:]]
    assert print_of(base) == print_of(numbers(5)) == print_of(retold)
    # Written out, because a hash must not depend on the process, the machine or the order of keys.
    text = b'["0",[{"content":"What is 0 + 1?","role":"user"}],1]\n'
    assert print_of(base[:1]) == hashlib.sha256(text).hexdigest()
    assert len({print_of(tasks) for tasks in (base, edited, base[:4], base[::-1])}) == 4
    assert PromptStream(base, seed=1).fingerprint == print_of(base)


def test_other_tasks_stop_a_resume_with_instructions() -> None:
    saved = PromptStream(numbers(100), seed=0).fingerprint
    check_fingerprint(saved, PromptStream(numbers(100), seed=0).fingerprint)
    for other in (numbers(30), numbers(101)):
        with pytest.raises(ValueError, match=r"not those of the checkpoint .* another run\.dir"):
            check_fingerprint(saved, PromptStream(other, seed=0).fingerprint)


def test_an_answer_without_a_stable_form_is_refused() -> None:
    task = Task(id="t", messages=({"role": "user", "content": "x"},), answer={1, 2})
    with pytest.raises(ValueError, match=r"task 't': set .* cannot be written as JSON"):
        _ = PromptStream([task], seed=0).fingerprint


# --- files ------------------------------------------------------------------------------------------------------------


def test_rows_become_tasks(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "q", "name": None}]
    path = write(
        tmp_path / "train.jsonl",
        {"id": "a", "prompt": "What is 3 + 4?", "answer": "7", "level": 2},
        {"id": 5, "messages": talk, "prompt": None, "answer": 42, "source": "book"},
    )
    loaded = load_tasks(path)
    assert loaded.warnings == ()
    assert loaded.tasks == (
        Task("a", ({"role": "user", "content": "What is 3 + 4?"},), "7", {"source": f"{path}:1", "level": 2}),
        Task("5", (talk[0], {"role": "user", "content": "q"}), 42, {"source": "book"}),
    )


def test_marks_line_ends_and_blank_lines_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    rows = '\ufeff{"prompt": "a\u2028b\u0085c"}\r\n\r\n   \n{"prompt": "d"}\r\n{"prompt": "e"}'
    path.write_bytes(rows.encode())
    tasks = load_tasks(path).tasks
    assert [task.messages[0]["content"] for task in tasks] == ["a\u2028b\u0085c", "d", "e"]
    assert [task.metadata["source"] for task in tasks] == [f"{path}:1", f"{path}:4", f"{path}:5"]


def test_ids_are_made_from_content_and_line(tmp_path: Path) -> None:
    first, second, third = load_tasks(write(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "x"}, {"prompt": "y"})).tasks
    assert first.id.endswith(":1")
    assert first.id.split(":")[0] == second.id.split(":")[0] != third.id.split(":")[0]
    assert load_tasks(write(tmp_path / "b.jsonl", {"prompt": "x"})).tasks[0].id == first.id


def test_all_errors_are_reported_together_with_line_columns_and_remedy(tmp_path: Path) -> None:
    path = write(
        tmp_path / "train.jsonl",
        {"prompt": "fine", "answer": 1},
        "",
        {"prompt": "no answer", "level": 3},
        {"prompt": "", "answer": 1},
        {"prompt": "   \t", "answer": 1},
        {"prompt": "a number is fine", "answer": 42},
        {"question": "x", "answer": 1},
        '{"prompt": "cut of',
        '["prompt"]',
        {"prompt": "x", "messages": [], "answer": 1},
        {"messages": [{"role": "system", "content": "only"}], "answer": 1},
        {"messages": [{"role": "user", "content": 3}], "answer": 1},
        {"messages": "x", "answer": 1},
        {"prompt": [{"role": "user"}], "answer": 1},
        {"id": 1.5, "prompt": "x", "answer": 1},
        '{"prompt": "x", "answer": NaN}',
        '{"prompt": "\\ud800", "answer": 1}',
        {"messages": ["x"], "answer": 1},
        "[" * 100_000,
    )
    with path.open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match="17 of 19 rows cannot be used") as caught:
        load_tasks(path)
    lines = str(caught.value).split("\n")[1:]
    assert [int(line.split(":")[1]) for line in lines] == [3, 4, 5, *range(7, 21)]
    expected = {
        3: "no 'answer' (columns: prompt, level), but other rows have one",
        4: "'prompt' is empty or white space only",
        5: "'prompt' is empty or white space only",
        7: "has neither 'messages' nor 'prompt'; rename or add one (columns: question, answer)",
        8: "broken JSON at column 12",
        9: "a row must be a JSON object, not list",
        10: "has both 'messages' and 'prompt'; remove one",
        11: "'messages' is empty or white space only",
        12: "'messages'[0].content must be text, not 3",
        13: "'messages' must be a list of {role, content}, not str",
        14: "a list of messages belongs in 'messages'",
        15: "'id' must be text or a whole number, not 1.5",
        16: "NaN is no JSON number",
        17: "half of a surrogate pair",
        18: "must be an object with 'role' and 'content'",
        19: "broken JSON",
        20: "not valid UTF-8 at byte 12",
    }
    for line in lines:
        number = int(line.split(":")[1])
        assert line.strip().startswith(f"{path}:{number}: ")
        assert expected[number] in line


def test_many_errors_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *[{"text": "x"}] * 50)
    with pytest.raises(ValueError, match="50 of 50 rows") as caught:
        load_tasks(path)
    assert len(str(caught.value).split("\n")) == 1 + 20 + 1
    assert str(caught.value).endswith("... and 30 more")


def test_answers_may_be_absent_everywhere(tmp_path: Path) -> None:
    tasks = load_tasks(write(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y", "answer": None})).tasks
    assert [task.answer for task in tasks] == [None, None]
    tasks = load_tasks(write(tmp_path / "b.jsonl", {"prompt": "x", "answer": 0}, {"prompt": "y", "answer": ""})).tasks
    assert [task.answer for task in tasks] == [0, ""]


def test_repeated_ids_stay_separate_tasks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *[{"id": name, "prompt": name} for name in ("a", "a#2", "a", "a", "b")])
    loaded = load_tasks(path)
    assert [task.id for task in loaded.tasks] == ["a", "a#2", "a#3", "a#4", "b"]
    assert loaded.warnings == tuple(
        f"{path}:{line}: id 'a' was used before; this row became 'a#{line}', a group of its own" for line in (3, 4)
    )
    many = load_tasks(write(tmp_path / "b.jsonl", *[{"id": "a", "prompt": "x"}] * 40))
    assert len({task.id for task in many.tasks}) == 40
    assert len(many.warnings) == 21
    assert many.warnings[-1].endswith("19 more rows repeat an id")


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.jsonl: no such file; set data\.path"):
        load_tasks(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match=r"unknown kind of file '\.csv'; use \.jsonl or \.parquet"):
        load_tasks(write(tmp_path / "a.csv", "x"))
    with pytest.raises(ValueError, match="holds no tasks"):
        load_tasks(write(tmp_path / "empty.jsonl", "", " "))
    (tmp_path / "wide.jsonl").write_bytes('{"prompt": "x"}\n'.encode("utf-16"))
    with pytest.raises(ValueError, match=r"wide\.jsonl:1: the file is UTF-16; save it as UTF-8"):
        load_tasks(tmp_path / "wide.jsonl")
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read as Parquet"):
        load_tasks(write(tmp_path / "a.parquet", "x"))


def test_a_huge_line_is_a_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x\x00" * 2_500_000})
    assert len(load_tasks(path).tasks[0].messages[0]["content"]) == 5_000_000


def test_parquet_gives_the_tasks_of_jsonl(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "q1", "name": None}], "answer": "1", "level": 1},
        {"id": "b", "messages": [{"role": "user", "content": "q2", "name": "n"}], "answer": "2", "level": None},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = load_tasks(write(tmp_path / "a.jsonl", *rows))
    table = load_tasks(tmp_path / "a.parquet")
    assert PromptStream(table.tasks, seed=0).fingerprint == PromptStream(lines.tasks, seed=0).fingerprint
    assert table.tasks[0].metadata == {"source": f"{tmp_path / 'a.parquet'}:1", "level": 1}
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x", None]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet:2: has neither 'messages' nor 'prompt'"):
        load_tasks(tmp_path / "b.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", "x")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ValueError, match=r"pip install 'rljax\[parquet\]'"):
        load_tasks(path)


# --- the length filter ------------------------------------------------------------------------------------------------


def test_long_prompts_are_dropped_and_counted(tokenizers: dict[str, Tokenizer]) -> None:
    def encode(task: Task) -> int:
        return len(tokenizers["chatml"].apply_chat_template(task.messages))

    tasks = [number_task(index) for index in range(6)]
    tasks[2] = Task(id="long", messages=({"role": "user", "content": "fox " * 100},))
    limit = max(encode(task) for task in tasks if task.id != "long")
    kept, report = filter_by_length(tasks, encode, limit)
    assert [kept[index].id for index in range(len(kept))] == ["0", "1", "3", "4", "5"]
    assert (report.total, report.kept, report.longest) == (6, 5, encode(tasks[2]))
    assert report.examples == (("long", report.longest),)
    assert f"1 of 6 tasks dropped: their prompts are longer than max_prompt_length = {limit} tokens" in str(report)
    assert sorted(ids(PromptStream(kept, seed=0).take(0, 5))) == ["0", "1", "3", "4", "5"]
    everything, report = filter_by_length(tasks, encode, report.longest)
    assert everything is tasks
    assert str(report).startswith("all 6 tasks fit")


def test_generated_tasks_are_measured_one_at_a_time() -> None:
    alive, most = 0, 0

    class Watched(dict[str, Any]):
        def __init__(self, content: str) -> None:
            nonlocal alive, most
            super().__init__(role="user", content=content)
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    source = GeneratedTasks(make=lambda index: Task(str(index), (Watched("x"),)), length=300)
    kept, _ = filter_by_length(source, lambda task: int(task.id), 99)
    assert len(kept) == 100
    assert most <= 2
    assert kept[99].id == "99"
    with pytest.raises(IndexError):
        kept[100]


def test_a_prompt_that_cannot_be_templated_names_its_task(tmp_path: Path, tokenizers: dict[str, Tokenizer]) -> None:
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    path = write(tmp_path / "a.jsonl", {"id": "first", "prompt": "x"}, {"id": "second", "messages": talk})
    with pytest.raises(ValueError, match=r"task 'second' \(.*a\.jsonl:2\): .*System role not supported"):
        filter_by_length(load_tasks(path).tasks, lambda task: len(tokenizers["gemma"].apply_chat_template(task.messages)), 99)


def test_too_few_tasks_stop_the_run_with_all_counts() -> None:
    _, fits = filter_by_length(numbers(3), lambda task: 1, 10)
    with pytest.raises(ValueError, match=r"3 tasks are left, fewer than the batch of 8 .* The source has 3; all 3 tasks fit"):
        require_batch(fits, 8)
    require_batch(fits, 3)
    _, none = filter_by_length(numbers(20), lambda task: 11, 10)
    assert none.kept == 0
    with pytest.raises(ValueError, match=r"0 tasks are left.* 20 of 20 tasks dropped"):
        require_batch(none, 8)


def test_filtered_tasks_have_their_own_fingerprint() -> None:
    kept, _ = filter_by_length(numbers(20), lambda task: int(task.id), 9)
    assert isinstance(kept, TaskSource)
    assert PromptStream(kept, seed=0).fingerprint == PromptStream(numbers(10), seed=0).fingerprint
