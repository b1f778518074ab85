"""Text out of a raw file, made fit to be shown: a raw file is not trusted.

What a terminal or a reader of XML would obey or choke on (control characters, directions of writing, halves
of surrogate pairs) is shown as a replacement character, and what is long is cut.
"""

MAX_WORD = 32  # a name in a table or a legend
MAX_SENTENCE = 300


def plain(text: str, longest: int = MAX_SENTENCE) -> str:
    """The text in one line of printable characters, with an ellipsis where it was cut."""
    cut = text if len(text) <= longest else text[: longest - 1] + "\u2026"
    return "".join(_shown(letter) for letter in cut)


def word(text: str) -> str:
    """A name, short enough for a table's head."""
    return plain(text, MAX_WORD) or '""'


def _shown(letter: str) -> str:
    if letter.isspace():
        return " "
    return letter if letter.isprintable() else "\ufffd"
