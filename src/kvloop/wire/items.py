"""The first items of a JSON array, in memory that the array's length has no part in.

An item of two bytes takes forty times as much once it is an object of its own, so a body of nothing but such
items would take gigabytes to look at. Items past the bound are read over and never made: msgspec skips what
an array-like struct has no field for.
"""

from typing import Any

import msgspec

from kvloop.core.lineage import MAX_UNITS

SMALL_BYTES = 64 * 1024  # up to here an array is decoded whole: at most 3 MB, and faster than a struct

_NONE = msgspec.Raw()
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
