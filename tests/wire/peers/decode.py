"""The decode engine: one memory, leases on it, and what overwrites it."""

from collections.abc import Callable
from dataclasses import dataclass

from kvloop.core.handle import HANDLE_VERSION, Handle
from kvloop.core.lease import ClaimRefused, LeaseTable
from kvloop.errors import WireError
from kvloop.wire.control import Claim, Failed, Granted, Message, Refused, Release, Released, Source
from kvloop.wire.handle import decode_handle, encode_handle
from kvloop.wire.seal import Opened, Seal

from .world import BLOCK_TOKENS, BLOCKS, CLAIM_TERM, KEY, MS, TERM, TTL, World, chain_of


@dataclass
class Kept:
    """A lease as the checks know it: tokens, and where they were put."""

    tenant: str
    tokens: list[int]
    handle: str


class Decode:
    """Grants leases out of one memory, answers claims, overwrites what comes home."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seal = Seal(KEY, "decode")
        self.memory: list[object] = [None] * BLOCKS
        self.leases: dict[int, Kept] = {}
        self.writes = 0
        self.restart()

    def restart(self) -> None:
        """A new process at the old address: nothing of the old one is left but its handles."""
        self.incarnation = f"i{self.world.nonce().hex()}"
        self.table = LeaseTable(BLOCK_TOKENS, TTL, CLAIM_TERM, 4, 4, incarnation=self.incarnation)
        self.free = list(range(BLOCKS))
        for block in self.free:
            self.overwrite(block)

    def overwrite(self, block: int) -> None:
        """Live work computes something else into the block."""
        self.writes += 1
        self.memory[block] = self.writes

    def grant(self, number: int, tenant: str, tokens: list[int]) -> None:
        """A turn ends: keep its blocks, and hand out a handle."""
        needed = -(-len(tokens) // BLOCK_TOKENS)
        if len(self.free) < needed:
            return
        blocks = tuple(self.free.pop() for _ in range(needed))
        for place, block in enumerate(blocks):
            self.memory[block] = (tenant, *tokens[: (place + 1) * BLOCK_TOKENS])
        lease_id = f"l{self.world.nonce().hex()}"
        held = self.table.grant(lease_id, chain_of(tenant, tokens), (blocks,), self.world.now, TERM)
        handle = Handle(
            HANDLE_VERSION, "d", self.incarnation, lease_id, "h", 1, 1, 1, 1, len(tokens), TERM // MS
        )
        if held:
            self.leases[number] = Kept(tenant, tokens, encode_handle(handle, KEY))

    def act(self, act: str, number: int) -> None:
        """The router, live work, or fate."""
        if act == "restart":
            self.restart()
        lease = self.leases.get(number)
        if lease is None:
            return
        lease_id = decode_handle(lease.handle, KEY).lease_id
        if act == "drop":
            self.table.drop(lease_id, self.world.now)
        elif act == "reclaim":
            self.table.reclaim(lease_id, self.world.now)
        elif act == "renew":
            self.table.renew(lease_id, self.world.now, TERM)

    def receive(self, frame: bytes, answer: Callable[[bytes], None]) -> None:
        """Answer a question; ignore everything else."""
        wall_ms = self.world.now // MS + 1_000_000
        try:
            opened = self.seal.open(frame, wall_ms)
        except WireError:
            return
        reply = self.serve(opened)
        self.world.send(self.seal.seal(reply, wall_ms, self.world.nonce(), opened.nonce), answer)

    def serve(self, opened: Opened) -> Message:
        """A claim or a release."""
        now, message = self.world.now, opened.message
        if isinstance(message, Release):
            return Released(self.table.release(message.claim_id, now))
        if not isinstance(message, Claim):
            return Failed("not a question")
        claim_id = f"c{self.world.nonce().hex()}"
        answer = self.table.claim(
            message.lease_id, claim_id, message.wanted(), opened.sender, now, incarnation=message.incarnation
        )
        if isinstance(answer, ClaimRefused):
            return Refused(answer.reason)
        source = Source("d", claim_id, "h", 1, 1, 1, 1)
        ids = [list(group) for group in answer.blocks]
        return Granted(claim_id, answer.matched_tokens, ids, answer.term_ns // MS, source)

    def settle(self) -> None:
        """What has ended is overwritten at once, and the next deadline is not missed."""
        self.table.advance(self.world.now)
        for freed in self.table.take_freed():
            for block in freed.blocks[0]:
                assert block not in self.free, "a block came home twice"
                self.overwrite(block)
                self.free.append(block)
        self.table.check_integrity()
