"""What decode holds for others, and that all of it comes home."""

import json

from kvloop.local.stack import Engine
from tests.e2e.counters import check_living, counters
from tests.e2e.turns import Pair, post, until

GRANTED, CLAIMED = "kvloop_leases{state=granted}", "kvloop_leases{state=claimed}"
EXPIRED, RELEASED, RECLAIMED = (
    f"kvloop_leases_ended_total{{state={state}}}" for state in ("expired", "released", "reclaimed")
)
RENEWED = "kvloop_renewals_total{outcome=renewed}"
REFUSED = "kvloop_allocations_total{outcome=refused}"
CLAIMS_GRANTED = "kvloop_claims_total{outcome=granted}"
REPLAYED, SKEWED = (
    f"kvloop_control_frames_dropped_total{{reason={reason}}}" for reason in ("replayed", "skewed")
)


def held(decode: Engine) -> int:
    """Leases that hold blocks, claimed or not."""
    now = counters(decode)
    return int(now[GRANTED] + now[CLAIMED])


def check_all_home(pair: Pair) -> None:
    """Leases and claims end by themselves; then decode holds no block for anybody."""
    until(lambda: not held(pair.decode), "a lease or a claim does not end")
    pair.step(pair.decode)
    assert counters(pair.decode)["kvloop_lease_blocks"] == 0
    until(lambda: not counters(pair.decode)["vllm:kv_cache_usage_perc"], "a block is held for nobody")
    check_living(pair)


def end_leases(decode: Engine) -> None:
    """Let decode forget all that it holds for others."""
    until(lambda: json.loads(post(f"{decode.url}/reset_prefix_cache", {}))["success"], "a claim does not end")
    assert held(decode) == 0
