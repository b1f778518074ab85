"""Errors that say whose fault it is.

A user or operator can mend a `UserError`; a `PeerError` came in over the network and costs its sender
an answer, never us a crash. A miss (no lease, no match, a deadline passed) is no error at all: it is an
answer, `Recompute(reason)` or `ClaimRefused(reason)`. Errors of other libraries are mapped to these
once, where they enter.
"""

from typing import ClassVar


class KvloopError(Exception):
    """The root of everything that kvloop raises on purpose."""


class UserError(KvloopError):
    """A client or an operator asked for something that cannot be; the message says what to change."""


class PeerError(KvloopError):
    """Another process sent something that it should not have."""


class ProtocolError(PeerError):
    """A field that a peer supplied breaks the protocol. `field` names it, `reason` says how."""

    def __init__(self, field: str, reason: str = "invalid") -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class HandleError(PeerError):
    """A handle that is not one of ours, or not whole.

    `reason` is one of malformed, too_long, forged, version, field; with `field` naming the field.
    """

    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(reason if field is None else f"{reason}: {field}")
        self.reason = reason
        self.field = field


class WireError(PeerError):
    """A control frame that was not accepted. `reason` is a short constant, fit for a metric's label."""

    reason: ClassVar[str] = "wire"

    def __init__(self, detail: str = "") -> None:
        super().__init__(f"{self.reason}: {detail}" if detail else self.reason)
        self.detail = detail


class FrameOversizeError(WireError):
    """The frame is longer than `max_frame_bytes`."""

    reason = "oversize"


class FrameMalformedError(WireError):
    """The envelope does not parse."""

    reason = "malformed"


class FrameVersionError(WireError):
    """The frame speaks another version of the envelope."""

    reason = "version"


class FrameForgedError(WireError):
    """The authentication tag is not the one that our key makes."""

    reason = "forged"


class FrameSkewedError(WireError):
    """The sender's wall clock is too far from ours, or the frame too old."""

    reason = "skewed"


class FrameReplayedError(WireError):
    """The frame was seen before, or is older than what the replay window can tell."""

    reason = "replayed"


class MessageUnknownError(WireError):
    """The frame is authentic, but its message's tag is not one of ours."""

    reason = "unknown_message"


class MessageInvalidError(WireError):
    """The frame is authentic, but its message breaks a type or a bound."""

    reason = "invalid_message"
