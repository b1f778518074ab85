"""What uses leases, broken one rule at a time: live work, reads, what has ended, the router."""

from functools import partialmethod
from typing import Any

import pytest

from kvloop.core import claim, lease, soft
from kvloop.core.chain import Chain, Identity
from kvloop.core.claim import ReadBook, ReadEvent, ReadState
from kvloop.core.keeper import Keeper
from kvloop.core.lineage import LineageTable, Prompt
from kvloop.core.soft import SoftTable
from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim import batch, leases
from kvloop.sim.fleet import filing, router, talk
from kvloop.sim.fleet.plan import S
from kvloop.sim.fleet.turns import Refuse
from kvloop.sim.loads import Loads
from kvloop.sim.pool import BlockPool
from tests.sim.fleet.broken_leases import proof_rounded_up
from tests.sim.fleet.runs import mutation

# Live work.


@mutation("RetentionYields")
def retention_that_does_not_yield(patch: pytest.MonkeyPatch) -> None:
    """Leases keep their blocks whatever live work needs."""
    patch.setattr(leases.Leases, "make_room", lambda self, _, now_ns: self.give_back(now_ns))


@mutation("RetentionYields")
def retention_that_yields_a_block_too_few(patch: pytest.MonkeyPatch) -> None:
    """One block less than is needed is made free."""
    honest = leases.Leases.make_room
    patch.setattr(leases.Leases, "make_room", lambda self, blocks, now_ns: honest(self, blocks - 1, now_ns))


# Reads.


@mutation("ReadersHoldClaims")
def deadline_not_kept(patch: pytest.MonkeyPatch) -> None:
    """Prefill takes a claim to last ten times as long as it does."""
    honest = ReadBook.on_granted

    def patient(book: ReadBook, *args: Any, **more: Any) -> object:
        request_id, claim_id, matched, blocks, term_ns, now_ns = args
        return honest(book, request_id, claim_id, matched, blocks, 10 * term_ns, now_ns, **more)

    patch.setattr(ReadBook, "on_granted", patient)


@mutation("ReadersHoldClaims")
def deadline_counted_from_the_answer(patch: pytest.MonkeyPatch) -> None:
    """A claim's time is counted from when the grant came, not from when it was asked for."""
    honest = ReadBook.on_granted

    def late(book: ReadBook, request_id: str, *args: Any, **more: Any) -> object:
        read = book._reads.get(request_id)
        if read is not None:
            read.sent_ns = args[-1]
        return honest(book, request_id, *args, **more)

    patch.setattr(ReadBook, "on_granted", late)


@mutation("ReadersHoldClaims")
def margin_not_taken_off(patch: pytest.MonkeyPatch) -> None:
    """Two clocks are taken to run at one rate."""
    honest = ReadBook.__init__

    def exact(book: ReadBook, reply_timeout_ns: int, max_reads: int, margin_ns: int) -> None:
        del margin_ns
        honest(book, reply_timeout_ns, max_reads, 0)

    patch.setattr(ReadBook, "__init__", exact)


@mutation("QuestionsEnd")
def lapsed_claim_not_asked_for_again(patch: pytest.MonkeyPatch) -> None:
    """Whoever stands in the queue for longer than his claim lasts computes."""
    patch.delitem(claim.TRANSITIONS, (ReadState.LAPSED, ReadEvent.ASK_AGAIN))


@mutation("QuestionsEnd")
def asked_again_while_it_reads(patch: pytest.MonkeyPatch) -> None:
    """A request whose read has outlived its claim asks again, although the bytes are still under way."""
    patch.setitem(claim.TRANSITIONS, (ReadState.ABANDONED, ReadEvent.ASK_AGAIN), ReadState.ASKED)


@mutation("QuestionsEnd")
def asked_without_end(patch: pytest.MonkeyPatch) -> None:
    """The number of questions is not bounded, and claims end before they begin."""
    patch.setattr(ReadBook, "__init__", partialmethod(ReadBook.__init__, max_questions=1000))
    honest = ReadBook.on_granted

    def brief(book: ReadBook, *args: Any, **more: Any) -> object:
        request_id, claim_id, matched, blocks, term_ns, now_ns = args
        return honest(book, request_id, claim_id, matched, blocks, term_ns // 20, now_ns, **more)

    patch.setattr(ReadBook, "on_granted", brief)


@mutation("NeverAWrongToken")
def grant_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Prefill believes whatever decode grants; decode grants a segment more than it has proven."""
    proof_rounded_up(patch)
    patch.setattr(claim, "_is_plausible", lambda *_: True)


@mutation("LateReadsAreFenced")
def fence_left_out(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a late read are free as soon as its request has given up waiting."""
    honest = Loads.end

    def careless(loads: Loads, request_id: str) -> None:
        loads._loads[loads._by_request[request_id]].sequence = None

    def end(loads: Loads, read_id: str, contents: Any) -> object:
        load = loads._loads.get(read_id)
        if load is not None and load.sequence is None:
            loads._pool.touch([block for block in load.targets if block < loads._pool.blocks])
        return honest(loads, read_id, contents)

    patch.setattr(Loads, "orphan", careless)
    patch.setattr(Loads, "end", end)
    patch.setattr(Loads, "orphaned_references", lambda _: 0)


# What has ended.


@mutation("NeverAWrongToken")
def soft_lease_not_compared(patch: pytest.MonkeyPatch) -> None:
    """The blocks of an ended lease are taken to hold what they held."""
    honest = SoftTable.surviving

    def trusting(table: SoftTable, lease_id: str, wanted: Chain, _: object) -> object:
        return honest(table, lease_id, wanted, lambda *_: True)

    patch.setattr(SoftTable, "surviving", trusting)


@mutation("NeverAWrongToken")
def soft_lease_without_proof(patch: pytest.MonkeyPatch) -> None:
    """An ended lease is had again for whatever is asked for."""
    patch.setattr(soft, "matched_tokens", lambda held, wanted: min(held.token_count, wanted.token_count))
    patch.setattr(lease, "matched_tokens", lambda held, wanted: min(held.token_count, wanted.token_count))


@mutation("NeverAWrongToken")
def cache_that_does_not_forget(patch: pytest.MonkeyPatch) -> None:
    """A block that is handed out is still found under its old name."""
    patch.setattr(BlockPool, "_forget", lambda *_: None)


@mutation("BlocksBalance")
def block_freed_twice(patch: pytest.MonkeyPatch) -> None:
    """A preempted request gives its first block back once too often."""
    honest = batch.Batch._preempt_last

    def twice(self: batch.Batch, wanting: Any, count: int) -> object:
        first = self._running[-1].blocks[:1]
        victim = honest(self, wanting, count)
        for block in first:
            if self._host.pool.is_held(block):
                self._host.pool.free([block])
        return victim

    patch.setattr(batch.Batch, "_preempt_last", twice)


# The router.


@mutation("TenantsAreApart")
def tenant_left_out_of_the_lookup(patch: pytest.MonkeyPatch) -> None:
    """The router finds everybody's turns."""
    keys, name = filing.content_keys, filing.name_key
    patch.setattr(filing, "content_keys", lambda key, _, units: keys(key, [], units))
    patch.setattr(filing, "name_key", lambda key, _, model, one: name(key, "", model, one))


@mutation("BlocksBalance")
def use_that_is_never_over(patch: pytest.MonkeyPatch) -> None:
    """A turn that has ended is taken to need its lease still."""
    patch.setattr(Keeper, "done", lambda *_: None)


@mutation("BlocksBalance")
def superseded_turns_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A keeper that does not forget what its TTL has passed for."""
    honest = Keeper._look_at

    def keeping(keeper: Keeper, entry: Any, now_ns: int) -> object:
        entry.since_ns = now_ns
        return honest(keeper, entry, now_ns)

    patch.setattr(Keeper, "_look_at", keeping)


@mutation("BlocksBalance")
def lineage_that_never_forgets(patch: pytest.MonkeyPatch) -> None:
    """A turn stays in the table for ever."""
    patch.setattr(LineageTable, "expire", lambda *_: None)


@mutation("ClientsSeeNoMetadata")
def handle_shown_to_the_client(patch: pytest.MonkeyPatch) -> None:
    """The event that carries the handle is passed on where a piece of the stream begins with it."""
    honest = talk.HandleFilter._line

    def showing(self: Any, line: bytes) -> bytes:
        shown = honest(self, line)
        return line if not shown and self.handle is not None and len(self.handle) % 2 else shown

    patch.setattr(talk.HandleFilter, "_line", showing)


@mutation("ClientsSeeNoMetadata")
def metadata_taken_from_the_client(patch: pytest.MonkeyPatch) -> None:
    """A request that brings block metadata is served like any other."""
    patch.setattr(talk, "read_generation", lambda *_: None)


@mutation("TensorsGoDirectly")
def router_that_reads(patch: pytest.MonkeyPatch) -> None:
    """A router claims blocks itself."""
    from kvloop.core.chain import build_chain, root_digest
    from kvloop.wire.control import Claim
    from kvloop.wire.handle import decode_handle

    honest = filing.Filing.file

    def curious(self: filing.Filing, ask: Any, found: Any, handle: str, engine: str, prompt: Prompt) -> None:
        honest(self, ask, found, handle, engine, prompt)
        named = decode_handle(handle, self._around.key)
        root = root_digest(self._around.key, Identity("sim", "sim", "sim", "", ask.salt))
        numbers = [int.from_bytes(ask.text.data(at, at + 1), "little") for at in range(len(ask.text))]
        wanted = build_chain(self._around.key, root, numbers)
        self._link.ask(engine, Claim.asking(named, wanted), "curious", lambda _: None)

    patch.setattr(filing.Filing, "file", curious)


@mutation("LossCostsTime")
def turn_that_gives_up(patch: pytest.MonkeyPatch) -> None:
    """A turn whose prefill fails is answered with an error, although decode alone could serve it; and a
    prefill that takes longer than a second has failed."""
    patch.setattr(router, "PREFILL_TIMEOUT_NS", S)
    patch.setattr(RouterTurn, "prefill_failed", lambda *_: Refuse("prefill failed"))
