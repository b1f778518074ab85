"""Decode's side in a simulated engine: a lease table over the block pool, as the connector has it.

What is kept, lent, given up and had again is decided by `core.lease` and `core.soft`; this file gives them
blocks, chains and names. Whether a block still holds what it did when its lease ended is what the connector
asks, too: it has the name that it had, and was not handed out since.
"""

from collections.abc import Hashable
from contextlib import suppress

from kvloop.core.chain import Chain, Identity, root_digest
from kvloop.core.handle import HANDLE_VERSION, Handle
from kvloop.core.lease import Blocks, ClaimRefused, LeaseState, LeaseTable, RefusalReason
from kvloop.core.soft import SoftTable
from kvloop.errors import ProtocolError
from kvloop.sim.config import NS_PER_MS, EngineConfig
from kvloop.sim.pool import BlockPool
from kvloop.sim.sequence import Sequence
from kvloop.wire.control import (
    Claim,
    Drop,
    Dropped,
    Failed,
    Granted,
    Message,
    Refused,
    Release,
    Released,
    Renew,
    Renewed,
    Source,
    Stat,
    StatReply,
)
from kvloop.wire.handle import encode_handle

MAX_ROOTS = 10_000  # tenants whose chain's root is remembered; it takes microseconds to make anew
_LIVE = (LeaseState.GRANTED, LeaseState.CLAIMED)


class Leases:
    """What one engine keeps of finished requests."""

    def __init__(self, config: EngineConfig, pool: BlockPool, block_tokens: int, model: str) -> None:
        self.table = LeaseTable(
            block_size=block_tokens,
            ttl_ns=config.lease_ttl_ns,
            claim_term_ns=config.claim_term_ns,
            max_leases=config.max_leases,
            max_claims=config.max_claims,
            incarnation=config.incarnation,
        )
        self.soft = SoftTable(block_tokens)
        self._config = config
        self._pool = pool
        self._block_tokens = block_tokens
        self._model = model
        self._limit_blocks = pool.blocks * config.max_retained_permille // 1000
        self._roots: dict[str, bytes] = {}
        self.revived = 0  # leases that had ended and are held again
        self._named = 0  # leases and claims: their ids are never used twice

    def root(self, salt: str) -> bytes:
        """The chain's root for a tenant's requests."""
        root = self._roots.get(salt)
        if root is None:
            if len(self._roots) >= MAX_ROOTS:
                self._roots.clear()
            config = self._config
            identity = Identity(self._model, config.revision, config.layout, "", salt)
            root = self._roots[salt] = root_digest(config.key, identity)
        return root

    def retain(self, sequence: Sequence, now_ns: int) -> str | None:
        """Keep what a finished request computed: the handle for it, or None where nothing is kept.

        The last token that was sampled was never computed, so there is no KV for it.
        """
        config = self._config
        count = min(sequence.computed, len(sequence.text) - 1)
        if count < max(1, config.recompute_threshold_tokens):
            return None
        chain = sequence.text.chain(config.key, self.root(sequence.request.salt), count)
        lease_id = self._next_id("l")
        blocks = tuple(sequence.blocks[: -(-count // self._block_tokens)])
        if not self._take(lease_id, chain, blocks, now_ns):
            return None
        return encode_handle(self._handle(lease_id, count), config.key)

    def make_room(self, blocks: int, now_ns: int) -> None:
        """Give up leases that nobody reads until so many blocks are free, or none is left to give up."""
        self.give_back(now_ns)
        while self._pool.free_count < blocks and self._reclaim_one(now_ns):
            self.give_back(now_ns)

    def give_back(self, now_ns: int) -> int:
        """Free the blocks of every lease that has ended, and remember what they hold; how many those were."""
        self.table.advance(now_ns)
        freed = self.table.take_freed()
        for lease in freed:
            self.soft.keep(lease, tuple([self._pool.proofs(group) for group in lease.blocks]))
            for group in lease.blocks:
                self._pool.free(group)
        return len(freed)

    def drop_all(self, now_ns: int) -> None:
        """End every lease for good, as after a change of weights."""
        self.table.drop_all(now_ns)
        self.give_back(now_ns)
        self.soft.clear()

    def serve(self, message: Message, now_ns: int, *, starved: bool) -> Message:
        """Answer a peer. `starved`: live work lacks blocks, so none are taken up again."""
        table = self.table
        self.give_back(now_ns)
        match message:
            case Claim():
                return self._serve_claim(message, now_ns, starved)
            case Release():
                return Released(table.release(message.claim_id, now_ns))
            case Renew():
                return self._serve_renew(message, now_ns)
            case Drop():
                if message.is_over:
                    for lease_id in message.lease_ids:
                        self.soft.forget(lease_id)
                return Dropped(sum(table.drop(one, now_ns, message.is_over) for one in message.lease_ids))
            case Stat():
                return StatReply(self._config.engine_id, self._config.incarnation, self.samples())
            case _:
                return Failed("not a question")

    def samples(self) -> dict[str, int]:
        """Gauges and totals, under the names that the connector gives them."""
        counts, totals = self.table.counts(), self.table.totals
        samples = {f'kvloop_leases{{state="{state}"}}': counts[state] for state in _LIVE}
        samples['kvloop_leases{state="soft"}'] = len(self.soft)
        for state, count in counts.items():
            if state not in _LIVE:
                samples[f'kvloop_leases_ended_total{{state="{state}"}}'] = count
        for outcome, count in totals.claims.items():
            samples[f'kvloop_claims_total{{outcome="{outcome}"}}'] = count
        return samples | {
            "kvloop_lease_blocks": self.table.held_blocks,
            "kvloop_leases_granted_total": totals.granted,
            'kvloop_renewals_total{outcome="renewed"}': totals.renewed,
            'kvloop_renewals_total{outcome="lost"}': totals.renewals_lost,
        }

    def check_integrity(self) -> None:
        """AssertionError where the tables contradict themselves."""
        self.table.check_integrity()
        self.soft.check_integrity()

    def _take(self, lease_id: str, chain: Chain, blocks: tuple[int, ...], now_ns: int) -> bool:
        """Lease these blocks. False where the share of the pool that leases may have does not allow it."""
        table = self.table
        if len(blocks) > self._limit_blocks:
            return False
        self.give_back(now_ns)
        while table.held_blocks + len(blocks) > self._limit_blocks:
            if not self._reclaim_one(now_ns):
                return False
            self.give_back(now_ns)
        self._pool.touch(blocks)
        self.soft.forget(lease_id)
        granted = table.grant(lease_id, chain, (blocks,), now_ns, self._config.lease_term_ns)
        self.give_back(now_ns)
        return granted

    def _reclaim_one(self, now_ns: int) -> bool:
        victim = self.table.least_worth()
        return victim is not None and self.table.reclaim(victim, now_ns)

    def _revive(self, lease_id: str, wanted: Chain, now_ns: int) -> None:
        """Lease what a soft lease still holds of `wanted`, under its old id."""
        found = self.soft.surviving(lease_id, wanted, self._is_unchanged)
        if found is not None:
            chain, blocks = found
            self.revived += self._take(lease_id, chain, blocks[0], now_ns)

    def _is_unchanged(self, block: int, proof: Hashable) -> bool:
        return self._pool.proof(block) == proof

    def _serve_claim(self, claim: Claim, now_ns: int, starved: bool) -> Message:
        with suppress(ProtocolError):  # refused below
            if (
                not starved
                and self._config.revives
                and claim.incarnation == self._config.incarnation
                and self.table.state(claim.lease_id) is None
            ):
                self._revive(claim.lease_id, claim.wanted(), now_ns)
        try:
            wanted = claim.wanted()
        except ProtocolError:
            return Refused(self.table.totals.refused(RefusalReason.MALFORMED).reason)
        claim_id = self._next_id("c")
        answer = self.table.claim(claim.lease_id, claim_id, wanted, "", now_ns, incarnation=claim.incarnation)
        if isinstance(answer, ClaimRefused):
            return Refused(answer.reason)
        return self._granted(claim_id, answer.matched_tokens, answer.blocks, answer.term_ns)

    def _granted(self, claim_id: str, matched_tokens: int, blocks: Blocks, term_ns: int) -> Granted:
        host, port = self._config.side_channel
        return Granted(
            claim_id=claim_id,
            matched_tokens=matched_tokens,
            block_ids=[list(group) for group in blocks],
            term_ms=term_ns // NS_PER_MS,
            source=Source(self._config.engine_id, claim_id, host, port, 1, 1, 1),
        )

    def _serve_renew(self, message: Renew, now_ns: int) -> Renewed:
        gone: list[str] = []
        soft: list[str] = []
        for lease_id, term_ms, chance in message.leases:
            if not self.table.renew(lease_id, now_ns, term_ms * NS_PER_MS, chance):
                left = self.table.state(lease_id) is not None or self.soft.get(lease_id) is not None
                (soft if left else gone).append(lease_id)
        return Renewed(gone, soft)

    def _handle(self, lease_id: str, token_count: int) -> Handle:
        config = self._config
        host, port = config.control
        return Handle(
            version=HANDLE_VERSION,
            engine_id=config.engine_id,
            incarnation=config.incarnation,
            lease_id=lease_id,
            control_host=host,
            control_port=port,
            tp_size=1,
            pp_size=1,
            dcp_size=1,
            token_count=token_count,
            expires_in_ms=config.lease_term_ns // NS_PER_MS,
        )

    def _next_id(self, kind: str) -> str:
        self._named += 1
        return f"{self._config.incarnation}-{kind}{self._named}"
