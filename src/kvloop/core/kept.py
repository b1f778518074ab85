"""Many leases that a router has filed, in little room: what the keeper knows of each, packed.

A row has a lease's numbers in one buffer, and what it shares with others (its engine's address, its caller)
by reference. An entry is made of a row where the keeper looks at it, and packed again when it is through:
what was changed of an entry and not put back has not happened. Rows are numbered from 1, and used again.
"""

import struct
from array import array
from collections.abc import Iterator

from kvloop.core.keeper_state import Entry, KeptState
from kvloop.core.order import SlotOrder
from kvloop.core.returns import Ending
from kvloop.core.shared import Shared

GROWTH = 256  # rows at a time
_NUMBERS = struct.Struct("<qqqqqIIBB?")
_NO_WISH = -1
_STATES, _ENDINGS = tuple(KeptState), tuple(Ending)
_STATE_NUMBERS = {state: number for number, state in enumerate(_STATES)}
_ENDING_NUMBERS = {ending: number for number, ending in enumerate(_ENDINGS)}
_NOWHERE: tuple[str, int] = ("", 0)


class KeptLeases:
    """Entries by lease id, least recently used first. Times are of 63 bits, terms in ms of 32."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._ids = [""]
        self._addresses = [_NOWHERE]
        self._callers = [""]
        self._numbers = bytearray(_NUMBERS.size)
        self._by_use = SlotOrder()
        self._unused = array("I")
        self._shared = Shared()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._rows

    def __iter__(self) -> Iterator[Entry]:
        """Every entry, least recently used first."""
        for row in self._by_use:
            yield self[row]

    def get(self, lease_id: str) -> Entry | None:
        """What is known of a lease; None for nothing."""
        row = self._rows.get(lease_id)
        return None if row is None else self[row]

    def __getitem__(self, row: int) -> Entry:
        """The entry of a row that is used."""
        numbers = _NUMBERS.unpack_from(self._numbers, row * _NUMBERS.size)
        since_ns, deadline_ns, wish_ns, renew_ns, seen_ns, term_ms, in_flight, state, ending, waits = numbers
        return Entry(
            self._ids[row],
            self._addresses[row],
            term_ms,
            self._callers[row],
            _ENDINGS[ending],
            since_ns,
            deadline_ns,
            None if wish_ns == _NO_WISH else wish_ns,
            renew_ns,
            _STATES[state],
            seen_ns,
            in_flight,
            waits,
            row,
        )

    def add(self, entry: Entry) -> None:
        """Take in a lease that is not known, as the most recently used; its entry then says its row."""
        if not self._unused:
            self._grow()
        entry.row = row = self._unused.pop()
        self._ids[row] = entry.lease_id
        self._addresses[row] = self._shared.of(entry.address)
        self._callers[row] = self._shared.of(entry.caller)
        self._rows[entry.lease_id] = row
        self._by_use.append(row)
        self.put(entry)

    def put(self, entry: Entry) -> None:
        """Keep what has changed of an entry."""
        _NUMBERS.pack_into(
            self._numbers,
            entry.row * _NUMBERS.size,
            entry.since_ns,
            entry.deadline_ns,
            _NO_WISH if entry.wish_until_ns is None else entry.wish_until_ns,
            entry.renew_ns,
            entry.seen_ns,
            entry.term_ms,
            entry.in_flight,
            _STATE_NUMBERS[entry.state],
            _ENDING_NUMBERS[entry.ending],
            entry.waits,
        )

    def was_used(self, row: int) -> None:
        """The lease is the most recently used one."""
        self._by_use.to_end(row)

    def least_recently_used(self) -> str:
        """Its lease's id. There must be one."""
        return self._ids[self._by_use.first]

    def remove(self, entry: Entry) -> None:
        """Forget a lease."""
        del self._rows[entry.lease_id]
        self._ids[entry.row] = self._callers[entry.row] = ""
        self._addresses[entry.row] = _NOWHERE
        self._by_use.remove(entry.row)
        self._unused.append(entry.row)

    def check_integrity(self) -> None:
        """AssertionError where a lease has no row, or not one of its own."""
        self._by_use.check_integrity()
        rows = list(self._by_use)
        assert sorted(rows) == sorted(self._rows.values()), "a row that is not in order"
        assert all(self._ids[row] == lease_id for lease_id, row in self._rows.items())
        assert sorted([*rows, *self._unused]) == list(range(1, len(self._ids))), "a row that is lost"

    def _grow(self) -> None:
        rows = len(self._ids)
        self._ids += [""] * GROWTH
        self._addresses += [_NOWHERE] * GROWTH
        self._callers += [""] * GROWTH
        self._numbers += bytes(_NUMBERS.size * GROWTH)
        self._unused.extend(range(rows + GROWTH - 1, rows - 1, -1))
