"""Talking to a checkpoint in the terminal.

Owns the conversation: what is said so far, streaming the answer, and the few commands a person may type. Refuses to own
sampling and templates.
"""

import secrets
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rljax.config import MeshConfig
from rljax.convert import read_checkpoint
from rljax.data.tokenizer import Tokenizer
from rljax.mesh import build_mesh
from rljax.rollouts.weights import learner_layout, publisher
from rljax.sampler.engine import Engine, Request, draw_key

HELP = "/new starts over, /system TEXT sets the system message, /quit (or Ctrl-D) ends."


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a chat samples.

    Example:
        ChatOptions(temperature=0.0, max_tokens=128, context=1024, seed=0, system=None)
    """

    temperature: float = 0.7
    """Sampling temperature; 0 takes the most likely token."""
    max_tokens: int = 256
    """Longest answer (tokens)."""
    context: int = 1024
    """Longest conversation that is sent to the model (tokens)."""
    seed: int | None = None
    """Seed of the draws; a random one when it is None."""
    system: str | None = None
    """System message."""

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.max_tokens < 1 or self.context < 1:
            raise ValueError(
                f"--temperature must be at least 0, --max-tokens and --context at least 1; got {self.temperature}, "
                f"{self.max_tokens} and {self.context}"
            )


class Chat:
    """A conversation with a checkpoint.

    Example:
        chat = Chat(Path("checkpoints/model"), ChatOptions(temperature=0.0))
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
        arch = loaded.arch
        if options.context + options.max_tokens > arch.max_position:
            raise ValueError(
                f"a conversation of {options.context} and an answer of {options.max_tokens} tokens are more than the "
                f"{arch.max_position} the model was made for; lower --context or --max-tokens"
            )
        self.options = options
        self.tokenizer = Tokenizer.load(loaded.tokenizer_dir)
        self.seed = secrets.randbits(32) if options.seed is None else options.seed
        self._engine = Engine(
            arch,
            mesh,
            sorted(self.tokenizer.stop_ids),
            slots=1,
            max_prompt_length=options.context,
            max_completion_length=options.max_tokens,
            readers=1,
            decode_chunk_steps=1,
            dtype="float32",
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
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(messages)
        if len(prompt) > self.options.context:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens with this message, more than the {self.options.context} that fit; "
                "shorten it or raise --context"
            )
        key = draw_key(self.seed, "chat", "chat", self._turns)
        self._turns += 1
        request = Request(self._turns, tuple(prompt), key, self.options.max_tokens, self.options.temperature)
        shown: list[str] = []
        stream = self.tokenizer.decode_stream()
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


def sample(checkpoint: Path, prompt: str, options: ChatOptions | None = None) -> str:
    """Return a checkpoint's answer to one message: `rljax sample CHECKPOINT --prompt PROMPT`.

    Raises:
        ValueError: there is no checkpoint, or the lengths do not fit the model.
    """
    return "".join(Chat(checkpoint, options or ChatOptions()).say(prompt))


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
