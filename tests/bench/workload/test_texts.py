"""Text that is made up: the same for the same name, a prefix for a shorter stretch, a word a token."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.bench.workload.texts import WORDS, Texts
from kvloop.bench.workload.turns import MadeUp
from kvloop.errors import UserError
from kvloop.sim.text import TOKEN_BYTES
from kvloop.sim.tokenizer import encode
from tests.bench.workload.layout import common

NAMES = st.text(max_size=12)


@given(NAMES, st.integers(0, 500), st.integers(0, 500), st.floats(0.1, 5))
def test_a_short_stretch_begins_a_long_one(name: str, one: int, other: int, tokens_per_word: float) -> None:
    """Whatever a word comes to."""
    texts = Texts(7, tokens_per_word)
    short, long = sorted((one, other))
    assert texts.stretch(name, long).startswith(texts.stretch(name, short))


@given(NAMES, st.integers(1, 500), st.floats(0.1, 5))
def test_a_stretch_is_as_long_as_words_allow(name: str, tokens: int, tokens_per_word: float) -> None:
    """Within one word, and at least one."""
    text = Texts(7, tokens_per_word).stretch(name, tokens)
    words = text.split()
    assert text == "".join(f" {word}" for word in words)
    assert set(words) <= set(WORDS)
    assert len(words) == max(1, int(tokens / tokens_per_word))


def test_a_word_is_a_token_of_the_simulated_engines() -> None:
    """A made-up message of n tokens has n there."""
    message = MadeUp("user", (("a", 100), ("b", 1), ("c", 2899)))
    assert len(encode(Texts().message(message))) == message.tokens * TOKEN_BYTES


def test_words_differ() -> None:
    """256 of them, of three letters each: a byte chooses one and none twice."""
    assert len(set(WORDS)) == 256
    assert all(len(word) == 3 and word.isascii() and word.islower() for word in WORDS)


def test_names_and_seeds_make_other_texts() -> None:
    """Of two hundred, no two have more than three words in common at the beginning."""
    texts = [Texts(seed).stretch(f"n{name}", 50).split() for seed in range(2) for name in range(100)]
    assert max(common(one, other) for at, one in enumerate(texts) for other in texts[:at]) <= 3


def test_texts_do_not_depend_on_hash_seeds() -> None:
    """Another process makes the same."""
    program = (
        "import json; from kvloop.bench.workload.texts import Texts; "
        "print(json.dumps(Texts(3).stretch('name', 20)))"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert json.loads(made.stdout) == Texts(3).stretch("name", 20)


@pytest.mark.parametrize("tokens_per_word", [0.0, -1.0, float("nan"), float("inf")])
def test_a_word_is_some_tokens(tokens_per_word: float) -> None:
    """Anything else is an error."""
    with pytest.raises(UserError, match="a word cannot be"):
        Texts(0, tokens_per_word)
