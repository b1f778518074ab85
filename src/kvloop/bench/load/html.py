"""The report as one page: no scripts, nothing from elsewhere, well-formed as XML too.

A raw file is not trusted: its text is escaped, and the page's policy lets a browser load and run nothing, so
that a mistake in the first would still do no harm.
"""

from collections.abc import Sequence
from html import escape

from kvloop.bench.load.figures import Figures
from kvloop.bench.load.plain import plain
from kvloop.bench.load.plots import plots_of
from kvloop.bench.load.record import Record
from kvloop.bench.load.sections import Section, sections
from kvloop.bench.load.words import alarms, facts, notices, settings
from kvloop.bench.plot import INK, PAPER

MAX_TITLE = 100
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = f"""
:root{{color-scheme:light dark}}
body{{margin:0 auto;max-width:1500px;padding:16px;font:15px/1.5 sans-serif}}
body{{color:{INK[0]};background:{PAPER[0]}}}
h1{{font-size:24px;margin:0 0 8px}}h2{{font-size:17px;margin:24px 0 6px}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:2px 16px;margin:0}}
dt{{font-weight:bold}}dd{{margin:0;overflow-wrap:anywhere}}
.wrong,.said{{border-left:6px solid;padding:4px 14px;margin:14px 0;overflow-wrap:anywhere}}
.wrong{{color:#a30000;border-color:#c00000;background:#fff0f0}}
.said{{color:#6b4a00;border-color:#b08900;background:#fff9e6}}
.wrong h2,.said h2{{margin:4px 0}}
.wide{{overflow-x:auto}}
table{{border-collapse:collapse;font-variant-numeric:tabular-nums}}
caption{{text-align:left;font-weight:bold;padding:18px 0 4px}}
th,td{{padding:2px 14px;text-align:right;border-bottom:1px solid #8884;white-space:nowrap}}
th[scope=row]{{text-align:left;font-weight:normal;white-space:pre-wrap}}
.plots{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,560px),1fr));gap:20px}}
figure{{margin:0}}svg{{width:100%;height:auto}}
@media (prefers-color-scheme:dark){{
body{{color:{INK[1]};background:{PAPER[1]}}}
.wrong{{color:#ff9c9c;background:#3a1416;border-color:#ff5c5c}}
.said{{color:#f0d080;background:#332a10}}
}}
"""


def page(figures: Figures, records: Sequence[Record]) -> str:
    """The whole page, of figures and of the records that they are from."""
    title = "kvloop bench"
    if figures.run is not None:
        title += f": {plain(figures.run.workload, MAX_TITLE)}"
    drawn = "".join(f"<figure>{svg}</figure>" for svg in plots_of(figures, records))
    flags = _pairs(settings(figures))
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en" xmlns="http://www.w3.org/1999/xhtml">',
        '<head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>",
        f"<body><header><h1>{escape(title)}</h1>{_pairs(facts(figures))}</header><main>",
        _box("wrong", "These figures are not sound", alarms(figures)),
        _box("said", "To know", notices(figures)),
        *map(_table, sections(figures)),
        f'<h2>Plots</h2><div class="plots">{drawn}</div>' if drawn else "",
        f"<h2>Settings</h2>{flags}" if flags else "",
        "</main></body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def _box(kind: str, title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    role = "alert" if kind == "wrong" else "note"
    return f'<section class="{kind}" role="{role}"><h2>{title}</h2><ul>{listed}</ul></section>'


def _pairs(told: Sequence[tuple[str, str]]) -> str:
    if not told:
        return ""
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in told)
    return f"<dl>{listed}</dl>"


def _table(section: Section) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in section.head)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(what)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for what, cells in section.rows
    )
    title = escape(section.title)
    return (
        f'<div class="wide" role="region" aria-label="{title}" tabindex="0"><table>'
        f"<caption>{title}</caption>\n"
        f"<thead><tr><td></td>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>"
    )
