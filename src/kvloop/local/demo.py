"""A scripted conversation that shows the loop at work, beside the same conversation with reuse off.

Both go through the same two engines, turn by turn, never at the same time: first the turn as the router takes
it, then the same messages through a second router that was started with `--return off`. The second
conversation has a cache salt of its own, so neither engine can serve one from the blocks of the other; on
decode it keeps its own history, as a one-way deployment would. What prefill may keep is said in the caption,
because it decides the result.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvloop.errors import UserError
from kvloop.local.chat import Message, TurnResult, served_model, stream_turn

Say = Callable[[str], None]

ANSWER_TOKENS = 40
SALT_OFF = "kvloop-demo-reuse-off"

BRIEF = """You answer questions about the following notes, briefly and from the notes alone.

The lighthouse at Skerry Point was built in 1871 after two ships were lost on the reef in one winter. Its
tower is forty-one metres high and stands on a base of granite that was cut on the mainland and brought over
in summer, when the landing is calm. The first lamp burned colza oil; paraffin replaced it in 1885, and
electric light came in 1949 with a cable across the sound. The keepers lived on the rock in turns of six
weeks. There were always three of them, so that one could sleep, one could cook and one could watch the
light. Their log books are kept in the harbour office and record the weather four times a day, every passing
ship by name, and now and then a whale. In 1923 a storm took the boat house and the lower railing, and for
nineteen days no relief could land; the keepers lived on biscuit, dried fish and rain water. The light was
made automatic in 1984. Since then an engineer visits twice a year to change the batteries, to paint the
door, which faces the weather, and to read the counters. The gallery is closed to visitors, but the boat
from the harbour goes round the rock on Sundays from May to September when the swell is under a metre. The
trip takes two hours, costs eleven crowns, and includes tea, which is served on the way back."""

QUESTIONS = (
    "When was the lighthouse built, and why?",
    "What did the keepers burn in the lamp before electric light came?",
    "How many keepers were there, and what did each of them do?",
    "What happened in 1923?",
    "I would like to visit. When does the boat go, and what does it cost?",
)


@dataclass(frozen=True, slots=True)
class DemoTurn:
    """One row: the turn as routed and, where there is a second router, the same turn with reuse off."""

    index: int
    result: TurnResult
    without: TurnResult | None


def converse(url: str, url_off: str | None, questions: tuple[str, ...] = QUESTIONS) -> Iterator[DemoTurn]:
    """Hold the conversation, yielding each turn as it ends. Raises `UserError` where a turn fails."""
    model = served_model(url)
    messages: list[Message] = [{"role": "system", "content": BRIEF}]
    for index, question in enumerate(questions, start=1):
        messages.append({"role": "user", "content": question})
        body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        result = stream_turn(url, body)
        without = stream_turn(url_off, body | {"cache_salt": SALT_OFF}) if url_off is not None else None
        yield DemoTurn(index, result, without)
        messages.append({"role": "assistant", "content": result.text})


_COLUMNS = ("turn", "route", "prompt", "from decode", "computed", "first token")
_WIDTHS = (4, 9, 6, 11, 8, 11)


def _cells(cells: tuple[str, ...]) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))


def header(compares: bool) -> str:
    """The table's first line."""
    return _cells(_COLUMNS) + ("  with reuse off" if compares else "")


def row(turn: DemoTurn) -> str:
    """One line of the table."""

    def count(value: int | None) -> str:
        return "-" if value is None else str(value)

    result = turn.result
    line = _cells(
        (
            str(turn.index),
            result.route or "-",
            count(result.prompt_tokens),
            count(result.reused_tokens),
            count(result.computed_tokens),
            f"{result.first_token_s:.2f} s",
        )
    )
    if turn.without is None:
        return line
    ratio = turn.without.first_token_s / max(result.first_token_s, 1e-9)
    return f"{line}  {f'{turn.without.first_token_s:.2f} s':>14}  {ratio:.1f}x"


def caption(compares: bool, prefill_cache: bool) -> str:
    """What the numbers are, and under which conditions."""
    lines = [
        "Tokens are of the prompt; `from decode` were read back over NIXL, `computed` are what prefill did."
    ]
    if prefill_cache:
        lines.append("Prefill keeps its own prefix cache: what it still held is in neither column.")
    else:
        lines.append(
            "Prefill's own prefix cache is off, as if other work had evicted this conversation from it."
        )
    if compares:
        lines.append(
            "`with reuse off`: the same messages right afterwards through the same engines and a router with"
        )
        lines.append("`--return off`, under a cache salt of their own; decode keeps its history either way.")
    return "\n".join(lines)


def run_demo(url: str, url_off: str | None, *, prefill_cache: bool, expects_return: bool, say: Say) -> None:
    """Hold the conversation and print it.

    Raises `UserError` where a turn fails, or no turn read anything back although the loop was to close.
    """
    compares = url_off is not None
    say(header(compares))
    turns: list[DemoTurn] = []
    for turn in converse(url, url_off):
        turns.append(turn)
        say(row(turn))
    say(caption(compares, prefill_cache))
    if compares:
        same = sum(turn.without is not None and turn.without.text == turn.result.text for turn in turns)
        say(f"Answers with and without reuse were the same text in {same} of {len(turns)} turns.")
    if expects_return and not any(turn.result.reused_tokens for turn in turns):
        raise UserError("no turn read anything back from decode: the loop did not close")
