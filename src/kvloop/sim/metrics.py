"""What a simulated engine counts, under vLLM's names, and the connector's for leases, claims and reads.

One family is the simulation's own: `kvloop_sim_wrong_answers_total`, the requests that computed from KV which
was not their tokens'. Anything but 0 is a bug, and this engine is the only one that can see it.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvloop.sim.engine import Engine

# vLLM's own buckets, in seconds.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)
_LABELS = ("model_name", "engine")
_COUNTERS = {
    "vllm:prompt_tokens": ("prompt_tokens", "Number of prefill tokens processed."),
    "vllm:generation_tokens": ("generated_tokens", "Number of generation tokens processed."),
    "vllm:prefix_cache_queries": ("prompt_tokens", "Prefix cache queries, in number of queried tokens."),
    "vllm:prefix_cache_hits": ("local_tokens", "Prefix cache hits, in number of cached tokens."),
    "vllm:external_prefix_cache_queries": (
        "queried_tokens",
        "External prefix cache queries from KV connector, in number of queried tokens.",
    ),
    "vllm:external_prefix_cache_hits": (
        "read_tokens",
        "External prefix cache hits from KV connector, in number of cached tokens.",
    ),
    "vllm:num_preemptions": ("preemptions", "Cumulative number of preemptions from the engine."),
    "kvloop_sim_wrong_answers": (
        "wrong_answers",
        "Requests that computed from KV of other tokens. Anything but 0 is a bug.",
    ),
    "kvloop_sim_steps": ("steps", "Steps that the engine has taken."),
    "kvloop_sim_late_reads": ("late_reads", "Reads that outlived their claim."),
}


class Metrics(Collector):
    """One engine's metrics. Histograms are observed by the server, the rest is read off the engine."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        self._values = (engine.profile.model, "0")
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry)
            return made.labels(*self._values)

        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TTFT_S
        )
        self.next_token = histogram(
            "vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _TOKEN_S
        )
        self.whole = histogram(
            "vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _REQUEST_S
        )
        self.registry.register(self)

    def ended(self, reason: str) -> None:
        """A request has ended."""
        self._finished[reason] += 1

    def describe(self) -> list[Metric]:
        """Nothing: what there is, is said when it is collected."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Everything but the histograms, as it is now."""
        engine, limits = self._engine, self._engine.profile.limits
        running, waiting = engine.queue
        gauges = {
            "vllm:num_requests_running": (running, "Number of requests in model execution batches."),
            "vllm:num_requests_waiting": (waiting, "Number of requests waiting to be processed."),
            "vllm:kv_cache_usage_perc": (
                1 - engine.pool.free_count / limits.blocks,
                "KV-cache usage. 1 means 100 percent usage.",
            ),
        }
        for name, (value, text) in gauges.items():
            yield _sample(GaugeMetricFamily(name, text, labels=_LABELS), self._values, value)
        for name, (counter, text) in _COUNTERS.items():
            value = engine.counters.get(counter, 0)
            yield _sample(CounterMetricFamily(name, text, labels=_LABELS), self._values, value)
        ended = CounterMetricFamily(
            "vllm:request_success",
            "Count of successfully processed requests.",
            labels=(*_LABELS, "finished_reason"),
        )
        for reason, count in self._finished.items():
            ended.add_metric((*self._values, reason), count)
        yield ended
        yield from self._leases()

    def _leases(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        samples = self._engine.leases.samples()
        samples["kvloop_unbalanced_blocks"] = self._engine.unbalanced_blocks
        for name, value in samples.items():
            family, _, label = name.partition("{")
            key, _, text = label.rstrip("}").partition("=")
            labels = {"engine": "0"} | ({key: text.strip('"')} if key else {})
            kind = "counter" if family.endswith("_total") else "gauge"
            metric = families.setdefault(
                family, Metric(family.removesuffix("_total"), "See the connector's metric.", kind)
            )
            metric.add_sample(family, labels, value)
        yield from families.values()


def _sample(
    family: GaugeMetricFamily | CounterMetricFamily, labels: tuple[str, ...], value: float
) -> GaugeMetricFamily | CounterMetricFamily:
    family.add_metric(labels, value)
    return family
