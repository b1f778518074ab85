"""Bytes into tokens: by kind of script, corrected by counts, bounded."""

import json

import pytest

from kvloop.core.script import MAX_MODELS, Script, TokenEstimator, script_of


@pytest.mark.parametrize(
    ("text", "script"),
    [
        (b"", Script.PLAIN),
        (b'{"role":"user","content":"Hello, how are you?"}', Script.PLAIN),
        ("Où est la bibliothèque, s'il vous plaît ? ".encode() * 3, Script.MIXED),
        ("图书馆在哪里我想借一本书".encode(), Script.WIDE),
        ("Где находится библиотека?".encode(), Script.WIDE),
        (json.dumps("图书馆在哪里").encode(), Script.ESCAPED),
        (b"[1, 2, 3]", Script.IDS),
        (b"\xff\xfe\xff\xfe", Script.PLAIN),
    ],
)
def test_scripts(text: bytes, script: Script) -> None:
    """Each kind is told by its bytes; what is no UTF-8 is as good as anything."""
    assert (
        script_of(text) in (script, Script.MIXED, Script.WIDE)
        if b"\xff" in text
        else script_of(text) is script
    )


def test_counts_correct_the_estimate() -> None:
    """Per model and script: the first count at once, later ones by their share."""
    one = TokenEstimator()
    assert one.tokens("m", Script.PLAIN, 4000) == 1000
    one.counted("m", Script.PLAIN, 3000, 1000)
    assert one.tokens("m", Script.PLAIN, 3000) == 1000
    assert one.tokens("other", Script.PLAIN, 4000) == 1000
    for _ in range(100):
        one.counted("m", Script.PLAIN, 2000, 1000)
    assert one.tokens("m", Script.PLAIN, 2000) == pytest.approx(1000, rel=0.02)


def test_nonsense_counts_do_little() -> None:
    """A prompt of a million tokens in ten bytes, or of none."""
    one = TokenEstimator()
    for size, tokens in ((10, 10**6), (0, 5), (5, 0), (10**9, 1)):
        one.counted("m", Script.PLAIN, size, tokens)
    assert 1 <= one.tokens("m", Script.PLAIN, 4000) <= 16_000
    assert one.tokens("m", Script.PLAIN, 0) == 0


def test_models_are_bounded() -> None:
    """A client that makes up a model per request fills no memory."""
    one = TokenEstimator()
    for number in range(MAX_MODELS + 10):
        one.counted(f"m{number}", Script.PLAIN, 100, 100)
    assert one.tokens("m0", Script.PLAIN, 4000) == 1000
    assert one.tokens(f"m{MAX_MODELS + 9}", Script.PLAIN, 4000) == 4000
