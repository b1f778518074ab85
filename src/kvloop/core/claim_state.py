"""The states of a read, its questions and its answers.

A read that nobody waits for any more is not over: until the transfer has ended its bytes may still land,
which is why ABANDONED is a state and not an end. Nor is a claim's end the end of a read that has not begun:
LAPSED waits, without a deadline, for the request's turn. The table is the machine; a pair that is not in it
is an illegal move.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvloop.core.chain import Chain
from kvloop.core.handle import Handle
from kvloop.core.lease_state import Blocks


class ReadState(StrEnum):
    """Where a request's one read stands. DONE and DISCARDED are final."""

    ASKED = "asked"  # the claim is under way
    LATE = "late"  # nobody waits for the answer; a grant that still comes is released
    GRANTED = "granted"
    LAPSED = "lapsed"  # the claim ended before its read began: to be asked for again at the request's turn
    READING = "reading"
    ABANDONED = "abandoned"  # nobody waits for the read, and it still runs
    DONE = "done"
    DISCARDED = "discarded"


class ReadEvent(StrEnum):
    """What can happen to a read. LAPSE: the reply's or the claim's time is over."""

    GRANT = "grant"
    REFUSE = "refuse"
    ASK_AGAIN = "ask_again"
    START = "start"
    FINISH = "finish"
    FAIL = "fail"
    LAPSE = "lapse"
    GIVE_UP = "give_up"


TRANSITIONS: dict[tuple[ReadState, ReadEvent], ReadState] = {
    (ReadState.ASKED, ReadEvent.GRANT): ReadState.GRANTED,
    (ReadState.ASKED, ReadEvent.REFUSE): ReadState.DISCARDED,
    (ReadState.ASKED, ReadEvent.LAPSE): ReadState.LATE,
    (ReadState.ASKED, ReadEvent.GIVE_UP): ReadState.LATE,
    (ReadState.LATE, ReadEvent.GRANT): ReadState.DISCARDED,
    (ReadState.LATE, ReadEvent.REFUSE): ReadState.DISCARDED,
    (ReadState.GRANTED, ReadEvent.START): ReadState.READING,
    (ReadState.GRANTED, ReadEvent.LAPSE): ReadState.LAPSED,
    (ReadState.GRANTED, ReadEvent.GIVE_UP): ReadState.DISCARDED,
    (ReadState.LAPSED, ReadEvent.ASK_AGAIN): ReadState.ASKED,
    (ReadState.LAPSED, ReadEvent.GIVE_UP): ReadState.DISCARDED,
    (ReadState.READING, ReadEvent.FINISH): ReadState.DONE,
    (ReadState.READING, ReadEvent.FAIL): ReadState.DISCARDED,
    (ReadState.READING, ReadEvent.LAPSE): ReadState.ABANDONED,
    (ReadState.READING, ReadEvent.GIVE_UP): ReadState.ABANDONED,
    (ReadState.ABANDONED, ReadEvent.FINISH): ReadState.DISCARDED,
    (ReadState.ABANDONED, ReadEvent.FAIL): ReadState.DISCARDED,
}
INITIAL = ReadState.ASKED
FINAL = frozenset({ReadState.DONE, ReadState.DISCARDED})
WAITING = frozenset({ReadState.ASKED, ReadState.GRANTED, ReadState.READING})  # the states with a deadline
IN_FLIGHT = frozenset({ReadState.READING, ReadState.ABANDONED})


class RecomputeReason(StrEnum):
    """Why a request computes its prompt itself; beside these, every `RefusalReason`."""

    NOT_ASKED = "not_asked"
    TRIED = "tried"
    TOO_MANY_READS = "too_many_reads"
    TOO_SHORT = "too_short"
    NO_REPLY = "no_reply"
    BAD_GRANT = "bad_grant"
    REFUSED = "refused"
    DEADLINE = "deadline"
    READ_FAILED = "read_failed"


@dataclass(frozen=True, slots=True)
class SendClaim:
    """Claim `wanted` from where `handle` says. The reply must come back with this `ask_id`."""

    request_id: str
    ask_id: int
    handle: Handle
    wanted: Chain


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Release a claim, where `handle` says; without one, at whoever granted it."""

    request_id: str
    claim_id: str
    handle: Handle | None


@dataclass(frozen=True, slots=True)
class Pending:
    """The answer is under way: ask again."""


@dataclass(frozen=True, slots=True)
class Ready:
    """These blocks hold `matched_tokens` proven tokens; a read counts if it ends before `deadline_ns`."""

    matched_tokens: int
    blocks: Blocks
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """A miss: the request computes its prompt itself."""

    reason: str


@dataclass(frozen=True, slots=True)
class Keep:
    """The read ended within its claim: its tokens are good."""


@dataclass(frozen=True, slots=True)
class Discard:
    """What was read may not be used."""

    reason: str
