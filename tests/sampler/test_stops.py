"""A stop string ends a completion where it is complete, in whatever pieces it comes; tokens stay whole, text hides it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rljax.data.tokenizer import Tokenizer
from rljax.sampler.stops import StopStream, text_before_stop
from tests.tiny_run import tiny_checkpoint


class Pieces:
    """Knows tokens by their place in a list."""

    def __init__(self, pieces: Sequence[str]) -> None:
        """Take what each token says."""
        self._pieces = pieces

    def push(self, token_id: Any) -> str:
        """Say it."""
        return self._pieces[token_id]

    def flush(self) -> str:
        """Hold nothing back."""
        return ""

    def decode(self, tokens: Sequence[int]) -> str:
        """Say all of it."""
        return "".join(self._pieces[token] for token in tokens)


def read(pieces: Sequence[str], stop: Sequence[str], min_tokens: int = 0) -> tuple[str, int, str | None]:
    """Return the text that is shown, the tokens that are kept, and what ended them."""
    text = Pieces(pieces)
    stream, shown = StopStream(text, stop, min_tokens), ""
    for token in range(len(pieces)):
        shown += stream.push(token)
        assert not any(known in shown for known in stop) or min_tokens
        if stream.stop is not None:
            break
    shown += stream.flush()
    assert shown == text_before_stop(range(stream.count), stream.stop, text.decode)
    return shown, stream.count, stream.stop


def test_the_token_that_overshoots_stays_and_the_text_ends_before_the_string() -> None:
    assert read(["a", "..."], [".."]) == ("a", 2, "..")
    assert read(["a", ".", ".b", "c"], [".."]) == ("a", 3, "..")
    assert read(["a.", ".", "."], [".."]) == ("a", 2, "..")


def test_only_a_string_that_is_whole_ends_it() -> None:
    pieces = ["un", "der", "x", "stand", "s"]
    assert read(pieces, ["understand"]) == ("underxstands", 5, None)
    assert read(["3", "un", "der", "stand", "s"], ["understand"]) == ("3", 4, "understand")
    assert read(["aab", "aaa", "b"], ["aaab"]) == ("aab", 3, "aaab")


def test_the_first_to_be_complete_ends_it_whatever_the_pieces() -> None:
    for pieces in (["abcd"], ["a", "b", "c", "d"], ["ab", "cd"]):
        assert read(pieces, ["abcd", "bc"])[::2] == ("a", "bc")
        assert read(pieces, ["c", "bc", "abc"])[::2] == ("", "abc"), "of those that end together, the longest"


def test_what_is_complete_too_early_does_not_count() -> None:
    assert read(["x", "END", "y", "EN", "D", "z"], ["END"], min_tokens=2) == ("xENDy", 5, "END")
    assert read(["E", "ND", "z"], ["END"], min_tokens=2) == ("ENDz", 3, None)
    assert read(["E", "N", "D"], ["END"], min_tokens=2) == ("", 3, "END")
    assert read(["END"], ["END"], min_tokens=1) == ("END", 1, None)


def test_random_texts_end_where_a_search_after_every_token_ends_them() -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(400):
        pieces = ["".join(rng.choice(list("ab"), rng.integers(0, 4))) for _ in range(12)]
        stop = ["".join(rng.choice(list("ab"), rng.integers(2, 6))) for _ in range(rng.integers(1, 4))]
        text, count, ended = read(pieces, stop)
        whole = ["".join(pieces[: n + 1]) for n in range(len(pieces))]
        first = next((n for n, said in enumerate(whole) if any(known in said for known in stop)), None)
        assert count == (len(pieces) if first is None else first + 1)
        if first is None:
            assert (text, ended) == (whole[-1], None)
        else:
            ends = [(whole[first].find(known) + len(known), known) for known in stop if known in whole[first]]
            assert (len(text + str(ended)), ended) in ends
            assert len(text + str(ended)) == min(end for end, _ in ends)
            found += 1
    assert 100 < found < 390


def test_text_that_may_become_a_stop_string_waits() -> None:
    stream = StopStream(Pieces(["ab", "c", "ab", "cd"]), ["abcd"])
    assert [stream.push(token) for token in range(4)] == ["", "", "abc", ""]
    stream = StopStream(Pieces(["xab"]), ["abcd"])
    assert stream.push(0) + "|" + stream.flush() == "x|ab"


def test_characters_are_put_together_from_tokens() -> None:
    tokenizer = Tokenizer.load(tiny_checkpoint())
    fox = tokenizer.encode("🦊")
    assert len(fox) == 4
    ids = [*tokenizer.encode("a"), *fox, *tokenizer.encode("b")]
    for stop, text, count in (("🦊", "a", 5), ("a", "", 1), ("🦊b", "a", 6), ("🦊c", "a🦊b", 6)):
        stream, shown = StopStream(tokenizer.decode_stream(), [stop]), ""
        for token in ids:
            shown += stream.push(token)
            if stream.stop:
                break
        assert (shown + stream.flush(), stream.count) == (text, count)
        assert text_before_stop(ids[:count], stream.stop, tokenizer.decode) == text


def test_long_texts_take_no_longer_per_token() -> None:
    """What is looked at for a token is bounded: the stop strings' length and the token's own text."""

    class Windows(StopStream):
        longest = 0

        def _find(self, window: str, first: int) -> tuple[int, str] | None:
            Windows.longest = max(Windows.longest, len(window))
            return super()._find(window, first)

    stream = Windows(Pieces(["ab"] * 2000), ["abac"])
    for token in range(2000):
        stream.push(token)
    assert Windows.longest <= 5


@pytest.mark.parametrize("stop", [None, 2])
def test_an_end_token_or_a_limit_cuts_no_text(stop: int | None) -> None:
    assert text_before_stop([0, 1], stop, Pieces(["a", "b"]).decode) == "ab"
