"""The demo's table: one line per turn, and a caption that says what was compared with what.

A figure without its conditions misleads, so the caption is made from them: what prefill may keep of its own
decides the result more than anything else.
"""

from dataclasses import dataclass

from kvloop.local.chat import TurnResult

_COLUMNS = ("turn", "route", "prompt", "from decode", "computed", "first token")
_WIDTHS = (4, 9, 6, 11, 8, 11)
_OFF = "reuse off"
_OFF_WIDTH = 10


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """One row: the turn as routed and, where there is a second router, the same turn with reuse off."""

    index: int
    result: TurnResult
    without: TurnResult | None

    @property
    def same_text(self) -> bool:
        """Whether both ways gave the same answer."""
        return self.without is not None and self.without.text == self.result.text


def _cells(cells: tuple[str, ...]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _seconds(value: float) -> str:
    return f"{value:.2f} s"


def header(compares: bool) -> str:
    """The table's first line."""
    return _cells(_COLUMNS) + (f"  {_OFF:>{_OFF_WIDTH}}  ratio" if compares else "")


def row(turn: DemoTurn) -> str:
    """One line of the table. What the answer did not say is `-`."""
    result = turn.result
    line = _cells(
        (
            str(turn.index),
            result.route or "-",
            _count(result.prompt_tokens),
            _count(result.reused_tokens),
            _count(result.computed_tokens),
            _seconds(result.first_token_s),
        )
    )
    if turn.without is None:
        return line
    ratio = f"{turn.without.first_token_s / result.first_token_s:.1f}x" if result.first_token_s else "-"
    return f"{line}  {_seconds(turn.without.first_token_s):>{_OFF_WIDTH}}  {ratio:>5}"


def caption(compares: bool, prefill_cache: bool) -> str:
    """What the numbers are, and under which conditions."""
    lines = [
        "Prompt tokens: `from decode` were read back from it by prefill (return), or found there by decode",
        "itself, which then computed the rest without prefill (append); `computed` were computed.",
    ]
    if prefill_cache:
        lines.append("Prefill's own prefix cache is on: what it still held itself is in neither column.")
    else:
        lines.append("Prefill's own prefix cache is off, as if other work had evicted the conversation there")
        lines.append("(`--prefill-cache on` leaves it on).")
    if compares:
        lines.append(
            "`reuse off`: time to first token of the same messages, sent next to the same engines by a"
        )
        lines.append(
            "router with `--return off`, under a cache salt of its own; decode's own cache is on in both."
        )
    return "\n".join(lines)
