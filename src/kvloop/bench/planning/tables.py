"""A plan as text and as JSON: a column for each arrangement, a line for each figure, all from runs."""

from collections.abc import Callable, Sequence
from typing import Any

from kvloop.bench.planning.arrangement import Way
from kvloop.bench.planning.run import Came
from kvloop.bench.planning.settings import extra_config, router_flags
from kvloop.bench.report import aligned, rounded

GIB = 1 << 30
NONE = "-"


def table(columns: Sequence[tuple[str, Came]], floor: Callable[[Came], Came | None], token_bytes: int) -> str:
    """The figures of each, with its heading. `floor`: the one-way run with as many engines."""
    came = [one for _, one in columns]

    def row(what: str, told: Callable[[Came], str]) -> list[str]:
        return [what, *map(told, came)]

    return aligned(
        [
            ["", *(heading for heading, _ in columns)],
            row("engines, prefill:decode", lambda one: one.arrangement.ratio),
            row("leases", lambda one: one.arrangement.leases),
            row("kv_recompute_threshold", _threshold),
            row("prompt tokens reused", lambda one: _percent(one.reused_share)),
            row("  read back from decode", lambda one: _percent(one.share_of(one.tokens.returned))),
            row("  found at decode (append)", lambda one: _percent(one.share_of(one.tokens.at_decode))),
            row("  in prefill's own cache", lambda one: _percent(one.share_of(one.tokens.at_prefill))),
            row("TTFT median", lambda one: _ms(one.median_ms)),
            row("TTFT p90", lambda one: _ms(one.p90_ms)),
            row("TTFT p99", lambda one: _ms(one.p99_ms)),
            row("time per further token", lambda one: _ms(one.per_token_ms, 1)),
            row("decode computes, of prompts", lambda one: f"{one.tokens.computed_by_decode:,}"),
            row("prefill computes, tokens", lambda one: f"{one.tokens.computed_by_prefill:,}"),
            row("prefill busy", lambda one: _percent(one.busy_share)),
            row("prefill load saved", lambda one: _saved(saved(one, floor(one)))),
            row("decode holds, tokens, mean", lambda one: f"{one.held_tokens:,.0f}"),
            row("  at most", lambda one: f"{one.most_held_tokens:,}"),
            row("  mean, of its memory", lambda one: _percent(one.held_tokens / one.room_tokens)),
            row("  mean, GiB", lambda one: _gib(one.held_tokens, token_bytes)),
            row("  at most, GiB", lambda one: _gib(one.most_held_tokens, token_bytes)),
            row("  mean, for each open conversation", _for_each),
            row("conversations open, mean", lambda one: f"{one.open:.1f}"),
            row("leases given up to live work", lambda one: f"{one.reclaimed:,}"),
            row("preemptions", lambda one: f"{one.preempted:,}"),
        ],
        numbers=True,
    )


def saved(came: Came, floor: Came | None) -> float | None:
    """The share of prefill's busy time that one-way needs and this does not; below 0 where it needs more."""
    if floor is None or not floor.prefill_busy_s:
        return None
    return 1 - came.prefill_busy_s / floor.prefill_busy_s


def as_json(heading: str, came: Came, floor: Came | None, token_bytes: int) -> dict[str, Any]:
    """An arrangement's figures."""
    arrangement, tokens = came.arrangement, came.tokens
    return {
        "name": heading,
        "way": arrangement.way.value,
        "prefill": arrangement.prefill,
        "decode": arrangement.decode,
        "leases": arrangement.leases,
        "kv_recompute_threshold": arrangement.threshold_tokens,
        "turns": came.turns,
        "prompt_tokens": tokens.prompt,
        "returned_tokens": tokens.returned,
        "found_at_decode_tokens": tokens.at_decode,
        "prefill_cached_tokens": tokens.at_prefill,
        "prefill_computed_tokens": tokens.computed_by_prefill,
        "decode_computed_tokens": tokens.computed_by_decode,
        "returning_turns": tokens.returning_turns,
        "appended_turns": tokens.appended_turns,
        "reused_share": came.reused_share,
        "ttft_ms": {"median": came.median_ms, "p90": came.p90_ms, "p99": came.p99_ms},
        "per_token_ms": came.per_token_ms,
        "prefill_busy_s": came.prefill_busy_s,
        "prefill_busy_share": came.busy_share,
        "prefill_load_saved": saved(came, floor),
        "held_tokens_mean": came.held_tokens,
        "held_tokens_most": came.most_held_tokens,
        "held_bytes_mean": came.held_tokens * token_bytes if token_bytes else None,
        "decode_room_tokens": came.room_tokens,
        "leases_reclaimed": came.reclaimed,
        "preemptions": came.preempted,
        "open_conversations_mean": came.open,
        "simulated_s": came.lasted_s,
        "keeps_up": came.is_through,
    }


def settings_as_json(came: Came) -> dict[str, Any]:
    """What was chosen, as it is written down."""
    arrangement = came.arrangement
    return {
        "prefill": arrangement.prefill,
        "decode": arrangement.decode,
        "kv_connector_extra_config": extra_config(arrangement),
        "router_flags": router_flags(arrangement),
    }


def _threshold(came: Came) -> str:
    return NONE if came.arrangement.way is Way.ONE_WAY else str(came.arrangement.threshold_tokens)


def _percent(share: float) -> str:
    return f"{rounded(100 * share)} %"


def _saved(share: float | None) -> str:
    return NONE if share is None else _percent(share)


def _ms(milliseconds: float | None, digits: int = 0) -> str:
    return "none" if milliseconds is None else f"{milliseconds:,.{digits}f} ms"


def _for_each(came: Came) -> str:
    return f"{came.held_tokens / came.open:,.0f}" if came.open else NONE


def _gib(tokens: float, token_bytes: int) -> str:
    return rounded(tokens * token_bytes / GIB) if token_bytes else "not known"
