"""An arrangement as an operator writes it down: engines, the connector's keys, the router's flags."""

import json

from kvloop.bench.planning.arrangement import DEFAULT_THRESHOLD_TOKENS, Arrangement

DEFAULT_TTL_S = 480


def extra_config(arrangement: Arrangement) -> dict[str, int]:
    """What goes into `kv_connector_extra_config` of every engine; empty where the defaults will do."""
    extra = {}
    if arrangement.threshold_tokens != DEFAULT_THRESHOLD_TOKENS:
        extra["kv_recompute_threshold"] = arrangement.threshold_tokens
    if arrangement.ttl_s not in (None, DEFAULT_TTL_S):
        extra["decoder_kv_blocks_ttl"] = arrangement.ttl_s or DEFAULT_TTL_S
    return extra


def router_flags(arrangement: Arrangement) -> list[str]:
    """What `kvloop route` is told beside its engines; empty where the defaults will do."""
    if arrangement.ttl_s is None:
        return []
    return ["--lease-policy", "fixed", "--retention-s", str(arrangement.ttl_s)]


def lines(arrangement: Arrangement) -> list[str]:
    """To read, and to paste."""
    extra, flags = extra_config(arrangement), router_flags(arrangement)
    config = json.dumps({"kv_connector_extra_config": extra})[1:-1] if extra else "nothing beside the role's"
    return [
        f"engines              {arrangement.prefill} prefill, {arrangement.decode} decode",
        f"--kv-transfer-config {config}",
        f"router               kvloop route {' '.join(flags)}".rstrip()
        + (" (defaults)" if not flags else ""),
    ]
