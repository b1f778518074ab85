"""What happened, in order: the end of it to read, and a digest of all of it to compare.

Two runs of one seed are the same run if their digests are equal. The digest is BLAKE2b over each line's text,
so a set that was walked in hash order anywhere would show.
"""

import hashlib
from collections import deque

KEPT_LINES = 400  # shown around a failure; some hundred events make a turn


class Trace:
    """The lines of one run; `lines` are the last ones. `is_on` False keeps and digests nothing."""

    def __init__(self, *, is_on: bool = True, kept_lines: int = KEPT_LINES) -> None:
        self.is_on = is_on
        self.count = 0
        self.lines: deque[str] = deque(maxlen=kept_lines)
        self._digest = hashlib.blake2b(digest_size=16)

    def note(self, now_ns: int, who: str, what: str, *more: object) -> None:
        """Something happened."""
        if not self.is_on:
            return
        line = f"{now_ns / 1e9:12.6f} {who:<8} {what} {' '.join(map(str, more))}"
        self.count += 1
        self.lines.append(line)
        self._digest.update(line.encode() + b"\n")

    def digest(self) -> str:
        """Of every line so far."""
        return self._digest.hexdigest()
