"""docs/operations.md says what the code does: the breaker's table, the defaults, the metrics."""

import re
from pathlib import Path

import pytest
from prometheus_client.registry import Collector

from kvloop.core import breaker
from kvloop.core.breaker import BreakerRules
from kvloop.core.decision import AppendLimits
from kvloop.core.diagram import state_diagram
from kvloop.core.policy import Kv
from kvloop.router.access import KeyState
from kvloop.router.config import Discovery, Health, RouterConfig, Timeouts
from kvloop.router.engine import EngineRules
from kvloop.router.engines_file import read_engines
from kvloop.router.fleet import Fleet
from kvloop.router.fleet_metrics import FleetState
from kvloop.router.keys import KeyRing, read_keys
from kvloop.router.membership import Membership
from kvloop.router.target import MAX_TARGETS
from kvloop.router.watch import Reloads

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
WORDS = " ".join(PAGE.split())
HEALTH, TIMES, FOUND = Health(), Timeouts(), Discovery()


def test_the_page_shows_the_breaker() -> None:
    """To mend it, paste what this test expects over the block in the page."""
    drawn = state_diagram(breaker.TRANSITIONS, breaker.INITIAL, frozenset[breaker.BreakerState]())
    assert f"```mermaid\n{drawn}\n```" in PAGE, f"docs/operations.md wants:\n{drawn}"


@pytest.mark.parametrize(
    "stated",
    [
        f"`--dns-interval-s` ({TIMES.dns_interval_s:.0f} s)",
        f"`--reload-interval-s` ({TIMES.reload_interval_s:.0f} s)",
        f"`--drain-timeout-s` ({TIMES.drain_timeout_s:.0f} s)",
        f"`--drain-delay-s` ({RouterConfig(('http://d',)).drain_delay_s:.0f})",
        f"`--breaker-failures` ({HEALTH.breaker_failures})",
        f"`--breaker-ratio` ({HEALTH.breaker_ratio})",
        f"at least {BreakerRules().min_hops} hops within `--breaker-window-s`",
        f"`--breaker-window-s` ({HEALTH.breaker_window_s:.0f} s)",
        f"for {BreakerRules().backoff_first_ns / 1e9} s, then",
        f"`--breaker-backoff-max-s` ({HEALTH.breaker_backoff_max_s:.0f} s)",
        f"`--probe-interval-s` ({HEALTH.probe_interval_s:.0f} s)",
        f"`--probe-timeout-s` ({HEALTH.probe_timeout_s:.0f} s)",
        f"`--probe-fall` ({HEALTH.probe_fall})",
        f"`--probe-rise` ({HEALTH.probe_rise})",
        f"`--slow-start-s` ({HEALTH.slow_start_s:.0f} s)",
        f"`--pod-role-label` (`{FOUND.pod_role_label}`",
        f"`--pod-port` ({FOUND.pod_port})",
        f"At most {MAX_TARGETS:,}.",
    ],
)
def test_the_page_states_the_defaults(stated: str) -> None:
    """An operator who reads a default there gets it."""
    assert stated in WORDS


def names_of(*collectors: Collector) -> set[str]:
    """The metrics that these export, as a scrape names them."""
    families = [family for collector in collectors for family in collector.collect()]
    return {family.name + ("_total" if family.type == "counter" else "") for family in families}


def test_the_page_lists_the_metrics() -> None:
    """All that there are, and none that there are not."""
    fleet = Fleet([], [], lambda: 0, Kv(), AppendLimits())
    state = FleetState(Membership(fleet, EngineRules()), Reloads())
    listed = set(re.findall(r"^\| `(\w+)` \|", PAGE.partition("## Metrics")[2], re.M))
    assert {f"kvloop_router_{name}" for name in listed} == names_of(state, KeyState(KeyRing()))


def test_the_page_s_files_are_files() -> None:
    """The examples can be copied: they say what the text says of them."""
    blocks = [block.replace("\n    ", "\n") for block in re.findall(r"\n\n    (.+?)\n\n", PAGE, re.S)]
    (engines,) = [block for block in blocks if block.startswith("engines:")]
    (keys,) = [block for block in blocks if block.startswith("keys:")]
    assert [target.name for target in read_engines("page", engines.encode())][-1] == "http://10.0.0.2:8200#3"
    assert read_keys("page", keys.encode())[0].concurrency == 16
