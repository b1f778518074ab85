"""A party on the control channel: what it was asked, and what came back to it."""

import socket
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue

from kvloop.control.address import Address
from kvloop.control.channel import ControlChannel
from kvloop.control.deferred import Answer
from kvloop.wire.control import Message, Release, Released
from kvloop.wire.seal import Seal

KEY = bytes(range(32))
WAIT_S = 5.0
AT_ONCE_S = 0.05

Open = Callable[..., "Peer"]


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on just now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class Peer:
    """A channel, what it was asked, and what came back to it. It grants every release of claim "there"."""

    def __init__(self, name: str, host: str = "127.0.0.1", port: int = 0) -> None:
        self.address: Address = (host, port or free_port(host))
        self.asked: list[Message] = []
        self.replies: Queue[tuple[object, Message]] = Queue()
        self.channel = ControlChannel(self.address, Seal(KEY, name), serve=self.serve, on_reply=self.on_reply)
        self.channel.start()

    def serve(self, message: Message, _: Answer) -> Message:
        """Runs on the channel's thread."""
        self.asked.append(message)
        return Released(message == Release("there"))

    def on_reply(self, tag: object, message: Message) -> None:
        """Runs on the channel's thread."""
        self.replies.put((tag, message))

    def ask(self, address: Address, claim_id: str = "there", tag: object = "tag") -> object:
        """The answer to this question, or "silence"."""
        assert self.channel.send(address, Release(claim_id), tag)
        with suppress(Empty):
            while True:
                answered, message = self.replies.get(timeout=WAIT_S)
                if answered == tag:
                    return message
        return "silence"
