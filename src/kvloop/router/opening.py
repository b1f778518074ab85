"""What a request is, before any engine is asked to compute something for it.

Its body is read, its model has to be served somewhere, what it goes on from is put before it, and the turn
that it continues is looked up. Whatever is wrong with it is said here.
"""

from collections.abc import Collection
from dataclasses import dataclass

from kvloop.router.conversations import Conversations, Lookup
from kvloop.router.models import Models
from kvloop.router.request import Request
from kvloop.router.responses import Responses, Thread
from kvloop.wire.openai import Endpoint, Generation, read_generation
from kvloop.wire.refusal import unknown_model


@dataclass(frozen=True, slots=True)
class Opened:
    """A request that can be served. `thread`: a response's conversation, None for other endpoints.

    `continues`: the request whose answer this one is to go on with.
    """

    generation: Generation
    lookup: Lookup
    thread: Thread | None = None
    continues: Generation | None = None

    @property
    def previous_id(self) -> str | None:
        """The response that it goes on from."""
        return None if self.thread is None else self.thread.previous_id

    @property
    def response_id(self) -> str | None:
        """Its own response's, once that is there."""
        return None if self.thread is None else self.thread.response_id


class Opening:
    """Opens requests, and closes them."""

    def __init__(self, conversations: Conversations, models: Models, responses: Responses) -> None:
        self._conversations = conversations
        self._models = models
        self._responses = responses

    async def open(
        self, endpoint: Endpoint, request: Request, engine_names: Collection[str], lines: bytes
    ) -> Opened:
        """Read a request that one of these engines has to serve. RequestError for one that cannot be."""
        generation = read_generation(endpoint, request.body)
        if not await self._models.is_served(generation.model, engine_names, lines):
            raise unknown_model(generation.model)
        if endpoint is not Endpoint.RESPONSES:
            return Opened(generation, self._conversations.look_up(request, generation))
        thread = await self._responses.open(request, generation)
        try:
            lookup = self._conversations.look_up(request, thread.generation, thread.previous_id)
        except BaseException:
            self._responses.close(thread)
            raise
        return Opened(thread.generation, lookup, thread)

    def suits(self, opened: Opened, engine_name: str) -> bool:
        """Whether an engine can serve it at all."""
        return self._models.serves(engine_name, opened.generation.model)

    def keep(self, opened: Opened, answer: bytes) -> None:
        """Its answer has come: a response may be gone on from."""
        if opened.thread is not None:
            self._responses.keep(opened.thread, answer)

    def close(self, opened: Opened) -> None:
        """It was served. To be called once."""
        if opened.thread is not None:
            self._responses.close(opened.thread)
