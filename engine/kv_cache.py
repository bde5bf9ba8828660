"""KVBlockPool: which block of the KV cache belongs to whom. Block ids only, no tensors, no torch.

A block holds the keys and values of `block_size` consecutive tokens of one sequence, in every layer.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reserved:
    """The blocks that were added to the table (none, where its last block still had room)."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OutOfBlocks:
    """Nothing was reserved: `missing` more blocks would have to be free."""

    missing: int


class IntegrityError(AssertionError):
    """The pool's books do not agree with the block tables: a bug of ours, never a caller's mistake."""


class KVBlockPool:
    """Free blocks lie in a heap, lowest id first: a sequence alone gets a contiguous run, which attention reads in place."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 1
        assert block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # ascending, hence a heap
        self._held = bytearray(num_blocks)  # 1 where a table holds the block

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that some table holds."""
        return self.num_blocks - len(self._free)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens of one sequence take."""
        return -(-tokens // self.block_size)

    def reserve(self, table: list[int], tokens: int) -> Reserved | OutOfBlocks:
        """Grows a block table until it holds `tokens` tokens: all of it, or nothing."""
        needed = self.blocks_for(tokens) - len(table)
        if needed <= 0:
            return Reserved(())
        if needed > len(self._free):
            return OutOfBlocks(needed - len(self._free))
        blocks = tuple(heapq.heappop(self._free) for _ in range(needed))
        for block in blocks:
            self._held[block] = 1
        table.extend(blocks)
        return Reserved(blocks)

    def release(self, table: list[int]) -> None:
        """Gives back every block of a table and empties it. A second call on the same table does nothing."""
        for block in table:
            if not self._held[block]:
                raise IntegrityError(f"block {block} is released, but nobody holds it")
            self._held[block] = 0
            heapq.heappush(self._free, block)
        table.clear()

    def fragmentation(self) -> float:
        """(free - longest run of free blocks) / free; 0.0 where none is free. Linear in the number of free blocks."""
        free = sorted(self._free)  # a copy in one step, so that another thread may ask
        longest = run = 0
        previous = None
        for block in free:
            run = run + 1 if previous is not None and block == previous + 1 else 1
            longest = max(longest, run)
            previous = block
        return (len(free) - longest) / len(free) if free else 0.0

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Raises IntegrityError unless every block is either free once or in exactly one table once."""
        owners = bytearray(self.num_blocks)
        for block in [*self._free, *(block for table in tables for block in table)]:
            if not 0 <= block < self.num_blocks:
                raise IntegrityError(f"block {block} does not exist")
            if owners[block]:
                raise IntegrityError(f"block {block} has two owners")
            owners[block] = 1
        if (lost := owners.find(0)) >= 0:
            raise IntegrityError(f"block {lost} is neither free nor in a table")
        for block in self._free:
            if self._held[block]:
                raise IntegrityError(f"block {block} is free, but marked as held")
