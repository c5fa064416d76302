"""A conversation with a checkpoint: what is remembered, how it streams, and what a person may type."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rljax.chat import HELP, Chat, ChatOptions, converse
from rljax.checkpoint import save_params
from rljax.conversion.sources import ARCH_FILE
from rljax.records import SamplingParams
from tests.tiny_run import compiled_once, tiny_checkpoint
from tools.make_tiny_checkpoint import tiny_arch, tiny_params, tokenizer_files

SAMPLING = SamplingParams(max_tokens=12, temperature=1.0)
OPTIONS = ChatOptions(SAMPLING, context=64, seed=3)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> Iterator[None]:
    with compiled_once():
        yield


@pytest.fixture(scope="module")
def opened() -> Chat:
    return Chat(tiny_checkpoint(), OPTIONS)


@pytest.fixture
def chat(opened: Chat) -> Chat:
    """The same chat, as if it had just been opened."""
    opened._turns = 0
    opened.start(None)
    return opened


def roles(chat: Chat) -> list[str]:
    return [message["role"] for message in chat.messages]


class Person:
    """Types lines and sees what is written; `interrupt_at` pieces into an answer, Ctrl-C is pressed."""

    def __init__(self, *lines: str, interrupt_at: int | None = None, leave: type[BaseException] = EOFError) -> None:
        self._lines, self._interrupt_at, self._leave = iter(lines), interrupt_at, leave
        self._pieces = 0
        self.seen = ""

    def read(self, prompt: str) -> str:
        self.seen += prompt
        try:
            return next(self._lines)
        except StopIteration:
            raise self._leave from None

    def write(self, text: str) -> None:
        self.seen += text
        if text.startswith("model> "):
            self._pieces = 0
        else:
            self._pieces += 1
        if self._interrupt_at is not None and self._pieces == self._interrupt_at:
            self._interrupt_at = None
            raise KeyboardInterrupt


def test_an_answer_comes_in_pieces_and_is_remembered(chat: Chat) -> None:
    pieces = list(chat.say("What is 3 + 4?"))
    assert len(pieces) > 1
    assert roles(chat) == ["user", "assistant"]
    assert chat.messages[1]["content"] == "".join(pieces)
    second = "".join(chat.say("What is 3 + 4?"))
    assert roles(chat) == ["user", "assistant", "user", "assistant"]
    assert second != "".join(pieces), "another turn has other draws"


def test_a_seed_makes_a_conversation_repeatable(chat: Chat) -> None:
    first = "".join(chat.say("What is 3 + 4?"))
    again = Chat(tiny_checkpoint(), OPTIONS)
    assert "".join(again.say("What is 3 + 4?")) == first
    other = Chat(tiny_checkpoint(), ChatOptions(SAMPLING, context=64, seed=4))
    assert "".join(other.say("What is 3 + 4?")) != first


def test_a_message_that_does_not_fit_is_not_remembered(chat: Chat) -> None:
    list(chat.say("Hi"))
    before = list(chat.messages)
    with pytest.raises(ValueError, match=r"more than the 64 that fit; shorten it or raise --context"):
        list(chat.say("z" * 100))
    assert chat.messages == before
    list(chat.say("Hi"))
    assert len(roles(chat)) == 4


def test_what_the_template_refuses_is_not_remembered(tmp_path: Path) -> None:
    files = tokenizer_files()
    refuse = b"{% if messages[-1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    name = "chat_template.jinja"
    arch = tiny_arch()
    template = b"{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}<|im_start|>" + refuse
    save_params(tmp_path / "model", tiny_params(arch, 0), {ARCH_FILE: arch.to_json().encode(), **files, name: template})
    chat = Chat(tmp_path / "model", OPTIONS)
    with pytest.raises(ValueError, match="not that"):
        list(chat.say("no"))
    assert chat.messages == []


def test_an_answer_that_is_left_early_stays_as_far_as_it_came(chat: Chat) -> None:
    stream = chat.say("What is 3 + 4?")
    shown = [next(stream) for _ in range(3)]
    stream.close()
    assert chat.messages[-1] == {"role": "assistant", "content": "".join(shown)}
    assert "".join(chat.say("And 5 + 6?")), "the next question is answered"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingParams(max_tokens=500)}, r"the 512 the model was made for; lower --context or --max-tokens"),
        ({"context": 0}, "context and attempts must be at least 1; got 0 and 1"),
        ({"attempts": 0}, "context and attempts must be at least 1; got 64 and 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Chat(tiny_checkpoint(), ChatOptions(**{"sampling": SAMPLING, "context": 64, **changes}))


def test_a_person_talks_and_leaves(chat: Chat) -> None:
    person = Person("What is 3 + 4?", "", "/nonsense", "/quit", "never read")
    converse(chat, person.read, person.write)
    assert person.seen.startswith(HELP)
    assert f"model> {chat.messages[1]['content']}\n" in person.seen
    assert f"/nonsense is no command. {HELP}" in person.seen
    assert roles(chat) == ["user", "assistant"], "neither an empty line nor a command is a message"


@pytest.mark.parametrize("leave", [EOFError, KeyboardInterrupt])
def test_a_person_leaves_with_ctrl_d_or_ctrl_c(chat: Chat, leave: type[BaseException]) -> None:
    person = Person(leave=leave)
    converse(chat, person.read, person.write)
    assert person.seen.endswith("you> \n")


def test_a_person_cuts_an_answer_short_and_goes_on(chat: Chat) -> None:
    person = Person("What is 3 + 4?", "And 5 + 6?", interrupt_at=3)
    converse(chat, person.read, person.write)
    assert person.seen.count(" [cut short]\n") == 1
    assert roles(chat) == ["user", "assistant", "user", "assistant"]
    assert 0 < len(chat.messages[1]["content"]) < len(person.seen)


def test_a_person_starts_over_and_sets_the_system_message(chat: Chat) -> None:
    person = Person("Hi", "/system Be brief.", "Hi", "/new", "/system")
    converse(chat, person.read, person.write)
    assert person.seen.count("a new conversation begins") == 3
    assert chat.messages == []
    list(chat.say("Hi"))
    chat.start("Be brief.")
    list(chat.say("Hi"))
    assert roles(chat) == ["system", "user", "assistant"]


def test_a_conversation_that_is_too_long_is_said_to_be_and_can_start_over(chat: Chat) -> None:
    person = Person("Hi", "z" * 100, "/new", "Hi")
    converse(chat, person.read, person.write)
    assert "that fit; shorten it or raise --context" in person.seen
    assert "Start over with /new." in person.seen
    assert roles(chat) == ["user", "assistant"]


def test_an_answer_ends_before_a_stop_string_and_never_shows_a_part_of_it(chat: Chat) -> None:
    whole = "".join(chat.say("What is 3 + 4?"))
    stop = next(character for character in whole[3:] if character.isascii() and character.isprintable())
    cut = whole[: whole.index(stop)]
    stopped = Chat(tiny_checkpoint(), replace(OPTIONS, sampling=replace(SAMPLING, stop=(stop,))))
    pieces = list(stopped.say("What is 3 + 4?"))
    assert "".join(pieces) == cut
    assert stopped.messages[-1]["content"] == cut


def test_attempts_are_ranked_and_the_first_is_what_a_single_one_says(chat: Chat) -> None:
    single = chat.answers("What is 3 + 4?")[0].completion.tokens.tolist()
    several = Chat(
        tiny_checkpoint(), replace(OPTIONS, attempts=3, sampling=replace(SAMPLING, logprobs=2, prompt_logprobs=True))
    )
    answers = several.answers("What is 3 + 4?")
    assert single in [answer.completion.tokens.tolist() for answer in answers]
    means = [float(np.mean(answer.completion.logp_raw)) for answer in answers]
    assert means == sorted(means, reverse=True)
    assert several.messages[-1]["content"] == answers[0].text
    for answer in answers:
        done = answer.completion
        assert done.top is not None
        assert done.top.ids.shape == (len(done.tokens), 2)
        assert done.prompt_logp is not None
        assert np.isnan(done.prompt_logp[0])
        assert (done.prompt_logp[1:] < 0).all()
