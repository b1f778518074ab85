"""What an engine says on `/metrics`, by family and labels."""

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from kvloop.local.stack import Engine
from tests.e2e.turns import Pair, until

Counters = Mapping[str, float]


def counters(engine: Engine) -> dict[str, float]:
    """Every sample, by its name and labels but `engine` and `model_name`; the latter's are added up. Waits
    for an engine that is busy."""
    text = ""

    def scraped() -> bool:
        nonlocal text
        with urllib.request.urlopen(engine.url + "/metrics") as answer:
            text = answer.read().decode()
        return "kvloop_" in text  # left out where the engine's scheduler does not answer in time

    until(scraped, f"{engine.name} does not say what it counts")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")}
            inside = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
            key = f"{sample.name}{{{inside}}}" if inside else sample.name
            found[key] = found.get(key, 0) + sample.value
    return found


def grown(before: Counters, after: Counters, name: str) -> float:
    """How much a counter has grown."""
    return after.get(name, 0) - before.get(name, 0)


def check_books(*engines: Engine) -> None:
    """Block references were accounted for at every step so far, and none was ever missing."""
    for engine in engines:
        now = counters(engine)
        assert now["kvloop_balance_checks_total"] > 0
        assert now["kvloop_unbalanced_blocks"] == 0


def check_living(pair: Pair) -> None:
    """At those of both engines that run no request is left, and their books have been right at every step."""
    for engine in (pair.prefill, pair.decode):
        if engine.running:
            pair.step(engine)
            for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
                until(lambda: counters(engine)[name] == 0, f"a request is stuck at {engine.name}")  # noqa: B023
            check_books(engine)
