"""Block tables: which blocks a request has, and which of them the prefix cache may offer to others.

A request never takes all of its tokens from the cache: its last one is computed, for something has to be
sampled from it. Before a request goes without blocks, leases are given up.
"""

from kvloop.sim.leases import Leases
from kvloop.sim.pool import BlockPool
from kvloop.sim.sequence import Sequence


class BlockTables:
    """The block tables of one engine's requests."""

    def __init__(self, pool: BlockPool, leases: Leases, block_tokens: int, *, prefix_cache: bool) -> None:
        self._pool = pool
        self._leases = leases
        self._block_tokens = block_tokens
        self._prefix_cache = prefix_cache

    def missing(self, sequence: Sequence, tokens: int) -> int:
        """How many blocks the request lacks to hold so many tokens; 0 or less where none."""
        return -(-tokens // self._block_tokens) - len(sequence.blocks)

    def fit(self, sequence: Sequence, tokens: int, now_ns: int) -> bool:
        """Give a request the blocks to hold so many tokens. False if there are not so many."""
        missing = self.missing(sequence, tokens)
        if missing <= 0:
            return True
        if missing > self._pool.free_count:
            self._leases.make_room(missing, now_ns)
        taken = self._pool.take(missing)
        if taken is None:
            return False
        sequence.blocks += taken
        return True

    def begin(self, sequence: Sequence, blocks: list[int]) -> None:
        """Let a request without blocks start from these, which the cache has found for it."""
        self._pool.touch(blocks)
        sequence.blocks = blocks
        sequence.computed = sequence.local = sequence.cached = len(blocks) * self._block_tokens
        sequence.named_blocks = len(blocks)

    def give_up(self, sequence: Sequence) -> None:
        """Take a request's blocks, and with them all it has computed."""
        self._pool.free(sequence.restart())

    def cut(self, sequence: Sequence, tokens: int) -> None:
        """Leave a request only the blocks of its first tokens, whole blocks, and what they hold."""
        kept = tokens // self._block_tokens
        self._pool.free(sequence.blocks[kept:])
        del sequence.blocks[kept:]
        sequence.computed = sequence.cached = tokens

    def cached(self, sequence: Sequence) -> list[int]:
        """The blocks that hold a prefix of the request, as the cache says. They are not taken."""
        if not self._prefix_cache:
            return []
        return self._pool.cached_prefix(self._names(sequence, (len(sequence.text) - 1) // self._block_tokens))

    def name(self, sequence: Sequence) -> None:
        """Let the cache offer the blocks that the request has filled."""
        full = sequence.computed // self._block_tokens
        if not self._prefix_cache or full <= sequence.named_blocks:
            return
        names = self._names(sequence, full)
        for place in range(sequence.named_blocks, full):
            self._pool.cache(sequence.blocks[place], names[place])
        sequence.named_blocks = full

    def _names(self, sequence: Sequence, blocks: int) -> list[int]:
        cells = self._block_tokens // sequence.text.cell_tokens
        return sequence.text.states(blocks * cells)[cells - 1 :: cells]
