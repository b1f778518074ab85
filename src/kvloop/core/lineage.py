"""Which earlier turn a request goes on from: a guess that the engines check.

A conversation has no name on the wire, but it has a past, and the client resends it with every turn. So a
finished turn is filed under a rolling digest of every prefix of what its client sent,

    k[i] = BLAKE2b(root, unit[0] .. unit[i]; key, 8 bytes)

a unit being a message, or a stretch of a prompt; the root is whatever changes the tokens before the first
unit, and the tenant. A prefix belongs to the newest turn that has it. The longest prefix of a new request
that is found names the turn that shares most with it: its continuation, a fork, an edit further up. Names
that clients send (conversation and session ids) are filed beside the digests, each under its kind.

A digest or a name only proposes a handle. The engines prove every reuse themselves, so a wrong guess costs
time and a forgotten turn costs time, never an answer. Hence the bounds: by keys, by bytes, by age. And hence
eight bytes for a digest: among ten million, one that was never filed meets an equal one once in 10^12
look-ups, whoever wants it to (the key is secret), and what it then finds is refused like any wrong guess.

A million turns have to fit into a router beside its work. So turns are rows of packed columns (see `filed`),
keys lead to rows by way of a table without objects (see `digest_index`), and a turn that goes on from another
takes over its row with the keys that are in the table already: what a long conversation costs with each turn
is what is new.
"""

import hashlib
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvloop.core.digest_index import DigestIndex
from kvloop.core.filed import KEY_BYTES, NO_PROMPT, FiledTurn, FiledTurns, Name, Prompt
from kvloop.core.key import checked_key
from kvloop.core.order import SlotOrder

__all__ = [
    "CONTENT",
    "KEY_BYTES",
    "NO_PROMPT",
    "FiledTurn",
    "LineageTable",
    "Match",
    "Name",
    "Prompt",
    "content_keys",
    "name_key",
]

CONTENT = "content"  # the kind under which a turn without a name is listed
MAX_UNITS = (
    4096  # an agent's longest recorded sessions have under 1,000 messages; what is beyond is not filed
)
KEY_COST_BYTES = 30  # in the index, with its head, and in the turn: measured 29
TURN_COST_BYTES = 700  # a turn's row and its lease's, less its handle and names: measured 650 at most
MAX_DROPPED_TURNS = 10_000  # of which nobody asked what became of them; their leases expire by themselves
_CONTENT_PURPOSE = b"kvloop.content"
_NAME_PURPOSE = b"kvloop.name"


class Match(NamedTuple):
    """A turn to go on from.

    `by` is `content` or the name's kind; `depth` counts the units known to be shared.
    """

    turn: FiledTurn
    by: str
    depth: int


def content_keys(key: bytes, root: Sequence[bytes], units: Iterable[bytes]) -> list[bytes]:
    """The digest of every prefix: element i covers the root and units 0 to i, up to `MAX_UNITS`.

    Every part goes in behind its length, and the root's parts behind their number: none runs into another.
    """
    rolling = hashlib.blake2b(key=checked_key(key), digest_size=KEY_BYTES, person=_CONTENT_PURPOSE)
    parts = [len(root).to_bytes(8, "little")]
    for part in root:
        parts += (len(part).to_bytes(8, "little"), part)
    rolling.update(b"".join(parts))
    keys: list[bytes] = []
    for unit in units:
        if len(keys) == MAX_UNITS:
            break
        rolling.update(len(unit).to_bytes(8, "little") + unit)
        keys.append(rolling.copy().digest())
    return keys


def name_key(key: bytes, tenant: str, model: str, name: Name) -> bytes:
    """The key under which `tenant` finds `name`.

    Agents use one session for several models: each has its own.
    """
    digest = hashlib.blake2b(key=checked_key(key), digest_size=KEY_BYTES, person=_NAME_PURPOSE)
    for part in (text.encode() for text in (tenant, model, name.kind, name.value)):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


class LineageTable:
    """Filed turns by key, least recently used out first. Times are nanoseconds of one monotonic clock.

    Filing is fastest where turns are filed in the order in which they expire, as with one retention for all.
    """

    def __init__(self, max_keys: int, max_bytes: int) -> None:
        """`max_bytes` bounds an estimate of the memory that the table takes."""
        if min(max_keys, max_bytes) <= 0:
            raise ValueError("bounds must be positive")
        self.max_keys = max_keys
        self.max_bytes = max_bytes
        self._index = DigestIndex(max_keys)
        self._turns = FiledTurns()
        self._by_use = SlotOrder()
        self._by_expiry = SlotOrder()
        self._dropped: deque[FiledTurn] = deque(maxlen=MAX_DROPPED_TURNS)
        self._count = 0
        self._used_bytes = 0

    def __len__(self) -> int:
        """Turns that can be found."""
        return self._count

    @property
    def key_count(self) -> int:
        """Keys that lead to a turn."""
        return len(self._index)

    @property
    def used_bytes(self) -> int:
        """The estimate that `max_bytes` bounds."""
        return self._used_bytes

    def file(
        self, turn: FiledTurn, content: Sequence[bytes], names: Sequence[bytes], now_ns: int
    ) -> list[FiledTurn]:
        """Make `turn` the newest one under each of its content and name keys; without any, nothing.

        The answer: the turns that it supersedes, for nothing leads to them any more.
        """
        self.expire(now_ns)
        if not (content or names) or turn.expires_ns <= now_ns:
            self._dropped.append(turn)
            return []
        keys = b"".join((*names, *content))
        digests = array("Q", b"".join(content))
        known, row = self._index.deepest(digests)
        turns = self._turns
        older = turns.keys(row)
        if row and turns.held[row] * KEY_BYTES == len(older) and keys.startswith(older):
            superseded = [turns[row]]
            self._used_bytes -= self._cost_bytes(row)
            self._by_use.to_end(row)
            self._by_expiry.remove(row)
        else:
            row = turns.add()
            superseded = self._take_over(digests[:known] + array("Q", b"".join(names)), row)
            self._by_use.append(row)
            self._count += 1
        self._index.add(digests[known:], row)
        turns.held[row] += len(digests) - known
        turns.set(row, turn, keys)
        self._put_by_expiry(row)
        self._used_bytes += self._cost_bytes(row)
        while len(self._index) > self.max_keys or self._used_bytes > self.max_bytes:
            self._drop(self._by_use.first)
        return superseded

    def find(
        self, content: Sequence[bytes], names: Sequence[tuple[Name, bytes]], now_ns: int
    ) -> Match | None:
        """The turn that shares most with a request of these content keys and names (with their keys).

        The longest known prefix wins if it is all that its turn had, or as much as the named turn had; else
        the first name that is known; else the prefix after all.
        """
        self.expire(now_ns)
        depth, row = self._index.deepest(array("Q", b"".join(content)))
        by, turns = CONTENT, self._turns
        if names and (not row or depth < turns.depth(row)):
            for name, key in names:
                named = self._index.find(int.from_bytes(key, sys.byteorder))
                if named and (not row or depth < turns.depth(named)):
                    row, depth, by = named, depth if named == row else 0, name.kind
                    break
        if not row:
            return None
        self._by_use.to_end(row)
        return Match(turns[row], by, depth)

    def turns(self) -> Iterator[tuple[FiledTurn, str]]:
        """Every turn, latest use first, with the hexadecimal digest that it is listed under."""
        for row in reversed(self._by_use):
            yield self._listed(row)

    def named(self, kind: str, value: str) -> list[tuple[FiledTurn, str]]:
        """The turns named so, whoever's they are, as `turns` lists them; with the kind `content`, the one
        listed so."""
        return [self._listed(row) for row in reversed(self._named(kind, value))]

    def remove(self, kind: str, value: str) -> int:
        """Forget the turns named so; how many that were."""
        found = self._named(kind, value)
        for row in found:
            self._drop(row)
        return len(found)

    def take_dropped(self) -> list[FiledTurn]:
        """The turns that were removed, have expired, or found no room since the last call, each once."""
        if not self._dropped:
            return []
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    def expire(self, now_ns: int) -> None:
        """Forget what has passed its time."""
        expires_ns, order = self._turns.expires_ns, self._by_expiry
        while expires_ns[row := order.first] <= now_ns:
            self._drop(row)

    def check_integrity(self) -> None:
        """AssertionError where the books do not balance."""
        turns, rows = self._turns, list(self._by_use)
        held = dict.fromkeys(rows, 0)
        for digest, row in self._index:
            assert row in held, "a key leads to a forgotten turn"
            assert digest in array("Q", turns.keys(row)), "a key leads to a turn that does not have it"
            held[row] += 1
        for row in rows:
            assert turns.held[row] == held[row] > 0, "a turn miscounts its keys, or cannot be found"
        by_expiry = list(self._by_expiry)
        assert len(rows) == len(by_expiry) == self._count
        assert sorted(rows) == sorted(by_expiry), "a turn that never expires"
        assert by_expiry == sorted(by_expiry, key=lambda row: turns.expires_ns[row])
        assert self._used_bytes == sum(self._cost_bytes(row) for row in rows)
        assert self.key_count <= self.max_keys
        assert self._used_bytes <= self.max_bytes
        for part in (self._index, self._by_use, self._by_expiry):
            part.check_integrity()

    def _named(self, kind: str, value: str) -> list[int]:
        turns = self._turns
        if kind == CONTENT:
            return [row for row in self._by_use if self._label(row) == value]
        return [row for row in self._by_use if (kind, value) in turns.names(row)]

    def _listed(self, row: int) -> tuple[FiledTurn, str]:
        return self._turns[row], self._label(row)

    def _label(self, row: int) -> str:
        return self._turns.keys(row)[-KEY_BYTES:].hex()

    def _cost_bytes(self, row: int) -> int:
        own_bytes, keys_bytes = self._turns.own_bytes(row)
        return TURN_COST_BYTES + own_bytes + keys_bytes // KEY_BYTES * KEY_COST_BYTES

    def _take_over(self, digests: "array[int]", row: int) -> list[FiledTurn]:
        """Let keys lead to `row` that may lead to other turns: those that nothing leads to any more."""
        superseded: list[FiledTurn] = []
        put, held = self._index.put, self._turns.held
        for digest in digests:
            older = put(digest, row)
            if older == row:
                continue
            held[row] += 1
            if older:
                held[older] -= 1
                if not held[older]:
                    superseded.append(self._turns[older])
                    self._forget(older)
        return superseded

    def _put_by_expiry(self, row: int) -> None:
        expires_ns, order = self._turns.expires_ns, self._by_expiry
        before, after, mine_ns = order.last, 0, expires_ns[row]
        while before and expires_ns[before] > mine_ns:
            before, after = order.before(before), before
        order.insert(row, after)

    def _drop(self, row: int) -> None:
        self._index.drop(array("Q", self._turns.keys(row)), row)
        self._dropped.append(self._turns[row])
        self._forget(row)

    def _forget(self, row: int) -> None:
        self._used_bytes -= self._cost_bytes(row)
        self._by_use.remove(row)
        self._by_expiry.remove(row)
        self._turns.remove(row)
        self._count -= 1
