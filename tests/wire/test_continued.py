"""An answer cut anywhere and gone on with is, to its client, the answer that was not cut."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvloop.wire.continuable import has_media, why_not
from kvloop.wire.continued import RestFilter, end_of, rest_of
from kvloop.wire.ledger import MAX_STREAM_BYTES, Ledger
from kvloop.wire.openai import Endpoint, Generation, read_generation
from kvloop.wire.token_ids import TokenIdsFilter, asks_for_ids
from tests.router.fake_engine import Asked
from tests.router.token_engine import PROMPT_IDS, TEXT, Read, Speaker, pieces_of, read
from tests.wire.streams import NASTY

MAX_EVENT_BYTES = 1 << 20
ENDPOINTS = (Endpoint.CHAT, Endpoint.COMPLETIONS)
endpoints = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=["chat", "completions"])
PROMPTS = {
    Endpoint.CHAT: {"messages": [{"role": "user", "content": "x"}]},
    Endpoint.COMPLETIONS: {"prompt": "x"},
}


def generation_of(endpoint: Endpoint, **more: Any) -> Generation:
    """A greedy streamed request, read."""
    start = {"model": "tiny", "stream": True, "temperature": 0, "max_tokens": 10_000}
    body = {**start, "stream_options": {"include_usage": True}, **PROMPTS[endpoint], **more}
    return read_generation(endpoint, json.dumps(body).encode())


def said_to(speaker: Speaker, body: bytes) -> bytes:
    """The engine's stream, without the handle."""
    events = speaker.answer(Asked("POST", "", {}, body))
    return b"".join(event for event in events if b"kvloop.handle" not in event)


def asked_body(generation: Generation) -> bytes:
    """What decode gets."""
    return json.dumps({**json.loads(generation.raw), "return_token_ids": True}).encode()


def gone_on(speaker: Speaker, generation: Generation, cuts: list[int], piece: int = 1 << 20) -> bytes | None:
    """What a client gets whose engines die after so many bytes each; None where it ends with an error."""
    keep = asks_for_ids(generation)
    ledger, places = Ledger(lambda _: True), iter(cuts)
    taken: TokenIdsFilter | RestFilter = TokenIdsFilter(MAX_EVENT_BYTES, ledger, keep=keep)
    body, out = asked_body(generation), b""
    while True:
        cut = next(places, None)
        for one in pieces_of(said_to(speaker, body)[:cut], piece):
            out += taken.feed(one)
        if taken.failed is not None:
            return None
        ledger.settle()
        assert not ledger.lost
        if ledger.open_event:
            out, ledger.open_event = out + b"\n", False
        if ledger.done or ledger.finish is not None:
            return out + end_of(ledger, generation)
        rest = rest_of(generation, ledger, None)
        assert rest is not None
        assert cut is not None, "it ended without an end"
        body = rest
        taken = RestFilter(MAX_EVENT_BYTES, ledger, generation.endpoint, keep=keep)


def check(speaker: Speaker, generation: Generation, cuts: list[int], piece: int = 1 << 20) -> bool:
    """Whether it went on to the end; then the client has read the whole answer, else none but its beginning
    was in vain."""
    plain = said_to(speaker, asked_body(generation) if asks_for_ids(generation) else generation.raw)
    got = gone_on(speaker, generation, cuts, piece)
    assert got is None or read(got) == read(plain)
    return got is not None


@endpoints
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_cut_at_every_byte(endpoint: Endpoint, keep: bool, width: int) -> None:
    """Tokens that come one at a time: wherever the first engine dies, the rest is exact, whatever part of a
    character its last token was."""
    speaker = Speaker(text='é"世🎉\\n', width=width)
    generation = generation_of(endpoint, **({"return_token_ids": True} if keep else {}))
    stream = said_to(speaker, asked_body(generation))
    first = stream.index(b"\n\n") + 2
    for at in range(first, len(stream) + 1, 1 if width == 3 else 13):
        assert check(speaker, generation, [at]), at


@endpoints
def test_several_at_a_time(endpoint: Endpoint) -> None:
    """Tokens that come several at a time: the rest is exact, or known not to be; of plain text it always
    is."""
    generation = generation_of(endpoint)
    for text, several in ((TEXT, 4), ("Nothing but ASCII, and a good deal of that. " * 3, 5)):
        speaker = Speaker(text=text, several=several)
        stream = said_to(speaker, asked_body(generation))
        first = stream.index(b"\n\n") + 2
        whole = [check(speaker, generation, [at]) for at in range(first, len(stream) + 1, 31)]
        assert all(whole) if text.isascii() else sum(whole) > len(whole) // 2


texts = st.text(st.characters(codec="utf-8") | st.sampled_from("🎉世é👩‍"), min_size=1, max_size=90)


@settings(deadline=None, max_examples=100)
@given(
    text=texts,
    width=st.integers(1, 5),
    several=st.integers(1, 3),
    endpoint=st.sampled_from(ENDPOINTS),
    keep=st.booleans(),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=3),
    piece=st.sampled_from([1, 40, 300, 1 << 20]),
)
@example(NASTY, 1, 1, Endpoint.CHAT, False, [0.7, 0.5], 300)
@example(TEXT, 1, 1, Endpoint.COMPLETIONS, True, [0.95, 0.5, 0.5], 300)
def test_any_text_and_any_deaths(
    text: str, width: int, several: int, endpoint: Endpoint, keep: bool, shares: list[float], piece: int
) -> None:
    """Up to three engines die over one answer, each at its place, however their bytes come in."""
    speaker = Speaker(text=text, width=width, several=several)
    generation = generation_of(endpoint, **({"return_token_ids": True} if keep else {}))
    stream = said_to(speaker, asked_body(generation))
    first = stream.index(b"\n\n") + 2
    cuts = [
        first + int(shares[0] * (len(stream) - first)),
        *[int(one * len(stream) / 2) for one in shares[1:]],
    ]
    assert check(speaker, generation, cuts, piece) or several > 1


def lines_of(*ids: Any, text: str = "a", **choice: Any) -> bytes:
    """An event of a chat with these ids."""
    one = {
        "index": 0,
        "delta": {"content": text},
        "logprobs": None,
        "finish_reason": None,
        "token_ids": [*ids],
    }
    body = {
        "id": "c",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [one | choice],
    }
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


ROLE = lines_of(text="", delta={"role": "assistant", "content": ""})[:-3] + b',"prompt_token_ids":[1,2]}\n\n'


def ledger_of(*events: bytes, most_bytes: int = 1 << 30) -> Ledger:
    """What is known after these."""
    left = [most_bytes]

    def charge(size: int) -> bool:
        if size > left[0]:
            return False
        left[0] -= size
        return True

    ledger = Ledger(charge)
    taken = TokenIdsFilter(MAX_EVENT_BYTES, ledger, keep=False)
    for event in events:
        taken.feed(event)
    ledger.settle()
    assert not ledger.lost or left == [most_bytes], "not given back"
    return ledger


def test_long_answers_are_counted_off() -> None:
    """Of a long plain answer only the ids are kept, and not one is missed: whatever odd event comes in
    between."""
    odd = [b"", lines_of(7, 8, text="ab"), lines_of(9, text=""), b": ping\n\n", lines_of(5, text="\n\n")]
    for strange in odd:
        events = [lines_of(number) for number in range(100, 300)]
        ledger = ledger_of(ROLE, *events[:70], strange, *events[70:])
        ids = json.loads(b"[" + ledger.ids + b"]")
        known = [] if b"token_ids" not in strange else json.loads(strange[5:])["choices"][0]["token_ids"]
        assert ids == [*range(100, 170), *known, *range(170, 300)]
        assert (ledger.overlap_ids, ledger.overlap) == ([], "")


@pytest.mark.parametrize(
    "strange",
    [
        lines_of(3, delta={"reasoning": "hm"}),
        lines_of(3, delta={"tool_calls": [{"index": 0}]}),
        lines_of(3, delta={"content": 5}),
        lines_of(text="no id for it"),
        lines_of(3, token_ids=None),
        lines_of(3, index=1),
        lines_of(3, logprobs={"content": []} | {"x": 1}),
        lines_of(-3),
        lines_of(2**31),
        lines_of("3"),
        b"data: {no json}\n\n",
        b'data: {"choices":[{"token_ids":[1],"text":"a"},{"token_ids":[1],"text":"a"}]}\n\n',
    ],
)
@pytest.mark.parametrize("before", [1, 50])
def test_what_is_not_understood(strange: bytes, before: int) -> None:
    """Anything else than text and its ids makes an answer one that cannot be gone on from."""
    events = [ROLE, *[lines_of(number) for number in range(before)]]
    assert not ledger_of(*events).lost
    at_once = ledger_of(*events, strange)
    assert at_once.lost or rest_of(generation_of(Endpoint.CHAT), at_once, None) is None
    later = ledger_of(*events, strange, *[lines_of(number) for number in range(50)])
    assert later.lost or rest_of(generation_of(Endpoint.CHAT), later, None) is None


def test_bounds() -> None:
    """Beyond its share, or what one stream may have, nothing is kept, and everything is given back."""
    events = [ROLE, *[lines_of(number) for number in range(200)]]
    assert not ledger_of(*events, most_bytes=2000).lost
    assert ledger_of(*events, most_bytes=500).lost
    long = lines_of(*[2**31 - 1] * 20_000)
    assert ledger_of(ROLE, *[long] * (MAX_STREAM_BYTES // 200_000)).lost
    assert ledger_of(b'data: {"prompt_token_ids":[%b1]}\n\n' % (b"1," * MAX_STREAM_BYTES)).lost


def test_events_of_ids_alone_go_no_further() -> None:
    """Where a parser holds text back the engine sends chunks only because ids were asked for."""
    taken = TokenIdsFilter(MAX_EVENT_BYTES, Ledger(lambda _: True), keep=False)
    empty = lines_of(4, delta={})
    shown = lines_of(5).replace(b'"token_ids":[5]', b'"token_ids":null')
    taken.feed(ROLE)
    assert taken.feed(empty + lines_of(5) + empty) == shown
    assert taken.feed(empty) == b""
    assert taken.feed(lines_of(5)) == shown


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("seed", 1),
        ("stop", ["x"]),
        ("stop", "x"),
        ("logprobs", 0),
        ("logprobs", True),
        ("prompt_logprobs", 0),
        ("frequency_penalty", 0.1),
        ("presence_penalty", -1),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a"}),
        ("guided_regex", "a"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("bad_words", ["a b"]),
        ("echo", True),
        ("use_beam_search", True),
        ("suffix", "x"),
        ("vllm_xargs", {"a": 1}),
        ("thinking_token_budget", 5),
        ("repetition_detection", {"a": 1}),
        ("truncate_prompt_tokens", 5),
        ("watermarking", True),
        ("include_reasoning", False),
        ("return_token_ids", False),
        ("stream", False),
        ("a_parameter_of_tomorrow", 0),
    ],
)
@endpoints
def test_not_followed(endpoint: Endpoint, field: str, value: Any) -> None:
    """What the rest would depend on is not followed; the same member at rest is."""
    more = {field: value} | ({"temperature": 0.7} if field == "seed" else {})
    assert why_not(generation_of(endpoint, **more)) == field
    if field not in ("stream", "a_parameter_of_tomorrow", "return_token_ids"):
        assert why_not(generation_of(endpoint, **{field: None})) is None


def test_followed() -> None:
    """Greedy with a seed, sampled without; tools that are not to be called; and the members that clients
    send without a thought."""
    for more in (
        {"seed": 4},
        {"temperature": 0.7},
        {"temperature": None},
        {"n": 1, "stop": [], "logprobs": False, "frequency_penalty": 0, "user": "u", "metadata": {}},
        {"response_format": {"type": "text"}, "tools": [{}], "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto"},
    ):
        assert why_not(generation_of(Endpoint.CHAT, **more)) is None
    media = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    plain = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "assistant"}]
    assert has_media(generation_of(Endpoint.CHAT, messages=media))
    assert not has_media(generation_of(Endpoint.CHAT, messages=plain))


def test_how_long_the_rest_may_be() -> None:
    """What is left of the bound; without one, of the model's length, and where that is not known, nothing."""
    ledger = ledger_of(ROLE, *[lines_of(number) for number in range(6)])

    def most(endpoint: Endpoint, length: int | None = None, **more: Any) -> int | None:
        rest = rest_of(generation_of(endpoint, **more), ledger, length)
        return None if rest is None else json.loads(rest)["max_tokens"]  # type: ignore[no-any-return]

    assert most(Endpoint.CHAT, max_tokens=10) == 4
    assert most(Endpoint.CHAT, max_tokens=10, max_completion_tokens=9) == 3
    assert most(Endpoint.CHAT, max_tokens=None) is None
    assert most(Endpoint.CHAT, 100, max_tokens=None) == 100 - 2 - 6
    assert most(Endpoint.COMPLETIONS, 100, max_tokens=None) == 16 - 6
    assert most(Endpoint.CHAT, max_tokens=6) is None
    assert PROMPT_IDS


def test_rest_that_is_another() -> None:
    """Ids or text that the client has otherwise, an end before what he has, an error, no JSON: a failure."""
    ledger = ledger_of(ROLE, lines_of(1), lines_of(2, 3, text="bc"), lines_of(4, 5, text="de"))
    assert (ledger.overlap_ids, ledger.overlap) == ([4, 5], "de")
    for wrong in (
        lines_of(4, 6, text="de"),
        lines_of(4, 5, text="dE"),
        lines_of(4, text="d", finish_reason="stop"),
        lines_of(text="de"),
        b'data: {"error":{"message":"x"},"choices":[]}\n\n',
        b"data: {\n\n",
        b"data: [DONE]\n\n",
    ):
        text = wrong.replace(b'"delta":{"content":', b'"text":').replace(b'},"logprobs"', b',"logprobs"')
        taken = RestFilter(MAX_EVENT_BYTES, ledger, Endpoint.CHAT, keep=False)
        assert taken.feed(text) == b""
        assert taken.failed is not None
        assert taken.feed(lines_of(7)) == b""


def test_reads() -> None:
    """The reader that these tests trust sees a second role, or an error, for what it is."""
    assert read(b'data: {"error":{}}\n\n') == Read("", [], None, None, 1, False, 0, set())
