"""The names under which an engine's leases, claims and reads are counted, and how Prometheus reads them.

The scheduler process counts, vLLM's API server answers scrapes; between them travel plain integers by name
(`StatReply`), each name a Prometheus sample's: `kvloop_claims_total{outcome="granted"}`. Which families there
are stands here once, with what they mean. Gauges say what is now, counters (`_total`) what has been since the
engine started.
"""

import re
from collections.abc import Iterator, Mapping

FAMILIES: dict[str, str] = {
    "kvloop_leases": "Leases by state; soft: given back, but its blocks may still hold what they held.",
    "kvloop_lease_blocks": "Block references that leases hold; a block that two leases share counts twice.",
    "kvloop_lease_bytes": "The same in bytes of KV cache, over all workers.",
    "kvloop_lease_block_seconds_total": "Blocks held by leases, times for how long.",
    "kvloop_leases_granted_total": "Finished requests that were leased, and soft leases that were claimed.",
    "kvloop_leases_ended_total": "Leases that have ended, by how.",
    "kvloop_claims_total": "Claims of readers by what came of them: granted, or the reason for a refusal.",
    "kvloop_reads_total": "Reads back from a decode engine by what came of them.",
    "kvloop_read_bytes_total": "KV that this engine read: returned by decode, or handed over by prefill.",
    "kvloop_prompt_tokens_total": "Prompt tokens of turns by where their KV came from.",
    "kvloop_recomputed_total": "Turns of which nothing was returned, by reason.",
    "kvloop_renewals_total": "Renewals asked for: done, or lost because the lease was gone.",
    "kvloop_allocations_total": "Allocations short of blocks: relieved, because leases gave way; or refused.",
    "kvloop_control_frames_dropped_total": "Control frames that were not answered, by reason.",
    "kvloop_unbalanced_blocks": "Most block references ever found unaccounted for. Anything but 0 is a bug.",
    "kvloop_balance_checks_total": "How often block references were accounted for.",
}
_SAMPLE = re.compile(r'(?P<family>kvloop_[a-z_]+)(?:\{(?P<labels>[a-z_]+="[^"\\\n{}]*")\})?')


def sample(family: str, **label: str) -> str:
    """The name of a family's sample, under at most one label."""
    labels = ",".join(f'{name}="{value}"' for name, value in label.items())
    return f"{family}{{{labels}}}" if labels else family


def labelled(family: str, label: str, counts: Mapping[str, int]) -> dict[str, int]:
    """A family's samples, one for each value of its label."""
    return {sample(family, **{label: value}): count for value, count in counts.items()}


def exposition(engines: Mapping[int, Mapping[str, int]]) -> str:
    """Prometheus' text of what each engine counted, under vLLM's own label `engine`: its data-parallel
    index. Names that are not ours are left out."""
    lines: list[str] = []
    for family, meaning in FAMILIES.items():
        found = list(_samples(family, engines))
        if found:
            kind = "counter" if family.endswith("_total") else "gauge"
            lines += [f"# HELP {family} {meaning}", f"# TYPE {family} {kind}", *found]
    return "".join(f"{line}\n" for line in lines)


def _samples(family: str, engines: Mapping[int, Mapping[str, int]]) -> Iterator[str]:
    for engine, counters in engines.items():
        for name, value in counters.items():
            found = _SAMPLE.fullmatch(name)
            if found and found["family"] == family:
                labels = f",{found['labels']}" if found["labels"] else ""
                yield f'{family}{{engine="{engine}"{labels}}} {value}'
