"""The router's log: lines for people, or JSON for machines, with the id of the request that a line is about.

Each request is a task of its own, and what is said in it is about it; the task's context carries the id there
without anybody's passing it on.
"""

import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum

import msgspec

REQUEST: ContextVar[bytes | None] = ContextVar("kvloop_request", default=None)
"""The id of the request that is being served."""


class LogFormat(StrEnum):
    """How a line looks."""

    TEXT = "text"
    JSON = "json"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (UTC), `level`, `logger`, `message`, and where they are known
    `request_id` and `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        at = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = REQUEST.get()
        if request is not None:
            line["request_id"] = request.decode("latin-1")
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class TextFormatter(logging.Formatter):
    """As people read it, the request's id in brackets."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (logging's name)
        """The line without what an exception adds."""
        line, request = super().formatMessage(record), REQUEST.get()
        return line if request is None else f"{line} [{request.decode('latin-1')}]"


def configure(log_format: LogFormat) -> None:
    """Let the process log so, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
