"""What a scrape sees of the engines, and of the files that say which there are.

Labels are engines' names, which are bounded as the fleet is, and go with their engines.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvloop.router.membership import Membership
from kvloop.router.watch import Reloads


class FleetState(Collector):
    """Every engine as it is now."""

    def __init__(self, membership: Membership, reloads: Reloads) -> None:
        self._membership = membership
        self._fleet = membership.fleet
        self._reloads = reloads

    def collect(self) -> Iterator[Metric]:
        """All families, as they are now."""
        labels = ("role", "engine")
        in_flight = GaugeMetricFamily("kvloop_router_in_flight", "Requests at an engine", labels=labels)
        up = GaugeMetricFamily("kvloop_router_engine_up", "0 while an engine is left out", labels=labels)
        openings = CounterMetricFamily(
            "kvloop_router_breaker_openings", "How often failures left an engine out", labels=labels
        )
        probes = CounterMetricFamily(
            "kvloop_router_probes", "Probes of an engine by outcome", labels=(*labels, "outcome")
        )
        serving = self._fleet.engines()
        for engine in serving:
            names = (engine.role.value, engine.name)
            up.add_metric(names, self._fleet.is_available(engine))
            openings.add_metric(names, engine.breaker.openings)
            probes.add_metric((*names, "passed"), engine.probes.passed)
            probes.add_metric((*names, "missed"), engine.probes.missed)
        for engine in [*serving, *self._fleet.leaving.values()]:
            in_flight.add_metric((engine.role.value, engine.name), engine.in_flight)
        yield from (in_flight, up, openings, probes)
        yield GaugeMetricFamily(
            "kvloop_router_draining_engines",
            "Engines that only finish what they have",
            value=len(self._fleet.leaving),
        )
        failures = CounterMetricFamily(
            "kvloop_router_discovery_failures", "Sources of engines that gave no answer", labels=("source",)
        )
        for source, count in self._membership.failures.items():
            failures.add_metric((source,), count)
        yield failures
        reloads = CounterMetricFamily(
            "kvloop_router_file_reloads", "Files that had changed, by outcome", labels=("file", "outcome")
        )
        for (name, outcome), count in self._reloads.counts.items():
            reloads.add_metric((name.removeprefix("--"), outcome), count)
        yield reloads
