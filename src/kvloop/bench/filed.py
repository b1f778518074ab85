"""What a router's memory of conversations costs, and its decisions beside it: `python -m kvloop.bench.filed`.

    memory     a million conversations filed in the router's own tables, lineage and keeper, with the bounds
               that so many need: by how much the process has grown, for each
    decision   then turns go on from some of them: digest the history, find the turn, predict every way in
               front of ten prefill and ten decode engines and choose, all in CPU time

Conversations have five to eight messages, a handle of 126 bytes with a lease of their own, one of a thousand
tenants and ten engines of each role. Between decisions the turns run to their end, as far as the router's
books are concerned, so that costs are learned, and looked up anew, as under traffic. The collector is off
while memory is filled; no engine is started. The exit status is 0 if every target was met.
"""

import argparse
import base64
import gc
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvloop.bench.report import Bound, Row, Target, spread
from kvloop.bench.run import conclude, say
from kvloop.core.belief import believed
from kvloop.core.decision import AppendLimits, Option
from kvloop.core.handle import LeaseRef
from kvloop.core.keeper import Keeper
from kvloop.core.life_table import Ending
from kvloop.core.lineage import FiledTurn, LineageTable, Match, Prompt, content_keys
from kvloop.core.policy import Kv
from kvloop.core.report import TurnReport
from kvloop.router.config import LeasePolicy, Leases, Limits, RouterConfig
from kvloop.router.engine import Engine
from kvloop.router.fleet import Fleet
from kvloop.router.heartbeat import keeper_of
from kvloop.router.target import Role

CONVERSATIONS = 1_000_000
DECISIONS = 20_000
QUICK_PARTS = 100  # of each, with --quick
MOST_BYTES = 1000
MOST_DECISION_US = 200
ENGINES = 10  # of each role
TENANTS = 1000
UNITS = (5, 8)
UNIT_BYTES = 400
UNIT_TOKENS = UNIT_BYTES // 4
HANDLE_TEXT_BYTES = 106  # with its field's name around it 126
_MS = 1_000_000
_S = 1000 * _MS


@dataclass(frozen=True, slots=True)
class Timed:
    """CPU time of decisions, in nanoseconds: all of each, and the parts of it."""

    whole: list[int]
    find: list[int]
    choose: list[int]


class Router:
    """The tables that a turn meets in a router, wired as the router does it; time passes when asked to."""

    def __init__(self, conversations: int) -> None:
        self.now_ns = _S
        self._random = random.Random(1)
        self._key = bytes(range(32))
        config = RouterConfig(
            prefill=(),
            decode=("http://10.0.0.1:8200",),
            limits=Limits(
                max_conversation_keys=conversations * (UNITS[1] + 2),
                max_conversation_bytes=conversations * 4096,
            ),
            leases=Leases(max_leases=conversations, lease_policy=LeasePolicy.FIXED),
        )
        self.lineage = LineageTable(config.limits.max_conversation_keys, config.limits.max_conversation_bytes)
        self.keeper: Keeper = keeper_of(config)
        self._retention_ns = int(config.retention_s * _S)
        prefill, decode = (
            [Engine(f"http://10.0.{number}.{place}:8000", role) for place in range(ENGINES)]
            for number, role in enumerate((Role.PREFILL, Role.DECODE))
        )
        self.fleet = Fleet(prefill, decode, lambda: self.now_ns, Kv(), AppendLimits())

    def history(self, number: int, more: int = 0) -> list[bytes]:
        """The messages of a conversation, and so many that came later."""
        count = UNITS[0] + number % (UNITS[1] - UNITS[0] + 1) + more
        return [b"%d %d " % (number, place) + b"." * UNIT_BYTES for place in range(count)]

    def content(self, number: int, units: Sequence[bytes]) -> list[bytes]:
        """Their keys."""
        return content_keys(self._key, [b"%032x" % (number % TENANTS), b"chat", b"model"], units)

    def file(self, number: int, content: list[bytes], decode: str, prompt: Prompt) -> None:
        """A turn of a conversation has ended at this engine, and left a handle."""
        text = base64.urlsafe_b64encode(self._random.randbytes(HANDLE_TEXT_BYTES))[:HANDLE_TEXT_BYTES]
        address = (decode[7:-5], 5570)
        lease = LeaseRef(f"{self._random.getrandbits(64):016x}", decode[-16:], address, prompt.tokens, 60_000)
        handle = b'{"kvloop_handle":"%b"}' % text
        tenant, expires_ns = "%032x" % (number % TENANTS), self.now_ns + self._retention_ns
        turn = FiledTurn(handle, decode, tenant, len(content), expires_ns, (), lease, prompt)
        self.keeper.filed(lease, tenant, Ending.STOP, self.now_ns)
        for ended in (*self.lineage.file(turn, content, [], self.now_ns), *self.lineage.take_dropped()):
            if ended.lease is not None:
                self.keeper.ended(ended.lease.lease_id, self.now_ns)

    def fill(self, conversations: int) -> None:
        """File so many within a second."""
        names = [*self.fleet.prefill], [*self.fleet.decode]
        for number in range(conversations):
            self.now_ns += max(1, _S // conversations)
            units = self.history(number)
            tokens = len(units) * UNIT_TOKENS
            prompt = Prompt(tokens, names[0][number // ENGINES % ENGINES], tokens)
            self.file(number, self.content(number, units), names[1][number % ENGINES], prompt)

    def decide(self, number: int, timed: Timed) -> None:
        """The next turn of a conversation: a decision, which is timed, and what the turn then comes to."""
        self.now_ns += 10 * _MS
        units = self.history(number, 2)
        clock = time.thread_time_ns
        began_ns = clock()
        content = self.content(number, units)
        match = self.lineage.find(content, [], self.now_ns)
        found_ns = clock()
        ask = believed(match, len(units) * UNIT_TOKENS, _no_edit, lambda _: UNIT_TOKENS)
        ways = self.fleet.choose(ask)
        ended_ns = clock()
        timed.whole.append(ended_ns - began_ns)
        timed.find.append(found_ns - began_ns)
        timed.choose.append(ended_ns - found_ns)
        assert match is not None
        self._serve(number, content, match, ways[0])

    def _serve(self, number: int, content: list[bytes], match: Match, way: Option) -> None:
        """What the books hear of a turn that goes this way."""
        ask = believed(match, len(content) * UNIT_TOKENS, _no_edit, lambda _: UNIT_TOKENS)
        progress, at_ns = self.fleet.progress(ask), self.now_ns
        if match.turn.lease is not None:
            self.keeper.used(match.turn.lease.lease_id, self.now_ns)
        if way.prefill is not None:
            progress.sent_prefill(way.prefill, with_handle=way.read > 0, now_ns=at_ns)
            at_ns += self._random.randrange(80, 120) * _MS
            report = TurnReport(ask.tokens, 0, way.read, ask.tokens - way.read, None, 5000 * (way.read > 0))
            progress.prefilled(report, at_ns)
        progress.sent_decode(way.decode, whole=way.prefill is None, now_ns=at_ns)
        at_ns += self._random.randrange(20, 40) * _MS
        progress.began(at_ns)
        local = ask.held if way.decode == ask.holder else 0
        pulled = ask.tokens - local if way.prefill is not None else 0
        progress.reported(TurnReport(ask.tokens, local, pulled, ask.tokens - local - pulled))
        if match.turn.lease is not None:
            self.keeper.done(match.turn.lease.lease_id, self.now_ns)
        progress.ended(at_ns)
        self.file(number, content, way.decode, progress.prompt)


def main(words: list[str] | None = None) -> int:
    """Measure, print the table, and return 1 if a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m kvloop.bench.filed", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="little of each: to see that it runs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="keep the rows there")
    args = parser.parse_args(words)
    parts = QUICK_PARTS if args.quick else 1
    rows = filed_rows(CONVERSATIONS // parts, DECISIONS // parts)
    heading = "Conversations that a router has filed, and what it decides."
    return conclude(heading, rows, (), {"quick": args.quick}, args.json)


def filed_rows(conversations: int, decisions: int) -> list[Row]:
    """Fill a router's tables, measure them, and let turns go on from a sample."""
    say(f"filing {conversations:,} conversations")
    gc.collect()
    gc.disable()
    try:
        before_bytes, began_s = _resident_bytes(), time.process_time()
        router = Router(conversations)
        router.fill(conversations)
        each_bytes = (_resident_bytes() - before_bytes) / conversations
        took_us = (time.process_time() - began_s) / conversations * 1e6
        known, held = len(router.lineage), router.keeper.held
    finally:
        gc.enable()
    say(f"{each_bytes:,.0f} bytes each; {decisions:,} decisions")
    timed = Timed([], [], [])
    for number in random.Random(2).sample(range(conversations), decisions):
        router.decide(number, timed)
    router.fleet.close()
    return [
        Row(
            "memory for a filed conversation",
            each_bytes,
            "bytes",
            Target(Bound.AT_MOST, MOST_BYTES),
            f"{known:,} turns, {held:,} leases, {router.lineage.key_count:,} keys",
        ),
        Row("filing one", took_us, "µs", None, "CPU, with digests of the history and making the handle"),
        *_decision_rows(timed),
    ]


def _decision_rows(timed: Timed) -> list[Row]:
    slow_us = _percentile_us(timed.whole, 99)
    return [
        Row("a decision, median", _percentile_us(timed.whole, 50), "µs", None, "CPU"),
        Row("a decision, p99", slow_us, "µs", Target(Bound.UNDER, MOST_DECISION_US), _spread(timed.whole)),
        Row(
            "of it, finding the turn, median", _percentile_us(timed.find, 50), "µs", None, _spread(timed.find)
        ),
        Row("of it, the choice, median", _percentile_us(timed.choose, 50), "µs", None, _spread(timed.choose)),
    ]


def _percentile_us(taken_ns: list[int], percent: int) -> float:
    return sorted(taken_ns)[len(taken_ns) * percent // 100] / 1000


def _spread(taken_ns: list[int]) -> str:
    return spread([taken / 1000 for taken in taken_ns], "µs")


def _no_edit(_: int) -> int:
    raise AssertionError("every turn here goes on from all of the one before")


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
