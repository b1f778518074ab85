"""Which earlier turn a request goes on from: a guess that the engines check.

A conversation has no name on the wire, but it has a past, and the client resends it with every turn. So a
finished turn is filed under a rolling digest of every prefix of what its client sent,

    k[i] = BLAKE2b(root, unit[0] .. unit[i]; key, 16 bytes)

a unit being a message, or a stretch of a prompt; the root is whatever changes the tokens before the first
unit, and the tenant. A prefix belongs to the newest turn that has it. The longest prefix of a new request
that is found names the turn that shares most with it: its continuation, a fork, an edit further up. Names
that clients send (conversation and session ids) are filed beside the digests, each under its kind.

A digest or a name only proposes a handle. The engines prove every reuse themselves, so a wrong guess costs
time and a forgotten turn costs time, never an answer. Hence the bounds: by keys, by bytes, by age.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvloop.core.deadline import Deadlines
from kvloop.core.handle import LeaseRef
from kvloop.core.key import checked_key

KEY_BYTES = 16
CONTENT = "content"  # the kind under which a turn without a name is listed
MAX_UNITS = (
    4096  # an agent's longest recorded sessions have under 1,000 messages; what is beyond is not filed
)
KEY_COST_BYTES = 150  # a dictionary slot and a 16-byte key, and its place in the turn's tuple: measured 146
TURN_COST_BYTES = 1400  # a turn's own objects, less its handle and names: measured 910; and its lease's: 400
MAX_DROPPED_TURNS = 10_000  # of which nobody asked what became of them; their leases expire by themselves
_CONTENT_PURPOSE = b"kvloop.content"
_NAME_PURPOSE = b"kvloop.name"


@dataclass(frozen=True, slots=True)
class Name:
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


@dataclass(frozen=True, slots=True)
class Match:
    """A turn to go on from.

    `by` is `content` or the name's kind; `depth` counts the units known to be shared.
    """

    turn: FiledTurn
    by: str
    depth: int


@dataclass(slots=True, eq=False)
class _Entry:
    serial: str
    label: str
    turn: FiledTurn
    keys: tuple[bytes, ...]
    cost_bytes: int
    held: int  # keys that still lead here; at 0 a newer turn has taken them all over


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
    """Filed turns by key, least recently used out first. Times are nanoseconds of one monotonic clock."""

    def __init__(self, max_keys: int, max_bytes: int) -> None:
        """`max_bytes` bounds an estimate of the memory that the table takes."""
        if min(max_keys, max_bytes) <= 0:
            raise ValueError("bounds must be positive")
        self.max_keys = max_keys
        self.max_bytes = max_bytes
        self._newest: dict[bytes, _Entry] = {}
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._deadlines = Deadlines()
        self._dropped: deque[FiledTurn] = deque(maxlen=MAX_DROPPED_TURNS)
        self._serial = 0
        self._used_bytes = 0

    def __len__(self) -> int:
        """Turns that can be found."""
        return len(self._entries)

    @property
    def key_count(self) -> int:
        """Keys that lead to a turn."""
        return len(self._newest)

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
        unique = tuple(dict.fromkeys((*content, *names)))
        if not unique or turn.expires_ns <= now_ns:
            self._dropped.append(turn)
            return []
        label = (content or names)[-1].hex()
        self._serial += 1
        names_bytes = sum([len(name.kind) + len(name.value) for name in turn.names])
        cost_bytes = TURN_COST_BYTES + len(turn.handle) + names_bytes + KEY_COST_BYTES * len(unique)
        entry = _Entry(str(self._serial), label, turn, unique, cost_bytes, len(unique))
        superseded: list[FiledTurn] = []
        newest = self._newest
        for key in unique:
            older = newest.get(key)
            newest[key] = entry
            if older is not None:
                older.held -= 1
                if not older.held:
                    superseded.append(older.turn)
                    self._forget(older)
        self._entries[entry.serial] = entry
        self._deadlines.set(entry.serial, turn.expires_ns)
        self._used_bytes += cost_bytes
        while len(self._newest) > self.max_keys or self._used_bytes > self.max_bytes:
            self._drop(next(iter(self._entries.values())))
        return superseded

    def find(
        self, content: Sequence[bytes], names: Sequence[tuple[Name, bytes]], now_ns: int
    ) -> Match | None:
        """The turn that shares most with a request of these content keys and names (with their keys).

        The longest known prefix wins if it is all that its turn had, or as much as the named turn had; else
        the first name that is known; else the prefix after all.
        """
        self.expire(now_ns)
        entry, depth = self._longest(content)
        by = CONTENT
        if entry is None or depth < entry.turn.depth:
            for name, key in names:
                named = self._newest.get(key)
                if named is not None and (entry is None or depth < named.turn.depth):
                    entry, depth, by = named, depth if named is entry else 0, name.kind
                    break
        if entry is None:
            return None
        self._entries.move_to_end(entry.serial)
        return Match(entry.turn, by, depth)

    def turns(self) -> Iterator[tuple[FiledTurn, str]]:
        """Every turn, latest use first, with the hexadecimal digest that it is listed under."""
        for entry in reversed(self._entries.values()):
            yield entry.turn, entry.label

    def named(self, kind: str, value: str) -> list[tuple[FiledTurn, str]]:
        """The turns named so, whoever's they are, as `turns` lists them; with the kind `content`, the one
        listed so."""
        return [(entry.turn, entry.label) for entry in reversed(self._named(kind, value))]

    def remove(self, kind: str, value: str) -> int:
        """Forget the turns named so; how many that were."""
        found = self._named(kind, value)
        for entry in found:
            self._drop(entry)
        return len(found)

    def take_dropped(self) -> list[FiledTurn]:
        """The turns that were removed, have expired, or found no room since the last call, each once."""
        dropped = list(self._dropped)
        self._dropped.clear()
        return dropped

    def expire(self, now_ns: int) -> None:
        """Forget what has passed its time."""
        while (serial := self._deadlines.pop_due(now_ns)) is not None:
            self._drop(self._entries[serial])

    def check_integrity(self) -> None:
        """AssertionError where the books do not balance."""
        held: dict[str, int] = dict.fromkeys(self._entries, 0)
        for key, entry in self._newest.items():
            assert self._entries.get(entry.serial) is entry, "a key leads to a forgotten turn"
            assert key in entry.keys, "a key leads to a turn that does not have it"
            held[entry.serial] += 1
        for serial, entry in self._entries.items():
            assert entry.held == held[serial] > 0, "a turn miscounts its keys, or cannot be found"
            assert serial in self._deadlines, "a turn that never expires"
        assert len(self._deadlines) == len(self._entries)
        assert self._used_bytes == sum(entry.cost_bytes for entry in self._entries.values())
        assert self.key_count <= self.max_keys
        assert self._used_bytes <= self.max_bytes
        self._deadlines.check_integrity()

    def _named(self, kind: str, value: str) -> list[_Entry]:
        return [
            entry
            for entry in self._entries.values()
            if (entry.label == value if kind == CONTENT else Name(kind, value) in entry.turn.names)
        ]

    def _longest(self, content: Sequence[bytes]) -> tuple[_Entry | None, int]:
        for depth in range(len(content), 0, -1):
            entry = self._newest.get(content[depth - 1])
            if entry is not None:
                return entry, depth
        return None, 0

    def _drop(self, entry: _Entry) -> None:
        for key in entry.keys:
            if self._newest.get(key) is entry:
                del self._newest[key]
        self._dropped.append(entry.turn)
        self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.serial]
        self._deadlines.discard(entry.serial)
        self._used_bytes -= entry.cost_bytes
