"""What a scrape sees of the leases that a router renews."""

from collections.abc import Callable, Iterator
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvloop.router.leases import TurnLeases


class LeaseState(Collector):
    """The keeper's counts, each engine's messages, and what was dropped as forged, late or unread."""

    def __init__(self, leases: TurnLeases, frames_dropped: Callable[[], dict[str, int]]) -> None:
        self._leases = leases
        self._frames_dropped = frames_dropped

    def collect(self) -> Iterator[Metric]:
        """All families, as they are now."""
        renewal = self._leases.renewal
        keeper = renewal.keeper
        known = GaugeMetricFamily("kvloop_router_leases", "Leases by what becomes of them", labels=("state",))
        known.add_metric(("renewed",), keeper.held)
        known.add_metric(("let_go",), len(keeper) - keeper.held)
        yield known
        events = CounterMetricFamily("kvloop_router_lease_events", "What became of leases", labels=("event",))
        for name, count in asdict(keeper.counts).items():
            events.add_metric((name,), count)
        yield events
        yield self._messages()
        for name, what, by_reason in (
            ("handles_unread", "Handles that the secret does not open", dict(self._leases.refused)),
            ("control_frames_dropped", "Answers of engines that do not open", self._frames_dropped()),
        ):
            family = CounterMetricFamily(f"kvloop_router_{name}", what, labels=("reason",))
            for reason, count in by_reason.items():
                family.add_metric((reason,), count)
            yield family

    def _messages(self) -> Metric:
        messages = CounterMetricFamily(
            "kvloop_router_control_messages",
            "Renewals and drops by engine; an answer may still come to one that is unanswered",
            labels=("engine", "outcome"),
        )
        for engine, tally in self._leases.renewal.tallies():
            for outcome in ("sent", "answered", "failed", "unanswered"):
                messages.add_metric((engine, outcome), getattr(tally, outcome))
        return messages
