"""Decode's side of the loop: keep what a finished turn computed, and name it by a handle.

Retained blocks are held by reference count (`BlockPool.touch`) and by nothing else: the request itself is
freed at once, so vLLM's scheduler has nothing to step for and an idle engine sleeps. What becomes of the
leases is `leases`' business, who reads from them `lend`'s.
"""

from typing import TYPE_CHECKING

from kvloop.connector.identity import IdentityOf, media_of
from kvloop.connector.leases import Leases
from kvloop.connector.settings import NS_PER_MS, Settings
from kvloop.core.chain import MAX_CHAIN_TOKENS, Chain, build_chain, root_digest
from kvloop.core.handle import Handle
from kvloop.errors import HandleError, UserError
from kvloop.wire.control import Source
from kvloop.wire.handle import HANDLE_VERSION, encode_handle

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Retainer:
    """Leases the blocks of finished requests. For the scheduler's thread. `source`: where blocks are read."""

    def __init__(
        self,
        settings: Settings,
        leases: Leases,
        *,
        identity_of: IdentityOf,
        block_size: int,
        source: Source,
    ) -> None:
        self._settings = settings
        self._leases = leases
        self._identity_of = identity_of
        self._block_size = block_size
        self._source = source

    def retain(
        self, request: "Request", block_ids: tuple[list[int], ...], *, starved: bool = False
    ) -> Handle | None:
        """Lease the blocks of a finished request, or None where there is nothing to prove or no room for it.
        While live work lacks blocks (`starved`) the lease is soft from the start.

        The last sampled token was never an input, so KV is proven for one position less than the request has
        tokens. Positions beyond that in the last block are never granted.
        """
        tokens = request.all_token_ids
        count = min(request.num_computed_tokens, len(tokens) - 1)
        if (
            self._identity_of.why_not(request)
            or len(block_ids) != 1
            or count < max(1, self._settings.recompute_threshold_tokens)
        ):
            return None
        blocks = tuple(block_ids[0][: -(-count // self._block_size)])
        if len(blocks) * self._block_size < count or len(blocks) > self._leases.max_blocks:
            return None
        grant = self._leases.grant_soft if starved else self._leases.grant
        lease_id = grant(self._chain(request, count), blocks)
        return None if lease_id is None else self._handle(lease_id, count)

    def _chain(self, request: "Request", count: int) -> Chain:
        root = root_digest(self._settings.key, self._identity_of(request))
        tokens = list(request.all_token_ids[:count])
        return build_chain(self._settings.key, root, tokens, media_of(request))

    def _handle(self, lease_id: str, token_count: int) -> Handle:
        return Handle(
            version=HANDLE_VERSION,
            engine_id=self._source.engine_id,
            incarnation=self._leases.table.incarnation,
            lease_id=lease_id,
            control_host=self._settings.control_host,
            control_port=self._settings.control_port,
            tp_size=self._source.tp_size,
            pp_size=self._source.pp_size,
            dcp_size=self._source.dcp_size,
            token_count=token_count,
            expires_in_ms=self._settings.lease_term_ns // NS_PER_MS,
        )

    def check_handle(self) -> None:
        """UserError where the engine's id and address make handles that no peer would accept."""
        try:
            self.encode(self._handle("0" * 16, MAX_CHAIN_TOKENS))
        except HandleError as error:
            raise UserError(
                f"the engine id {self._source.engine_id!r} and the control host "
                f"{self._settings.control_host!r} do not fit into a handle ({error}): choose shorter ones of "
                "printable ASCII"
            ) from error

    def encode(self, handle: Handle) -> str:
        """The handle as text, sealed with the deployment's secret."""
        return encode_handle(handle, self._settings.key)
