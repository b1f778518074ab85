"""A scripted conversation that shows the loop at work, beside the same conversation with reuse off.

Both go through the same engines, turn by turn, never at the same time: first the turn as the router takes it,
then the same messages through a second router that was started with `--return off`. The second conversation
has a cache salt of its own, so no engine can serve one from the blocks of the other; on decode it keeps its
own history, as a one-way deployment would. What prefill may keep is said in the caption, because it decides
the result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvloop.errors import UserError
from kvloop.local.chat import APPEND, Message, TurnResult, return_misses, served_model, stream_turn
from kvloop.local.demo_table import DemoTurn, caption, header, row

Say = Callable[[str], None]

ANSWER_TOKENS = 40
WARM_UP_TOKENS = 8
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
trip takes two hours, costs eleven crowns, and includes tea, which is served on the way back.

The harbour itself is older than the light. Its east wall was begun in 1790 with stone from the same quarry,
and was lengthened twice, the second time for the herring fleet, which had grown to ninety boats. When the
herring went away, most of the boats followed them north; the ice house became a school and the smoke house a
shop for rope, lamps and paint. Today eleven boats fish from the harbour, mostly for crab, and sell their
catch on the quay at six in the morning. The harbour master keeps the key of the museum, which has two rooms:
one for the old lens, which weighs almost two tonnes and still turns when it is pushed with one hand, and one
for the boat that rescued fourteen people from the steamer Aurora in 1902. Children may ring the fog bell at
noon. Dogs are welcome in the harbour but not in the museum, and nobody may feed the seals."""

WARM_UP = """This is another conversation, which the engines have before the one that counts. It is only here
so that they know each other: it opens their connections, makes their memory known to each other, and runs
every step once. Its text is long enough that reading it back is worth the trouble, and it has nothing to say
about lighthouses. Tea is a drink that is made by pouring hot water on leaves, and it should stand for four
minutes before it is drunk; some people take it with milk, some with lemon, and some with nothing at all."""

QUESTIONS = (
    "When was the lighthouse built, and why?",
    "What did the keepers burn in the lamp before electric light came?",
    "How many keepers were there, and what did each of them do?",
    "What happened in 1923?",
    "I would like to visit. When does the boat go, and what does it cost?",
)


@dataclass(frozen=True, slots=True)
class DemoTarget:
    """What the conversation is held with. `url_off` is the router with reuse off (None: do not compare).

    `returns` says whether later turns are to be read back, and `counts` whether this connector says how much.
    """

    url: str
    url_off: str | None = None
    metrics_url: str | None = None
    prefill: int = 1
    decode: int = 1
    prefill_cache: bool = False
    returns: bool = True
    counts: bool = True


def _ask(url: str, url_off: str | None, body: dict[str, Any]) -> tuple[TurnResult, TurnResult | None]:
    result = stream_turn(url, body)
    return result, stream_turn(url_off, body | {"cache_salt": SALT_OFF}) if url_off is not None else None


def warm_up(target: DemoTarget) -> None:
    """Other conversations, until every pair of engines has met. Raises `UserError` where a turn fails.

    The first transfer between two engines opens connections and exchanges layouts, which would else count
    to whichever turn comes first. Prefill engines take turns, so each conversation meets all of them.
    """
    model = served_model(target.url)
    for conversation in range(target.decode):
        messages: list[Message] = [{"role": "system", "content": f"{conversation}. {WARM_UP}"}]
        for turn in range(1 + target.prefill):
            messages.append({"role": "user", "content": f"Question {turn}: is the tea good?"})
            body = {"model": model, "messages": messages, "max_tokens": WARM_UP_TOKENS, "temperature": 0}
            result, _ = _ask(target.url, target.url_off, body)
            messages.append({"role": "assistant", "content": result.text})


def converse(target: DemoTarget, questions: tuple[str, ...] = QUESTIONS) -> Iterator[DemoTurn]:
    """Hold the conversation, yielding each turn as it ends. Raises `UserError` where a turn fails."""
    model = served_model(target.url)
    messages: list[Message] = [{"role": "system", "content": BRIEF}]
    for index, question in enumerate(questions, start=1):
        messages.append({"role": "user", "content": question})
        body = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        result, without = _ask(target.url, target.url_off, body)
        yield DemoTurn(index, result, without)
        messages.append({"role": "assistant", "content": result.text})


def not_returned(turns: Sequence[DemoTurn], counts: bool) -> list[int]:
    """The turns after the first that reused nothing of decode's, by index; with `counts`, tokens decide, else
    the route."""
    return [
        turn.index
        for turn in turns[1:]
        if turn.result.route not in ("return", APPEND) or (counts and not turn.result.reused_tokens)
    ]


def run_demo(target: DemoTarget, say: Say) -> None:
    """Hold the conversation and print it.

    Raises `UserError` where a turn fails, or a later turn reused nothing although the loop was to close.
    """
    compares = target.url_off is not None
    say("warming up: the engines meet in another conversation")
    warm_up(target)
    say("a conversation" + (", each turn with reuse and then without" if compares else "") + ":")
    say(header(compares))
    turns: list[DemoTurn] = []
    for turn in converse(target):
        turns.append(turn)
        say(row(turn))
    say(caption(compares, target.prefill_cache))
    if compares:
        same = sum(turn.same_text for turn in turns)
        say(f"The answers with and without reuse were the same in {same} of {len(turns)} turns.")
    missed = not_returned(turns, target.counts) if target.returns else []
    if missed:
        which = f"turn{'s' * (len(missed) > 1)} {', '.join(map(str, missed))}"
        reasons = return_misses(target.metrics_url) if target.metrics_url else ""
        because = f" (the router's misses so far: {reasons})" if reasons else ""
        raise UserError(f"{which} reused nothing of what decode held{because}")
