"""Stop strings: where a completion ends because of what it says.

Owns the search for stop strings in text that comes token by token, across tokens and split characters. Refuses to own the
decoding of tokens (the caller brings it) and the slots (engine.py).

The rule, for text and for tokens:

    stop ".."     tokens "a" "..."     text "a"     tokens kept: both

- The first stop string to be complete ends the completion; of several that end at the same character, the longest.
- Tokens up to and including the one that completes it are kept, with their log-probabilities: they were sampled.
- Text ends before it, and text that might still become one is not shown.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, SupportsIndex, runtime_checkable


@runtime_checkable
class TextStream(Protocol):
    """Tokens in, text out, in time that does not grow with the text; `data.tokenizer.DecodeStream` is one."""

    def push(self, token_id: SupportsIndex) -> str:
        """Take the next token and give the text that is certain now."""
        ...

    def flush(self) -> str:
        """Give what is still held back."""
        ...


class StopStream:
    """Tokens in, text out, up to the first stop string.

    Example:
        stream = StopStream(tokenizer.decode_stream(), stop=("\\n\\n",))
        for token in sampled:
            print(stream.push(token), end="")
            if stream.stop is not None:
                break
        print(stream.flush())
    """

    def __init__(self, text: TextStream, stop: Sequence[str], min_tokens: int = 0):
        """Begin before the first token.

        Args:
            text: Turns tokens into text.
            stop: Stop strings.
            min_tokens: Tokens among which none completes a stop string.
        """
        self._text, self._stops, self._min_tokens = text, tuple(stop), min_tokens
        self._longest = max(map(len, self._stops), default=0)
        self._tail = ""  # the last characters, as many as may belong to a stop string that is not complete yet
        self._held = 0  # how many of them have not been given out
        self.count = 0
        """Tokens taken so far."""
        self.stop: str | None = None
        """The stop string that was found."""

    def push(self, token_id: SupportsIndex) -> str:
        """Take the next token and give the text that can be shown now."""
        assert self.stop is None, "nothing follows a stop string"
        self.count += 1
        fresh = self._text.push(token_id)
        window, first = self._tail + fresh, len(self._tail)
        shown = first - self._held
        found = self._find(window, first) if self.count > self._min_tokens else None
        if found is not None:
            start, self.stop = found
            return window[shown:start]
        self._held = self._beginning(window)
        self._tail = window[max(0, len(window) - self._longest + 1) :] if self._longest else ""
        return window[shown : len(window) - self._held]

    def flush(self) -> str:
        """Give what is still held back, when no stop string came."""
        if self.stop is not None:
            return ""
        rest = self._tail[len(self._tail) - self._held :] + self._text.flush()
        self._tail, self._held = "", 0
        return rest

    def _find(self, window: str, first: int) -> tuple[int, str] | None:
        """Return where the stop string begins that is the first to end after `first` characters, and the string."""
        found = []
        for stop in self._stops:
            start = window.find(stop, max(0, first - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start, stop))
        return min(found)[1:] if found else None

    def _beginning(self, window: str) -> int:
        """Return how many characters at the end may be the beginning of a stop string."""
        for length in range(min(len(window), self._longest - 1), 0, -1):
            if any(stop.startswith(window[-length:]) for stop in self._stops if len(stop) > length):
                return length
        return 0


def text_before_stop(tokens: Sequence[int], stop: str | int | None, decode: Callable[[Sequence[int]], str]) -> str:
    """Return a completion's text, cut before the stop string that its last token completes.

    Args:
        tokens: The completion's tokens.
        stop: `Completion.stop`.
        decode: Turns tokens into text.
    """
    text = decode(tokens)
    if not isinstance(stop, str):
        return text
    # It ends in what the last token adds; an earlier occurrence is one that min_tokens did not count.
    known = len(decode(tokens[:-1]).rstrip("\ufffd"))
    start = text.find(stop, max(0, known - len(stop) + 1))
    return text[:start] if start >= 0 else text.partition(stop)[0]
