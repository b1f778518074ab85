"""A line of JSON for every answered turn: what an operator needs to replay this traffic, or to plan for it.

There is no text in it. Which turn another goes on from is recognised as the router recognises it, by digests
of message prefixes, but from a memory of the log's own: what keeping more for longer would bring is what is
to be planned. Lines gather in memory and are written a second later; a file that has been moved away, as
logrotate does, is made anew. Nothing that happens to the file fails a turn.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvloop.core.decision import Route
from kvloop.errors import UserError
from kvloop.router.run import Run

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
MAX_PENDING_BYTES = 16 * 1024 * 1024  # some 40,000 lines, should the disk stand still
MAX_REMEMBERED = 200_000  # turns, some 300 bytes each
_NS_PER_MS = 1e6


class LoggedTurn(msgspec.Struct, frozen=True):
    """One turn. `time`: Unix seconds at which it came.

    `goes_on_from`: the request with whose messages it begins, if any; `shared_tokens`: that one's prompt and
    answer, at most the whole prompt. `conversation`: the id of the first request of the line. Tokens are the
    engines' counts, or the router's estimate where an engine does not count; the answer's are 0 where nothing
    was kept of it. Times are counted from the request's coming in; `first_ms` is 0 but for a stream.
    """

    time: float
    request_id: str
    conversation: str
    goes_on_from: str | None
    tenant: str
    model: str
    prompt_tokens: int
    shared_tokens: int
    answer_tokens: int
    ending: str
    route: str
    reused_tokens: int
    first_ms: float
    took_ms: float


class _Earlier(msgspec.Struct, frozen=True):
    request_id: str
    conversation: str
    tokens: int  # prompt and answer


class TurnLog:
    """Appends to a file. `clock_ns` is the one by which turns begin; `wall_s` tells the time of day."""

    def __init__(
        self, path: Path, clock_ns: Callable[[], int], wall_s: Callable[[], float] = time.time
    ) -> None:
        """Raises `UserError` where the file cannot be written to."""
        self._path = path
        self._clock_ns = clock_ns
        self._wall_s = wall_s
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._lost = 0
        self._earlier: OrderedDict[bytes, _Earlier] = OrderedDict()
        self._encode = msgspec.json.Encoder().encode
        try:
            self._append(b"")
        except OSError as error:
            raise UserError(f"--turn-log {path}: {error.strerror}") from None

    def add(self, run: Run) -> None:
        """A turn has been answered."""
        now_ns = self._clock_ns()
        prompt = run.progress.prompt.tokens
        earlier = self._goes_on_from(run.lookup.content)
        request_id = run.request_id.decode("latin-1")
        kept = run.kept_tokens  # all but the last token, which has no KV yet
        answer = 0 if kept is None else max(0, kept + 1 - prompt)
        turn = LoggedTurn(
            time=self._wall_s() - (now_ns - run.began_ns) / 1e9,
            request_id=request_id,
            conversation=request_id if earlier is None else earlier.conversation,
            goes_on_from=None if earlier is None else earlier.request_id,
            tenant=run.lookup.tenant,
            model=run.lookup.model,
            prompt_tokens=prompt,
            shared_tokens=0 if earlier is None else min(prompt, earlier.tokens),
            answer_tokens=answer,
            ending=run.ending,
            route=run.turn.route,
            reused_tokens=_reused(run),
            first_ms=(run.first_ns - run.began_ns) / _NS_PER_MS if run.first_ns else 0.0,
            took_ms=(now_ns - run.began_ns) / _NS_PER_MS,
        )
        self._remember(run.lookup.content, _Earlier(request_id, turn.conversation, prompt + answer))
        self._put(self._encode(turn) + b"\n")

    def close(self) -> None:
        """Write what is left."""
        if self._timer is not None:
            self._timer.cancel()
        self._flush()

    def _goes_on_from(self, content: list[bytes]) -> _Earlier | None:
        return next((found for key in reversed(content) if (found := self._earlier.get(key))), None)

    def _remember(self, content: list[bytes], turn: _Earlier) -> None:
        if not content:
            return
        self._earlier[content[-1]] = turn
        self._earlier.move_to_end(content[-1])
        if len(self._earlier) > MAX_REMEMBERED:
            self._earlier.popitem(last=False)

    def _put(self, line: bytes) -> None:
        if self._pending_bytes + len(line) > MAX_PENDING_BYTES:
            self._lost += 1
            return
        self._pending.append(line)
        self._pending_bytes += len(line)
        if self._timer is None:
            self._timer = self._loop.call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._timer = None
        try:
            self._append(b"".join(self._pending))
        except OSError as error:
            logger.warning("--turn-log %s: %s; %d turns wait", self._path, error.strerror, len(self._pending))
            self._timer = self._loop.call_later(10 * FLUSH_S, self._flush)
            return
        if self._lost:
            logger.warning("--turn-log %s: %d turns were not logged", self._path, self._lost)
        self._pending, self._pending_bytes, self._lost = [], 0, 0

    def _append(self, data: bytes) -> None:
        with self._path.open("ab", buffering=0) as file:
            if data:
                file.write(data)


def _reused(run: Run) -> int:
    """Tokens that need not be computed because decode had them."""
    if run.turn.route is Route.APPEND:
        return run.decoded.local_tokens if run.decoded is not None else 0
    return run.report.returned_tokens if run.report is not None else 0
