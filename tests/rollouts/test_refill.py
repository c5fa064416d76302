"""Dynamic sampling: uninformative groups are replaced whole, the stream is used up in order, and the search ends."""

import pytest

from rljax.config import Config
from rljax.records import Group
from rljax.rollouts.refill import NothingToLearn, fill_batch
from tests.rollouts.test_batching import group, settings

SOLVED, FAILED, MIXED, BROKEN = [1.0] * 4, [0.0] * 4, [1.0, 0.0, 0.0, 0.0], [None, None, None, 1.0]


class Stream:
    """Groups in order, and what was asked for."""

    def __init__(self, *rewards: list) -> None:
        self.groups = [group(str(index), row) for index, row in enumerate(rewards)]
        self.asked: list[tuple[int, int]] = []

    def sample(self, taken: int, count: int) -> list[Group]:
        self.asked.append((taken, count))
        return self.groups[taken : taken + count]


def filled(stream: Stream, *more: str) -> list[str]:
    return [kept.task.id for kept in fill_batch(stream.sample, config(*more)).kept]


def config(*more: str) -> Config:
    return settings("algorithm.dynamic_sampling=true", *more)


def test_without_it_a_batch_is_what_was_sampled() -> None:
    stream = Stream(SOLVED, FAILED, MIXED)
    collected = fill_batch(stream.sample, settings())
    assert [kept.task.id for kept in collected.kept] == ["0", "1"]
    assert (collected.kept, collected.tasks, stream.asked) == (collected.sampled, 2, [(0, 2)])


def test_uninformative_groups_are_replaced_by_the_tasks_that_follow() -> None:
    stream = Stream(SOLVED, MIXED, BROKEN, FAILED, MIXED, MIXED)
    collected = fill_batch(stream.sample, config())
    assert [kept.task.id for kept in collected.kept] == ["1", "4"]
    assert stream.asked == [(0, 2), (2, 1), (3, 1), (4, 1)]
    assert (collected.tasks, len(collected.sampled)) == (5, 5)
    assert all(len(kept.rollouts) == 4 for kept in collected.kept)


def test_a_full_batch_asks_for_nothing_more() -> None:
    stream = Stream(MIXED, MIXED, MIXED)
    assert filled(stream) == ["0", "1"]
    assert stream.asked == [(0, 2)]


def test_the_search_ends_with_what_was_seen() -> None:
    stream = Stream(*[FAILED] * 3, SOLVED, MIXED, *[FAILED] * 9)
    with pytest.raises(NothingToLearn) as caught:
        fill_batch(stream.sample, config("algorithm.dynamic_sampling_max_rounds=3"))
    assert stream.asked == [(0, 2), (2, 2), (4, 2)]
    message = str(caught.value)
    assert "found 1 of 2 groups" in message
    assert "6 groups and 3 rounds (algorithm.dynamic_sampling_max_rounds)" in message
    assert "4 of reward 0, 1 of reward 1" in message


def test_more_rounds_do_not_change_a_batch_that_was_filled() -> None:
    rewards = [SOLVED, MIXED, FAILED, MIXED]
    few, many = (filled(Stream(*rewards), f"algorithm.dynamic_sampling_max_rounds={rounds}") for rounds in (3, 30))
    assert few == many == ["1", "3"]
    assert config().hash() == config("algorithm.dynamic_sampling_max_rounds=30").hash(), "so a stopped run may be given more"
