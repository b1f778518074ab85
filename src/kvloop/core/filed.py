"""Finished turns as they are filed, and many of them in little room.

A million turns as Python objects, each with its lease and its prompt, take a kilobyte apiece and a dozen
objects for the collector to visit. Here a turn is a row of a table by columns: its numbers in one packed
buffer, what many turns have in common (engines, tenants) by reference to one object, and only its handle, its
lease's id and its keys as bytes of its own. Rows are numbered from 1, and used again.
"""

import struct
from array import array
from typing import NamedTuple

from kvloop.core.handle import LeaseRef
from kvloop.core.shared import Shared

KEY_BYTES = 8
GROWTH = 256  # rows at a time
_NUMBERS = struct.Struct("<IIIIQQ")
_NEVER_NS = (1 << 63) - 1
_made = tuple.__new__  # of a NamedTuple, from its fields: in a third of the time that calling it takes


class Name(NamedTuple):
    """What a client calls its conversation. Equal values of different kinds are different names."""

    kind: str
    value: str


class Prompt(NamedTuple):
    """A turn's prompt, in tokens, and the prefill engine that computed so many of it last, if one did."""

    tokens: int = 0
    computed_at: str | None = None
    computed: int = 0


NO_PROMPT = Prompt()


class FiledTurn(NamedTuple):
    """A finished turn: decode's opaque handle, the engine that gave it, how many units its request had.

    `lease`: what the handle names, where the router can tell.
    """

    handle: bytes
    engine: str
    tenant: str
    depth: int
    expires_ns: int
    names: tuple[Name, ...] = ()
    lease: LeaseRef | None = None
    prompt: Prompt = NO_PROMPT

    @property
    def held_tokens(self) -> int:
        """Tokens that decode holds: what the handle says, else those of the prompt."""
        return self.prompt.tokens if self.lease is None else self.lease.token_count


_Place = tuple[str, str, tuple[str, int], str | None]  # the engine, its run, its address; who computed
_Own = tuple[bytes, str | None, _Place, str, tuple[Name, ...]]
_NOWHERE: _Place = ("", "", ("", 0), None)
_NOBODY: _Own = (b"", None, _NOWHERE, "", ())


class FiledTurns:
    """Rows. `held`: how many of a turn's keys still lead to it.

    `expires_ns` of row 0, which is no turn's, is later than any. Numbers are of 32 bits, but for those of a
    prompt, which engines count, of 64; times of 63.
    """

    def __init__(self) -> None:
        self.held = array("I", (0,))
        self.expires_ns = array("q", (_NEVER_NS,))
        self._own = [_NOBODY]  # keys and handle, lease, where it is, tenant, names
        self._numbers = bytearray(_NUMBERS.size)
        self._unused = array("I")
        self._shared = Shared()

    def add(self) -> int:
        """A row for a turn that is still to be set."""
        if not self._unused:
            self._grow()
        return self._unused.pop()

    def set(self, row: int, turn: FiledTurn, keys: bytes) -> None:
        """Make the row this turn's, whatever it was. `keys`: its digests, `KEY_BYTES` each."""
        handle, engine, tenant, depth, expires_ns, names, lease, (tokens, computed_at, computed) = turn
        if lease is None:
            lease_id, place, held_tokens, term_ms = None, (engine, "", ("", 0), computed_at), 0, 0
        else:
            lease_id, incarnation, address, held_tokens, term_ms = lease
            place = engine, incarnation, address, computed_at
        shared = self._shared.of
        self._own[row] = keys + handle, lease_id, shared(place), shared(tenant), names
        self.expires_ns[row] = expires_ns
        numbers = len(keys), depth, held_tokens, term_ms, tokens, computed
        _NUMBERS.pack_into(self._numbers, row * _NUMBERS.size, *numbers)

    def __getitem__(self, row: int) -> FiledTurn:
        """The turn as it was filed."""
        numbers = _NUMBERS.unpack_from(self._numbers, row * _NUMBERS.size)
        keys_bytes, depth, held_tokens, term_ms, tokens, computed = numbers
        text, lease_id, (engine, incarnation, address, computed_at), tenant, names = self._own[row]
        lease = None
        if lease_id is not None:
            lease = _made(LeaseRef, (lease_id, incarnation, address, held_tokens, term_ms))
        prompt = _made(Prompt, (tokens, computed_at, computed))
        expires_ns = self.expires_ns[row]
        fields = (text[keys_bytes:], engine, tenant, depth, expires_ns, names, lease, prompt)
        return _made(FiledTurn, fields)

    def keys(self, row: int) -> bytes:
        """The turn's digests, `KEY_BYTES` each."""
        keys_bytes = _NUMBERS.unpack_from(self._numbers, row * _NUMBERS.size)[0]
        return self._own[row][0][:keys_bytes]

    def depth(self, row: int) -> int:
        """Units of the turn's request."""
        depth: int = _NUMBERS.unpack_from(self._numbers, row * _NUMBERS.size)[1]
        return depth

    def names(self, row: int) -> tuple[Name, ...]:
        """What the turn is called."""
        return self._own[row][-1]

    def own_bytes(self, row: int) -> tuple[int, int]:
        """The sizes of its handle and its names, together, and of its keys."""
        keys_bytes = _NUMBERS.unpack_from(self._numbers, row * _NUMBERS.size)[0]
        own = self._own[row]
        named = sum([len(kind) + len(value) for kind, value in own[4]]) if own[4] else 0
        return len(own[0]) - keys_bytes + named, keys_bytes

    def remove(self, row: int) -> None:
        """The row is nobody's any more."""
        self._own[row] = _NOBODY
        self.held[row] = 0
        self._unused.append(row)

    def _grow(self) -> None:
        rows = len(self._own)
        self._own += [_NOBODY] * GROWTH
        self.held.frombytes(bytes(4 * GROWTH))
        self.expires_ns.frombytes(bytes(8 * GROWTH))
        self._numbers += bytes(_NUMBERS.size * GROWTH)
        self._unused.extend(range(rows + GROWTH - 1, rows - 1, -1))
