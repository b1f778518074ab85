"""How many tokens a text will be: learned bytes per token, per model and kind of script.

No text is tokenised on the router's loop; what a tokenizer makes of so many bytes of such text is learned
from prompts whose tokens an engine has counted. English has about four bytes a token, Chinese three, and JSON
that escapes every character six bytes for each; within one kind the ratio varies little, and the engines' own
counts correct it turn by turn. What is estimated decides which way a turn goes, and nothing else.
"""

from collections import OrderedDict
from enum import StrEnum

DEFAULT_MILLI_BYTES = 4000  # per token
MEMORY_PARTS = 16  # an observation of all bytes weighs a sixteenth of what is known
MAX_MODELS = 1000
_WIDE_SHARE = 4  # continuation bytes from a quarter of the text on: mostly not Latin letters
MIN_MILLI_BYTES, MAX_MILLI_BYTES = 250, 64_000


class Script(StrEnum):
    """A text by what its bytes are mostly like; `ids`: it is a list of tokens already."""

    PLAIN = "plain"
    MIXED = "mixed"
    WIDE = "wide"
    ESCAPED = "escaped"
    IDS = "ids"


def script_of(text: bytes) -> Script:
    """By the share of UTF-8's continuation bytes and of JSON's escapes; C speed, a few microseconds."""
    if text[:1] == b"[":
        return Script.IDS
    if text.count(b"\\u") * 6 * _WIDE_SHARE > len(text):
        return Script.ESCAPED
    if text.isascii():
        return Script.PLAIN
    continuation = len(text) - len(text.decode("utf-8", "replace"))
    return Script.WIDE if continuation * _WIDE_SHARE > len(text) else Script.MIXED


class TokenEstimator:
    """Bytes per token, by model and script; the models least recently counted are forgotten."""

    def __init__(self) -> None:
        self._milli_bytes: OrderedDict[tuple[str, Script], int] = OrderedDict()

    def tokens(self, model: str, script: Script, size_bytes: int) -> int:
        """Of so many bytes, at least one token if there is a byte."""
        return -(-size_bytes * 1000 // self._milli_bytes.get((model, script), DEFAULT_MILLI_BYTES))

    def counted(self, model: str, script: Script, size_bytes: int, tokens: int) -> None:
        """So many bytes were so many tokens."""
        if size_bytes <= 0 or tokens <= 0:
            return
        seen = min(max(size_bytes * 1000 // tokens, MIN_MILLI_BYTES), MAX_MILLI_BYTES)
        known = self._milli_bytes.pop((model, script), seen)
        self._milli_bytes[model, script] = known + (seen - known) // MEMORY_PARTS
        if len(self._milli_bytes) > MAX_MODELS:
            self._milli_bytes.popitem(last=False)
