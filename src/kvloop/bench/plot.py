"""A plot of a few lines over logarithmic axes, as SVG, written out by hand: there is not more to it."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 190, 40, 50
COLOURS = ("#1b6ca8", "#c8553d", "#3f7d20", "#7b4b94", "#b08900", "#444444")
SMALLEST = 0.1  # what is less is drawn there


@dataclass(frozen=True, slots=True)
class Series:
    """One line: what it is, and its points."""

    name: str
    across: Sequence[float]
    up: Sequence[float]


def log_plot(title: str, across: str, lines: Sequence[Series]) -> str:
    """The SVG of these lines, with their names at their ends."""
    left, right = _decades([value for line in lines for value in line.across])
    low, high = _decades([value for line in lines for value in line.up])

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (log10(max(value, SMALLEST)) - left) / (right - left)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (log10(max(value, SMALLEST)) - low) / (high - low)

    parts = [_text(LEFT, 22, title, "start", 14), _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, across)]
    for power in range(left, right + 1):
        at = x(10**power)
        parts += [_line(at, TOP, at, HEIGHT - BOTTOM), _text(at, HEIGHT - BOTTOM + 16, _number(power))]
    for power in range(low, high + 1):
        at = y(10**power)
        parts += [_line(LEFT, at, WIDTH - RIGHT, at), _text(LEFT - 6, at + 4, _number(power), "end")]
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x(one), y(two)) for one, two in zip(line.across, line.up, strict=True)]
        path = " ".join(f"{one:.1f},{two:.1f}" for one, two in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        end = points[-1]
        parts.append(_text(end[0] + 8, end[1] + 4, line.name, "start", 12, colour))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten around them, at least one apart."""
    low = floor(log10(max(min(values), SMALLEST)))
    high = ceil(log10(max(*values, SMALLEST)))
    return low, max(high, low + 1)


def _number(power: int) -> str:
    return f"{10**power:,}" if power >= 0 else f"{10**power:g}"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(
    x: float, y: float, text: str, anchor: str = "middle", size: int = 12, fill: str = "#222222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">'
        f"{escape(text)}</text>"
    )
