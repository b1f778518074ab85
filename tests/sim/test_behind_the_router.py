"""The simulated engine behind the real router: the loop closes, and no answer depends on it."""

import json
from typing import Any

import pytest

from kvloop.core import lease
from kvloop.core.chain import Chain, Identity, root_digest
from kvloop.sim import leases
from tests.router.harness import in_loop, until
from tests.sim.pair import make_profile
from tests.sim.servers import Deployment, deployment

NOTES = "The lighthouse at Skerry Point was built in 1871 after two ships were lost on the reef. " * 12
QUESTIONS = ("When was it built?", "Why?", "How many ships were lost, and where?", "And then?", "Thanks.")
Messages = list[dict[str, Any]]


async def converse(stack: Deployment, questions: tuple[str, ...] = QUESTIONS, **fields: Any) -> list[str]:
    """A conversation; its answers."""
    messages: Messages = [{"role": "system", "content": NOTES}]
    answers = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = (await stack.chat(messages, **fields)).json()["choices"][0]["message"]
        messages.append(answer)
        answers.append(answer["content"])
    return answers


async def streamed(stack: Deployment, messages: Messages, **fields: Any) -> tuple[str, dict[str, Any], str]:
    """One streamed turn: its text, its usage, and every byte of it."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    raw = (await stack.chat(messages, **options, **fields)).text
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    text = "".join(
        choice["delta"].get("content") or "" for event in events for choice in event.get("choices", [])
    )
    return text, next(event["usage"] for event in events if event.get("usage")), raw


@pytest.mark.parametrize("profile", ["instant", "timed", "few blocks"])
def test_answers_are_the_same_with_and_without_return(profile: str) -> None:
    """A conversation of five turns, several at a time, read back and recomputed: word for word the same."""

    async def both() -> None:
        made = {"instant": None, "timed": make_profile(), "few blocks": make_profile(blocks=128)}[profile]
        async with deployment(profile=made, decode=2) as stack:
            with_return = await converse(stack)
            last = await stack.chat([{"role": "user", "content": "hi"}])
            assert last.headers["x-kvloop-route"] == "recompute"
            assert stack.wrong_answers() == 0
            stack.check()
            returned = sum(driver.engine.counters.get("read_tokens", 0) for driver in stack.prefill)
            assert returned > 4 * len(NOTES) // 4
        async with deployment(profile=made, returns=False) as stack:
            assert await converse(stack) == with_return
            assert not any(driver.engine.counters.get("read_tokens") for driver in stack.prefill)

    in_loop(both)()


@in_loop
async def test_a_turn_reads_back_all_but_what_is_new() -> None:
    """The router's header counts every token of the history; the stream shows no metadata, and its usage
    says how many tokens were cached."""
    async with deployment() as stack:
        messages: Messages = [{"role": "user", "content": NOTES}]
        text, usage, _ = await streamed(stack, messages)
        history = usage["prompt_tokens"] + usage["completion_tokens"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
        again = await stack.chat(messages)
        assert again.headers["x-kvloop-route"] == "return"
        assert int(again.headers["x-kvloop-reused-tokens"]) == history - 1
        assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == history - 1
        _, usage, raw = await streamed(stack, messages)
        assert usage["prompt_tokens_details"]["cached_tokens"] == (history - 1) // 64 * 64
        assert "kv_transfer_params" not in raw
        assert "kvloop" not in raw
        assert raw.endswith("data: [DONE]\n\n")
        stack.check()


@in_loop
async def test_histories_that_changed_are_answered_as_by_cold_engines() -> None:
    """Edited, cut, forked and foreign histories, with another conversation's id: each as if it were new."""
    async with deployment() as stack, deployment(returns=False) as cold:
        messages: Messages = [{"role": "system", "content": NOTES}, {"role": "user", "content": "One?"}]
        for salt in (None, "tenant"):
            fields = {"conversation_id": "c", **({"cache_salt": salt} if salt else {})}
            said = (await stack.chat(messages, **fields)).json()["choices"][0]["message"]
            changed: list[Messages] = [
                [*messages, said, {"role": "user", "content": "Two?"}],
                [messages[0], {"role": "user", "content": "Other?"}],
                [{"role": "system", "content": NOTES[4:]}, *messages[1:]],
                [{"role": "system", "content": NOTES.replace("reef", "rock")}, *messages[1:], said],
                messages[1:],
                [{"role": "user", "content": "x"}],
            ]
            for history in changed:
                answer = (await stack.chat(history, **fields)).json()["choices"][0]["message"]
                expected = (await cold.chat(history, **fields)).json()["choices"][0]["message"]
                assert answer == expected
        assert stack.wrong_answers() == 0


def matched_without_proof(held: Chain, wanted: Chain) -> int:
    """Whatever is asked for is there."""
    return min(held.token_count, wanted.token_count)


def root_without_salt(key: bytes, identity: Identity) -> bytes:
    """The chain's root says nothing of whose tokens they are."""
    return root_digest(key, Identity(identity.model, identity.revision, identity.kv_layout, "", ""))


@pytest.mark.parametrize("broken", ["no proof", "no tenant"])
def test_a_wrong_reuse_is_seen_by_the_client(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rule left out, the same client gets another answer, HTTP 200; and the engines count it."""

    async def other_answers() -> tuple[bool, int]:
        async with deployment() as stack, deployment(returns=False) as cold:
            mine: Messages = [{"role": "system", "content": NOTES}, {"role": "user", "content": "One?"}]
            theirs: Messages = [{"role": "system", "content": NOTES.upper()}, *mine[1:]]
            salt = "mine"
            if broken == "no tenant":
                theirs, salt = [*mine, {"role": "user", "content": "Two?"}], "theirs"
            await stack.chat(mine, conversation_id="c", cache_salt="mine")
            answer = (await stack.chat(theirs, conversation_id="c", cache_salt=salt)).json()
            expected = (await cold.chat(theirs)).json()
            return answer["choices"] != expected["choices"], stack.wrong_answers()

    async def run() -> None:
        assert await other_answers() == (False, 0)
        if broken == "no proof":
            monkeypatch.setattr(lease, "matched_tokens", matched_without_proof)
        else:
            monkeypatch.setattr(leases, "root_digest", root_without_salt)
        differs, counted = await other_answers()
        assert (differs, counted > 0) == (True, True)

    in_loop(run)()


@in_loop
async def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    """In the middle of a long answer its connection ends: the engines are idle soon, their blocks free."""
    async with deployment(profile=make_profile(), lease_term_ns=10**9) as stack:
        body = {"model": "sim", "messages": [{"role": "user", "content": NOTES}], "stream": True}
        async with stack.client.stream(
            "POST", "/v1/chat/completions", json={**body, "max_tokens": 900}
        ) as one:
            assert one.status_code == 200
            await anext(one.aiter_bytes())
        engines = [driver.engine for driver in stack.prefill + stack.decode]
        await until(lambda: all(engine.is_idle for engine in engines))
        await until(lambda: all(engine.pool.references == 0 for engine in engines))
