"""What the terminal says: what is wrong first, in red where it is seen, and the tables."""

import io
import re

import pytest

from kvloop.bench.load.figures import figures_of
from kvloop.bench.load.record import End, Leg
from kvloop.bench.load.sections import MAX_BUCKETS, MAX_LEGS, MAX_ROUTES, sections
from kvloop.bench.load.summary import RED, summary_text, write_summary
from tests.bench.load.made_up import LEGS, a_whole_run, asked, run_of, window

WRONG = [
    run_of("aggregated", "kvloop"),
    asked("aggregated", 3, text="the cat sat", agrees=True),
    asked("kvloop", 3, text="the cat ate", agrees=False),
    asked("kvloop", 4, status=503, error="no engine is left"),
    End("done"),
]


class Terminal(io.StringIO):
    """A stream that is one."""

    def isatty(self) -> bool:
        """Yes."""
        return True


def test_what_is_wrong_comes_before_the_tables() -> None:
    """Each leg's number, then where each is and where the texts part; the verdict is the last line."""
    lines = summary_text(figures_of(WRONG)).splitlines()
    tables = lines.index("requests")
    above = "\n".join(lines[:tables])
    assert "MISMATCH: 1 of 1 answers of kvloop are not the others'" in above
    assert (
        "MISMATCH: conversation c0, turn 3, round 0: kvloop parts from aggregated at character 8: "
        'after "the cat " it has "ate", the other "sat"'
    ) in above
    assert "FAILED: conversation c0, turn 4, round 0: kvloop: status 503, no engine is left" in above
    assert lines[-1] == "NOT SOUND: 1 requests failed, 1 answers differ; 2 answers compared"


def test_red_is_for_terminals() -> None:
    """A stream that goes into a file gets the words without the colours."""
    seen, kept = Terminal(), io.StringIO()
    write_summary(figures_of(WRONG), seen)
    write_summary(figures_of(WRONG), kept)
    assert f"{RED}MISMATCH: conversation c0, turn 3" in seen.getvalue()
    assert f"{RED}NOT SOUND" in seen.getvalue()
    assert "\x1b" not in kept.getvalue()
    assert re.sub(r"\x1b\[[\d;]*m", "", seen.getvalue()) == kept.getvalue()
    sound = summary_text(figures_of([run_of("a"), asked("a"), End("done")]), coloured=True)
    assert RED not in sound


def test_a_terminal_that_has_not_all_letters() -> None:
    """Gets question marks, not a traceback."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write_summary(figures_of([run_of("a", model="modèle"), asked("a")]), stream)
    stream.flush()
    assert b"mod?le" in raw.getvalue()


def test_a_raw_file_cannot_write_to_the_terminal() -> None:
    """No control character of it gets there, in names, errors or texts."""
    evil = "\x1b]0;x\x07\x1b[2J\r\n\u202e\u200b"
    records = [
        run_of(evil, command=evil, source=evil, settings={evil: evil}, machine={evil: {evil: [evil]}}),
        asked(evil, route=evil, conversation=evil, status=500, error=evil, agrees=False, text=evil),
        asked(evil, route=evil, first_ms=1.0, what=evil),
    ]
    text = summary_text(figures_of([*records, End(evil)]))
    assert all(letter == "\n" or letter.isprintable() for letter in text)


def test_the_tables_hold_what_there_is() -> None:
    """A whole run has every table, one without anything but times has two, and no row is empty."""
    titles = [section.title for section in sections(figures_of(a_whole_run()))]
    assert len(titles) == 12
    few = sections(figures_of([run_of("a"), asked("a")]))
    assert [section.title for section in few] == ["requests", "after the first token, ms", "rates"]
    for section in sections(figures_of(a_whole_run())):
        assert section.head == list(LEGS)
        for what, cells in section.rows:
            assert len(cells) == len(LEGS), what
            assert any(cell != "-" for cell in cells), what


@pytest.mark.parametrize(
    ("title", "row", "cell"),
    [
        ("requests", "measured", "2"),
        ("time to the first token (TTFT), ms", "median", "15.0"),
        ("TTFT by prompt length, ms: median (requests)", "1k-2k", "15.0 (2)"),
        ("TTFT by route, ms: median (requests)", "return", "15.0 (2)"),
        ("prompts, tokens", "share cached", "75.0 %"),
        ("rates", "requests/s", "0.500"),
    ],
)
def test_cells(title: str, row: str, cell: str) -> None:
    """Figures are in their tables as they were reckoned."""
    told = {"prompt_tokens": 1200, "cached_tokens": 900, "route": "return"}
    records = [
        run_of("a"),
        asked("a", 0, first_ms=10.0, **told),
        asked("a", 1, first_ms=20.0, **told),
        window("a", 4.0),
    ]
    found = {section.title: dict(section.rows) for section in sections(figures_of(records))}
    assert found[title][row] == [cell]


def test_reading_back_against_a_plain_copy() -> None:
    """A share of what the machine reaches, where the run tells that."""
    moved = window("a", 4.0, transferred_bytes=4e9, transfer_s=2.0)

    def prefill(**machine: object) -> dict[str, list[str]]:
        records = [run_of("a", machine=machine), asked("a"), moved]
        return next(dict(one.rows) for one in sections(figures_of(records)) if one.title == "prefill, ms")

    assert prefill()["read back, GB/s"] == ["2.00"]
    assert prefill(copy_bytes_per_s=3.2e9)["  of a plain copy between processes"] == ["62.5 %"]
    for nothing in ({}, {"copy_bytes_per_s": "fast"}, {"copy_bytes_per_s": 0}):
        assert "  of a plain copy between processes" not in prefill(**nothing)


def test_what_a_table_cannot_hold_is_named() -> None:
    """Legs, routes and lengths beyond the bound; what is wrong in a leg beyond it is still said."""
    names = [f"leg-{number}" for number in range(MAX_LEGS + 3)]
    records = [run_of(*names), *(asked(name) for name in names), asked(names[-1], 1, status=500)]
    records += [
        asked(names[0], first_ms=1.0, route=f"route-{n}", prompt_tokens=600 << (n % 30)) for n in range(200)
    ]
    text = summary_text(figures_of(records))
    assert {len(section.head) for section in sections(figures_of(records))} == {MAX_LEGS}
    assert "3 more legs are not shown" in text
    assert "FAILED in legs that are not shown: 0 answers that differ, 1 requests that failed" in text
    assert re.search(rf"\(others, not shown\) +{200 - MAX_ROUTES}", text)
    assert re.search(rf"\(others, not shown\) +{30 - MAX_BUCKETS}", text)
    assert "NOT SOUND" in text


def test_notices() -> None:
    """A run that was cut off, a client that was busy, and answers that nobody compared are said."""
    records = [run_of("a", "b"), asked("a"), asked("b"), window("a", 10.0, client_cpu_s=9.3)]
    text = summary_text(figures_of(records))
    assert "CUT OFF: the file ends before the run does" in text
    assert "the client took 93 % of a core for a" in text
    assert "the legs' answers were not compared" in text
    assert "CUT OFF: interrupted" in summary_text(figures_of([*records, End("interrupted")]))
    assert "CUT OFF" not in summary_text(figures_of([*records, End("done")]))


def test_a_leg_of_an_empty_name() -> None:
    """Has a column all the same."""
    run = run_of(legs=[Leg("", "", "")])
    (section, *_) = sections(figures_of([run, asked("")]))
    assert section.head == ['""']
