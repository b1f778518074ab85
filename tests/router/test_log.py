"""The router's log: JSON that a machine can read, and each line's request by its id."""

import json
import logging
import sys

from kvloop.router.log import REQUEST, JsonFormatter, TextFormatter
from tests.router.fake_engine import Answer
from tests.router.harness import HELLO, in_loop, stack


def record(message: str, *arguments: object) -> logging.LogRecord:
    """A line at a known time."""
    made = logging.LogRecord("kvloop.router", logging.WARNING, "f", 1, message, arguments, None)
    made.created = 0.5
    return made


def test_a_json_line() -> None:
    """UTC to the millisecond, and whatever is in the message stays one line."""
    line = JsonFormatter().format(record("%s engine\n%s", "prefill", '"x"'))
    assert "\n" not in line
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "warning",
        "logger": "kvloop.router",
        "message": 'prefill engine\n"x"',
    }


def test_an_exception_is_in_its_line() -> None:
    """With its traceback, as one string."""
    failed = record("failed")
    try:
        raise ValueError("why")
    except ValueError:
        failed.exc_info = sys.exc_info()
    assert "ValueError: why" in json.loads(JsonFormatter().format(failed))["exception"]


@in_loop
async def test_lines_name_their_request() -> None:
    """The one in whose task they are said; between requests none."""
    said: list[tuple[str, str]] = []

    class Both(logging.Handler):
        def emit(self, made: logging.LogRecord) -> None:
            said.append((JsonFormatter().format(made), TextFormatter().format(made)))

    handler = Both()
    logging.getLogger("kvloop.router").addHandler(handler)
    try:
        async with stack(prefill=[lambda _: Answer(500)]) as router:
            await router.chat([HELLO], headers={"x-request-id": "mine"})
    finally:
        logging.getLogger("kvloop.router").removeHandler(handler)
    about = [pair for pair in said if "prefill engine" in pair[0]]
    assert [json.loads(line)["request_id"] for line, _ in about] == ["mine"]
    assert about[0][1].endswith("[mine]")
    assert REQUEST.get() is None
