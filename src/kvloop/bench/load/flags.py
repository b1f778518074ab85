"""The flags of `kvloop bench`, and what cannot be asked with them."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvloop.bench.load.api import Api
from kvloop.bench.load.asked_for import add_workload_arguments
from kvloop.bench.load.deployments import LEGS
from kvloop.bench.load.play import Pace
from kvloop.bench.load.report_command import add_report_arguments
from kvloop.bench.workload.agent import MAX_CONVERSATIONS
from kvloop.bench.workload.turns import Conversation
from kvloop.errors import UserError

_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `kvloop bench`, and `kvloop bench report`."""
    actions = parser.add_subparsers(
        dest="action",
        metavar="report",
        required=False,
        help="draw a finished run again: kvloop bench report RAW",
    )
    report = actions.add_parser("report", help="draw summary and report again from a raw file")
    add_report_arguments(report)
    _add_whom(parser)
    add_workload_arguments(parser)
    _add_how(parser)
    what = parser.add_argument_group("what comes of it")
    what.add_argument(
        "--out", type=Path, metavar="FILE", help="the raw file (default: bench-DATE-TIME.jsonl)"
    )
    what.add_argument("--html", type=Path, metavar="FILE", help="write the report as one page there")
    what.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")


def _add_whom(parser: argparse.ArgumentParser) -> None:
    whom = parser.add_argument_group("who is asked")
    whom.add_argument(
        "--url",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="an endpoint that is there already; given again, endpoints are compared",
    )
    whom.add_argument(
        "--compare", metavar="LEGS", help=f"start deployments and compare them, of {','.join(LEGS)}"
    )
    whom.add_argument(
        "--model",
        metavar="NAME",
        help="what to ask for, or to serve (default: the first that is served; with --compare smollm2)",
    )
    whom.add_argument("--api-key", metavar="KEY", help="sent to --url endpoints (default: $OPENAI_API_KEY)")
    whom.add_argument(
        "--prefill", type=int, default=1, metavar="N", help="with --compare: prefill engines (default: 1)"
    )
    whom.add_argument(
        "--decode", type=int, default=1, metavar="N", help="with --compare: decode engines (default: 1)"
    )
    whom.add_argument(
        "--prefill-cache",
        choices=("on", "off"),
        default="off",
        help="with --compare: prefill's own prefix cache (default: off)",
    )
    whom.add_argument(
        "--policy", default="kv", metavar="NAME", help="with --compare: the kvloop router's (default: kv)"
    )
    whom.add_argument(
        "--kv-cache-gib",
        type=int,
        default=2,
        metavar="N",
        help="with --compare: KV memory of each CPU engine (default: 2)",
    )
    whom.add_argument("--sim", metavar="PROFILE", help="with --compare: simulated engines with this profile")


def _add_how(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how it is asked")
    how.add_argument(
        "--arrival",
        choices=("closed", "open"),
        default="closed",
        help="conversations begin when others end, or at their own times (default: closed)",
    )
    how.add_argument(
        "--concurrency",
        type=int,
        default=1,
        metavar="N",
        help="conversations at once, in a closed loop (default: 1)",
    )
    how.add_argument(
        "--time-scale",
        type=float,
        default=1.0,
        metavar="F",
        help="multiply gaps and starts; 0 leaves no pauses (default: 1)",
    )
    how.add_argument(
        "--rounds", type=int, default=3, metavar="N", help="how often legs take turns (default: 3)"
    )
    how.add_argument(
        "--warm-up",
        type=int,
        metavar="N",
        help="conversations that count for nothing (default: one for each pair of engines)",
    )
    how.add_argument(
        "--api",
        choices=[api.value for api in Api],
        default=Api.CHAT.value,
        help="which of the endpoint's (default: chat)",
    )
    how.add_argument("--no-stream", action="store_true", help="whole answers: no time to first token")
    how.add_argument(
        "--natural-lengths",
        action="store_true",
        help="let answers end (else vLLM's ignore_eos keeps lengths)",
    )
    how.add_argument(
        "--session-header", metavar="NAME", help="tell conversations' names in this header (default: do not)"
    )
    how.add_argument(
        "--no-cache-salt",
        action="store_true",
        help="do without vLLM's cache_salt, which keeps legs and runs from finding each other's prompts",
    )
    how.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="fields for every request"
    )
    how.add_argument(
        "--timeout-s", type=float, default=600.0, metavar="S", help="an answer may stand still (default: 600)"
    )


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"not a JSON object: {error}") from None


def check(args: argparse.Namespace) -> None:
    """Raises `UserError` for what cannot be."""
    if bool(args.url) == bool(args.compare):
        raise UserError("say whom to ask: --url URL, or --compare LEGS")
    for name, least in (
        ("concurrency", 1),
        ("rounds", 1),
        ("prefill", 1),
        ("decode", 1),
        ("kv_cache_gib", 1),
    ):
        if getattr(args, name) < least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")
    for name, least in (("warm_up", 0), ("conversations", 1)):
        given = getattr(args, name)
        if given is not None and not least <= given <= MAX_CONVERSATIONS:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} must be from {least} to {MAX_CONVERSATIONS}, not {given}")
    if args.session_header is not None and not _HEADER.fullmatch(args.session_header):
        raise UserError(f"--session-header: {args.session_header!r} is no header's name")
    if not 0 <= args.time_scale <= 1000:
        raise UserError(f"--time-scale must be from 0 to 1000, not {args.time_scale:g}")
    if not 0 < args.timeout_s <= 86_400:
        raise UserError(f"--timeout-s must be above 0 and at most a day, not {args.timeout_s:g}")


def pace_of(args: argparse.Namespace) -> Pace:
    """A closed loop or an open one."""
    return Pace(args.concurrency if args.arrival == "closed" else None, args.time_scale)


def pauses_s(pace: Pace, conversations: Sequence[Conversation]) -> float:
    """About how long one leg's pauses between turns are in all, in a closed loop: no machine makes a run
    shorter than that. 0 for an open one, which lasts as long as was recorded."""
    if pace.concurrency is None:
        return 0.0
    lanes = min(pace.concurrency, max(1, len(conversations)))
    return pace.time_scale * sum(turn.wait_s for one in conversations for turn in one.turns) / lanes
