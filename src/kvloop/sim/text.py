"""What a stretch of KV was computed for, as the simulated memory writes it down.

The KV of a position depends on every token before it. So the state after n tokens is a rolling digest,

    s[0] = origin                              the model, and whose tokens they are (the cache salt)
    s[n] = BLAKE2b(s[start of n's cell] || the tokens of that cell up to n, 8 bytes)

and a cell, the stretch of a block that can be proven on its own, holds the state after its last token. The
rule has nothing to do with `core.chain`, on purpose: what the chain proves is what these states check.

A text only ever grows, so what was computed of it stays true and is kept: its states, and the chain that
`core` built for it, which is continued from its last whole segment.
"""

import hashlib
from array import array

from kvloop.core.chain import DIGEST_BYTES, SEGMENT_TOKENS, Chain, build_chain

TOKEN_BYTES = 4  # u32, little-endian, as the chain digests them
STATE_BYTES = 8


def origin(*names: str) -> int:
    """The state before the first token, for KV that depends on `names`."""
    return _digest(b"".join(len(name.encode()).to_bytes(4) + name.encode() for name in names))


def mixed(*states: int) -> int:
    """A state that belongs to no text: what is computed from, or torn between, such contents."""
    return _digest(b"wrong" + b"".join(state.to_bytes(STATE_BYTES) for state in states))


class Text:
    """Tokens, as bytes, with the states of memory that was filled with their KV."""

    __slots__ = ("_chain_root", "_data", "_seed", "_segments", "_states", "cell_tokens", "count", "origin")

    def __init__(self, data: bytes | bytearray, origin: int, cell_tokens: int) -> None:
        """`data`: four bytes a token. `cell_tokens`: see `memory`. ValueError for a torn token."""
        if len(data) % TOKEN_BYTES:
            raise ValueError(f"{len(data)} bytes are no whole number of tokens")
        self.origin = origin
        self.cell_tokens = cell_tokens
        self._data = bytearray(data)
        self.count = len(data) // TOKEN_BYTES
        self._seed: int | None = None
        self._states: list[int] = []
        self._chain_root = b""
        self._segments = b""

    def __len__(self) -> int:
        """Tokens."""
        return self.count

    def copy(self) -> "Text":
        """The same text, to be grown by somebody else."""
        return self.prefix(self.count)

    def prefix(self, tokens: int) -> "Text":
        """Its first tokens as a text of its own, with what is known of them."""
        twin = Text(self._data[: tokens * TOKEN_BYTES], self.origin, self.cell_tokens)
        twin._states = self._states[: tokens // self.cell_tokens]
        twin._chain_root = self._chain_root
        twin._segments = self._segments[: tokens // SEGMENT_TOKENS * DIGEST_BYTES]
        return twin

    def append(self, data: bytes) -> None:
        """Grow by these tokens."""
        if len(data) % TOKEN_BYTES:
            raise ValueError(f"{len(data)} bytes are no whole number of tokens")
        self._data += data
        self.count = len(self._data) // TOKEN_BYTES
        self._seed = None

    def data(self, start_token: int = 0, end_token: int | None = None) -> bytes:
        """The tokens from `start_token` up to `end_token`, as bytes."""
        end = None if end_token is None else end_token * TOKEN_BYTES
        return bytes(self._data[start_token * TOKEN_BYTES : end])

    def seed(self) -> int:
        """Decides what a model that reads this text answers. The salt has no part in it: it is no token."""
        if self._seed is None:
            self._seed = _digest(self._data)
        return self._seed

    def states(self, cells: int) -> list[int]:
        """The states after the first 1, 2, ... `cells` whole cells."""
        states, cell_bytes = self._states, self.cell_tokens * TOKEN_BYTES
        if len(states) < cells:
            state = states[-1] if states else self.origin
            for start in range(len(states) * cell_bytes, cells * cell_bytes, cell_bytes):
                state = _digest(state.to_bytes(STATE_BYTES) + self._data[start : start + cell_bytes])
                states.append(state)
        return states[:cells]

    def states_up_to(self, tokens: int) -> list[int]:
        """The states after each whole cell of the first `tokens` tokens, and after a part of one."""
        cells, rest = divmod(tokens, self.cell_tokens)
        states = self.states(cells)
        if rest:
            before = states[-1] if cells else self.origin
            start = cells * self.cell_tokens * TOKEN_BYTES
            data = self._data[start : start + rest * TOKEN_BYTES]
            states.append(_digest(before.to_bytes(STATE_BYTES) + data))
        return states

    def state(self, tokens: int) -> int:
        """The state after the first `tokens` tokens."""
        return self.states_up_to(tokens)[-1] if tokens else self.origin

    def chain(self, key: bytes, root: bytes, tokens: int) -> Chain:
        """`core`'s chain over the first `tokens` tokens (all of them, where there are fewer)."""
        tokens = min(tokens, len(self))
        if root != self._chain_root:
            self._chain_root, self._segments = root, b""
        known = min(len(self._segments) // DIGEST_BYTES, tokens // SEGMENT_TOKENS)
        kept = self._segments[: known * DIGEST_BYTES]
        start, end = known * SEGMENT_TOKENS * TOKEN_BYTES, tokens * TOKEN_BYTES
        rest = build_chain(key, kept[-DIGEST_BYTES:] or root, array("I", bytes(self._data[start:end])))
        segments = kept + rest.segments
        if len(segments) > len(self._segments):
            self._segments = segments
        return Chain(root, segments, rest.tail, tokens)


def _digest(data: bytes | bytearray) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=STATE_BYTES).digest())
