"""A router's renewing half in virtual time: real keeper, real control channel, the test's clock."""

import asyncio
import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvloop.control.address import Address
from kvloop.control.channel import ControlChannel
from kvloop.core.keeper import Keeper, KeeperTimes
from kvloop.core.lineage import FiledTurn
from kvloop.core.returns import ReturnModel
from kvloop.router.leases import TurnLeases
from kvloop.router.renewal import Renewal
from kvloop.wire.seal import Seal
from tests.router.decode_peer import KEY, NS_PER_S, DecodePeer
from tests.router.harness import until


class Clock:
    """Nanoseconds that pass when a test says so; several parties may share one."""

    def __init__(self) -> None:
        self.now_ns = NS_PER_S

    def __call__(self) -> int:
        return self.now_ns


class RouterSide:
    """What `router.heartbeat` puts together, without its task: `run_until` does what the task would."""

    def __init__(self, clock: Clock, *, fixed: bool = True, key: bytes = KEY) -> None:
        times = KeeperTimes()
        self.clock = clock
        self.keeper = Keeper(ReturnModel(times.ttl_ns), times, fixed=fixed)
        self.renewal = Renewal(self.keeper, clock)
        self.leases = TurnLeases(self.renewal, key)
        self.channel = ControlChannel(
            None, Seal(key, f"router/{secrets.token_hex(4)}"), on_reply=self.renewal.on_reply
        )

    def file(self, peer: DecodePeer, ending: str = "stop", keep_ns: int | None = None) -> FiledTurn:
        """A turn that has left a new lease with `peer`."""
        handle = b'{"kvloop_handle":"%s"}' % peer.grant().encode()
        turn = FiledTurn(handle, "u", "tenant", 1, 1 << 62, (), self.leases.read(handle))
        self.leases.filed(turn, ending, keep_ns)
        return turn

    async def run_until(self, at_s: float, silent: Collection[Address] = ()) -> None:
        """Let everything happen that is due by then, a second at a time. Engines answer before it goes on,
        but for those that are `silent`."""
        while self.clock.now_ns < at_s * NS_PER_S:
            self.clock.now_ns += NS_PER_S
            await self.round(silent)

    async def round(self, silent: Collection[Address] = ()) -> None:
        """One round of the task, until every engine that says anything has said it."""
        self.steps()
        sent = self.renewal.take_outgoing()
        for asked in sent:
            assert self.channel.send(asked.address, asked.message, asked.tag)
        if sent:
            await until(
                lambda: (
                    not any(
                        tally.open for address, tally in self.renewal.engines.items() if address not in silent
                    )
                )
            )
            self.steps()
        self.renewal.check_integrity()

    def steps(self) -> int:
        """Steps until nothing is left to do; how many those were."""
        count = 0
        while self.renewal.step():
            count += 1
        return count

    async def heard(self, count: int, peer: DecodePeer) -> None:
        """Wait until `peer` has got so many messages."""
        await until(lambda: len(peer.heard) >= count)
        await asyncio.sleep(0)


@contextmanager
def router_side(clock: Clock, *, fixed: bool = True, key: bytes = KEY) -> Iterator[RouterSide]:
    """One that talks while the block lasts."""
    side = RouterSide(clock, fixed=fixed, key=key)
    side.channel.start()
    try:
        yield side
    finally:
        side.channel.stop()
