"""What clients call their conversations, wherever they put it today.

There is no standard: every agent, gateway and router has a header or a field of its own. All of them count,
each under its own kind, so that equal values of different kinds never meet. Some name a conversation, some
only what it came out of: an agent that starts another one says who its parent is, and a response which one it
goes on from. Those are looked up and not filed under, for the parent's name must not lead to its child's
turns. `user` names a person, and is no name here.
"""

from dataclasses import dataclass

from kvloop.core.lineage import Name
from kvloop.router.request import Request
from kvloop.wire.openai import Generation

MAX_NAME_CHARS = 256
AGENT = "x-claude-code-agent-id"
SESSION = "x-claude-code-session-id"
PARENT_AGENT = "x-claude-code-parent-agent-id"
PARENT_SESSION = "x-parent-session-id"
RESPONSE = "previous_response_id"
# From the one that names a single conversation most surely to the one that several may share.
NAME_FIELDS = (
    "conversation_id",
    "session_id",
    "session_params.session_id",
    "vllm_xargs.session_id",
    "vllm_xargs.agentic_context",
    "metadata.session_id",
    "prompt_cache_key",
)
NAME_HEADERS = (
    "x-conversation-id",
    AGENT,
    "x-session-id",
    SESSION,
    "thread-id",
    "session-id",
    "x-dynamo-session-id",
    "x-smg-routing-key",
    "x-correlation-id",
)
# Names that many conversations may have in common, or of what a conversation came out of.
SHARED_KINDS = (
    "prompt_cache_key",
    "x-smg-routing-key",
    "x-correlation-id",
    PARENT_AGENT,
    PARENT_SESSION,
)
_FIELD_PATHS = tuple((kind, kind.partition(".")[0]) for kind in NAME_FIELDS)
_HEADER_KEYS = tuple((kind, kind.encode()) for kind in NAME_HEADERS)
_PARENTS = (
    (PARENT_AGENT, PARENT_AGENT.encode(), AGENT),
    (PARENT_SESSION, PARENT_SESSION.encode(), "x-session-id"),
)


@dataclass(frozen=True, slots=True)
class Origin:
    """What a conversation came out of: the name that its client sends, and the one that was filed."""

    sent: Name
    filed: Name


def names_of(
    request: Request, generation: Generation, previous_id: str | None = None
) -> tuple[list[Name], list[Origin]]:
    """The conversation's own names, and what it came out of. `previous_id`: of the response before it."""
    fields, named = generation.fields, request.named
    own = [
        Name(kind, value)
        for kind, outer in _FIELD_PATHS
        if outer in fields and (value := generation.text(kind))
    ]
    own += [Name(kind, named[key].decode("latin-1")) for kind, key in _HEADER_KEYS if named.get(key)]
    own = [name for name in own if len(name.value) <= MAX_NAME_CHARS]
    origins: list[Origin] = []
    if previous_id is not None:
        name = Name(RESPONSE, previous_id)
        origins.append(Origin(name, name))
    for kind, key, filed in _PARENTS:
        parent = named.get(key, b"").decode("latin-1")
        if 0 < len(parent) <= MAX_NAME_CHARS:
            origins.append(Origin(Name(kind, parent), Name(filed, parent)))
    if any(name.kind == AGENT for name in own):  # the session is that of the agent which started this one
        for session in [name for name in own if name.kind == SESSION]:
            own.remove(session)
            origins.append(Origin(Name(PARENT_AGENT, session.value), session))
    return own, origins
