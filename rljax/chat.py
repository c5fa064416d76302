"""Talking to a checkpoint in the terminal.

Owns the conversation: what is said so far, streaming the answer, and the few commands a person may type. Refuses to own
sampling and templates.
"""

import secrets
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax

from rljax.config import MeshConfig
from rljax.convert import read_checkpoint
from rljax.data.tokenizer import Tokenizer
from rljax.mesh import build_mesh
from rljax.records import Completion, SamplingParams
from rljax.rollouts.weights import learner_layout, publisher
from rljax.sampler.attempts import n_best
from rljax.sampler.engine import Engine, Request, draw_key
from rljax.sampler.stops import StopStream, text_before_stop

_CHUNK = 8  # decode steps between two looks by the host, when several answers are drawn and nobody watches
HELP = "/new starts over, /system TEXT sets the system message, /quit (or Ctrl-D) ends."


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a chat samples.

    Example:
        ChatOptions(SamplingParams(max_tokens=128, temperature=0.7, top_p=0.9), context=1024, seed=0)
    """

    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=256, temperature=0.7))
    """How answers are drawn, and what is reported of them."""
    context: int = 1024
    """Longest conversation that is sent to the model (tokens)."""
    seed: int | None = None
    """Seed of the draws; a random one when it is None."""
    system: str | None = None
    """System message."""
    attempts: int = 1
    """Answers drawn for one message."""

    def __post_init__(self) -> None:
        if self.context < 1 or self.attempts < 1:
            raise ValueError(f"context and attempts must be at least 1; got {self.context} and {self.attempts}")


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer.

    Example:
        Answer(text="7", completion=completion)
    """

    text: str
    """What it says, without the stop string that ended it."""
    completion: Completion
    """Its tokens and their log-probabilities, `logp_raw` among them."""


class Chat:
    """A conversation with a checkpoint.

    Example:
        chat = Chat(Path("checkpoints/model"), ChatOptions())
        for piece in chat.say("What is 3 + 4?"):
            print(piece, end="", flush=True)
    """

    def __init__(self, checkpoint: Path, options: ChatOptions):
        """Load the model onto one device.

        Raises:
            ValueError: there is no checkpoint, or the lengths do not fit the model.
        """
        # One device: a conversation has one row, and rows are what more devices would split.
        mesh = build_mesh(MeshConfig(), jax.devices()[:1])
        loaded = read_checkpoint(checkpoint, learner_layout(mesh))
        arch, sampling = loaded.arch, options.sampling
        if options.context + sampling.max_tokens > arch.max_position:
            raise ValueError(
                f"a conversation of {options.context} and an answer of {sampling.max_tokens} tokens are more than the "
                f"{arch.max_position} the model was made for; lower --context or --max-tokens"
            )
        self.options = options
        self.tokenizer = Tokenizer.load(loaded.tokenizer_dir)
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        self._engine = Engine(
            arch,
            mesh,
            sorted(self.tokenizer.stop_ids),
            slots=options.attempts,
            max_prompt_length=options.context,
            max_completion_length=sampling.max_tokens,
            readers=options.attempts,
            decode_chunk_steps=1 if options.attempts == 1 else _CHUNK,
            dtype="float32",
            logprobs=sampling.logprobs or 0,
            open_text=self.tokenizer.decode_stream,
        )
        self._engine.set_weights(publisher(arch, mesh, "float32")(loaded.params), 0)
        self._turns = 0
        self.messages: list[dict[str, Any]] = []
        self.start(options.system)

    def start(self, system: str | None) -> None:
        """Begin a new conversation."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def say(self, text: str) -> Generator[str, None, None]:
        """Send a message and yield the answer in pieces; what was answered so far is remembered even if it is cut short.

        Raises:
            ValueError: the conversation has become longer than `context`, or the chat template refuses it. The message is
                not remembered then.
        """
        messages, prompt, keys = self._asked(text)
        sampling = self.options.sampling
        request = Request(self._turns, prompt, keys[0], sampling)
        shown: list[str] = []
        stream = StopStream(self.tokenizer.decode_stream(), sampling.stop, sampling.min_tokens)
        try:
            for tokens in self._engine.stream(request):
                for token in tokens:
                    shown.append(stream.push(token))
                    yield shown[-1]
            shown.append(stream.flush())
            yield shown[-1]
        finally:
            self._engine.clear()
            # An empty answer is one too: templates that want speakers to alternate would refuse the next question.
            self.messages = [*messages, {"role": "assistant", "content": "".join(shown)}]

    def answers(self, text: str) -> list[Answer]:
        """Send a message and return all attempts at an answer, the most likely first, which is remembered.

        Raises:
            ValueError: as for `say`.
        """
        messages, prompt, keys = self._asked(text)
        sampling = self.options.sampling
        decode = partial(self.tokenizer.decode, skip_special=True)
        done = n_best(self._engine, prompt, keys, sampling)
        answers = [Answer(text_before_stop(one.tokens.tolist(), one.stop, decode), one) for one in done]
        self.messages = [*messages, {"role": "assistant", "content": answers[0].text}]
        return answers

    def _asked(self, text: str) -> tuple[list[dict[str, Any]], tuple[int, ...], list[tuple[int, int]]]:
        """Return the conversation with a new message, its tokens, and the random keys of the attempts at an answer."""
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(messages)
        if len(prompt) > self.options.context:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens with this message, more than the {self.options.context} that fit; "
                "shorten it or raise --context"
            )
        keys = [draw_key(self.seed, "chat", str(self._turns), attempt) for attempt in range(self.options.attempts)]
        self._turns += 1
        return messages, tuple(prompt), keys


def sample(checkpoint: Path, prompt: str, options: ChatOptions | None = None) -> list[Answer]:
    """Return a checkpoint's answers to one message, the most likely first: `rljax sample CHECKPOINT --prompt PROMPT`.

    Raises:
        ValueError: there is no checkpoint, the lengths do not fit the model, or nothing can be drawn as the options ask.
    """
    return Chat(checkpoint, options or ChatOptions()).answers(prompt)


def _print(text: str) -> None:
    print(text, end="", flush=True)


def converse(chat: Chat, read: Callable[[str], str] = input, write: Callable[[str], object] = _print) -> None:
    """Read messages and stream answers until the person ends the conversation.

    Ctrl-C cuts an answer short; Ctrl-D or /quit ends.
    """
    write(HELP + "\n")
    while True:
        try:
            text = read("\nyou> ").strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        command, _, rest = text.partition(" ")
        if command in ("/quit", "/exit"):
            return
        if command in ("/new", "/system"):
            chat.start(rest.strip() or None if command == "/system" else chat.options.system)
            write("a new conversation begins\n")
        elif text.startswith("/"):
            write(f"{command} is no command. {HELP}\n")
        elif text:
            _answer(chat, text, write)


def _answer(chat: Chat, text: str, write: Callable[[str], object]) -> None:
    write("model> ")
    try:
        with closing(chat.say(text)) as pieces:
            for piece in pieces:
                write(piece)
        write("\n")
    except KeyboardInterrupt:
        write(" [cut short]\n")
    except ValueError as error:
        write(f"\n{error}\nStart over with /new.\n")
