"""What a report says in sentences: what was run, what is wrong with it, and what a reader has to know of it.

A mismatch or a failure is never a footnote: each leg's number of them is a sentence of its own, and the first
of each are told with where they are.
"""

from typing import Any

import msgspec

from kvloop.bench.load.figures import Figures, is_sound
from kvloop.bench.load.leg import LegFigures
from kvloop.bench.load.mismatch import Failure, Mismatch
from kvloop.bench.load.plain import plain, word
from kvloop.bench.load.sections import MAX_LEGS

MAX_FACTS = 64
BUSY_CLIENT = 0.8
"""Of a core: from here on a client's own waiting for the processor shows in the times that it takes."""


def facts(figures: Figures) -> list[tuple[str, str]]:
    """What was run, where, when and with what: names and values, both fit to be shown."""
    run = figures.run
    if run is None:
        return []
    told = [
        ("workload", f"{plain(run.workload)}: {plain(run.source)}"),
        ("model", plain(run.model)),
        ("started", f"{plain(run.started)}, kvloop {plain(run.kvloop)}, seed {plain(str(run.seed))}"),
        ("command", plain(run.command)),
        ("machine", _listed(run.machine)),
    ]
    described = figures.legs[:MAX_LEGS]
    told += [
        (f"leg {word(leg.name)}", plain(leg.description)) for leg in described if leg.description.strip()
    ]
    return told


def settings(figures: Figures) -> list[tuple[str, str]]:
    """The command's settings by flag."""
    told = list(figures.run.settings.items()) if figures.run else []
    return [(word(name), _value(value)) for name, value in told[:MAX_FACTS]]


def alarms(figures: Figures) -> list[str]:
    """What makes the figures unsound, the numbers before the examples."""
    said = []
    for leg in figures.legs[:MAX_LEGS]:
        name = word(leg.name)
        if leg.differing:
            said.append(
                f"MISMATCH: {leg.differing:,} of {leg.compared:,} answers of {name} are not the others'"
            )
        if leg.failed:
            said.append(f"FAILED: {leg.failed:,} of {leg.asked + leg.warm_up:,} requests of {name}")
        if not leg.asked:
            said.append(f"NOTHING MEASURED: {name} was asked nothing but warm-up")
    said += _beyond(figures.legs[MAX_LEGS:])
    if not figures.legs:
        said.append("NOTHING MEASURED: there is no leg")
    said += [f"MISMATCH: {mismatch_text(one)}" for one in figures.mismatches]
    said += [f"FAILED: {failure_text(one)}" for one in figures.failures]
    return said


def verdict(figures: Figures) -> str:
    """The last line: whether the figures may be believed, and what that rests on."""
    answers = sum(leg.compared for leg in figures.legs)
    compared = f"{answers:,} answers compared" if answers else "no answers compared"
    if is_sound(figures):
        return f"sound: {sum(leg.asked for leg in figures.legs):,} requests measured, none failed; {compared}"
    failed = sum(leg.failed for leg in figures.legs)
    differing = sum(leg.differing for leg in figures.legs)
    return f"NOT SOUND: {failed:,} requests failed, {differing:,} answers differ; {compared}"


def notices(figures: Figures) -> list[str]:
    """What a reader of the figures has to know, although nothing is wrong with them."""
    said = []
    if figures.cut_off is not None:
        said.append(f"CUT OFF: {plain(figures.cut_off)}; the figures are of what was recorded until then")
    if len(figures.legs) > MAX_LEGS:
        said.append(f"{len(figures.legs) - MAX_LEGS:,} more legs are not shown")
    for leg in figures.legs[:MAX_LEGS]:
        share = leg.rates.client_share
        if share is not None and share >= BUSY_CLIENT:
            said.append(
                f"the client took {100 * share:.0f} % of a core for {word(leg.name)}: "
                "its times have waiting of its own in them"
            )
    if len(figures.legs) > 1 and not any(leg.compared for leg in figures.legs):
        said.append("the legs' answers were not compared")
    return said


def mismatch_text(one: Mismatch) -> str:
    """Where it is, and where the texts part."""
    where = f"conversation {one.conversation}, turn {one.turn}, round {one.round}: {one.leg}"
    if one.against is None:
        return f"{where} differs; no other leg's answer is in the file"
    if one.at is None:
        return f"{where} differs from {one.against}; the texts are not in the file"
    return (
        f"{where} parts from {one.against} at character {one.at:,}: "
        f'after "{one.same}" it has "{one.here}", the other "{one.there}"'
    )


def failure_text(one: Failure) -> str:
    """Where it is, and what was said."""
    status = f"status {plain(str(one.status))}" if one.status else "no answer"
    where = f"conversation {one.conversation}, turn {one.turn}, round {one.round}"
    return f"{where}: {one.leg}: {status}, {one.error}"


def _beyond(legs: list[LegFigures]) -> list[str]:
    differing, failed = sum(leg.differing for leg in legs), sum(leg.failed for leg in legs)
    empty = sum(not leg.asked for leg in legs)
    if not differing and not failed and not empty:
        return []
    counts = f"{differing:,} answers that differ, {failed:,} requests that failed, {empty:,} legs without any"
    return [f"MISMATCH or FAILED in legs that are not shown: {counts}"]


def _listed(values: dict[str, Any]) -> str:
    told = list(values.items())[:MAX_FACTS]
    return ", ".join(f"{word(name)} {_value(value)}" for name, value in told) or "not told"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, float):
        return f"{value:g}"
    try:
        return plain(msgspec.json.encode(value).decode())
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        return plain(repr(value))
