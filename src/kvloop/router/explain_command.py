"""`kvloop explain REQUEST-ID`: why a request went the way it did, from a running router's admin port."""

import argparse
import http.client
import json
import sys
from typing import Any
from urllib.parse import quote, urlsplit

from kvloop.errors import UserError

TIMEOUT_S = 10.0
DEFAULT_ADMIN = "http://127.0.0.1:8001"
_COLUMNS = (
    *("route", "prefill", "decode", "computed", "read"),
    *("queue ms", "read ms", "compute ms", "handover ms", "score ms"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "request_id", metavar="REQUEST-ID", help="the answer's X-Request-Id, of one of the last few thousand"
    )
    parser.add_argument(
        "--admin", metavar="URL", default=DEFAULT_ADMIN, help="the router's admin port (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="as the router says it")


def run(args: argparse.Namespace) -> int:
    """Print it. `UserError` where the router cannot be reached, or knows nothing of the request."""
    found = _ask(args.admin, args.request_id)
    try:
        text = json.dumps(found, indent=2) + "\n" if args.json else explained(found)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{args.admin} does not answer as a router's admin port does: {error!r}") from error
    sys.stdout.write(text)
    return 0


def explained(found: dict[str, Any]) -> str:
    """The decision as text: what was believed, the ways by score, and what came of it."""
    believed = found["believed"]
    lines = [
        f"request {found['request_id']}: {found['route']}",
        f"believed to have {believed['prompt_tokens']} prompt tokens"
        + f", {believed['held_tokens']} of them held by {believed['holder']}" * bool(believed["holder"])
        + f", {believed['local_tokens']} by {believed['computed_at']}" * bool(believed["computed_at"]),
        "",
    ]
    rows = [_COLUMNS, *(_cells(way) for way in found["ways"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines += ["", "asked: " + ", then ".join(f"{one['hop']} {one['engine']}" for one in found["engines"])]
    for hop in ("prefill", "decode"):
        if (report := found[hop]) is not None:
            lines.append(
                f"{hop} counted: {report['prompt_tokens']} prompt tokens, {report['local_tokens']} in its "
                f"own cache, {report['returned_tokens']} loaded, {report['computed_tokens']} computed"
                + (f" (nothing came back: {report['reason']})" if report["reason"] else "")
            )
    if (prefilled_ms := found["prefilled_ms"]) is not None:
        read_us = (found["prefill"] or {}).get("read_us", 0)
        read = f", of which reading back took {read_us / 1000:.1f} ms" * bool(read_us)
        lines.append(f"prefill answered after {prefilled_ms:.1f} ms{read}")
    if found["first_byte_ms"] is not None:
        error = found["error_ms"]
        off = "" if error is None else f", {error:+.1f} ms from what was predicted"
        lines.append(f"first byte after {found['first_byte_ms']:.1f} ms{off}")
    return "\n".join(lines) + "\n"


def _cells(way: dict[str, Any]) -> tuple[str, ...]:
    parts = way["parts"]
    times = [parts["queue_ms"], parts["read_ms"], parts["compute_ms"], parts["handover_ms"], way["score_ms"]]
    return (
        *(way["route"], way["prefill"] or "-", way["decode"]),
        *(str(way["computed_tokens"]), str(way["read_tokens"])),
        *(f"{value:.1f}" for value in times),
    )


def _ask(admin: str, request_id: str) -> dict[str, Any]:
    try:
        parts = urlsplit(admin)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or parts.scheme != "http":
        raise UserError(f"--admin {admin!r} is not a URL like {DEFAULT_ADMIN}")
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"/decisions/{quote(request_id, safe='')}")
        answer = connection.getresponse()
        body = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise UserError(f"{admin} does not answer as a router's admin port does: {error}") from error
    finally:
        connection.close()
    if answer.status != http.client.OK or not isinstance(body, dict):
        raise UserError(f"the router at {admin} knows nothing of request {request_id}, or not any more")
    return body
