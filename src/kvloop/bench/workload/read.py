"""A workload by the name of its format, or by what the file looks like.

Formats are told apart by their fields, for neither names nor endings of files say much: the first line, or
the first entry of a list, has fields that the other formats do not have."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from kvloop.bench.workload.agent import AgentOptions, made_up
from kvloop.bench.workload.files import entries, is_list, read_bytes
from kvloop.bench.workload.mooncake import read_mooncake
from kvloop.bench.workload.multi_turn import read_multi_turn
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.recorded import read_agent_sessions
from kvloop.bench.workload.sharegpt import read_sharegpt
from kvloop.bench.workload.turn_log import read_turn_log
from kvloop.bench.workload.turns import Workload
from kvloop.errors import UserError

AGENT = "agent"
AUTO = "auto"
Reader = Callable[[Path, RecordingOptions], Workload]
READERS: dict[str, Reader] = {
    "sharegpt": read_sharegpt,
    "mooncake": read_mooncake,
    "multi-turn": read_multi_turn,
    "agent-sessions": read_agent_sessions,
    "turn-log": read_turn_log,
}
FORMATS = (AGENT, *READERS, AUTO)
"""What a workload can be called."""

_SIGNS = (
    ("mooncake", {"timestamp", "input_length", "hash_ids"}),
    ("agent-sessions", {"id", "requests"}),
    ("turn-log", {"time", "request_id", "prompt_tokens"}),
    ("sharegpt", {"conversations"}),
    ("sharegpt", {"messages"}),
    ("multi-turn", {"filetype"}),
)
"""The fields that tell a format."""


def read_workload(
    spec: str,
    path: Path | None = None,
    options: RecordingOptions | None = None,
    agent: AgentOptions | None = None,
) -> Workload:
    """The workload of format `spec` (one of `FORMATS`). `agent` makes up its own, as its options say; all
    others are read from `path`, and changed as `options` say. UserError says what is wrong with which
    file."""
    if spec == AGENT:
        return made_up(agent or AgentOptions())
    if spec not in FORMATS:
        raise UserError(f"no workload is called {spec[:40]!r}; there are {', '.join(FORMATS)}")
    if path is None:
        raise UserError(f"a workload of kind {spec} is read from a file, and none was given")
    if spec == AUTO:
        spec = format_of(path)
    return READERS[spec](path, options or RecordingOptions())


def format_of(path: Path) -> str:
    """The name of a file's format. UserError if it is none that we know."""
    data = read_bytes(path)
    fields = _first_fields(path, data)
    for name, signs in _SIGNS:
        if signs <= fields:
            return name
    raise UserError(f"{path}: its format is none of {', '.join(READERS)}")


def _first_fields(path: Path, data: bytes) -> set[str]:
    """The fields of the first entry or line, or of the whole where that is one object over several lines."""
    try:
        _, first = next(entries(path, data, dict[str, msgspec.Raw]))
        return set(first)
    except (UserError, StopIteration):
        if is_list(data):
            return set()
    try:
        return set(msgspec.json.decode(data, type=dict[str, msgspec.Raw]))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return set()
