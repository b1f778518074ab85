"""A file that is read again when its content changes.

Looked at every few seconds, whole: a watch of the file system does not see through the links that Kubernetes
swaps, nor across every network mount, and these files are small. The reading is another thread's, for a mount
that hangs must not stop the router. A content that cannot be used changes nothing, and is said once.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from kvloop.errors import UserError
from kvloop.router.strict import MAX_FILE_BYTES

Content = TypeVar("Content")

logger = logging.getLogger("kvloop.router")


@dataclass(slots=True)
class Reloads:
    """How often a file was taken in anew, or refused: for the metrics."""

    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def count(self, name: str, outcome: str) -> None:
        """One more."""
        self.counts[name, outcome] = self.counts.get((name, outcome), 0) + 1


def read_file(path: str, setting: str) -> bytes:
    """A file's content. UserError, which names the setting, if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{setting} {path!r} cannot be read: {error.strerror}") from None


class WatchedFile(Generic[Content]):
    """One file, what takes its content, and what it was when it was last looked at.

    `read(path, data)` says what a content means, UserError if it cannot be used; on another thread, but for
    the first time. `take` puts that into effect.
    """

    def __init__(
        self,
        setting: str,
        path: str,
        read: Callable[[str, bytes], Content],
        take: Callable[[Content], None],
        reloads: Reloads,
    ) -> None:
        """Take it in. UserError if it cannot be."""
        self._setting = setting
        self._path = path
        self._read = read
        self._take = take
        self._reloads = reloads
        self._seen = read_file(path, setting)
        self._trouble = ""
        take(read(path, self._seen))

    async def look(self) -> None:
        """Take it in if it is another than it was; keep what was there if it cannot be used."""
        try:
            data = await asyncio.to_thread(read_file, self._path, self._setting)
            if data == self._seen:
                self._trouble = ""
                return
            content = await asyncio.to_thread(self._read, self._path, data)
        except UserError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self._reloads.count(self._setting, "refused")
                logger.error("%s; what was there before is kept", error)
            return
        self._take(content)
        self._seen, self._trouble = data, ""
        self._reloads.count(self._setting, "taken")
        logger.info("%s %s was read again", self._setting, self._path)

    async def follow(self, interval_s: float) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.look()
            except Exception:
                logger.exception("looking at %s failed", self._setting)


@contextlib.asynccontextmanager
async def running(*tasks: "asyncio.Future[None] | None") -> AsyncIterator[None]:
    """Background tasks, ended when the block is."""
    there = [task for task in tasks if task is not None]
    try:
        yield
    finally:
        for task in there:
            task.cancel()
        await asyncio.gather(*there, return_exceptions=True)
