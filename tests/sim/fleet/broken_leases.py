"""Proofs, leases and claims, broken one rule at a time."""

from typing import Any

import pytest

from kvloop.core import chain, lease
from kvloop.core.chain import Chain, Identity
from kvloop.core.lease import LeaseEvent, LeaseTable
from kvloop.sim import leases
from tests.sim.fleet.runs import mutation

# Proofs.


@mutation("NeverAWrongToken")
def claim_granted_without_proof(patch: pytest.MonkeyPatch) -> None:
    """Everything that is asked for is granted."""
    patch.setattr(lease, "matched_tokens", lambda held, wanted: min(held.token_count, wanted.token_count))


@mutation("NeverAWrongToken")
def claim_granted_by_length(patch: pytest.MonkeyPatch) -> None:
    """Segments are counted, not compared."""

    def counted(held: Chain, wanted: Chain) -> int:
        return min(held.token_count, wanted.token_count) // 64 * 64

    patch.setattr(lease, "matched_tokens", counted)


@mutation("NeverAWrongToken")
def proof_rounded_up(patch: pytest.MonkeyPatch) -> None:
    """A segment more than is proven."""
    honest = chain.matched_tokens

    def generous(held: Chain, wanted: Chain) -> int:
        proven = honest(held, wanted)
        most = min(held.token_count, wanted.token_count) // 64 * 64
        return min(proven + 64, most) if proven and proven % 64 == 0 else proven

    patch.setattr(lease, "matched_tokens", generous)


@mutation("NeverAWrongToken")
def tail_not_compared(patch: pytest.MonkeyPatch) -> None:
    """What is left over after the last whole segment is taken to be the same."""
    honest = chain.matched_tokens

    def careless(held: Chain, wanted: Chain) -> int:
        proven = honest(held, wanted)
        whole = held.token_count // 64 * 64
        return held.token_count if proven == whole and held.token_count == wanted.token_count else proven

    patch.setattr(lease, "matched_tokens", careless)


@mutation("TenantsAreApart")
def tenant_root_left_out(patch: pytest.MonkeyPatch) -> None:
    """The salt is not part of the chain's root."""
    honest = chain.root_digest

    def blind(key: bytes, one: Identity) -> bytes:
        return honest(key, Identity(one.model, one.revision, one.kv_layout, one.lora, ""))

    patch.setattr(leases, "root_digest", blind)


@mutation("NeverAWrongToken")
def segments_not_chained(patch: pytest.MonkeyPatch) -> None:
    """Only the last segment of a prefix is compared, and it does not depend on those before."""
    from kvloop.sim import text

    honest = chain.build_chain

    def loose(key: bytes, root: bytes, tokens: Any, media: Any = ()) -> Chain:
        whole = honest(key, b"\0" * 16, tokens, media)
        parts = [
            honest(key, b"\0" * 16, tokens[at : at + 64]).segments
            for at in range(0, len(tokens) // 64 * 64, 64)
        ]
        tail = honest(key, b"\0" * 16, tokens[len(tokens) // 64 * 64 :]).tail
        return Chain(root, b"".join(parts), tail, whole.token_count)

    def last_equal(held: Chain, wanted: Chain) -> int:
        for count in range(min(len(held.segments), len(wanted.segments)) // 16, 0, -1):
            if held.segments[16 * count - 16 : 16 * count] == wanted.segments[16 * count - 16 : 16 * count]:
                return 64 * count
        return 0

    patch.setattr(text, "build_chain", loose)
    patch.setattr(lease, "matched_tokens", last_equal)


# Leases and claims.


@mutation("ReadersHoldClaims")
def lease_reclaimed_under_a_claim(patch: pytest.MonkeyPatch) -> None:
    """Live work takes blocks that somebody reads."""
    honest = LeaseTable.reclaim

    def heartless(table: LeaseTable, lease_id: str, now_ns: int) -> bool:
        for claim_id in sorted(table._leases[lease_id].claim_ids):
            table.release(claim_id, now_ns)
        return honest(table, lease_id, now_ns)

    def any_lease(table: LeaseTable) -> str | None:
        return next(iter(table._leases), None)

    patch.setattr(LeaseTable, "reclaim", heartless)
    patch.setattr(LeaseTable, "least_worth", any_lease)


@mutation("ReadersHoldClaims")
def lease_dropped_under_a_claim(patch: pytest.MonkeyPatch) -> None:
    """A router's drop ends the claims, too."""
    honest = LeaseTable.drop

    def hasty(table: LeaseTable, lease_id: str, now_ns: int, is_over: bool = False) -> bool:
        held = table._leases.get(lease_id)
        for claim_id in sorted(held.claim_ids) if held is not None else ():
            table.release(claim_id, now_ns)
        return honest(table, lease_id, now_ns, is_over)

    patch.setattr(LeaseTable, "drop", hasty)


@mutation("ReadersHoldClaims")
def lease_expires_under_a_claim(patch: pytest.MonkeyPatch) -> None:
    """The end of its term frees a lease that is being read."""
    honest = LeaseTable._end

    def punctual(table: LeaseTable, held: lease.Lease, event: LeaseEvent) -> bool:
        if event is LeaseEvent.EXPIRE:
            for claim_id in sorted(held.claim_ids):
                table.release(claim_id, table._now_ns)
        return held.lease_id in table._leases and honest(table, held, event)

    patch.setattr(LeaseTable, "_end", punctual)


@mutation("BlocksBalance")
def claim_that_never_ends(patch: pytest.MonkeyPatch) -> None:
    """A reader that does not come back holds its blocks for ever."""
    honest = LeaseTable.claim

    def endless(table: LeaseTable, *args: Any, **more: Any) -> object:
        term_ns, table.claim_term_ns = table.claim_term_ns, 10**15
        answer = honest(table, *args, **more)
        table.claim_term_ns = term_ns
        return answer

    patch.setattr(LeaseTable, "claim", endless)


@mutation("BlocksBalance")
def lease_given_back_twice(patch: pytest.MonkeyPatch) -> None:
    """The blocks of an ended lease are freed a second time, wherever somebody else holds them."""
    honest = leases.Leases.give_back

    def twice(self: leases.Leases, now_ns: int) -> int:
        self.table.advance(now_ns)
        ended = [block for one in self.table._freed for group in one.blocks for block in group]
        count = honest(self, now_ns)
        for block in ended:
            if self._pool.is_held(block):
                self._pool.free([block])
        return count

    patch.setattr(leases.Leases, "give_back", twice)


@mutation("BlocksBalance")
def lease_never_given_back(patch: pytest.MonkeyPatch) -> None:
    """Of several leases that end at once one is lost."""

    def some(table: LeaseTable) -> list[lease.FreedLease]:
        freed, table._freed = table._freed, []
        return freed[1:] if len(freed) > 1 else freed

    patch.setattr(LeaseTable, "take_freed", some)


@mutation("TermsEnd")
def term_that_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    """A lease lasts three times as long as was said."""
    honest = LeaseTable.grant

    def generous(
        table: LeaseTable, lease_id: str, one: Chain, blocks: Any, now_ns: int, term_ns: int, *rest: Any
    ) -> bool:
        table.ttl_ns *= 3
        granted = honest(table, lease_id, one, blocks, now_ns, 3 * term_ns, *rest)
        table.ttl_ns //= 3
        return granted

    patch.setattr(LeaseTable, "grant", generous)
    patch.setattr(LeaseTable, "check_integrity", lambda _: None)


@mutation("TermsEnd")
def renewal_beyond_the_ttl(patch: pytest.MonkeyPatch) -> None:
    """Whoever renews a lease is taken to use it."""
    honest = LeaseTable.renew

    def used(table: LeaseTable, lease_id: str, now_ns: int, term_ns: int, chance: int | None = None) -> bool:
        held = table._leases.get(lease_id)
        if held is not None:
            held.last_use_ns = now_ns
        return honest(table, lease_id, now_ns, 10 * term_ns, chance)

    patch.setattr(LeaseTable, "renew", used)


@mutation("IdleIsIdle")
def engine_that_polls(patch: pytest.MonkeyPatch) -> None:
    """As long as anything is leased the engine wakes up every 10 ms to look."""
    honest = LeaseTable.next_deadline_ns

    def soon(table: LeaseTable) -> int | None:
        due_ns = honest(table)
        return None if due_ns is None else min(due_ns, table._now_ns + 10_000_000)

    patch.setattr(LeaseTable, "next_deadline_ns", soon)
