"""Who belongs to the fleet: what every source says together, less what an operator has drained.

A source (flags, a file, DNS, Kubernetes) only ever says which targets there are, whole, each time anew; what
has to change for that is worked out here. A source that knows nothing new keeps its last word. Draining is
the operator's own word and outlives every re-read of a source, until he takes it back or no source names the
engine any more.
"""

import logging
import ssl
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from kvloop.core.breaker import BreakerRules
from kvloop.router.config import RouterConfig
from kvloop.router.engine import Engine, EngineRules
from kvloop.router.fleet import Fleet
from kvloop.router.target import MAX_TARGETS, Target, united

logger = logging.getLogger("kvloop.router")

_NS_PER_S = 1_000_000_000


class Membership:
    """Keeps a fleet as its sources want it. `failures`: questions without an answer, by source."""

    def __init__(self, fleet: Fleet, rules: EngineRules) -> None:
        self.fleet = fleet
        self._rules = rules
        self.failures: Counter[str] = Counter()
        self._sources: dict[str, tuple[Target, ...]] = {}
        self._wanted: dict[str, Target] = {}
        self._drained: set[str] = set()

    def set(self, source: str, targets: Iterable[Target]) -> None:
        """All that a source knows of, from now on. Beyond `MAX_TARGETS` the rest is left out.

        An engine that only a later word names is new, and starts slowly.
        """
        is_first_word = source not in self._sources
        self._sources[source] = tuple(islice(targets, MAX_TARGETS))
        wanted = united(target for known in self._sources.values() for target in known)
        if len(wanted) > MAX_TARGETS:
            logger.error("%d engines are more than %d: the last are left out", len(wanted), MAX_TARGETS)
            wanted = dict(islice(wanted.items(), MAX_TARGETS))
        self._wanted = wanted
        self._drained &= wanted.keys()
        self._reconcile(is_first_word)

    def authorize(self, authorization: bytes) -> None:
        """What every engine gets as `Authorization` from now on."""
        self._rules = replace(self._rules, authorization=authorization)
        for engine in [*self.fleet.engines(), *self.fleet.leaving.values()]:
            engine.authorize(authorization)

    def drain(self, url: str) -> list[str]:
        """Let the engines of a URL, or the one of that name, take nothing new. Their names."""
        names = self._named(url)
        self._drained.update(names)
        self._reconcile()
        return names

    def undrain(self, url: str) -> list[str]:
        """Let them take requests again. Their names."""
        names = self._named(url)
        self._drained.difference_update(names)
        self._reconcile()
        return names

    def listed(self) -> list[dict[str, Any]]:
        """Every engine that a source names or that still has something to do, and how it stands."""
        leaving = {name: engine.target for name, engine in self.fleet.leaving.items()}
        return [self._row(target) for target in {**self._wanted, **leaving}.values()]

    def check_integrity(self) -> None:
        """AssertionError where the fleet is not what the sources and the operator want."""
        self.fleet.check_integrity()
        assert self._drained <= self._wanted.keys()
        serving = {engine.name: engine.target for engine in self.fleet.engines()}
        wanted = {name: one for name, one in self._wanted.items() if name not in self._drained}
        assert serving == wanted

    def _named(self, url: str) -> list[str]:
        url = url.rstrip("/")
        return [name for name, target in self._wanted.items() if url in (name, target.url)]

    def _reconcile(self, is_first_word: bool = False) -> None:
        fleet = self.fleet
        present = {engine.name: engine for engine in fleet.engines()}
        for name in present:
            if name not in self._wanted or name in self._drained:
                fleet.remove(name)
        for name, target in self._wanted.items():
            if name in self._drained:
                continue
            if name not in present and not fleet.restore(name):
                engine = Engine.of(target, self._rules)
                if not is_first_word:
                    engine.is_new(self.fleet.now_s)
                fleet.add(engine)
            else:
                engine = present.get(name) or fleet.find(name)  # type: ignore[assignment]
                if engine.target != target:
                    fleet.update(engine, target)

    def _row(self, target: Target) -> dict[str, Any]:
        now_s = self.fleet.now_s
        engine = self.fleet.find(target.name)
        row: dict[str, Any] = {
            "name": target.name,
            "url": target.url,
            "rank": target.rank,
            "role": target.role.value,
            "weight": target.weight,
            "labels": dict(target.labels),
        }
        if engine is None:
            return {**row, "state": "drained", "in_flight": 0}
        state = "serving" if engine.available(now_s) else "out"
        return {
            **row,
            "state": "draining" if engine.leaving else state,
            "in_flight": engine.in_flight,
            "held": engine.held,
            "breaker": engine.breaker.state.value,
            "probes": engine.probes.state.value,
            "share": engine.share_permille(now_s) / 1000,
        }


def rules_of(config: RouterConfig, tls: ssl.SSLContext | None = None) -> EngineRules:
    """How the config wants engines to be treated. `tls`: what their certificates are checked against."""
    health = config.health
    breaker = BreakerRules(
        max_failures=health.breaker_failures,
        max_failure_permille=int(1000 * health.breaker_ratio),
        window_ns=int(health.breaker_window_s * _NS_PER_S),
        backoff_first_ns=min(BreakerRules().backoff_first_ns, int(health.breaker_backoff_max_s * _NS_PER_S)),
        backoff_max_ns=int(health.breaker_backoff_max_s * _NS_PER_S),
    )
    return EngineRules(
        connect_timeout_s=config.timeouts.connect_timeout_s,
        breaker=breaker,
        fall=health.probe_fall,
        rise=health.probe_rise,
        slow_start_s=health.slow_start_s,
        tls=tls,
    )
