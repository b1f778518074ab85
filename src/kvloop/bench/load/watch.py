"""What a leg's engines and processes say of themselves while it is its turn: memory, transfers, CPU time.

Engines are scraped as Prometheus would, at a pace that costs them nothing worth a figure. What one does not
tell is None. Bytes that a lease holds are kvloop's own metric; usage of the KV cache is vLLM's, and the only
thing that shows what upstream pins.
"""

import asyncio
import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass

from kvloop.bench.engine import cpu_s, process_tree
from kvloop.bench.load.record import Sample

TIMEOUT_S = 5.0
HELD_BYTES = "kvloop_lease_bytes"
KV_USAGE = "vllm:kv_cache_usage_perc"
TRANSFER_S = "vllm:nixl_xfer_time_seconds_sum"
TRANSFER_BYTES = "vllm:nixl_bytes_transferred_sum"
_VALUE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)


def totals_of(text: str) -> dict[str, float]:
    """Each metric of an exposition, summed over its labels."""
    totals: dict[str, float] = {}
    for name, value in _VALUE.findall(text):
        try:
            totals[name] = totals.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return totals


def scrape(url: str) -> dict[str, float]:
    """An engine's metrics; nothing where it does not answer."""
    try:
        with urllib.request.urlopen(url + "/metrics", timeout=TIMEOUT_S) as answer:
            return totals_of(answer.read().decode("utf-8", "replace"))
    except (OSError, ValueError):
        return {}


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums from a start: what a window took is the difference of two."""

    cpu_s: float | None
    transfer_s: float | None
    transferred_bytes: float | None


class Watch:
    """One leg's engines, by URL, those of them whose memory is this leg's alone, and its processes, by the
    roots of their trees."""

    def __init__(
        self, engines: Sequence[str] = (), holders: Sequence[str] = (), pids: Sequence[int] = ()
    ) -> None:
        self._engines = tuple(engines)
        self._holders = tuple(holders)
        self._pids = tuple(pids)

    async def sample(self, leg: str, round_number: int, at_s: float) -> Sample | None:
        """What they hold now; None where nobody can tell."""
        if not self._holders:
            return None
        said = [await asyncio.to_thread(scrape, url) for url in self._holders]
        usage = [one[KV_USAGE] for one in said if KV_USAGE in one]
        return Sample(
            leg=leg,
            round=round_number,
            at_s=at_s,
            held_bytes=_sum(said, HELD_BYTES),
            kv_usage=sum(usage) / len(usage) if usage else None,
        )

    async def totals(self) -> Totals:
        """The sums so far."""
        said = [await asyncio.to_thread(scrape, url) for url in self._engines]
        trees = [pid for root in self._pids for pid in process_tree(root)]
        return Totals(
            cpu_s=cpu_s(trees) if trees else None,
            transfer_s=_sum(said, TRANSFER_S),
            transferred_bytes=_sum(said, TRANSFER_BYTES),
        )


def _sum(said: Sequence[dict[str, float]], name: str) -> float | None:
    found = [one[name] for one in said if name in one]
    return sum(found) if found else None
