"""The runs of `kvloop bench` that docs/results.md is made of, each with its table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvloop.bench.load.record import Record
from kvloop.bench.results.tables import crowd, first_tokens, held, wrong

SIZES = (500, 2_000, 4_000, 7_000)
ALL_LEGS = "one-way,upstream,kvloop,return,aggregated"
_LENGTHS = ("--workload", "lengths", "--prompt-tokens", ",".join(map(str, SIZES)), "--time-scale", "0")


@dataclass(frozen=True, slots=True)
class Experiment:
    """A run. `title` and `words` stand above its table, `table` makes it."""

    name: str
    title: str
    words: str
    flags: tuple[str, ...]
    table: Callable[[Sequence[Record]], Iterator[str]]


EXPERIMENTS = (
    Experiment(
        "lengths",
        "Time to first token by prompt length",
        "Prefill's prefix cache is off, as if other work had evicted the conversation, or it had landed on "
        "another prefill engine. Second turns, 115 tokens of them new.",
        ("--compare", ALL_LEGS, *_LENGTHS, "--conversations", "3"),
        first_tokens,
    ),
    Experiment(
        "cached",
        "The same with prefill's prefix cache on and warm",
        "Every leg's second turn finds its first in prefill's own cache.",
        ("--compare", ALL_LEGS, *_LENGTHS, "--conversations", "3", "--prefill-cache", "on"),
        first_tokens,
    ),
    *(
        Experiment(
            f"crowd-{count}",
            f"{count} conversations at once",
            "Prefill's prefix cache off; each engine has one core.",
            (
                *("--compare", ALL_LEGS, "--workload", "lengths", "--prompt-tokens", "500,2000"),
                *("--conversations", str(2 * count), "--concurrency", str(count), "--answer-tokens", "32"),
                *("--rounds", "2", "--time-scale", "0"),
            ),
            crowd,
        )
        for count in (4, 8)
    ),
    Experiment(
        "edits",
        "Histories that were edited",
        "Half of the turns change an earlier message, at its own length. Greedy decoding; the reference is "
        "one-way, which reuses nothing.",
        (
            *("--compare", "one-way,upstream,return", "--conversations", "10", "--turns", "4"),
            *(
                "--system-tokens",
                "200",
                "--user-tokens",
                "60",
                "--tool-tokens",
                "60",
                "--answer-tokens",
                "24",
            ),
            *("--fork-share", "0", "--edit-share", "0.5", "--time-scale", "0"),
        ),
        wrong,
    ),
    Experiment(
        "held",
        "Memory and CPU while conversations pause",
        "Agents with pauses of two seconds, eight at once.",
        (
            *(
                "--compare",
                "one-way,upstream,kvloop",
                "--conversations",
                "16",
                "--turns",
                "4",
                "--concurrency",
                "8",
            ),
            *(
                "--system-tokens",
                "300",
                "--user-tokens",
                "60",
                "--tool-tokens",
                "60",
                "--answer-tokens",
                "16",
            ),
            *("--think-s", "2", "--tool-s", "2", "--fork-share", "0", "--rounds", "2"),
        ),
        held,
    ),
)
