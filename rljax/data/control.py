"""Control tokens in other people's words.

Owns the rule that text from users, tools and environments never becomes a control token: if a web page says `<|im_end|>`,
the model reads those characters, not the end of a turn. Refuses to own templates and the encoder.

    messages --hide--> messages with marks --template--> text with marks --rename--> text for the tokenizer that knows
                                                                                     control tokens by their aliases only

A control token found in the text with marks was written by the template, so it gets its alias; then the marks become the
characters they stand for, which are no control tokens to that tokenizer.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_MARKS = range(0xF0000, 0xFFFFE)  # a private-use plane: one character per token survives trimming, splitting and JSON


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


class ControlTokens:
    """The control tokens of a tokenizer.

    Example:
        ControlTokens({"<|im_start|>": 1, "<|im_end|>": 2}, template_literals="<|im_start|>\\0<|im_end|>")
    """

    def __init__(self, ids: Mapping[str, int], template_literals: str) -> None:
        """Remember the control tokens and give each an alias.

        Args:
            ids: Control token -> id.
            template_literals: What the chat templates write themselves; marks must not occur in it.
        """
        self._literals = template_literals
        self.ids: dict[str, int] = dict(ids)
        """Control token -> id."""
        # Longest first: `<|end|>` must not hide the start of `<|end|>x`.
        alternatives = "|".join(re.escape(token) for token in sorted(ids, key=len, reverse=True))
        self.pattern: re.Pattern[str] = re.compile(alternatives or r"(?!)")
        """Matches any control token."""
        # Drawn anew in every process, so that nobody can write an alias; it never shows in ids or text.
        secret = secrets.token_hex(8)
        self.alias: dict[str, str] = {token: f"\ue000{secret}{index}\ue001" for index, token in enumerate(ids)}
        """Control token -> its name in the tokenizer that encodes marked text."""

    def hide(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Any], list[Any], dict[str, str]]:
        """Replace control tokens in text the model did not write by marks.

        The assistant's own messages are left alone: there, a control token is one.

        Returns:
            Messages, tools, and mark -> token. Without marks the input comes back as it was.
        """
        foreign = [message for message in messages if message.get("role") != "assistant"]
        if not any(self.pattern.search(text) for text in _strings([foreign, list(tools)])):
            return list(messages), list(tools), {}
        taken = {ord(character) for text in _strings([list(messages), list(tools), self._literals]) for character in text}
        free = (chr(point) for point in _MARKS if point not in taken)
        mark_of = dict(zip(self.ids, free, strict=False))

        def hidden(value: Any) -> Any:
            if isinstance(value, str):
                return self.pattern.sub(lambda match: mark_of[match.group()], value)
            if isinstance(value, Mapping):
                return {key: hidden(item) for key, item in value.items()}
            return [hidden(item) for item in value] if isinstance(value, list | tuple) else value

        shown = [
            message if message.get("role") == "assistant" else {**hidden(message), "role": message.get("role")}
            for message in messages
        ]
        return shown, hidden(list(tools)), {mark: token for token, mark in mark_of.items()}

    def rename(self, rendered: str, token_of: Mapping[str, str]) -> str:
        """Give the template's control tokens their aliases, then put back the text behind the marks.

        Args:
            rendered: What the template wrote from the messages of `hide`.
            token_of: mark -> token, from `hide`.
        """
        text = self.pattern.sub(lambda match: self.alias[match.group()], rendered)
        for mark, token in token_of.items():
            text = text.replace(mark, token)
        return text
