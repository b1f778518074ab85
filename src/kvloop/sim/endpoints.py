"""The generation endpoints as a table: what is asked, as the chat that it is, and how it is answered."""

from collections.abc import Callable
from dataclasses import dataclass

from kvloop.sim.body import Body
from kvloop.sim.formats import Chat, Completion, Format
from kvloop.sim.messages import Messages
from kvloop.sim.prompts import chat_of_message, chat_of_response, chat_prompts, completion_prompts
from kvloop.sim.responses import Responses


@dataclass(frozen=True, slots=True)
class Stamp:
    """What an answer is named and dated by. `asked` is the client's name for the request, who may use one
    twice; `drawn` is nobody else's.
    """

    asked: str
    drawn: str
    model: str
    created_s: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`read`: the request in the words of chats and completions. `prompts`: its tokens. RequestError of
    either where it cannot be served. `form`: how its answer is written.
    """

    read: Callable[[Body], Body]
    prompts: Callable[[Body], list[bytes]]
    form: Callable[[Body, Stamp], Format]


def _as_it_is(body: Body) -> Body:
    return body


def _chat(body: Body, stamp: Stamp) -> Format:
    return Chat(f"chatcmpl-{stamp.asked}", stamp.model, stamp.created_s, wants_usage=body.wants_usage)


def _completion(body: Body, stamp: Stamp) -> Format:
    return Completion(f"cmpl-{stamp.asked}", stamp.model, stamp.created_s, wants_usage=body.wants_usage)


def _response(_: Body, stamp: Stamp) -> Format:
    return Responses(stamp.drawn, stamp.model, stamp.created_s)  # others will find it by its id


def _message(_: Body, stamp: Stamp) -> Format:
    return Messages(f"chatcmpl-{stamp.asked}", stamp.model)


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(_as_it_is, chat_prompts, _chat),
    "/v1/completions": Endpoint(_as_it_is, completion_prompts, _completion),
    "/v1/responses": Endpoint(chat_of_response, chat_prompts, _response),
    "/v1/messages": Endpoint(chat_of_message, chat_prompts, _message),
}
