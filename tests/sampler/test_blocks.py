"""Blocks are given to one holder at a time, the lowest first, and come back with the last one that needs them."""

import numpy as np
import pytest

from rljax.sampler.blocks import Ledger, Pool, Size, empty_page_table, empty_tables
from rljax.sampler.cache import BLOCK

PROMPT = tuple(range(BLOCK + 5))  # two blocks
SLOTS = {slot: slot for slot in range(4)}  # a row for each


def a_ledger(prompts: int = 4, own: int = 6, readers: int = 2) -> Ledger:
    return Ledger(shards=1, readers=readers, prompts=Pool(prompts), own=Pool(own))


def test_a_pool_gives_its_lowest_blocks_and_all_or_none() -> None:
    pool = Pool(5)
    assert (pool.take(2), pool.take(2)) == ([0, 1], [2, 3])
    assert pool.take(2) is None
    pool.give([1])
    assert pool.take(2) == [1, 4]
    pool.give([2, 3, 4])
    assert (pool.used, pool.size) == (2, 5)
    with pytest.raises(KeyError):
        pool.give([4])


def test_readers_share_a_prompt_until_its_places_are_taken() -> None:
    ledger = a_ledger()
    assert not ledger.has_place(PROMPT)
    assert ledger.seat(0, PROMPT, 1)
    assert (ledger.prompt_of(0).blocks, ledger.prompt_of(0).computed) == ([0, 1], 0)
    assert ledger.has_place(PROMPT)
    assert ledger.seat(1, PROMPT, 1)
    assert ledger.prompt_of(1) is ledger.prompt_of(0)
    assert not ledger.has_place(PROMPT)
    assert ledger.seat(2, PROMPT, 1)
    assert ledger.prompt_of(2).blocks == [2, 3]  # a second copy
    ledger.leave(0)
    assert ledger.prompts.used == 4
    assert ledger.seat(3, PROMPT, 1)
    assert ledger.prompt_of(3).blocks == [0, 1]  # in the place that became free
    for slot in (1, 2, 3):
        ledger.leave(slot)
    assert (ledger.prompts.used, ledger.own.used) == (0, 0)
    assert not ledger.has_place(PROMPT)


def test_without_room_nothing_is_taken() -> None:
    ledger = a_ledger(prompts=3, own=3)
    ledger.seat(0, PROMPT, BLOCK + 1)
    assert not ledger.seat(1, (9,) * BLOCK * 2, 1)  # no prompt blocks
    assert not ledger.seat(1, (9,), 2 * BLOCK)  # no own blocks
    assert (ledger.prompts.used, ledger.own.used) == (2, 2)
    assert not ledger.extend(0, 4 * BLOCK)
    assert ledger.own.used == 2
    assert ledger.extend(0, 3 * BLOCK)
    assert ledger.own.used == 3


def test_what_is_parked_keeps_its_blocks_and_its_place_and_is_read_by_nobody() -> None:
    ledger = a_ledger(own=4)
    ledger.seat(0, PROMPT, 3 * BLOCK)
    ledger.seat(1, PROMPT, 1)
    parked = ledger.park(0, BLOCK + 1)
    assert (parked.blocks, parked.start, ledger.own.used) == ([0, 1], len(PROMPT), 3)  # the third block is free again
    assert not ledger.has_place(PROMPT)
    tables = empty_tables(1, Size(4, 4, 6, (2, 2)), 2)
    ledger.write(tables, 0, SLOTS)
    assert np.asarray(tables.prompt_slot).tolist() == [[-1, 1], [-1, 1], [-1, -1], [-1, -1]]
    assert np.asarray(tables.own_slot).tolist() == [-1, -1, -1, 1, -1, -1]
    assert ledger.need((1, 2, 4), (2, 3, 4)) == Size(1, 2, 3, (2, 1))  # what is parked lies below two of the own blocks
    assert not ledger.resume(2, parked, 4 * BLOCK)
    assert ledger.own.used == 3
    assert ledger.resume(2, parked, 2 * BLOCK + 1)
    assert (ledger.blocks_of(2), ledger.prompt_of(2)) == ([0, 1, 2], ledger.prompt_of(1))
    ledger.leave(1)
    ledger.drop(ledger.park(2, 1))
    assert (ledger.prompts.used, ledger.own.used) == (0, 0)
    assert not ledger.has_place(PROMPT)


def test_a_forgotten_prompt_is_read_on_and_joined_by_nobody() -> None:
    ledger = a_ledger()
    ledger.seat(0, PROMPT, 1)
    ledger.forget()
    assert not ledger.has_place(PROMPT)
    assert ledger.prompts.used == 2
    ledger.seat(1, PROMPT, 1)
    assert ledger.prompt_of(1) is not ledger.prompt_of(0)
    ledger.leave(0)
    assert (ledger.prompts.used, ledger.has_place(PROMPT)) == (2, True)
    ledger.leave(1)
    assert (ledger.prompts.used, ledger.own.used) == (0, 0)


def test_tables_name_each_block_and_its_readers_in_the_order_of_tokens() -> None:
    ledger = a_ledger()
    ledger.seat(1, PROMPT, BLOCK + 1)
    ledger.seat(0, PROMPT, 1)
    ledger.seat(2, (), 1)
    assert ledger.need((1, 2, 4), (2, 4, 6)) == Size(3, 2, 4, (2, 2))
    tables = empty_tables(1, Size(4, 4, 6, (2, 2)), 2)
    ledger.write(tables, 0, SLOTS)
    expected = {
        "prompt_slot": [[1, 0], [1, 0], [-1, -1], [-1, -1]],
        "prompt_start": [0, BLOCK, -1, -1],
        "prompt_filled": [BLOCK, 5, -1, -1],
        "own_slot": [1, 1, 0, 2, -1, -1],
        "own_start": [BLOCK + 5, 2 * BLOCK + 5, BLOCK + 5, 0, -1, -1],
        "prompt_parts": [[1, 3], [0, 2], [-1, -1], [-1, -1]],
        "own_parts": [[2, -1], [0, 1], [3, -1], [-1, -1]],
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(getattr(tables, name), value, err_msg=name)


def test_every_data_shard_writes_its_own_part_of_the_tables() -> None:
    ledger = Ledger(shards=2, readers=1, prompts=Pool(2), own=Pool(3))
    ledger.seat(0, PROMPT, 1)
    tables = empty_tables(2, Size(2, 2, 3, (2, 1)), 1)
    ledger.write(tables, 1, SLOTS)
    assert np.asarray(tables.own_slot).tolist() == [-1, -1, -1, 0, -1, -1]
    assert np.asarray(tables.prompt_parts).tolist() == [[-1, -1], [-1, -1], [0, 1], [-1, -1]]


def test_pages_are_one_sequence_whose_own_part_begins_where_a_block_of_the_prompt_does() -> None:
    ledger = Ledger(shards=1, readers=2, prompts=Pool(4), own=Pool(6), aligned=True)
    assert [ledger.start_of(PROMPT[:length]) for length in (0, 31, 32, 33)] == [0, 0, BLOCK, BLOCK]
    ledger.seat(1, PROMPT, 5 + BLOCK)
    ledger.seat(0, PROMPT, 6)
    ledger.seat(3, (), 1)
    assert ledger.prompt_of(0).blocks == [0, 1]  # the second one is the source of copies
    table = empty_page_table(4, 4)
    ledger.write(table, 0, SLOTS)
    assert np.asarray(table.pages).tolist() == [[0, 4 + 2, 0, 0], [0, 4 + 0, 4 + 1, 0], [0, 0, 0, 0], [4 + 3, 0, 0, 0]]
    parked = ledger.park(1, 6)
    assert (parked.blocks, parked.start) == ([0], BLOCK)
    assert ledger.resume(2, parked, BLOCK + 1)
    assert ledger.pages_of(2) == [0, 4 + 0, 4 + 1]


def test_blocks_move_down_into_the_room_that_others_left() -> None:
    ledger = a_ledger(prompts=8, own=8, readers=1)
    for slot in range(3):
        ledger.seat(slot, (slot, *PROMPT), 2 * BLOCK)
    ledger.seat(3, (9,), 1)
    ledger.leave(0)
    ledger.leave(2)
    need = ledger.need((2, 4, 8), (2, 4, 8))
    assert need == Size(2, 4, 4, (2, 2))  # two blocks and one of prompts, two and one of their own
    first = ledger.prompts.size
    assert sorted(ledger.compact(need)) == [(6, 0), (first + 6, first + 0)]
    assert (ledger.prompt_of(1).blocks, ledger.prompt_of(3).blocks) == ([2, 3], [0])
    assert (ledger.blocks_of(1), ledger.blocks_of(3)) == ([2, 3], [0])
    assert ledger.compact(need) == []
    assert (ledger.prompts.used, ledger.own.used) == (3, 3)
    assert ledger.rows() == {1: 0, 3: 1}
    tables = empty_tables(1, need, 1)
    ledger.write(tables, 0, ledger.rows())
    assert np.asarray(tables.own_slot).tolist() == [1, -1, 0, 0]
    assert np.asarray(tables.own_parts).tolist() == [[2, 3], [0, -1]]


def test_what_is_parked_does_not_move() -> None:
    ledger = a_ledger(prompts=2, own=8, readers=3)
    for slot in range(3):
        ledger.seat(slot, PROMPT, 2 * BLOCK)
    parked = ledger.park(0, BLOCK + 1)
    ledger.leave(1)
    assert ledger.need((2,), (2, 3, 4, 8)).own == 4
    assert ledger.compact(ledger.need((2,), (2, 4, 8))) == [(2 + 4, 2 + 2), (2 + 5, 2 + 3)]
    assert (parked.blocks, ledger.blocks_of(2)) == ([0, 1], [2, 3])
    assert ledger.resume(0, parked, 1)
    assert ledger.blocks_of(0) == [0, 1]
