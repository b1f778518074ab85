"""What the records of one leg come to.

Times are those of requests that were answered and were no warm-up. Rates are over windows: all that was
answered in those that were not warm-up alone, by the time that they took, so that nothing is left out of one
side of the fraction. Nothing is guessed: what no record tells is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvloop.bench.load.lengths import bucket_of, length_of
from kvloop.bench.load.mismatch import is_answered
from kvloop.bench.load.record import Request, Sample, Window
from kvloop.bench.load.spread import Spread, ratio, spread_of, told, told_of


@dataclass(frozen=True, slots=True)
class Bucket:
    """Prompts of like length. `compute_ms` and `transfer_ms` are means over the `split` requests that tell
    both, so that the two add up to their prefill."""

    ttft_ms: Spread | None
    split: int
    compute_ms: float | None
    transfer_ms: float | None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens. `cached` were not computed; `reused`, the part of them that was read back from decode.

    `share` is cached of prompt, over the requests that tell both; so is `computed`, the rest.
    """

    prompt: int
    cached: int | None
    computed: int | None
    reused: int | None
    share: float | None


@dataclass(frozen=True, slots=True)
class Rates:
    """Over `windows` windows of `took_s` seconds in all. Shares and CPU seconds are of one core."""

    windows: int
    took_s: float
    requests_per_s: float | None
    answer_tokens_per_s: float | None
    cpu_s_per_1000: float | None
    client_share: float | None
    transfer_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Held:
    """What decode engines held for conversations, over all samples but those of windows that were warm-up
    alone."""

    samples: int
    mean_bytes: float | None
    most_bytes: float | None
    mean_usage: float | None
    most_usage: float | None


@dataclass(frozen=True, slots=True)
class LegFigures:
    """One leg. `asked` is without warm-up; `failed`, `compared` and `differing` are with it."""

    name: str
    description: str
    asked: int
    warm_up: int
    failed: int
    compared: int
    differing: int
    ttft_ms: Spread | None
    later_ttft_ms: Spread | None
    by_route: dict[str, Spread]
    by_bucket: dict[int, Bucket]
    between_ms: Spread | None
    per_token_ms: Spread | None
    took_ms: Spread | None
    late_ms: Spread | None
    compute_ms: Spread | None
    transfer_ms: Spread | None
    tokens: Tokens
    share_by_turn: dict[int, float]
    rates: Rates
    held: Held


def measured(requests: Sequence[Request]) -> list[Request]:
    """Those that times are taken from."""
    return [one for one in requests if not one.warm_up and is_answered(one)]


def share_of(requests: Sequence[Request]) -> float | None:
    """Which share of the prompts' tokens was cached, where both are told."""
    pairs = [(told(one.prompt_tokens), told(one.cached_tokens)) for one in requests]
    both = [(prompt, cached) for prompt, cached in pairs if prompt is not None and cached is not None]
    return ratio(sum(min(cached, prompt) for prompt, cached in both), sum(prompt for prompt, _ in both))


def leg_figures(
    name: str,
    description: str,
    requests: Sequence[Request],
    windows: Sequence[Window],
    samples: Sequence[Sample],
) -> LegFigures:
    """The figures of what was asked of one leg, of its windows and of its samples."""
    answered = measured(requests)
    by_route: dict[str, list[Request]] = {}
    by_bucket: dict[int, list[Request]] = {}
    by_turn: dict[int, list[Request]] = {}
    for one in answered:
        if one.route is not None:
            by_route.setdefault(one.route, []).append(one)
        if (length := length_of(one)) is not None:
            by_bucket.setdefault(bucket_of(length), []).append(one)
        by_turn.setdefault(one.turn, []).append(one)
    routes = {route: spread_of(one.first_ms for one in some) for route, some in by_route.items()}
    shares = {turn: share_of(some) for turn, some in sorted(by_turn.items())}
    warm_up = sum(one.warm_up for one in requests)
    return LegFigures(
        name=name,
        description=description,
        asked=len(requests) - warm_up,
        warm_up=warm_up,
        failed=sum(not is_answered(one) for one in requests),
        compared=sum(one.agrees is not None for one in requests),
        differing=sum(one.agrees is False for one in requests),
        ttft_ms=spread_of(one.first_ms for one in answered),
        later_ttft_ms=spread_of(one.first_ms for one in answered if one.turn > 0),
        by_route={route: spread for route, spread in routes.items() if spread is not None},
        by_bucket={bucket: _bucket(some) for bucket, some in sorted(by_bucket.items())},
        between_ms=spread_of(gap for one in answered for gap in one.between_ms),
        per_token_ms=spread_of(map(_per_token_ms, answered)),
        took_ms=spread_of(one.took_ms for one in answered),
        late_ms=spread_of(one.late_ms for one in answered),
        compute_ms=spread_of(one.compute_ms for one in answered),
        transfer_ms=spread_of(one.transfer_ms for one in answered),
        tokens=_tokens(answered),
        share_by_turn={turn: share for turn, share in shares.items() if share is not None},
        rates=_rates(requests, windows),
        held=_held(requests, samples),
    )


def _per_token_ms(request: Request) -> float | None:
    """What each token after the first took (TPOT): the stream's time by the tokens that it brought."""
    first_ms, took_ms, tokens = map(told, (request.first_ms, request.took_ms, request.answer_tokens))
    if first_ms is None or took_ms is None or tokens is None or tokens < 2:
        return None
    return (took_ms - first_ms) / (tokens - 1)


def _bucket(requests: Sequence[Request]) -> Bucket:
    split = [(told(one.compute_ms), told(one.transfer_ms)) for one in requests]
    both = [
        (compute, transfer) for compute, transfer in split if compute is not None and transfer is not None
    ]
    return Bucket(
        ttft_ms=spread_of(one.first_ms for one in requests),
        split=len(both),
        compute_ms=ratio(sum(compute for compute, _ in both), len(both)),
        transfer_ms=ratio(sum(transfer for _, transfer in both), len(both)),
    )


def _tokens(requests: Sequence[Request]) -> Tokens:
    cached = told_of(one.cached_tokens for one in requests)
    reused = told_of(one.reused_tokens for one in requests)
    both = [
        (prompt, min(had, prompt))
        for one in requests
        if (prompt := told(one.prompt_tokens)) is not None and (had := told(one.cached_tokens)) is not None
    ]
    return Tokens(
        prompt=int(sum(told_of(one.prompt_tokens for one in requests))),
        cached=int(sum(cached)) if cached else None,
        computed=int(sum(prompt - had for prompt, had in both)) if both else None,
        reused=int(sum(reused)) if reused else None,
        share=share_of(requests),
    )


def _rates(requests: Sequence[Request], windows: Sequence[Window]) -> Rates:
    real = {one.round for one in requests if not one.warm_up}
    counted = [one for one in windows if one.round in real and told(one.took_s) is not None]
    rounds = {one.round for one in counted}
    answered = [one for one in requests if one.round in rounds and is_answered(one)]
    took_s = sum(told_of(one.took_s for one in counted))
    cpu = told_of(one.cpu_s for one in counted)
    tokens = told_of(one.answer_tokens for one in answered)
    moved = [(told(one.transferred_bytes), told(one.transfer_s)) for one in counted]
    both = [(size, spent) for size, spent in moved if size is not None and spent is not None]
    return Rates(
        windows=len(counted),
        took_s=took_s,
        requests_per_s=ratio(len(answered), took_s),
        answer_tokens_per_s=ratio(sum(tokens), took_s) if tokens else None,
        cpu_s_per_1000=ratio(1000 * sum(cpu), len(answered)) if cpu and len(cpu) == len(counted) else None,
        client_share=ratio(sum(told_of(one.client_cpu_s for one in counted)), took_s),
        transfer_bytes_per_s=ratio(sum(size for size, _ in both), sum(spent for _, spent in both)),
    )


def _held(requests: Sequence[Request], samples: Sequence[Sample]) -> Held:
    warm_up = {one.round for one in requests if one.warm_up}
    warm_up -= {one.round for one in requests if not one.warm_up}
    samples = [one for one in samples if one.round not in warm_up]
    held, usage = spread_of(one.held_bytes for one in samples), spread_of(one.kv_usage for one in samples)
    return Held(
        samples=len(samples),
        mean_bytes=held.mean if held else None,
        most_bytes=held.most if held else None,
        mean_usage=usage.mean if usage else None,
        most_usage=usage.most if usage else None,
    )
