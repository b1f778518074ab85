"""The page: well-formed, of nothing from elsewhere, and of a size that does not follow its file's."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from kvloop.bench.load.figures import figures_of
from kvloop.bench.load.html import page
from kvloop.bench.load.plots import MAX_DRAWN, MAX_POINTS, plots_of
from kvloop.bench.load.record import End, Record
from tests.bench.load.made_up import MIB, a_whole_run, asked, held, run_of, window
from tests.bench.test_plot import assert_legible

HTML = "{http://www.w3.org/1999/xhtml}"
SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x00\u202e"


class Reader(HTMLParser):
    """What a browser would see: elements, their attributes, and whether each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element begins."""
        self.seen.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element that is closed at once."""
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """An element ends."""
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Text."""
        self.text += data


def read(html: str) -> Reader:
    """The page as a browser reads it; it is XML too."""
    ET.fromstring(html.removeprefix("<!DOCTYPE html>\n"))
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert not reader.open
    return reader


def page_of(*records: Record) -> str:
    """The page of these."""
    return page(figures_of(records), records)


def assert_harmless(reader: Reader) -> None:
    """Nothing that runs, and nothing that is loaded."""
    tags = {tag for tag, _ in reader.seen}
    assert not tags & {"script", "img", "iframe", "link", "object", "embed", "a", "use", "image", "form"}
    for tag, attributes in reader.seen:
        assert not any(
            name.startswith("on") or name in ("src", "href", "xlink:href") for name in attributes
        ), tag
    policy = next(
        a for t, a in reader.seen if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert (policy["content"] or "").startswith("default-src 'none'")


def test_a_whole_run() -> None:
    """Header, tables and six plots, in one file of no scripts and no foreign addresses."""
    html = page_of(*a_whole_run())
    reader = read(html)
    assert_harmless(reader)
    assert [tag for tag, _ in reader.seen].count("figure") == 6
    assert "agents: synthetic, 40 conversations" in reader.text
    assert "cores 16, memory_gib 64" in reader.text
    assert "--concurrency" in reader.text
    addresses = set(re.findall(r"\w+://[^\s\"'<]+", html))
    assert addresses == {"http://www.w3.org/1999/xhtml", "http://www.w3.org/2000/svg"}
    assert "url(" not in html
    assert "@import" not in html
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids)) == 12
    assert html.count("prefers-color-scheme:dark") >= 7


def test_every_plot_is_legible() -> None:
    """Texts are inside and apart; title and description are there, with figures in words."""
    records = a_whole_run()
    drawn = plots_of(figures_of(records), records)
    for svg in drawn:
        assert_legible(svg)
        root = ET.fromstring(svg)
        assert root[0].tag == f"{SVG}title"
        assert len(root[1].text or "") > 40
    assert "Medians: aggregated" in drawn[0]


def test_what_is_wrong_is_at_the_top_and_in_red() -> None:
    """Before any table, in a box of its own."""
    html = page_of(
        run_of("aggregated", "kvloop"),
        asked("aggregated", 3, text="the cat sat"),
        asked("kvloop", 3, text="the cat ate", agrees=False),
    )
    read(html)
    box = html.index('<section class="wrong"')
    assert box < html.index("<table")
    assert "conversation c0, turn 3, round 0: kvloop parts from aggregated at character 8" in html
    assert re.search(r"\.wrong\{color:#a30000", html)
    assert '<section class="wrong"' not in page_of(run_of("a"), asked("a"), End("done"))


def test_a_raw_file_cannot_write_to_the_page() -> None:
    """Every text of it is text, wherever it stands."""
    run = run_of(
        EVIL, EVIL * 2, started=EVIL, command=EVIL, workload=EVIL, source=EVIL, model=EVIL, kvloop=EVIL,
        settings={EVIL: EVIL, "nested": {EVIL: [EVIL]}}, machine={EVIL: EVIL},
    )  # fmt: skip
    told = {"route": EVIL, "conversation": EVIL, "what": EVIL, "prompt_tokens": 600, "cached_tokens": 10}
    html = page_of(
        run,
        asked(EVIL, 1, first_ms=5.0, text="same", **told),
        asked(EVIL * 2, 1, first_ms=5.0, text=EVIL, agrees=False, between_ms=[1.0], compute_ms=1.0,
              transfer_ms=1.0, **told),
        asked(EVIL, 2, status=500, error=EVIL, **told),
        held(EVIL, 1.0, 1.0),
        End(EVIL),
    )  # fmt: skip
    reader = read(html)
    assert_harmless(reader)
    assert "<script" not in html
    assert "<script>alert(1)</script>" in reader.text
    assert "\x00" not in html
    assert "\u202e" not in html


@pytest.mark.parametrize(
    "records",
    [
        [run_of()],
        [run_of("a")],
        [run_of("a"), asked("a")],
        [run_of("a"), asked("a", status=0, error="refused")],
        [run_of("a"), asked("a", warm_up=True, first_ms=1.0)],
        [run_of("a"), held("a", 1.0, 5.0 * MIB)],
        [run_of("a"), window("a", 0.0)],
        [run_of("a"), asked("a", first_ms=0.0, prompt_tokens=0, cached_tokens=0, answer_tokens=0)],
        [run_of("a"), asked("a", first_ms=5.0, prompt_tokens=10**14, turn=10**12, route="")],
        [],
    ],
    ids=range(10),
)
def test_runs_of_which_there_is_little(records: list[Record]) -> None:
    """No leg, one leg, only errors, only warm-up, only samples: a page, with what plots there can be."""
    html = page_of(*records)
    assert_harmless(read(html))
    for svg in plots_of(figures_of(records), records):
        assert_legible(svg)


def test_more_legs_than_can_be_told_apart() -> None:
    """The first eight are drawn, and the plot says so."""
    names = [f"a leg of a rather long name, number {number}" for number in range(MAX_DRAWN + 2)]
    records = [run_of(*names), *(asked(name, first_ms=5.0, prompt_tokens=600, route="r") for name in names)]
    for svg in plots_of(figures_of(records), records):
        assert_legible(svg)
        assert f"Only the first {MAX_DRAWN} of {len(names)} legs are drawn." in svg


def test_a_large_file_makes_no_large_page() -> None:
    """Points are thinned and counted, lines are not longer; the page stays under a megabyte and a half."""
    records: list[Record] = [run_of("a", "b")]
    for number in range(20_000):
        leg = "ab"[number % 2]
        told = {"prompt_tokens": 500 + number, "cached_tokens": 100, "compute_ms": 5.0, "transfer_ms": 1.0}
        records.append(
            asked(
                leg,
                number,
                first_ms=5.0 + number % 977,
                between_ms=[1.0 + number % 7],
                route=f"r{number}",
                **told,
            )
        )
        records.append(held(leg, number / 10, float(number % 1000), number % 3000))
    html = page_of(*records)
    read(html)
    assert max(path.count("M") for path in re.findall(r' d="([^"]+)"', html)) == MAX_POINTS // 2
    assert len(html) < 1_500_000
    assert f"{MAX_POINTS:,} of 20,000 points are drawn; lines and figures are of all." in html
