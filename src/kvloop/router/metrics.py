"""What the router counts, in Prometheus' terms, in a registry of its own.

Counters are resolved to their label values once: on the way of a request only increments are left.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvloop.core.decision import Route
from kvloop.core.lineage import LineageTable
from kvloop.core.report import TurnReport
from kvloop.router.store import MemoryStore
from kvloop.wire.report import is_word

MAX_MISS_REASONS = 32
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_RATIOS = (0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.0, 4.0)
_GAP_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 240.0, 480.0)


class Metrics:
    """All of the router's counters and histograms. Names begin with `kvloop_router_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        requests = self._counter("requests", "Generation requests answered", "route", "status")
        self._requests = requests
        self._answered: dict[tuple[Route, int], Counter] = {}
        self._by: dict[str, Counter] = {}
        self._found = self._counter(
            "lookups", "Requests by how an earlier turn was found (none: it was not)", "by"
        )
        self.fallbacks = self._counter("fallbacks", "Hops that failed and were replaced", "hop", "reason")
        self.alone = self._counter(
            "unsplit", "Requests that prefill and decode cannot share, by field", "field"
        )
        self._miss_reasons: set[str] = set()
        self._misses = self._counter(
            "return_misses", "Handles that brought nothing back, by prefill's reason", "reason"
        )
        self._tokens = self._counter("prompt_tokens", "Prompt tokens by where their KV came from", "source")
        self._tokens_of: dict[str, Counter] = {}
        self.passed = self._counter(
            "passed", "Requests of routes that are passed on as they are", "path", "status"
        )
        self.filed = self._counter("handles_filed", "Handles taken out of answers and filed")
        self.cut = self._counter("answers_cut", "Answers that broke off after their first byte", "side")
        self.continued = self._counter(
            "streams_continued", "Answers that broke off, by what became of going on with them", "outcome"
        )
        self.gone = self._counter("clients_gone", "Requests whose client left before the answer was whole")
        seconds = Histogram(
            "kvloop_router_first_byte_seconds",
            "From a request's last byte to its answer's first",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.gap = Histogram(
            "kvloop_router_return_gap_seconds",
            "From the end of a turn to the beginning of one that goes on from all of it",
            buckets=_GAP_SECONDS,
            registry=self.registry,
        )
        errors = Histogram(
            "kvloop_router_prediction_error_ratio",
            "How far a stream's first byte was from its prediction, as a share of the time it took",
            ("route",),
            buckets=_RATIOS,
            registry=self.registry,
        )
        self.error = {route: errors.labels(route.value) for route in Route}
        self.first_byte = {route: seconds.labels(route.value) for route in Route}

    def answered(self, route: Route, status: int) -> None:
        """One request was answered."""
        counter = self._answered.get((route, status))
        if counter is None:
            counter = self._answered[route, status] = self._requests.labels(route.value, str(status))
        counter.inc()

    def looked_up(self, by: str) -> None:
        """An earlier turn was found so, or (`none`) was not."""
        counter = self._by.get(by)
        if counter is None:
            counter = self._by[by] = self._found.labels(by)
        counter.inc()

    def prefilled(self, report: TurnReport | None, asked: bool) -> None:
        """Prefill has said what a turn was made of. `asked`: it was to read back."""
        if report is None:
            return
        for source, tokens in (
            ("local", report.local_tokens),
            ("returned", report.returned_tokens),
            ("computed", report.computed_tokens),
        ):
            counter = self._tokens_of.get(source)
            if counter is None:
                counter = self._tokens_of[source] = self._tokens.labels(source)
            if tokens:
                counter.inc(tokens)
        if asked and not report.returned_tokens:
            self.missed(report.reason)

    def missed(self, reason: str | None) -> None:
        """A handle brought nothing back. Engines name the reason; what they call it is bounded in number."""
        reason = reason or "unknown"
        if reason not in self._miss_reasons:
            reason = reason if len(self._miss_reasons) < MAX_MISS_REASONS and is_word(reason) else "other"
            self._miss_reasons.add(reason)
        self._misses.labels(reason).inc()

    def observe(self, table: LineageTable, store: MemoryStore) -> None:
        """Let a scrape show the table and the stored responses as they are then."""
        self.registry.register(_State(table, store))

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"kvloop_router_{name}", what, labels, registry=self.registry)


class _State(Collector):
    def __init__(self, table: LineageTable, store: MemoryStore) -> None:
        self._table = table
        self._store = store

    def collect(self) -> Iterator[Metric]:
        for name, what, value in (
            ("turns", "Turns that can be found", len(self._table)),
            ("turn_keys", "Prefixes and names that lead to them", self._table.key_count),
            ("turn_bytes", "Estimate of their memory", self._table.used_bytes),
            ("responses", "Responses that can be gone on from", len(self._store)),
            ("response_bytes", "Estimate of their memory", self._store.used_bytes),
        ):
            yield GaugeMetricFamily(f"kvloop_router_{name}", what, value=value)
