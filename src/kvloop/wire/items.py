"""JSON arrays and objects one level deep, in memory and time that how many they hold has no part in.

An item of two bytes takes forty times as much once it is an object of its own, so a body of nothing but such
items would take gigabytes to look at, and seconds in which nobody else is served. Items past the bound are
read over and never made: msgspec skips what an array-like struct has no field for. Members all count, for
they are sent on, so an object of too many is refused at the first that is too much: msgspec asks for each key
that is not of a type that it knows.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from kvloop.core.lineage import MAX_UNITS

SMALL_BYTES = 64 * 1024  # up to here everything is decoded whole: at most 3 MB, and faster
MAX_MEMBERS = 1024  # vLLM's requests have about a hundred, and take any that they do not know

_NONE = msgspec.Raw()
_EVERY = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FIELDS = [(f"item_{place}", msgspec.Raw, _NONE) for place in range(MAX_UNITS)]
_ALL: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_FIRST: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
    msgspec.defstruct("FirstItems", _FIELDS, array_like=True)
)


class FirstItems:
    """Decodes JSON arrays into their items, each as its bytes."""

    def decode(self, array: bytes | msgspec.Raw) -> list[msgspec.Raw]:
        """All items of a small array, of a large one the first `MAX_UNITS`: no more are ever filed. msgspec's
        DecodeError where it is no array."""
        if len(bytes(array)) <= SMALL_BYTES:
            return _ALL.decode(array)
        return [item for item in msgspec.structs.astuple(_FIRST.decode(array)) if item is not _NONE]


class TooManyMembersError(msgspec.DecodeError):
    """An object has more than `MAX_MEMBERS`."""

    def __init__(self) -> None:
        super().__init__(f"more than {MAX_MEMBERS} members")


class _AnyString(type):
    def __instancecheck__(cls, key: Any) -> bool:
        return isinstance(key, str)


class _Key(metaclass=_AnyString):
    """A string, of which msgspec does not know that it is one."""


class Members:
    """Decodes JSON objects into their members, each value as its bytes."""

    def __init__(self) -> None:
        self._left = 0
        kind: Any = dict[_Key, msgspec.Raw]
        self._decode: Callable[[bytes | msgspec.Raw], Any] = msgspec.json.Decoder(
            kind, dec_hook=self._counted
        ).decode

    def decode(self, value: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
        """All members; of several of one name the last, though in a large object each counts.

        TooManyMembersError for more than `MAX_MEMBERS`, msgspec's ValidationError for what is no object, its
        DecodeError for what is no JSON.
        """
        members: dict[str, msgspec.Raw]
        if len(bytes(value)) > SMALL_BYTES:
            self._left = MAX_MEMBERS
            members = self._decode(value)
        else:
            members = _EVERY.decode(value)
            if len(members) > MAX_MEMBERS:
                raise TooManyMembersError
        return members

    def _counted(self, _: type, key: str) -> str:
        self._left -= 1
        if self._left < 0:
            raise TooManyMembersError
        return key
