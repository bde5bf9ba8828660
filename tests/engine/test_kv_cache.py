"""The pool's books under any sequence of operations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.engine.kv_cache import IntegrityError, KVBlockPool, OutOfBlocks, Reserved


@given(
    num_blocks=st.integers(1, 40),
    block_size=st.sampled_from([1, 3, 16]),
    actions=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 200), st.booleans()), max_size=60),
)
def test_no_block_is_lost_or_shared(num_blocks: int, block_size: int, actions: list[tuple[int, int, bool]]) -> None:
    pool = KVBlockPool(num_blocks, block_size)
    tables: list[list[int]] = [[] for _ in range(6)]
    for who, tokens, give_back in actions:
        table, before, free = tables[who], len(tables[who]), pool.free
        if give_back:
            pool.release(table)
            assert pool.free == free + before
        else:
            wanted = max(0, -(-tokens // block_size) - before)
            match pool.reserve(table, tokens):
                case Reserved(blocks):
                    assert len(blocks) == wanted
                    assert table[before:] == list(blocks)
                case OutOfBlocks(missing):
                    assert missing == wanted - free
                    assert (len(table), pool.free) == (before, free)
        pool.check_integrity(tables)
        assert pool.used == sum(map(len, tables))
        assert 0.0 <= pool.fragmentation() <= 1.0
    for table in tables:
        pool.release(table)
    assert pool.free == num_blocks
    assert pool.fragmentation() == 0.0


def test_a_sequence_alone_gets_consecutive_blocks() -> None:
    pool = KVBlockPool(10, 16)
    other: list[int] = []
    pool.reserve(other, 40)
    pool.release(other)
    table: list[int] = []
    for tokens in (1, 17, 60):
        pool.reserve(table, tokens)
    assert table == [0, 1, 2, 3]


def test_fragmentation_is_the_share_of_free_blocks_outside_the_longest_run() -> None:
    pool = KVBlockPool(8, 1)
    tables: list[list[int]] = [[] for _ in range(8)]
    for table in tables:
        pool.reserve(table, 1)
    assert pool.fragmentation() == 0.0  # nothing is free
    for free in (0, 2, 3, 6):
        pool.release(tables[free])
    assert pool.fragmentation() == pytest.approx((4 - 2) / 4)


def test_a_table_released_twice_changes_nothing() -> None:
    pool = KVBlockPool(4, 2)
    table: list[int] = []
    pool.reserve(table, 5)
    pool.release(table)
    pool.release(table)
    assert pool.free == 4


def test_broken_books_are_found() -> None:
    pool = KVBlockPool(4, 2)
    table: list[int] = []
    pool.reserve(table, 4)
    copied = list(table)
    with pytest.raises(IntegrityError, match="two owners"):
        pool.check_integrity([table, copied])
    with pytest.raises(IntegrityError, match="neither free nor in a table"):
        pool.check_integrity([])
    with pytest.raises(IntegrityError, match="does not exist"):
        pool.check_integrity([[*table, 9]])
    pool.release(table)
    with pytest.raises(IntegrityError, match="nobody holds it"):
        pool.release(copied)
