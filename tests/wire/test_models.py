"""Listings of models, and the model that a request names, in JSON or in a form."""

import json

import pytest

from kvloop.wire.models import MAX_MODELS, listed_models, merged_models, model_asked_for, one_model

FORM = b"multipart/form-data; boundary=b"


def listing(*models: str) -> bytes:
    """An engine's answer."""
    return json.dumps({"object": "list", "data": [{"id": model, "root": "r"} for model in models]}).encode()


def test_listings() -> None:
    """Ids, the union, and an engine's own entry for one of them."""
    a, b = listing("a", "b"), listing("b", "org/c")
    assert listed_models(a) == {"a", "b"}
    assert [model["id"] for model in json.loads(merged_models([a, b"{}", b]) or b"")["data"]] == [
        "a",
        "b",
        "org/c",
    ]
    assert one_model([a, b], "org/c") == b'{"id": "org/c", "root": "r"}'
    assert one_model([a, b], "d") is None
    assert merged_models([b"{}", b"[]", b"no"]) is None
    assert listed_models(listing()) == frozenset()


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"data":5}', listing(*map(str, range(MAX_MODELS + 1)))]
)
def test_what_is_no_listing(body: bytes) -> None:
    """Says nothing; neither does one that is too long to be read to its end."""
    assert listed_models(body) is None


def part(name: bytes, value: bytes, more: bytes = b"") -> bytes:
    """A form's part."""
    return b'--b\r\nContent-Disposition: form-data; name="%b"\r\n%b\r\n%b\r\n' % (name, more, value)


@pytest.mark.parametrize(
    ("content_type", "body", "model"),
    [
        (b"application/json", b'{"model":"a"}', "a"),
        (b"", b'{"model":"a","input":"x"}', "a"),
        (b"application/json", b'{"model":5}', None),
        (b"application/json", b"no", None),
        (FORM, part(b"file", b"\x00\xff") + part(b"model", b"org/a") + b"--b--\r\n", "org/a"),
        (FORM, part(b"model", b"a", b"Content-Type: text/plain\r\n") + b"--b--\r\n", "a"),
        (FORM, part(b"file", b"model") + b"--b--\r\n", None),
        (b"text/plain", part(b"model", b"a"), None),
        (FORM, part(b"model", b"a") + part(b"file", b"x" * 2_000_000) + b"--b--\r\n", "a"),
        (FORM, part(b"file", b"x" * 2_000_000) + part(b"model", b"a") + b"--b--\r\n", "a"),
        (
            FORM,
            part(b"f", b"x" * 1_500_000) + part(b"model", b"a") + part(b"g", b"x" * 70_000) + b"--b",
            None,
        ),
    ],
)
def test_the_model_asked_for(content_type: bytes, body: bytes, model: str | None) -> None:
    """None where none can be found: then any engine may say what it makes of the request."""
    assert model_asked_for(content_type, body) == model
