"""How prefill's part of a turn divides into reading back and computing, by the router's own account."""

import asyncio
import http.client
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

TIMEOUT_S = 10.0
_US_PER_MS = 1000.0


@dataclass(frozen=True, slots=True)
class Split:
    """Milliseconds of the prefill hop: reading back, and all the rest of it."""

    transfer_ms: float
    compute_ms: float


async def splits(admin_url: str | None, request_ids: Sequence[str]) -> dict[str, Split]:
    """Those of the requests that the router still knows and that went through prefill. A router that does not
    answer knows of none."""
    if admin_url is None:
        return {}
    return await asyncio.to_thread(_splits, admin_url, request_ids)


def _splits(admin_url: str, request_ids: Sequence[str]) -> dict[str, Split]:
    where = urlsplit(admin_url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT_S)
    found: dict[str, Split] = {}
    try:
        for request_id in request_ids:
            connection.request("GET", f"/decisions/{quote(request_id, safe='')}")
            answer = connection.getresponse()
            data = answer.read()
            split = _split_of(json.loads(data)) if answer.status == http.client.OK else None
            if split is not None:
                found[request_id] = split
    except (OSError, http.client.HTTPException, ValueError):
        return found
    finally:
        connection.close()
    return found


def _split_of(decision: dict[str, Any]) -> Split | None:
    prefilled_ms = decision.get("prefilled_ms")
    if prefilled_ms is None:
        return None
    transfer_ms = (decision.get("prefill") or {}).get("read_us", 0) / _US_PER_MS
    return Split(transfer_ms, max(0.0, prefilled_ms - transfer_ms))
