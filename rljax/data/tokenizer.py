"""Text to token ids and back, as the checkpoint means it.

Owns a checkpoint's tokenizer folder: vocabulary, special tokens, chat templates, and which ids end a turn. Refuses to own
masks and padding: who wrote a token is recorded when it is written, never guessed from its id.

Two rules keep the ids that are trained the ids that were sampled:

- **Append only.** A conversation with several turns is never rendered again. Each turn's prompt is the ids so far, followed by
  the sampled ids as they came, followed by `reply_ids` for what the environment said. Templates that rewrite earlier turns
  (they drop old reasoning, say; see `is_prefix_preserving`) are safe under this rule, and text is never encoded twice.
- **Foreign text is text.** Control tokens spelled out by users, tools and environments are encoded as the characters they are.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, SupportsIndex

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from rljax.data.control import ControlTokens
from rljax.data.template import FALLBACK, ChatTemplate, plain, plain_messages, read_templates
from rljax.records import Message

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NEEDED_TOKENS = ("bos_token", "eos_token", "pad_token")

_EXTRA_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")
_ADDED_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")

_PLACEHOLDER = "assistant-turn-placeholder"
"""What a sampled turn is called while the template is asked what comes after it."""

_SURROGATE = re.compile("[\ud800-\udfff]")

_HELD_TOKENS = 4
"""A character is at most 4 bytes of UTF-8, so text still broken after 4 tokens stays broken and is shown as it is."""


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; a missing file is an empty one."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _token_text(entry: Any) -> str | None:
    """Read a token that is written as text, as `{"content": text}`, or as null."""
    return entry.get("content") if isinstance(entry, Mapping) else entry


def _named_tokens(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in _NAMED_TOKENS:
        token = _token_text(config.get(name))
        if token is not None and not isinstance(token, str):
            raise ValueError(f"{path}: {name} must be text or null, got {token!r}")
        if token is not None:
            named[name] = token
    return named


def _eos_ids(path: Path) -> frozenset[int]:
    """Read `eos_token_id` of a generation config: an id, a list of ids, or null."""
    entry = _read_json(path).get("eos_token_id")
    ids = [] if entry is None else entry if isinstance(entry, list) else [entry]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ValueError(f"{path}: eos_token_id must be an id, a list of ids, or null; got {entry!r}")
    return frozenset(ids)


def _load_backend(directory: Path, config: Mapping[str, Any], named: Mapping[str, str]) -> Backend:
    """Read `tokenizer.json` and register the added and special tokens that only `tokenizer_config.json` lists."""
    path = directory / "tokenizer.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist; a checkpoint needs the tokenizer in this format")
    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: cannot be read as a tokenizer ({error}); fetch the checkpoint again") from error
    backend.no_truncation()
    backend.no_padding()
    listed = {int(key): entry for key, entry in (config.get("added_tokens_decoder") or {}).items()}
    for token_id, entry in sorted(listed.items()):
        known = backend.get_added_tokens_decoder().get(token_id)
        token = AddedToken(**{key: entry[key] for key in _ADDED_TOKEN_FIELDS if key in entry})
        if known is None or repr(known) != repr(token):
            backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise ValueError(
                f"{directory / 'tokenizer_config.json'}: added token {token.content!r} should have id {token_id}, but "
                f"{path} gives it {backend.token_to_id(token.content)}; the two files are not of the same checkpoint"
            )
    extra = [_token_text(entry) for key in _EXTRA_TOKEN_LISTS for entry in _listed(config.get(key))]
    marked = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in [*named.values(), *(text for text in extra if text is not None)]:
        if token not in marked and backend.token_to_id(token) is not None:
            backend.add_special_tokens([AddedToken(token, special=True)])
    return backend


def _listed(entry: Any) -> list[Any]:
    return list(entry.values()) if isinstance(entry, Mapping) else list(entry or [])


def _control_ids(backend: Backend, literals: str) -> dict[str, int]:
    """List the special tokens, and the other added tokens that templates write (`<tool_response>`), white space aside."""
    return {
        token.content: token_id
        for token_id, token in sorted(backend.get_added_tokens_decoder().items())
        if token.special or (token.content in literals and not token.content.isspace())
    }


class Tokenizer:
    """The tokenizer of one checkpoint.

    Example:
        tokenizer = Tokenizer.load(Path("checkpoints/model"))
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "What is 3 + 4?"}])
    """

    def __init__(
        self,
        backend: Backend,
        *,
        named: Mapping[str, str],
        templates: Mapping[str, tuple[str, str]],
        generation_eos: frozenset[int] = frozenset(),
        origin: str,
        now: datetime,
    ) -> None:
        """Put a tokenizer together; most callers want `load`.

        Args:
            backend: Vocabulary and encoder.
            named: `bos_token`, `eos_token` ... -> text, without the absent ones.
            templates: Template name -> (origin, source).
            generation_eos: End ids of the generation config.
            origin: Where all this comes from, for messages.
            now: What a template that writes the date writes.

        Raises:
            ValueError: When a named token is not in the vocabulary, or nothing ends a turn.
        """
        self._backend = backend
        self._origin = origin
        sources = dict(templates) or {"default": ("the built-in fallback", FALLBACK)}
        self._templates = {
            name: ChatTemplate(name, source, origin=where, variables=named, now=now)
            for name, (where, source) in sources.items()
        }
        self.has_chat_template: bool = bool(templates)
        """Whether the checkpoint brings a chat template; without one, messages are simply put one after the other."""
        literals = "\0".join(template.literals for template in self._templates.values())
        self._control = ControlTokens(_control_ids(backend, literals), literals)
        ids = {name: self._named_id(name, token) for name, token in named.items() if name in _NEEDED_TOKENS}
        self.bos_id: int | None = ids.get("bos_token")
        """Id of the BOS token, if there is one."""
        self.pad_id: int | None = ids.get("pad_token")
        """Id of the padding token, if there is one. No mask is ever made from it."""
        self.end_of_turn_id: int | None = self._find_end_of_turn()
        """Id of the token with which the template closes the assistant's turn, if it uses one."""
        ends = [ids.get("eos_token"), self.end_of_turn_id, *sorted(generation_eos)]
        usable = [end for end in ends if end is not None]
        if not usable:
            raise ValueError(
                f"{origin}: nothing ends a turn; set eos_token in tokenizer_config.json, "
                "or eos_token_id in generation_config.json"
            )
        self.eos_id: int = usable[0]
        """Id of the tokenizer's end token; the template's or the generation config's where it has none."""
        self.stop_ids: frozenset[int] = frozenset(usable)
        """Every id that ends a turn: of the generation config, of the tokenizer, and of the chat template."""

    @classmethod
    def load(cls, dir: Path, now: datetime | None = None) -> "Tokenizer":
        """Read a checkpoint's tokenizer folder.

        `tokenizer.json` is needed; `tokenizer_config.json`, `generation_config.json`, `chat_template.jinja` and
        `chat_templates/` are read where they exist. Null means absent everywhere, and 0 is an id like any other.

        Args:
            dir: The folder.
            now: What a template that writes today's date writes; default: the time of loading. Give the start of the run
                to get the same prompts after a restart on another day.

        Raises:
            ValueError: For a missing or broken file, tokens outside the vocabulary, or when nothing ends a turn.
        """
        path = dir / "tokenizer_config.json"
        config = _read_json(path)
        named = _named_tokens(path, config)
        return cls(
            _load_backend(dir, config, named),
            named=named,
            templates=read_templates(dir, config),
            generation_eos=_eos_ids(dir / "generation_config.json"),
            origin=str(dir),
            now=now or datetime.now(),
        )

    @cached_property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; the model may have more rows than this, never fewer."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str, *, control: bool = True) -> list[int]:
        """Encode text as it stands, without BOS or EOS.

        Args:
            text: The text; a lone surrogate, which UTF-8 cannot express, becomes U+FFFD.
            control: Whether control tokens spelled out in the text become tokens; False for text of unknown origin.
        """
        text = _valid_unicode(text)
        if control or not self._control.pattern.search(text):
            return self._backend.encode(text, add_special_tokens=False).ids
        messages, _, token_of = self._control.hide([{"role": "user", "content": text}], [])
        return self._encode_marked(messages[0]["content"], token_of)

    def decode(self, ids: Iterable[SupportsIndex], skip_special: bool = False) -> str:
        """Turn ids into text for people, verifiers and logs; never to be encoded again.

        Args:
            ids: Token ids.
            skip_special: Leave special tokens out.
        """
        return self._backend.decode([int(token_id) for token_id in ids], skip_special_tokens=skip_special)

    def decode_stream(self, skip_special: bool = True) -> "DecodeStream":
        """Open a stream that turns ids into printable text as they arrive."""
        return DecodeStream(self, skip_special)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = True
    ) -> str:
        """Write a conversation as text, for people: control tokens in it may be the template's or a user's.

        Arguments and errors as for `apply_chat_template`.
        """
        text, token_of = self._render(messages, tools, add_generation_prompt)
        for mark, token in token_of.items():
            text = text.replace(mark, token)
        return text

    def apply_chat_template(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = True
    ) -> list[int]:
        """Turn a conversation into prompt ids.

        The template decides about BOS; the tokenizer adds none. A checkpoint without a template gets its BOS token, if it
        has one, and the contents of the messages one after the other.

        Args:
            messages: The conversation.
            tools: JSON schemas of the tools on offer.
            add_generation_prompt: Whether to open the assistant's turn at the end.

        Raises:
            ValueError: When the template refuses the conversation; names the template and the message.
        """
        text, token_of = self._render(messages, tools, add_generation_prompt)
        return self._encode_rendered(text, token_of)

    def reply_ids(self, reply: Sequence[Message], *, ended: bool, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Give the ids to append to a sampled turn so that the model can take the next one.

        They close the assistant's turn, hold the reply, and open the next turn. None of them was written by the model. The
        ids before them are left as they are: the template is only asked what follows an assistant's words.

        Args:
            reply: The environment's messages.
            ended: Whether the sampled ids end with a stop token. If so, the turn is closed already and no second end token is
                appended; if it was cut by the length limit, the end token is among these ids.
            tools: JSON schemas of the tools on offer.

        Raises:
            ValueError: When the reply is empty, or the template cannot continue a conversation.
        """
        if not reply:
            raise ValueError("there is no reply to append; the episode is over")
        text, token_of = self._render([*_PROBE, *reply], tools, True)
        return self._after_turn(text, token_of, ended)

    def is_prefix_preserving(self) -> bool:
        """Tell whether rendering a longer conversation only ever appends to the rendering of its beginning.

        False for templates that rewrite earlier turns, such as those that drop old reasoning. Conversations built with
        `reply_ids` are right either way; one rendered again from messages is not what the model saw when this is False.
        """
        answer = {"role": "assistant", "content": "<think>\nreason\n</think>\n\nanswer"}
        question = {"role": "user", "content": "question"}
        talk = [question, answer, question, answer, question]
        texts = [self.render(talk[: count + 1], add_generation_prompt=False) for count in range(len(talk))]
        return all(longer.startswith(shorter) for shorter, longer in pairwise(texts))

    def _named_id(self, name: str, token: str) -> int:
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ValueError(
                f"{self._origin}: {name} {token!r} (tokenizer_config.json) is not in the vocabulary (tokenizer.json)"
            )
        return token_id

    def _template_for(self, tools: Sequence[Mapping[str, Any]]) -> ChatTemplate:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ValueError(f"{self._origin}: has chat templates {sorted(self._templates)}, but none is named 'default'")
        return self._templates[name]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], generate: bool
    ) -> tuple[str, dict[str, str]]:
        """Render with the control tokens of foreign text hidden behind marks."""
        shown, shown_tools, token_of = self._control.hide(plain_messages(messages), plain(list(tools)))
        return self._template_for(tools).render(shown, shown_tools, generate), token_of

    def _encode_rendered(self, text: str, token_of: Mapping[str, str]) -> list[int]:
        text = _valid_unicode(text)
        # Without marks this is the plain call, so that ordinary conversations cannot differ from it.
        return self._encode_marked(text, token_of) if token_of else self._backend.encode(text, add_special_tokens=False).ids

    def _encode_marked(self, text: str, token_of: Mapping[str, str]) -> list[int]:
        control = self._control
        id_of_alias = {control.alias[token]: token_id for token, token_id in control.ids.items()}
        ids = []
        for piece in self._renamed.encode(control.rename(text, token_of), add_special_tokens=False).tokens:
            if piece in control.ids:
                raise ValueError(
                    f"{self._origin}: this vocabulary cannot tell the text {piece!r} from the control token; "
                    "remove it from the messages"
                )
            ids.append(id_of_alias[piece] if piece in id_of_alias else self._backend.token_to_id(piece))
        return ids

    @cached_property
    def _renamed(self) -> Backend:
        """The same tokenizer, to which control tokens are known by their aliases.

        One encoder for all of a marked text: what surrounds a control token is normalised and split exactly as always.
        """
        description = json.loads(self._backend.to_str())
        renamed = Backend.from_str(json.dumps(description | {"added_tokens": [], "post_processor": None}))
        for _, token in sorted(self._backend.get_added_tokens_decoder().items()):
            flags = {name: getattr(token, name) for name in _ADDED_TOKEN_FIELDS if name != "content"}
            renamed.add_tokens([AddedToken(self._control.alias.get(token.content, token.content), **flags)])
        return renamed

    def _after_turn(self, text: str, token_of: Mapping[str, str], ended: bool) -> list[int]:
        """Encode what follows the placeholder turn, without the end token if it was sampled."""
        _, found, after = text.partition(_PLACEHOLDER)
        if not found:
            raise ValueError(f"{self._origin}: the chat template does not show what the assistant says; it cannot take turns")
        ids = self._encode_rendered(after, token_of)
        end = self._leading_control(after)
        return ids[ids.index(end) + 1 :] if ended and end in self.stop_ids else ids

    def _leading_control(self, text: str) -> int | None:
        """Give the id of the control token that text starts with, white space aside."""
        match = self._control.pattern.match(text.lstrip())
        return self._control.ids[match.group()] if match else None

    def _find_end_of_turn(self) -> int | None:
        """Render a short conversation and read the token behind the assistant's words."""
        for talk in (_PROBE, [{"role": "system", "content": "system"}, *_PROBE]):
            try:
                text, _ = self._render(talk, (), False)
            except ValueError:  # this template wants another shape of conversation, or has no default
                continue
            end = self._leading_control(text.partition(_PLACEHOLDER)[2])
            if end is not None:
                return end
        return None


def _valid_unicode(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates, which no tokenizer accepts, by U+FFFD."""
    if not _SURROGATE.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class DecodeStream:
    """Ids in, printable text out, for a terminal.

    Example:
        stream = tokenizer.decode_stream()
        for token_id in sampled:
            print(stream.push(token_id), end="")
        print(stream.flush())
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        """Open the stream; `Tokenizer.decode_stream` is the short way."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._shown: list[int] = []  # the last tokens printed: some decoders treat the first token of a text differently
        self._held: list[int] = []
        self._given = 0  # characters of the held ids that were given already
        self._waiting = 0  # ids since the incomplete character at their end began

    def push(self, token_id: SupportsIndex) -> str:
        """Take the next id and give the text that is certain now: all but an incomplete character at the end."""
        self._held.append(int(token_id))
        text = self._new_text()
        certain = text.rstrip("\ufffd")
        self._waiting = 1 if len(certain) > self._given else self._waiting + 1
        if certain == text or self._waiting == _HELD_TOKENS:
            return self._release(text)
        fresh, self._given = certain[self._given :], max(self._given, len(certain))
        return fresh

    def flush(self) -> str:
        """Give what is still held back, broken or not."""
        return self._release(self._new_text()) if self._held else ""

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._shown, self._skip_special)
        return self._tokenizer.decode([*self._shown, *self._held], self._skip_special)[len(before) :]

    def _release(self, text: str) -> str:
        fresh, self._given, self._waiting = text[self._given :], 0, 0
        # Ids that show nothing do not take the place of those that do: what follows them is still no beginning.
        self._shown, self._held = self._held if text else [*self._shown, *self._held][-_HELD_TOKENS:], []
        return fresh


_PROBE: list[Message] = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _PLACEHOLDER}]
