"""Why a turn went the way it did: each decision as it was weighed, and what came of it.

The last decisions are kept under their requests' ids; `GET /decisions/{request id}` on the admin port and
`kvloop explain` show one, and every so many is a line in the log.
"""

import logging
from collections import OrderedDict
from typing import Any

import msgspec

from kvloop.core.decision import Ask, Option
from kvloop.core.report import TurnReport
from kvloop.router.run import Run

logger = logging.getLogger("kvloop.router.decision")

MAX_KEPT = 2000  # some 3 KB each
_NS_PER_MS = 1e6


class Explanations:
    """The last decisions. `log_every`: one of so many is logged, 0 for none."""

    def __init__(self, log_every: int) -> None:
        self._kept: OrderedDict[bytes, dict[str, Any]] = OrderedDict()
        self._log_every = log_every
        self._count = 0

    def add(self, run: Run) -> None:
        """A request has been answered."""
        self._kept.pop(run.request_id, None)
        self._kept[run.request_id] = {
            "request_id": run.request_id.decode("latin-1"),
            "believed": run.believed,
            "ways": run.ways,
            "route": run.turn.route,
            "asked": run.turn.asked,
            "first_ns": run.first_ns - run.began_ns if run.first_ns else 0,
            "prefilled_ns": run.prefilled_ns - run.began_ns if run.prefilled_ns else 0,
            "report": run.report,
            "decoded": run.decoded,
        }
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        self._count += 1
        if self._log_every and self._count % self._log_every == 0:
            logger.info("%s", msgspec.json.encode(self.find(run.request_id.decode("latin-1"))).decode())

    def find(self, request_id: str) -> dict[str, Any] | None:
        """What is known of a request, as JSON's values; None if nothing is, or not any more."""
        kept = self._kept.get(request_id.encode("latin-1", "replace"))
        if kept is None:
            return None
        ways: list[Option] = kept["ways"]
        first_ns = kept["first_ns"]
        expected_ns = ways[0].expected_ns if ways else 0
        return {
            "request_id": kept["request_id"],
            "believed": _believed(kept["believed"]),
            "ways": [_way(way) for way in ways],
            "route": kept["route"],
            "engines": [{"hop": hop, "engine": engine} for hop, engine in kept["asked"]],
            "prefill": _reported(kept["report"]),
            "decode": _reported(kept["decoded"]),
            "prefilled_ms": kept["prefilled_ns"] / _NS_PER_MS or None,
            "first_byte_ms": first_ns / _NS_PER_MS if first_ns else None,
            "error_ms": (first_ns - expected_ns) / _NS_PER_MS if first_ns and ways else None,
        }


def _believed(ask: Ask) -> dict[str, Any]:
    return {
        "prompt_tokens": ask.tokens,
        "held_tokens": ask.held,
        "holder": ask.holder,
        "local_tokens": ask.local,
        "computed_at": ask.computed_at,
    }


def _way(way: Option) -> dict[str, Any]:
    parts = {
        name.removesuffix("_ns") + "_ms": value / _NS_PER_MS for name, value in way.parts._asdict().items()
    }
    return {
        "route": way.route,
        "prefill": way.prefill,
        "decode": way.decode,
        "computed_tokens": way.computed,
        "read_tokens": way.read,
        "parts": parts,
        "expected_ms": way.expected_ns / _NS_PER_MS,
        "score_ms": way.score_ns / _NS_PER_MS,
    }


def _reported(report: TurnReport | None) -> dict[str, Any] | None:
    return None if report is None else msgspec.to_builtins(report)
