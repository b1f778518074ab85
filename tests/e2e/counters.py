"""What an engine says on `/metrics`, by family and labels."""

import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from kvloop.local.stack import Engine

Counters = Mapping[str, float]


def counters(engine: Engine) -> dict[str, float]:
    """Every sample, by its name and labels but `engine` and `model_name`; the latter's are added up."""
    with urllib.request.urlopen(engine.url + "/metrics") as answer:
        text = answer.read().decode()
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
