"""What an idle decode engine costs while it retains conversations: CPU time of all its processes.

The conversations are real turns through the router, so each was handed over, pulled and leased. After the
last the engine is left alone for longer than anything a turn leaves behind can last, then its process tree's
CPU time is read twice. The leases must be there at both ends.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvloop.bench.control import ControlClient
from kvloop.bench.engine import cpu_s, process_tree
from kvloop.bench.report import Bound, Row, Target
from kvloop.errors import UserError
from kvloop.local.chat import served_model, stream_turn
from kvloop.local.stack import Stack
from kvloop.wire.control import Stat, StatReply

MOST_IDLE_PERCENT = 5.0
ANSWER_TOKENS = 16
GRANTED = 'kvloop_leases{state="granted"}'
QUESTION = (
    "Please tell me about the subject that I shall now name, and say where the word comes from, how it was "
    "used in earlier times, who works with it today, and what a beginner ought to read about it first: "
)


@dataclass(frozen=True, slots=True)
class Effort:
    """How many conversations, how long to leave the engine alone, and how long to look, in seconds.

    A hand-over that nobody pulled keeps an engine stepping for 30 s; the wait is longer than that.
    """

    conversations: int = 20
    settle_s: float = 35.0
    window_s: float = 15.0


def measure(stack: Stack, seed: str, effort: Effort, say: Callable[[str], None]) -> list[Row]:
    """The row. Raises `UserError` where the engine retains less than it should."""
    model = served_model(stack.url)
    for number in range(effort.conversations):
        content = f"{seed}, conversation {number}. {QUESTION}number {number}."
        body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}
        stream_turn(stack.url, body | {"max_tokens": ANSWER_TOKENS})
    say(f"{effort.conversations} conversations are retained; now {effort.settle_s:g} s of silence")
    key = (stack.folder / "secret").read_bytes().strip()
    engine = stack.decode[0]
    with ControlClient(key, "127.0.0.1", engine.control_port) as client:
        time.sleep(effort.settle_s)
        _retained(client, effort.conversations)
        percent = _percent(engine.pid, effort.window_s)
        leases = _retained(client, effort.conversations)
    return [
        Row(
            "idle decode engine, CPU",
            percent,
            "% of a core",
            Target(Bound.UNDER, MOST_IDLE_PERCENT),
            f"{leases} leases held, over {effort.window_s:g} s; prefill beside it "
            f"{_percent(stack.prefill[0].pid, effort.window_s):.1f} %",
        )
    ]


def _retained(client: ControlClient, least: int) -> int:
    answer = client.ask(Stat())
    granted = answer.counters.get(GRANTED, 0) if isinstance(answer, StatReply) else 0
    if granted < least:
        raise UserError(f"decode should retain {least} conversations, and says {answer}")
    return granted


def _percent(pid: int, window_s: float) -> float:
    tree = process_tree(pid)
    began_s, used_s = time.monotonic(), cpu_s(tree)
    time.sleep(window_s)
    return 100 * (cpu_s(tree) - used_s) / (time.monotonic() - began_s)
