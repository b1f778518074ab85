"""What engines need not hold any more, gathered for a moment so that each hears of many leases at once."""

from collections import OrderedDict
from collections.abc import Iterator

from kvloop.core.keeper_state import Entry, SendDrop


class Drops:
    """Leases to drop, the oldest first; where they are too many, the oldest end by themselves."""

    def __init__(self, max_leases: int, every_ns: int) -> None:
        self._max_leases = max_leases
        self._every_ns = every_ns
        self._waiting: OrderedDict[str, tuple[tuple[str, int], bool]] = OrderedDict()
        self._due_ns = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(self._waiting)

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._waiting

    def add(self, entry: Entry, now_ns: int, is_over: bool) -> None:
        """One more. `is_over`: nobody will ask for it again."""
        if not self._waiting:
            self._due_ns = (now_ns // self._every_ns + 1) * self._every_ns
        self._waiting[entry.lease_id] = (entry.address, is_over)
        if len(self._waiting) > self._max_leases:
            self._waiting.popitem(last=False)

    def take_back(self, lease_id: str) -> bool:
        """Do not drop it after all. False if that was not going to be, or has been said already."""
        return self._waiting.pop(lease_id, None) is not None

    def next_due_ns(self) -> int | None:
        """When there will be something to say, or None."""
        return self._due_ns if self._waiting else None

    def due(self, now_ns: int, limit: int) -> list[SendDrop]:
        """What to say now, of `limit` leases at most."""
        drops: dict[tuple[tuple[str, int], bool], list[str]] = {}
        if now_ns >= self._due_ns:
            for _ in range(min(limit, len(self._waiting))):
                lease_id, where = self._waiting.popitem(last=False)
                drops.setdefault(where, []).append(lease_id)
        return [SendDrop(address, tuple(ids), is_over) for (address, is_over), ids in drops.items()]
