"""The demo against scripted answers: what it asks, what it prints, and when it is a failure."""

import http.server
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvloop.errors import UserError
from kvloop.local.chat import TurnResult, return_misses, served_model, stream_turn
from kvloop.local.demo import QUESTIONS, SALT_OFF, DemoTarget, converse, not_returned, run_demo
from kvloop.local.demo_table import DemoTurn, caption, header, row

METRICS = b"""# TYPE kvloop_router_return_misses_total counter
kvloop_router_return_misses_total{reason="no_reply"} 2.0
kvloop_router_return_misses_total{reason="unknown_lease"} 1.0
kvloop_router_return_misses_created{reason="no_reply"} 1.7e+09
"""


@dataclass
class Router:
    """A router with one answer for everything. `missing` are the turns, by number of user messages, that are
    not returned."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: bool = True
    missing: tuple[int, ...] = ()
    status: int = 200
    events: tuple[str, ...] = ()

    def answer(self, body: dict[str, Any]) -> tuple[dict[str, str], bytes]:
        """Headers and body for one request."""
        self.asked.append(body)
        turn = sum(message["role"] == "user" for message in body["messages"])
        is_return = turn > 1 and turn not in self.missing and "cache_salt" not in body
        reused = 100 * turn if is_return else 0
        said = {"x-kvloop-route": "return" if is_return else "recompute"}
        if self.headers:
            said |= {"x-kvloop-reused-tokens": str(reused), "x-kvloop-cached-tokens": str(reused + 1)}
        usage = {"prompt_tokens": 100 * turn + 20, "completion_tokens": 2}
        events = self.events or (
            '{"choices":[{"delta":{"role":"assistant","content":""}}]}',
            '{"choices":[{"delta":{"content":"Yes"}}]}',
            '{"choices":[{"delta":{"content":", so."},"finish_reason":"stop"}]}',
            json.dumps({"choices": [], "usage": usage}),
            "[DONE]",
        )
        return said, "".join(f"data: {event}\n\n" for event in events).encode()


@pytest.fixture
def router() -> Iterator[Router]:
    """A fake router on a thread."""
    fake = Router()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply({}, METRICS if self.path == "/metrics" else b'{"data":[{"id":"m"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.reply(*fake.answer(body))

        def reply(self, headers: dict[str, str], body: bytes) -> None:
            self.send_response(fake.status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield fake
    server.shutdown()
    thread.join()
    server.server_close()


def result(**changes: Any) -> TurnResult:
    """An answered turn that was returned."""
    values: dict[str, Any] = {
        "text": "Yes",
        "route": "return",
        "prompt_tokens": 616,
        "reused_tokens": 591,
        "cached_tokens": 591,
        "first_token_s": 0.25,
    }
    return TurnResult(**(values | changes))


def test_the_row_stands_under_its_header() -> None:
    """Route, prompt, reused, computed, time, and the same turn without reuse with the ratio."""
    turn = DemoTurn(2, result(), result(first_token_s=1.0))
    assert header(True) == "turn      route  prompt  from decode  computed  first token   reuse off  ratio"
    assert row(turn) == "   2     return     616          591        25       0.25 s      1.00 s   4.0x"
    assert len(row(turn)) == len(header(True))


def test_a_row_without_comparison_is_shorter() -> None:
    """With `--return off` there is nothing to compare with."""
    turn = DemoTurn(1, result(route="recompute", reused_tokens=0, cached_tokens=0), None)
    assert row(turn) == "   1  recompute     616            0       616       0.25 s"
    assert len(row(turn)) == len(header(False))


def test_what_the_answer_does_not_say_is_a_dash() -> None:
    """Upstream's connector does not say what it reused; nothing is made up."""
    turn = DemoTurn(2, result(route=None, prompt_tokens=None, reused_tokens=None, cached_tokens=None), None)
    assert row(turn).split() == ["2", "-", "-", "-", "-", "0.25", "s"]
    assert result(cached_tokens=None).computed_tokens is None


@pytest.mark.parametrize(("prefill_cache", "said"), [(True, "cache is on"), (False, "cache is off")])
def test_the_caption_says_what_prefill_keeps(prefill_cache: bool, said: str) -> None:
    """And, where turns are compared, how."""
    assert said in caption(False, prefill_cache)
    assert "--return off" in caption(True, prefill_cache)
    assert "--return off" not in caption(False, prefill_cache)


def test_each_turn_is_asked_twice_and_grows_by_the_first_answer(router: Router) -> None:
    """Streamed, with usage; the same messages both times, the second under a salt of its own."""
    turns = list(converse(DemoTarget(router.url, router.url)))
    assert [turn.index for turn in turns] == [1, 2, 3, 4, 5]
    assert len(router.asked) == 2 * len(QUESTIONS)
    for on, off in zip(router.asked[::2], router.asked[1::2], strict=True):
        assert off == on | {"cache_salt": SALT_OFF}
        assert on["stream"]
        assert on["stream_options"] == {"include_usage": True}
        assert on["temperature"] == 0
    last = router.asked[-1]["messages"]
    assert [message["role"] for message in last] == ["system", *["user", "assistant"] * 4, "user"]
    assert last[2]["content"] == "Yes, so."


def test_the_conversation_is_printed_as_it_goes(router: Router) -> None:
    """Warm-up, header, a line per turn, caption, and whether the answers agree."""
    said: list[str] = []
    run_demo(DemoTarget(router.url, router.url), said.append)
    assert said[2] == header(True)
    assert [line.split()[:5] for line in said[3:8]] == [
        ["1", "recompute", "120", "0", "119"],
        ["2", "return", "220", "200", "19"],
        ["3", "return", "320", "300", "19"],
        ["4", "return", "420", "400", "19"],
        ["5", "return", "520", "500", "19"],
    ]
    assert said[-1] == "The answers with and without reuse were the same in 5 of 5 turns."


def test_the_warm_up_lets_every_pair_of_engines_meet(router: Router) -> None:
    """A conversation per decode engine, with a turn more than there are prefill engines."""
    run_demo(DemoTarget(router.url, prefill=2, decode=3), lambda _: None)
    assert len(router.asked) == 3 * (1 + 2) + len(QUESTIONS)


def test_a_later_turn_that_is_not_returned_is_a_failure(router: Router) -> None:
    """Every row is printed first; the error names the turns and the router's reasons."""
    router.missing = (3, 5)
    said: list[str] = []
    with pytest.raises(UserError) as caught:
        run_demo(DemoTarget(router.url, router.url, metrics_url=router.url), said.append)
    assert str(caught.value) == (
        "turns 3, 5 reused nothing of what decode held "
        "(the router's misses so far: no_reply 2, unknown_lease 1)"
    )
    assert len(said) == 3 + len(QUESTIONS) + 2


def test_without_reuse_no_turn_has_to_be_returned(router: Router) -> None:
    """`--return off` is a mode, not a failure."""
    router.missing = (2, 3, 4, 5)
    run_demo(DemoTarget(router.url, returns=False), lambda _: None)


def test_tokens_decide_where_they_are_known() -> None:
    """A route that says `return` and read nothing is a miss; without counts the route is all there is."""
    first = DemoTurn(1, result(route="recompute"), None)
    empty = DemoTurn(2, result(reused_tokens=0), None)
    unknown = DemoTurn(3, result(reused_tokens=None), None)
    alone = DemoTurn(4, result(route="decode"), None)
    assert not_returned([first, empty, unknown, alone], counts=True) == [2, 3, 4]
    assert not_returned([first, empty, unknown, alone], counts=False) == [4]


def test_an_error_answer_ends_the_demo(router: Router) -> None:
    """With its status and the start of its body."""
    router.status = 503
    with pytest.raises(UserError, match=r"the turn was answered with HTTP 503: data: "):
        stream_turn(router.url, {"messages": []})


def test_an_error_inside_a_stream_ends_the_demo(router: Router) -> None:
    """The status was sent before; the event says it."""
    router.events = ('{"error":{"message":"out of blocks"}}',)
    with pytest.raises(UserError, match="out of blocks"):
        stream_turn(router.url, {"messages": []})


def test_a_stream_that_breaks_off_or_says_nothing_is_not_an_answer(router: Router) -> None:
    """A turn without its last event, or without a word, is not reported with a time."""
    router.events = ('{"choices":[{"delta":{"content":"Yes"}}]}',)
    with pytest.raises(UserError, match="broke off"):
        stream_turn(router.url, {"messages": []})
    router.events = ('{"choices":[{"delta":{"content":""}}]}', "[DONE]")
    with pytest.raises(UserError, match="without a word"):
        stream_turn(router.url, {"messages": []})


def test_nobody_there_is_one_line() -> None:
    """Neither is a traceback."""
    with pytest.raises(UserError, match="the turn was not answered: "):
        stream_turn("http://127.0.0.1:9", {"messages": []})
    with pytest.raises(UserError, match="does not answer with a model"):
        served_model("http://127.0.0.1:9")
    assert return_misses("http://127.0.0.1:9") == ""
