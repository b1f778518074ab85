"""A simulated engine's memory: for each block, what its KV was computed for.

A cell is the stretch of a block that can be proven on its own: the block, or a segment of 64 tokens where a
block is longer, for there a proof may end in the middle of one. It holds the state (see `text`) of the tokens
that were computed into it. A transfer copies cells as they are. Attention looks at every cell of a request's
block table: if one of them is not what the request's own tokens say, whatever is computed next differs, and
so does the answer. The memory knows nothing of leases, claims or reference counts, and nobody asks it for
permission: that is what makes a mistake visible.
"""

from array import array
from collections.abc import Iterable, Sequence

from kvloop.core.chain import SEGMENT_TOKENS
from kvloop.errors import UserError
from kvloop.sim.text import Text, mixed

EMPTY = 0  # no text has this state, but by a chance of 2**-64


def cell_size(block_tokens: int) -> int:
    """Tokens in a cell. UserError for a block size with which segments and blocks do not line up."""
    if block_tokens <= 0 or (block_tokens % SEGMENT_TOKENS and SEGMENT_TOKENS % block_tokens):
        raise UserError(
            f"a block of {block_tokens} tokens is neither a multiple nor a part of {SEGMENT_TOKENS}"
        )
    return min(block_tokens, SEGMENT_TOKENS)


class Memory:
    """The cells of one engine's blocks."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.cell_tokens = cell_size(block_tokens)
        self._cells_per_block = block_tokens // self.cell_tokens
        self._cells = array("Q", bytes(8 * blocks * self._cells_per_block))

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self._cells) // self._cells_per_block

    def read(self, blocks: Sequence[int]) -> list[int]:
        """The contents of `blocks`, cell by cell. IndexError for a block that is not there."""
        cells = self._cells
        return [cells[cell] for cell in self._numbers(blocks)]

    def write(self, blocks: Sequence[int], contents: Sequence[int]) -> None:
        """Let `blocks` hold `contents`, as a transfer does. ValueError unless there is one for each cell."""
        for cell, state in zip(self._numbers(blocks), contents, strict=True):
            self._cells[cell] = state

    def seen(self, text: Text, blocks: Sequence[int], tokens: int) -> int:
        """0 where `blocks` hold the KV of the first `tokens` tokens of `text`; else what is there instead."""
        if not tokens:
            return 0
        held = self.read(blocks[: -(-tokens // (self.cell_tokens * self._cells_per_block))])
        expected = text.states_up_to(tokens)
        del held[len(expected) :]
        return 0 if held == expected else mixed(*held)

    def compute(self, text: Text, blocks: Sequence[int], start: int, end: int, seen: int) -> None:
        """Fill `blocks` with the KV of tokens `start` to `end`, computed from what was `seen` before them."""
        first, last = start // self.cell_tokens, -(-end // self.cell_tokens)
        states = text.states_up_to(end)[first:]
        if seen:
            states = [mixed(seen, state) for state in states]
        per_block = self._cells_per_block
        for cell, state in zip(range(first, last), states, strict=True):
            self._cells[blocks[cell // per_block] * per_block + cell % per_block] = state

    def _numbers(self, blocks: Sequence[int]) -> Iterable[int]:
        per_block = self._cells_per_block
        if per_block == 1:
            return blocks
        return [block * per_block + place for block in blocks for place in range(per_block)]


def torn(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """What a transfer brings whose source was rewritten on the way: neither the one nor the other."""
    return [first if first == last else mixed(first, last) for first, last in zip(before, after, strict=True)]
