"""Decode's side of the loop: keep what a finished turn computed, and lend it to whoever proves the prefix.

Retained blocks are held by reference count (`BlockPool.touch`) and by nothing else: the request itself is
freed at once, so vLLM's scheduler has nothing to step for and an idle engine sleeps. The lease table is
shared with the control thread, which answers claims from it under a lock; the block pool belongs to the
scheduler's thread, so a lease that ends on the other thread gives its blocks back on the scheduler's next
call.
"""

import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvloop.connector.identity import IdentityOf, media_of
from kvloop.connector.settings import Settings
from kvloop.connector.worker import CLAIM_READ_PREFIX
from kvloop.core.chain import MAX_CHAIN_TOKENS, Chain, build_chain, root_digest
from kvloop.core.handle import Handle
from kvloop.core.lease import ClaimRefused, LeaseState, LeaseTable, RefusalReason
from kvloop.errors import HandleError, ProtocolError, UserError
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
from kvloop.wire.handle import HANDLE_VERSION, encode_handle

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

MAX_LEASES = 100_000
MAX_CLAIMS = 10_000
NS_PER_MS = 1_000_000


class Retainer:
    """Grants leases over finished requests' blocks, serves claims on them, and gives the blocks back.

    `describe_source(claim_id)` says where the blocks can be read. All methods but `serve` are for the
    scheduler's thread.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        identity_of: IdentityOf,
        block_size: int,
        engine_id: str,
        incarnation: str,
        describe_source: Callable[[str], Source],
    ) -> None:
        self._settings = settings
        self._identity_of = identity_of
        self._block_size = block_size
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._describe_source = describe_source
        self._pool: BlockPool | None = None
        self._lock = threading.Lock()
        self._table = LeaseTable(
            block_size=block_size,
            ttl_ns=settings.lease_ttl_ns,
            claim_term_ns=settings.claim_term_ns,
            max_leases=MAX_LEASES,
            max_claims=MAX_CLAIMS,
            incarnation=incarnation,
        )

    def bind(self, pool: "BlockPool") -> None:
        """Take the block pool whose references leases hold."""
        self._pool = pool

    def retain(self, request: "Request", block_ids: tuple[list[int], ...]) -> Handle | None:
        """Lease the blocks of a finished request, or None where there is nothing to prove or no room for it.

        The last sampled token was never an input, so KV is proven for one position less than the request has
        tokens. Positions beyond that in the last block are never granted.
        """
        pool = self._pool
        tokens = request.all_token_ids
        count = min(request.num_computed_tokens, len(tokens) - 1)
        if (
            pool is None
            or self._identity_of.why_not(request)
            or len(block_ids) != 1
            or count < max(1, self._settings.recompute_threshold_tokens)
        ):
            return None
        blocks = tuple(block_ids[0][: -(-count // self._block_size)])
        held_limit = int(self._settings.max_retained_share * pool.num_gpu_blocks)
        if len(blocks) * self._block_size < count or len(blocks) > held_limit:
            return None
        now_ns = time.monotonic_ns()
        lease_id = secrets.token_hex(8)
        chain = self._chain(request, count)
        with self._lock:
            self._table.advance(now_ns)
            self._reclaim_until(lambda: self._table.held_blocks + len(blocks) <= held_limit, now_ns)
            if self._table.held_blocks + len(blocks) > held_limit:
                return None
            pool.touch([pool.blocks[block] for block in blocks])
            granted = self._table.grant(lease_id, chain, (blocks,), now_ns, self._settings.lease_ttl_ns)
            self._free_ended()
        if not granted:
            return None
        return self._handle(lease_id, count)

    def _handle(self, lease_id: str, token_count: int) -> Handle:
        source = self._describe_source("")
        return Handle(
            version=HANDLE_VERSION,
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            lease_id=lease_id,
            control_host=self._settings.control_host,
            control_port=self._settings.control_port,
            tp_size=source.tp_size,
            pp_size=source.pp_size,
            dcp_size=source.dcp_size,
            token_count=token_count,
            expires_in_ms=self._settings.lease_ttl_ns // NS_PER_MS,
        )

    def check_handle(self) -> None:
        """UserError where the engine's id and address make handles that no peer would accept."""
        try:
            self.encode(self._handle("0" * 16, MAX_CHAIN_TOKENS))
        except HandleError as error:
            raise UserError(
                f"the engine id {self._engine_id!r} and the control host {self._settings.control_host!r} "
                f"do not fit into a handle ({error}): choose shorter ones of printable ASCII"
            ) from error

    def begin_incarnation(self, incarnation: str) -> None:
        """The engine's memory is another than before: end every lease; earlier handles name nothing."""
        with self._lock:
            self._table.drop_all(time.monotonic_ns())
            self._free_ended()
            self._incarnation = self._table.incarnation = incarnation

    def encode(self, handle: Handle) -> str:
        """The handle as text, sealed with the deployment's secret."""
        return encode_handle(handle, self._settings.key)

    def _chain(self, request: "Request", count: int) -> Chain:
        root = root_digest(self._settings.key, self._identity_of(request))
        tokens = list(request.all_token_ids[:count])
        return build_chain(self._settings.key, root, tokens, media_of(request))

    def make_room(self, blocks_wanted: int) -> None:
        """Give back unclaimed leases, the least recently used first, until `blocks_wanted` blocks are
        free."""
        pool = self._pool
        if pool is None:
            return
        self.give_back()
        if pool.get_num_free_blocks() >= blocks_wanted:
            return
        while pool.get_num_free_blocks() < blocks_wanted:
            with self._lock:
                victim = self._table.oldest_unclaimed()
                if victim is None or not self._table.reclaim(victim, time.monotonic_ns()):
                    return
            self.give_back()

    def _reclaim_until(self, enough: Callable[[], bool], now_ns: int) -> None:
        while not enough():
            victim = self._table.oldest_unclaimed()
            if victim is None or not self._table.reclaim(victim, now_ns):
                return
            self._free_ended()

    def give_back(self) -> None:
        """Return the blocks of every lease that has ended to the pool."""
        with self._lock:
            self._table.advance(time.monotonic_ns())
            self._free_ended()

    def _free_ended(self) -> None:
        pool = self._pool
        if pool is None:
            return
        for freed in self._table.take_freed():
            for group in freed.blocks:
                pool.free_blocks(pool.blocks[block] for block in reversed(group))

    def drop_all(self) -> None:
        """End every lease, e.g. because the weights changed. Claimed blocks follow when their claims end."""
        with self._lock:
            self._table.drop_all(time.monotonic_ns())
            self._free_ended()

    def check_integrity(self) -> None:
        """Raise AssertionError where the lease table contradicts itself."""
        with self._lock:
            self._table.check_integrity()

    def serve(self, message: Message) -> Message:
        """Answer a peer's message. Called on the control thread."""
        now_ns = time.monotonic_ns()
        with self._lock:
            self._table.advance(now_ns)
            match message:
                case Claim():
                    return self._serve_claim(message, now_ns)
                case Release():
                    return Released(self._table.release(message.claim_id, now_ns))
                case Renew():
                    gone = [
                        lease_id
                        for lease_id, term_ms in message.leases
                        if not self._table.renew(lease_id, now_ns, term_ms * NS_PER_MS)
                    ]
                    return Renewed(gone)
                case Drop():
                    return Dropped(sum(self._table.drop(lease_id, now_ns) for lease_id in message.lease_ids))
                case Stat():
                    return self._stat()
                case _:
                    return Failed("not a question")

    def _serve_claim(self, claim: Claim, now_ns: int) -> Message:
        try:
            wanted = claim.wanted()
        except ProtocolError:
            return Refused(RefusalReason.MALFORMED)
        claim_id = secrets.token_hex(8)
        answer = self._table.claim(
            claim.lease_id, claim_id, wanted, "", now_ns, incarnation=claim.incarnation
        )
        if isinstance(answer, ClaimRefused):
            return Refused(answer.reason)
        return Granted(
            claim_id=claim_id,
            matched_tokens=answer.matched_tokens,
            block_ids=[list(group) for group in answer.blocks],
            term_ms=answer.term_ns // NS_PER_MS,
            source=self._describe_source(f"{CLAIM_READ_PREFIX}{claim_id}"),
        )

    def _stat(self) -> StatReply:
        counts = self._table.counts()
        return StatReply(
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            granted=counts[LeaseState.GRANTED],
            claimed=counts[LeaseState.CLAIMED],
            claims=self._table.claim_count(),
            held_blocks=self._table.held_blocks,
            expired_total=counts[LeaseState.EXPIRED],
            released_total=counts[LeaseState.RELEASED],
            reclaimed_total=counts[LeaseState.RECLAIMED],
        )
