"""Raw files that nobody measured: records with everything told but what a test gives."""

import random
from typing import Any

from kvloop.bench.load.record import FORMAT, End, Leg, Record, Request, Run, Sample, Window

LEGS = ("aggregated", "one-way", "upstream", "kvloop")
MIB = 2**20


def run_of(*names: str, **given: Any) -> Run:
    """The first line."""
    told: dict[str, Any] = {
        "format": FORMAT,
        "kvloop": "0.1.0",
        "started": "2026-11-30T15:00:00Z",
        "command": "kvloop bench --compare " + ",".join(names),
        "workload": "agents",
        "source": "synthetic, 40 conversations",
        "model": "smollm2-135m",
        "seed": 7,
        "legs": [Leg(name, f"what stands behind {name}", "http://127.0.0.1:8000") for name in names],
        "settings": {"--concurrency": 4, "--seed": 7},
        "machine": {"cores": 16, "memory_gib": 64.0, "cpu": "a processor"},
    }
    return Run(**(told | given))


def asked(leg: str, turn: int = 0, **given: Any) -> Request:
    """A request that was answered, of round 0 and conversation `c0`."""
    told: dict[str, Any] = {
        "leg": leg,
        "round": 0,
        "conversation": "c0",
        "turn": turn,
        "what": "user",
        "warm_up": False,
        "at_s": 0.0,
        "late_ms": 0.0,
        "status": 200,
        "took_ms": 100.0,
    }
    return Request(**(told | given))


def a_whole_run(seed: int = 1, conversations: int = 12, turns: int = 8, rounds: int = 3) -> list[Record]:
    """Four legs, as they might have been: one-way computes all, upstream some, kvloop reads back."""
    draw = random.Random(seed)
    records: list[Record] = [run_of(*LEGS)]
    for number in range(rounds):
        for leg in LEGS:
            at_s = 0.0
            for conversation in range(conversations):
                for turn in range(turns):
                    at_s += 0.2
                    records.append(_drawn(draw, leg, number, conversation, turn, at_s))
                    if turn % 2 == 0:
                        held = 3e5 * (turn + 1) * conversation * (1 + (leg == "kvloop"))
                        records.append(Sample(leg, number, at_s, held, min(1.0, held / 4e7)))
            records.append(Window(leg, number, at_s + 0.3, at_s * 1.9, at_s * 0.05, 4e9, 1.3))
    return [*records, End("done")]


def _drawn(draw: random.Random, leg: str, number: int, conversation: int, turn: int, at_s: float) -> Request:
    prompt = int(600 * (1 + turn) * draw.uniform(0.8, 1.2))
    new = min(prompt, 500)
    reused = (
        0 if leg in ("aggregated", "one-way") or turn == 0 else (prompt - new) * (1 + (leg == "kvloop")) // 2
    )
    cached = prompt - new if leg == "aggregated" and turn else reused
    compute_ms = (prompt - cached) * 0.25 * draw.uniform(0.9, 1.3)
    transfer_ms = reused * 0.01 * draw.uniform(0.9, 1.3)
    first_ms = 20 + compute_ms + transfer_ms
    between = [draw.lognormvariate(2.4, 0.4) for _ in range(20)]
    return Request(
        leg=leg,
        round=number,
        conversation=f"c{conversation}",
        turn=turn,
        what="tool" if turn % 2 else "user",
        warm_up=number == 0 and conversation == 0,
        at_s=at_s,
        late_ms=draw.expovariate(5),
        status=200,
        took_ms=first_ms + sum(between),
        first_ms=first_ms,
        between_ms=between,
        planned_tokens=prompt,
        prompt_tokens=prompt,
        cached_tokens=cached,
        answer_tokens=21,
        route=None if leg == "aggregated" else "return" if reused else "prefill",
        reused_tokens=reused,
        transfer_ms=transfer_ms,
        compute_ms=compute_ms,
        answer="d0",
        agrees=True,
    )


def held(leg: str, at_s: float, held_bytes: float | None, number: int = 0) -> Sample:
    """What a leg held in a window."""
    return Sample(leg, number, at_s, held_bytes, None)


def window(leg: str, took_s: float = 10.0, number: int = 0, **given: Any) -> Window:
    """A leg's turn."""
    told: dict[str, Any] = {"leg": leg, "round": number, "took_s": took_s, "cpu_s": None, "client_cpu_s": 0.1}
    return Window(**(told | given))
