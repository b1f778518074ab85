"""Stored responses: a request that goes on from one is given its whole conversation, and answers are kept.

No engine is ever asked for an earlier response. The request is rewritten into one that brings everything
(`wire.thread`), which prefill and decode can serve alike, and whose units are those that the turn before was
filed under. Another tenant's response is as unknown as one that never was.
"""

import asyncio
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec

from kvloop.router.conversations import Conversations
from kvloop.router.headers import REQUEST_ID, request_id
from kvloop.router.request import BodyBudget, Request
from kvloop.router.response import Response
from kvloop.router.store import ConversationStore, StoredResponse
from kvloop.wire.openai import Generation
from kvloop.wire.refusal import RequestError
from kvloop.wire.thread import (
    expanded,
    is_stored,
    own_stretch,
    previous_of,
    response_id_of,
)

PATH = "/v1/responses/"  # and an id behind it
CANCEL = "/cancel"


@dataclass(slots=True)
class Thread:
    """One request's conversation.

    `own`: its own input, None where its answer is not to be kept. `previous_id`: the response that it goes on
    from; None where it brings all of it. `taken_bytes`: what it has of the budget of bodies. `response_id`:
    its answer's, once that has come.
    """

    tenant: str
    generation: Generation
    own: msgspec.Raw | None
    stretches: tuple[bytes, ...] = ()
    previous_id: str | None = None
    taken_bytes: int = 0
    response_id: str | None = None


class Responses:
    """Opens a request's conversation, keeps its answer, and serves what was kept."""

    def __init__(
        self,
        store: ConversationStore,
        conversations: Conversations,
        budget: BodyBudget,
        max_body_bytes: int,
    ) -> None:
        self._store = store
        self._conversations = conversations
        self._budget = budget
        self._max_body_bytes = max_body_bytes
        self._puts: set[asyncio.Task[None]] = set()

    async def open(self, request: Request, generation: Generation) -> Thread:
        """The request with all that it goes on from. To be closed. RequestError for an unknown response."""
        tenant = self._conversations.tenant(request)
        own = generation.fields["input"] if is_stored(generation) else None
        previous_id = previous_of(generation)
        if previous_id is None:
            return Thread(tenant, generation, own)
        stored = await self._store.get(tenant, previous_id)
        if stored is None:
            message = f"Previous response with id '{previous_id[:200]}' not found."
            raise RequestError(message, "previous_response_id", "previous_response_not_found", 404)
        more_bytes = sum(len(stretch) + 1 for stretch in stored.stretches)
        if more_bytes + len(generation.raw) > self._max_body_bytes:
            message = f"the conversation is larger than {self._max_body_bytes} bytes"
            raise RequestError(message, "previous_response_id", "invalid_value")
        if more_bytes > self._budget.left_bytes:
            message = "the router holds as many request bodies as it may; try again in a moment"
            raise RequestError(message, status=503)
        whole = expanded(generation, stored.stretches)
        self._budget.left_bytes -= more_bytes
        return Thread(tenant, whole, own, stored.stretches, previous_id, more_bytes)

    def close(self, thread: Thread) -> None:
        """The request was served, or was not."""
        self._budget.left_bytes += thread.taken_bytes
        thread.taken_bytes = 0

    def keep(self, thread: Thread, response: bytes) -> None:
        """The request's answer has come; it is kept if its client did not say otherwise."""
        thread.response_id = response_id_of(response)
        if thread.response_id is None or thread.own is None:
            return
        stretch = own_stretch(bytes(thread.own), response)
        stored = StoredResponse(response, (*thread.stretches, stretch) if stretch else thread.stretches)
        put = asyncio.get_running_loop().create_task(
            self._store.put(thread.tenant, thread.response_id, stored)
        )
        self._puts.add(put)
        put.add_done_callback(self._puts.discard)

    async def retrieve(self, request: Request, response: Response) -> None:
        """`GET /v1/responses/{id}`: as its client got it."""
        stored = await self._found(request, response)
        if stored is not None:
            response.send_json(200, stored.response)

    async def delete(self, request: Request, response: Response) -> None:
        """`DELETE /v1/responses/{id}`; what goes on from it keeps its conversation."""
        stored = await self._found(request, response)
        if stored is not None:
            name = _id_in(request)
            await self._store.delete(self._conversations.tenant(request), name)
            deleted = {"id": name, "object": "response", "deleted": True}
            response.send_json(200, msgspec.json.encode(deleted))

    async def cancel(self, request: Request, response: Response) -> None:
        """`POST /v1/responses/{id}/cancel`: nothing runs in the background, so nothing can be cancelled."""
        if await self._found(request, response) is not None:
            response.send_error(400, "Cannot cancel a synchronous response.", "response_id")

    async def _found(self, request: Request, response: Response) -> StoredResponse | None:
        response.headers.append((REQUEST_ID, request_id(request)))
        try:
            stored = await self._store.get(self._conversations.tenant(request), _id_in(request))
        except RequestError as error:
            response.send_error(error.status, str(error), error.param, error.code)
            return None
        if stored is None:
            message = f"Response with id '{_id_in(request)[:200]}' not found."
            response.send_error(404, message, "response_id")
        return stored


def _id_in(request: Request) -> str:
    return unquote(request.path.removeprefix(PATH).removesuffix(CANCEL))
