"""The soak: it runs, its clients tell right answers from every other, and it would see what it looks for."""

import asyncio
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvloop.bench.soak.__main__ import main
from kvloop.bench.soak.conversation import PATHS, Conversation, begun
from kvloop.bench.soak.exchange import Answer, Line, Manner
from kvloop.bench.soak.faults import Fault, Pace, Trouble, Window, drawn
from kvloop.bench.soak.hearing import CHAT, hear
from kvloop.bench.soak.home import Held
from kvloop.bench.soak.oracle import expected
from kvloop.bench.soak.rows import Ran, Sizes, facts_of, rows_of, told
from kvloop.bench.soak.tally import Outcome, Report, Tally
from kvloop.core import lease
from kvloop.sim.body import read_body
from kvloop.sim.endpoints import ENDPOINTS
from tests.router.harness import in_loop
from tests.router.recorded import ANSWERS
from tests.sim.servers import MODEL, deployment
from tests.sim.test_behind_the_router import matched_without_proof

RIGHT = Report(1.0, 2.0, CHAT, True, Outcome.RIGHT, "return")
SIZES = Sizes(27, 80, 40, memory_mib=[50.0] * 12 + [51.0])
NOTHING = Held(**dict.fromkeys(Held.__dataclass_fields__, 0))


def ran(*reports: Report, held: Held = NOTHING, windows: tuple[Window, ...] = (), **changes: Any) -> Ran:
    """A run that ended well but for what is given."""
    trouble = Trouble(None, 1, Pace(), [*windows, Window(Fault.REFUSE, 90.0, 91.0)])  # type: ignore[arg-type]
    whole: dict[str, Any] = {
        "speed": 12.0,
        "turns": len(reports),
        "began_s": 0.0,
        "asked_s": 100.0,
        "tally": Tally([*reports]),
        "trouble": trouble,
        "sizes": SIZES,
        "held": held,
        "router": {},
        "tracebacks": 0,
        "wrong_answers": 0.0,
    }
    return Ran(**(whole | changes))


def missed(run: Ran) -> list[str]:
    """What a run's rows say was not met."""
    assert told(run)
    assert json.dumps(facts_of(run))
    return [row.what for row in rows_of(run) if row.met is False]


def test_a_quick_soak(tmp_path: Path) -> None:
    """Real processes, some faults: every turn is answered rightly or excused, and everything comes home. What
    the process holds of files and memory is for a longer run to judge."""
    path = tmp_path / "soak.json"
    main(["--quick", "--json", str(path), "--seed", "3"])
    facts = json.loads(path.read_text())
    assert facts["failures"] == []
    missed = [row["what"] for row in facts["rows"] if row["met"] is False]
    assert [what for what in missed if not what.startswith(("router's open files", "router's memory"))] == []
    assert facts["outcomes"]["right"] > 150
    assert len(facts["by_path"]) == 2 * len(PATHS)
    assert facts["faults"]


def test_the_schedule_is_the_seed_s() -> None:
    """The same faults for the same seed, every kind in each round, others for another."""

    def first(seed: int) -> list[Any]:
        return list(itertools.islice(drawn(seed, Pace()), 2 * len(Fault)))

    assert first(7) == first(7) != first(8)
    assert {fault for fault, *_ in first(7)[: len(Fault)]} == {*Fault}


@pytest.mark.parametrize(
    ("outcome", "what"),
    [(outcome, str(outcome)) for outcome in Outcome if outcome not in (Outcome.RIGHT, Outcome.LEFT)],
)
def test_what_no_fault_excuses(outcome: Outcome, what: str) -> None:
    """One turn that went wrong misses a target; errors only outside of every window."""
    window = Window(Fault.KILL_DECODE, 0.5, 1.5)
    bad = replace(RIGHT, outcome=outcome, words="why")
    is_error = outcome in (Outcome.REFUSED, Outcome.ENDED)
    assert missed(ran(RIGHT, bad)) == ["errors that no fault explains" if is_error else what]
    assert missed(ran(RIGHT, bad, windows=(window,))) == ([] if is_error else [what])
    assert missed(ran(RIGHT)) == []


def test_what_does_not_come_home() -> None:
    """Anything that is left misses its target, and so do files and memory beyond their bounds."""
    for name in Held.__dataclass_fields__:
        assert len(missed(ran(RIGHT, held=replace(NOTHING, **{name: 1})))) == 1
    assert len(missed(ran(RIGHT, sizes=replace(SIZES, files_end=60)))) == 1
    assert len(missed(ran(RIGHT, sizes=replace(SIZES, memory_mib=[50.0] * 12 + [61.0])))) == 1
    assert len(missed(ran(RIGHT, tracebacks=1))) == 1
    assert len(missed(ran(RIGHT, turns=2))) == 1
    tally = Tally([RIGHT])
    tally.hostile["/sleep answered 200"] = 1
    assert len(missed(ran(RIGHT, tally=tally))) == 1


@pytest.mark.parametrize("path", PATHS)
def test_broken_answers_are_no_answers(path: str) -> None:
    """A stream without its end is nothing, and one that an error ends is an error, in every API."""
    names = {"/v1/responses": "response_stream", "/v1/messages": "message_stream"}
    chunk = '{"choices":[{"index":0,"text":"Hello","delta":{"content":"Hello"},"finish_reason":"stop"}]}'
    events = ANSWERS[names[path]] if path in names else [f"data: {chunk}\n\n", "data: [DONE]\n\n"]
    stream = {"content-type": "text/event-stream"}

    def heard(*lines: str) -> Any:
        return hear(path, Answer(200, stream, "".join(lines).encode(), whole=True))

    whole = heard(*events)
    assert whole.said.text == "Hello"
    assert whole.error is None
    for cut in range(len(events)):
        assert heard(*events[:cut]).said is None
    assert heard(*events[:1], 'data: {"error":{"message":"broke off"}}\n\n').error == "stream broke off"
    assert hear(path, Answer(502, {}, b'{"error":{"message":"no"}', whole=False)).error is None


def converse(conversation: Conversation, send: Callable[..., Any]) -> Any:
    """Four turns of a conversation; how many answers were the oracle's."""

    async def run() -> int:
        chance, right = random.Random(1), 0
        for number in range(4):
            conversation.ask(chance)
            body = conversation.body(60) | {"stream": number % 2 == 1, "model": MODEL}
            answer = await send(conversation, conversation.wire_body(body))
            heard = hear(conversation.path, answer)
            right += heard.said == expected(conversation.path, body)
            conversation.answered(heard)
        return right

    return run()


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_says_what_engines_say(seed: int) -> None:
    """Of each API, with tools and by name: every answer through router and engines is the oracle's."""

    async def run() -> None:
        async with deployment() as stack:

            async def send(conversation: Conversation, body: dict[str, Any]) -> Answer:
                line = Line(stack.client.base_url.port or 0)
                answer = await line.ask(conversation.path, {}, json.dumps(body).encode(), Manner())
                line.close()
                return answer

            for path in PATHS:
                conversation = replace(begun(random.Random(seed)), path=path, tools=seed % 2 == 1)
                conversation.by_name = path == "/v1/responses" and seed % 3 == 0
                assert await converse(conversation, send) == 4

    in_loop(run)()


def test_a_wrong_reuse_is_no_right_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the proof left out of the engines, the oracle differs from what a client gets."""
    monkeypatch.setattr(lease, "matched_tokens", matched_without_proof)

    async def run() -> None:
        async with deployment() as stack:
            said = []
            for first in ("a" * 2000, "b" * 2000):
                messages = [{"role": "system", "content": first}, {"role": "user", "content": "Hello?"}]
                body = {"model": MODEL, "messages": messages, "max_tokens": 40, "conversation_id": "c"}
                answer = await stack.client.post(CHAT, json=body)
                heard = hear(CHAT, Answer(200, {}, answer.content, whole=True))
                said.append(heard.said == expected(CHAT, body))
            assert said == [True, False]

    in_loop(run)()


@in_loop
async def test_what_a_client_sees_of_a_broken_connection() -> None:
    """An answer that stops in the middle is not whole, none at all has no status; who leaves has left."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/cut" in head:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n5\r\nhe")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        line = Line(server.sockets[0].getsockname()[1])
        cut = await line.ask("/cut", {}, b"{}", Manner())
        assert (cut.status, cut.body, cut.whole, cut.left) == (200, b"hello", False, False)
        assert (await line.ask("/cut", {}, b"{}", Manner(leaves_after=1))).left
        assert (await line.ask("/none", {}, b"{}", Manner())).status == 0


def test_every_request_is_one_that_engines_take() -> None:
    """Conversations make bodies whose prompts can be rendered, and whose limit is set."""
    for seed in range(30):
        chance = random.Random(seed)
        conversation = begun(chance)
        conversation.ask(chance)
        body = read_body(json.dumps(conversation.body(20)).encode())
        endpoint = ENDPOINTS[conversation.path]
        assert body.limit == 20
        assert endpoint.prompts(endpoint.read(body))[0]
