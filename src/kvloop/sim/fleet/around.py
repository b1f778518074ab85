"""What all parties of a run share, and how they talk: frames under a seal, questions and their answers."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvloop.errors import WireError
from kvloop.sim.fleet.clocks import Clocks
from kvloop.sim.fleet.network import Network
from kvloop.sim.fleet.plan import MS
from kvloop.sim.fleet.trace import Trace
from kvloop.sim.fleet.watch import Checker
from kvloop.sim.loop import Loop
from kvloop.wire.control import Message
from kvloop.wire.seal import NONCE_BYTES, Opened, Seal

if TYPE_CHECKING:
    from kvloop.sim.fleet.node import EngineNode

MAX_QUESTIONS = 10_000  # as many as the control channel keeps
MAX_HANDLES = 100  # that a router may confuse with others
Frame = bytes | Opened
Answer = Callable[[Frame], None]


@dataclass(slots=True)
class Around:
    """The run that a party belongs to.

    `failed` is told what the code under test raised; `handles` are the last that decode gave to anybody.
    """

    loop: Loop
    network: Network
    trace: Trace
    checkers: list[Checker]
    key: bytes
    sealed: bool
    failed: Callable[[str, Exception], None]
    engines: dict[str, EngineNode] = field(default_factory=dict)
    handles: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_HANDLES))

    def note(self, who: str, what: str, *more: object) -> None:
        """Something happened."""
        self.trace.note(self.loop.now_ns, who, what, *more)


class Correspondent:
    """One party's side of the control channel: seals, opens, and pairs answers with questions.

    Without seals (`Around.sealed`) a frame is the opened message itself: it costs nothing and proves nothing.
    """

    def __init__(self, around: Around, name: str, clocks: Clocks) -> None:
        self.around = around
        self.name = name
        self._clocks = clocks
        self._sent = 0
        self._questions: OrderedDict[bytes, object] = OrderedDict()
        self._seal: Seal | None = None

    def begin(self, incarnation: str) -> None:
        """A new process: its seal remembers no frame, its questions are forgotten. Nonces go on."""
        self._questions.clear()
        if self.around.sealed:
            self._seal = Seal(self.around.key, f"{self.name}/{incarnation}")

    def ask(self, target: str, message: Message, tag: object, hear: Answer | None) -> bytes:
        """Send a question, and return its nonce. `hear` gets its answer's frame; None: nobody waits."""
        around, network = self.around, self.around.network
        frame, nonce = self.sealed(message)
        if hear is not None:
            self._questions[nonce] = tag
        if len(self._questions) > MAX_QUESTIONS:
            self._questions.popitem(last=False)
        node = around.engines.get(target)
        if node is not None:

            def answer(reply: Frame) -> None:
                network.frame(target, self.name, lambda: hear(reply) if hear is not None else None)

            network.frame(self.name, target, lambda: node.receive(self.name, frame, answer))
        return nonce

    def sealed(self, message: Message, reply_to: bytes = b"") -> tuple[Frame, bytes]:
        """A frame with the message, and its nonce."""
        self._sent += 1
        nonce = self._sent.to_bytes(NONCE_BYTES)
        if self._seal is None:
            return Opened(self.name, message, nonce, reply_to), nonce
        wall_ms = self._clocks.wall_ms(self.around.loop.now_ns)
        return self._seal.seal(message, wall_ms, nonce, reply_to), nonce

    def opened(self, frame: Frame) -> Opened | None:
        """What a frame says; None if it is not accepted."""
        if isinstance(frame, Opened):
            return frame
        assert self._seal is not None
        true_ns = self.around.loop.now_ns
        try:
            return self._seal.open(
                frame, self._clocks.wall_ms(true_ns), self._clocks.monotonic_ns(true_ns) // MS
            )
        except WireError as error:
            self.around.note(self.name, "drops a frame:", error)
            return None

    def taken(self, frame: Frame) -> tuple[object, Message] | None:
        """The question's tag and the message of an answer; None for one that nobody waits for."""
        opened = self.opened(frame)
        if opened is None or not opened.reply_to:
            return None
        tag = self._questions.pop(opened.reply_to, None)
        return None if tag is None else (tag, opened.message)


def named(message: Message) -> str:
    """A message's kind and its first field."""
    fields = message.__struct_fields__
    first = getattr(message, fields[0]) if fields else ""
    return f"{type(message).__name__}({first})" if not isinstance(first, list) else type(message).__name__
