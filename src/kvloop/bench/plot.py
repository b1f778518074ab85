"""Plots as SVG, written out by hand: lines, points and bars over two axes. There is not more to it.

A plot stands for itself: it has a title and a description for readers that do not see it, its colours are
told apart by people who do not see all colours, no line or point is told apart by colour alone, and a style
of its own makes it fit a dark page. Attributes are those of a light page, so that a program which knows no
styles draws it too. Nothing is placed by eye: how wide a text is, is reckoned from above (`text_width`), so
that labels do not meet.
"""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from kvloop.bench.scale import Axis, Tick, kept, logarithmic

WIDTH, HEIGHT = 720, 300  # the height is the axes'; what is around them is added to it
MARGIN, LINE_HEIGHT, TEXT_SIZE, TITLE_SIZE = 12, 18, 12, 15
SWATCH = 34
FAINT = 0.4  # how opaque what is drawn faintly is
NAMESPACE = "http://www.w3.org/2000/svg"
SMALLEST = 0.1  # what is less is drawn there, by `log_plot`
COLOURS = ("#0072b2", "#c04e00", "#00785a", "#a6417d", "#8a6400", "#444444", "#5a4fcf", "#a3262a")
DARK_COLOURS = ("#56b4e9", "#ff9a52", "#2fcfa0", "#ee9ccb", "#f0c24b", "#d0d0d0", "#b3adff", "#ff8f8f")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 4", "1 2", "6 2 2 2 2 2")
MARKERS = (
    "m-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0-5 0",
    "m-2.2-2.2h4.4v4.4h-4.4z",
    "m0-3l2.8 4.8h-5.6z",
    "m0-3.2l3.2 3.2-3.2 3.2-3.2-3.2z",
    "m-3-.7h2.3v-2.3h1.4v2.3h2.3v1.4h-2.3v2.3h-1.4v-2.3h-2.3z",
    "m0 3l2.8-4.8h-5.6z",
    "m-3-1.2h6v2.4h-6z",
    "m-1.2-3h2.4v6h-2.4z",
)
INK, GRID, PAPER = ("#1f1f1f", "#e6e6e6"), ("#d9d9d9", "#3d3d3d"), ("#ffffff", "#17191c")
"""On a light page and on a dark one."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """One line: what it is, and its points."""

    name: str
    across: Sequence[float]
    up: Sequence[float]


def log_plot(title: str, across: str, lines: Sequence[Series]) -> str:
    """The SVG of these lines over logarithmic axes."""
    plot = Plot(
        "plot",
        title,
        f"Lines over {across}: {', '.join(line.name for line in lines)}.",
        logarithmic(across, [value for line in lines for value in line.across], SMALLEST),
        logarithmic("", [value for line in lines for value in line.up], SMALLEST),
    )
    for number, line in enumerate(lines):
        plot.name(number, line.name)
        plot.line(number, list(zip(line.across, line.up, strict=True)))
    return plot.svg()


class Plot:
    """One plot, drawn mark by mark. `key` is a word that is no other plot's on the page. A series is told by
    its number: colour, dashes and marker follow from it. Eight more is the same colour with other dashes and
    another marker."""

    def __init__(self, key: str, title: str, description: str, across: Axis, up: Axis) -> None:
        self._key, self._title, self._description = key, title, description
        self._across, self._up = across, up
        self._names: list[tuple[int, str, bool]] = []
        self._notes: list[str] = []
        self._marks: list[str] = []
        widest = max((text_width(tick.text) for tick in up.ticks), default=0.0)
        self._left = MARGIN + widest + 6
        last = text_width(across.ticks[-1].text) / 2 if across.ticks else 0.0
        self._right = WIDTH - MARGIN - last

    def name(self, series: int, name: str, as_bar: bool = False) -> None:
        """An entry of the legend."""
        self._names.append((series, name, as_bar))

    def note(self, text: str) -> None:
        """A sentence under the plot."""
        self._notes.append(text)

    def line(self, series: int, points: Sequence[Point], marked: bool = False) -> None:
        """Points in order, joined; `marked`: with the series's marker on each."""
        if not points:
            return
        joined = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in points)
        self._marks.append(f'<polyline points="{joined}" {_stroke(series)}/>')
        if marked or len(points) == 1:
            self.points(series, points, solid=True)

    def points(self, series: int, points: Iterable[Point], solid: bool = False) -> None:
        """Points that stand alone; where many are, they are drawn thinly."""
        marker = MARKERS[_style(series)]
        path = "".join(f"M{self._x(x):.1f} {self._y(y):.1f}{marker}" for x, y in points)
        if path:
            self._marks.append(f'<path d="{path}" {_fill(series, 1 if solid else FAINT)}/>')

    def bar(self, series: int, sides: Point, ends: Point, faint: bool = False) -> None:
        """A bar between two values across and two values up."""
        x, right = map(self._x, sides)
        bottom, top = map(self._y, ends)
        self._marks.append(
            f'<rect x="{x:.1f}" y="{top:.1f}" width="{max(right - x, 0.1):.1f}" '
            f'height="{max(bottom - top, 0):.1f}" {_fill(series, FAINT if faint else 1)}/>'
        )

    def svg(self) -> str:
        """All of it. Marks are drawn from the axes' top down, then moved to under the legend."""
        legend, legend_rows = self._legend()
        notes = [line for note in self._notes for line in wrapped(note, WIDTH - 2 * MARGIN)]
        top = 2 * MARGIN + LINE_HEIGHT * (legend_rows + 2) + 4
        height = top + HEIGHT + 2 * LINE_HEIGHT + MARGIN + LINE_HEIGHT * len(notes)
        low = [
            text(WIDTH / 2, HEIGHT + 2 * LINE_HEIGHT, self._across.label),
            *(
                text(MARGIN, HEIGHT + LINE_HEIGHT * (3 + number), line, "start")
                for number, line in enumerate(notes)
            ),
        ]
        key, title, said = self._key, escape(self._title), escape(self._description)
        return "\n".join(
            [
                f'<svg xmlns="{NAMESPACE}" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif"',
                f'role="img" aria-labelledby="{key}-title {key}-desc">',
                f'<title id="{key}-title">{title}</title>',
                f'<desc id="{key}-desc">{said}</desc>',
                f"<style>{STYLE}</style>",
                f'<rect class="paper" width="{WIDTH}" height="{height}" fill="{PAPER[0]}"/>',
                text(MARGIN, MARGIN + TITLE_SIZE, self._title, "start", TITLE_SIZE),
                *legend,
                text(MARGIN, top - 13, self._up.label, "start"),
                f'<g transform="translate(0 {top})">',
                *self._grid(),
                *self._marks,
                *low,
                "</g>",
                "</svg>\n",
            ]
        )

    def _x(self, value: float) -> float:
        return self._left + (self._right - self._left) * self._across.share(value)

    def _y(self, value: float) -> float:
        return HEIGHT * (1 - self._up.share(value))

    def _grid(self) -> list[str]:
        def wide(tick: Tick) -> Point:
            half = text_width(tick.text) / 2
            return self._x(tick.value) - half, self._x(tick.value) + half

        def high(tick: Tick) -> Point:
            return -self._y(tick.value), TEXT_SIZE - self._y(tick.value)

        parts = []
        for tick in kept(self._across.ticks, wide, 8):
            x = self._x(tick.value)
            parts += [] if self._across.is_grouped else [_rule(x, 0, x, HEIGHT)]
            parts.append(text(x, HEIGHT + LINE_HEIGHT - 2, tick.text))
        for tick in kept(self._up.ticks, high, 4):
            y = self._y(tick.value)
            parts += [_rule(self._left, y, self._right, y), text(self._left - 6, y + 4, tick.text, "end")]
        return parts

    def _legend(self) -> tuple[list[str], int]:
        """Its parts, and how many lines it takes."""
        parts: list[str] = []
        x, row = float(MARGIN), 1
        for series, name, as_bar in self._names:
            wide = SWATCH + text_width(name) + 16
            if x > MARGIN and x + wide > WIDTH - MARGIN:
                x, row = float(MARGIN), row + 1
            y = MARGIN + TITLE_SIZE + LINE_HEIGHT * row
            middle = f"M{x + 13:.1f} {y - 4}{MARKERS[_style(series)]}"
            if as_bar:
                parts.append(
                    f'<rect x="{x + 6:.1f}" y="{y - 10}" width="14" height="11" {_fill(series, 1)}/>'
                )
            else:
                parts.append(f'<path d="M{x:.1f} {y - 4}h26" {_stroke(series)}/>')
                parts.append(f'<path d="{middle}" {_fill(series, 1)}/>')
            parts.append(text(x + SWATCH, y, name, "start"))
            x += wide
        return parts, row if self._names else 0


def text_width(content: str, size: int = TEXT_SIZE) -> float:
    """How wide it is at most, in the widest of the fonts that `sans-serif` stands for."""
    em = 0.0
    for letter in content:
        if unicodedata.east_asian_width(letter) in "WF":
            em += 1.1
        elif letter in "mwMW@%":
            em += 1.0
        else:
            em += 0.78 if letter.isupper() or ord(letter) > 0x2FF else 0.66
    return em * size


def wrapped(content: str, width: float) -> list[str]:
    """The words in lines that are not wider, if no word is."""
    lines: list[str] = []
    for word in content.split():
        if lines and text_width(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def text(x: float, y: float, content: str, anchor: str = "middle", size: int = TEXT_SIZE) -> str:
    """A text, escaped; `y` is its base line."""
    return (
        f'<text class="ink" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
        f'fill="{INK[0]}">{escape(content)}</text>'
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="grid" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{GRID[0]}"/>'


def _style(series: int) -> int:
    return (series + series // len(COLOURS)) % len(DASHES)


def _stroke(series: int) -> str:
    number, dashes = series % len(COLOURS), DASHES[_style(series)]
    dashes = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'class="line{number}" fill="none" stroke="{COLOURS[number]}" stroke-width="2"{dashes}'


def _fill(series: int, opacity: float) -> str:
    number = series % len(COLOURS)
    return f'class="mark{number}" fill="{COLOURS[number]}" fill-opacity="{opacity:g}"'


_DARK = "".join(f".line{n}{{stroke:{c}}}.mark{n}{{fill:{c}}}" for n, c in enumerate(DARK_COLOURS))
STYLE = (
    f"@media (prefers-color-scheme:dark){{.ink{{fill:{INK[1]}}}.grid{{stroke:{GRID[1]}}}"
    f".paper{{fill:{PAPER[1]}}}{_DARK}}}"
)
