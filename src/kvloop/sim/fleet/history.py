"""A conversation's history: messages as tokens, and what clients do to them between two turns.

The token streams are what a chat template makes of messages: a role, the content, an end; a prompt ends with
the assistant's role. Contents are drawn from seeds, so a history can be kept in a few bytes a message and
written out when it is needed. An answer that goes back unchanged is, token for token, what decode computed.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from msgspec import Struct

from kvloop.sim.answer import STOP_TOKEN, answer_tokens
from kvloop.sim.text import TOKEN_BYTES

USER, ASSISTANT, SYSTEM = b"<|us", b"<|as", b"<|sy"
UNIT_BYTES = 16
MAX_REMEMBERED = 20_000  # messages: a client sends each with every turn, and they are a few hundred bytes


class Message(Struct, frozen=True):
    """One message: whose, the seed of its content, and how many tokens that has, from which on.

    The content of an answer is the answer that the model gives to that seed; the first `skipped` tokens may
    have been left out (a client that strips the reasoning).
    """

    role: bytes
    seed: int
    tokens: int
    skipped: int = 0

    def content(self) -> bytes:
        """Its tokens."""
        if self.role == ASSISTANT:
            return answer_tokens(self.seed, self.skipped, self.tokens)
        key = self.seed.to_bytes(8)
        return hashlib.shake_128(key).digest(TOKEN_BYTES * self.tokens)

    @lru_cache(MAX_REMEMBERED)  # noqa: B019 - a value, and the bound is that of the table
    def unit(self) -> bytes:
        """What a router knows it by."""
        named = b"%b%d/%d/%d" % (self.role, self.seed, self.tokens, self.skipped)
        return hashlib.blake2b(named, digest_size=UNIT_BYTES).digest()

    @lru_cache(MAX_REMEMBERED)  # noqa: B019
    def rendered(self) -> bytes:
        """As the template has it."""
        return self.role + self.content() + STOP_TOKEN


History = tuple[Message, ...]


@dataclass(slots=True, eq=False)
class Talk:
    """A conversation: whose, its history so far, its name if it has one, how many turns are to come."""

    name: str
    tenant: str
    history: History
    label: str
    turns_left: int
    served: int = 0


def prompt_of(history: History) -> bytes:
    """The tokens of a request with this history."""
    return b"".join([message.rendered() for message in history]) + ASSISTANT


def prompt_tokens(history: History) -> int:
    """How many those are."""
    return sum([message.tokens - message.skipped + 2 for message in history]) + 1


def edited(history: History, place: int, seed: int) -> History:
    """With another content in one of its messages."""
    old = history[place]
    return (*history[:place], Message(old.role, seed, old.tokens, old.skipped), *history[place + 1 :])


def compacted(history: History, kept: int, seed: int, tokens: int) -> History:
    """With everything between its first and its last `kept` messages in one summary."""
    last = history[-kept:] if kept else ()
    return (history[0], Message(USER, seed, tokens), *last)


def stripped(history: History, share: int) -> History:
    """Without the first part of each answer: `share` in permille."""
    return tuple(
        Message(message.role, message.seed, message.tokens, message.tokens * share // 1000)
        if message.role == ASSISTANT
        else message
        for message in history
    )
