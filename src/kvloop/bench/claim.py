"""What proving a reuse costs: the claim's way there and back, its weight on the first token, digest, handle.

The claim that is timed is a real one, overheard from prefill, sent under a fresh seal and released each time.
Its weight on the first token is the difference between prefill hops that bring a handle which decode refuses
and hops that bring none, in alternating order: same prompt, same computation, one claim more. Every hand-over
is pulled by decode, so that nothing is left over that an engine would go on stepping for.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvloop.bench.control import ControlClient, Middleman
from kvloop.bench.conversation import ANSWER_TOKENS, counter, first_turn, next_turn, plan
from kvloop.bench.engine import ALONE, PREFILL, chat
from kvloop.bench.report import Bound, Row, Target, spread
from kvloop.core.chain import Identity, build_chain, root_digest
from kvloop.core.lease import RefusalReason
from kvloop.errors import UserError
from kvloop.local.chat import Message, served_model
from kvloop.local.stack import Stack
from kvloop.wire.control import Claim, Granted, Refused, Release
from kvloop.wire.handle import decode_handle, encode_handle

MOST_CLAIM_MS = 1.0
MOST_EFFECT_MS = 2.0
MOST_DIGEST_MS = 2.0
MOST_HANDLE_BYTES = 300
DIGEST_TOKENS = 10_000
DIGESTS = 50
PACE_S = 0.005
GENERATED_TOKENS = 100
SHORT_PROMPT: list[Message] = [{"role": "user", "content": "Name a colour, and one that goes with it. " * 5}]
"""Over the threshold below which prefill does not even ask, and as short as that allows, so that little else
than the claim makes a difference."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How many samples to take, and the tokens of the conversation that is claimed."""

    claims: int = 500
    pairs: int = 100
    prompt_tokens: int = 1_900


class Deployment:
    """A running stack, driven by hand."""

    def __init__(self, stack: Stack, seed: str) -> None:
        self.key = (stack.folder / "secret").read_bytes().strip()
        self.control_port = stack.decode[0].control_port
        self.handle_bytes: list[int] = []
        self._prefill, self._decode = stack.prefill[0].url, stack.decode[0].url
        self._model = served_model(self._decode)
        self._seed = seed

    def prefill(self, messages: list[Message], filed: dict[str, Any] | None = None) -> dict[str, Any]:
        """The first hop: its `kv_transfer_params`."""
        answer = chat(self._prefill, self._model, messages, PREFILL | (filed or {}))
        return dict(answer["kv_transfer_params"])

    def decode(
        self, messages: list[Message], handover: dict[str, Any], max_tokens: int
    ) -> tuple[str, dict[str, Any]]:
        """The second hop: text and filed handle (empty where decode retained nothing)."""
        answer = chat(self._decode, self._model, messages, handover, max_tokens)
        filed = dict(answer.get("kv_transfer_params") or {})
        if "kvloop_handle" in filed:
            self.handle_bytes.append(len(filed["kvloop_handle"]))
        return str(answer["choices"][0]["message"]["content"]), filed

    def generate(self) -> None:
        """Keep decode busy with an answer of its own."""
        chat(self._decode, self._model, SHORT_PROMPT, ALONE | {}, GENERATED_TOKENS)

    def overhear(self, prompt_tokens: int) -> tuple[Claim, dict[str, Any]]:
        """Hold a turn, begin the next, and return the claim that prefill makes in it, with the handle."""
        count = counter(self._prefill, self._model)
        history = first_turn(f"{self._seed} claim", plan(prompt_tokens).first_tokens, count)
        answer, filed = self.decode(history, self.prefill(history), ANSWER_TOKENS)
        if not filed:
            raise UserError("decode gave no handle")
        messages = next_turn(history, answer, self._seed, prompt_tokens, count)
        with Middleman(self.key, lambda *_: Refused("bench")) as middleman:
            handover = self.prefill(messages, middleman.take_over(filed))
            claim = middleman.claim()
        self.decode(messages, handover, 1)
        return claim, filed


def measure(stack: Stack, seed: str, effort: Effort, say: Callable[[str], None]) -> list[Row]:
    """All rows. Raises `UserError` where an engine does not do its part."""
    deployment = Deployment(stack, seed)
    claim, filed = deployment.overhear(effort.prompt_tokens)
    with ControlClient(deployment.key, "127.0.0.1", deployment.control_port) as client:
        idle = round_trips(client, claim, effort.claims)
        busy = _while_generating(deployment, client, claim)
    say(f"claims: idle {spread(idle, 'ms')}, generating {spread(busy, 'ms')}")
    with_claim, without = _effect(deployment, filed, effort.pairs)
    say(f"prefill hop: with a claim {spread(with_claim, 'ms')}, without {spread(without, 'ms')}")
    return [
        Row(
            "claim round trip, idle decode, median",
            statistics.median(idle),
            "ms",
            Target(Bound.UNDER, MOST_CLAIM_MS),
            f"{claim.token_count} tokens claimed; {spread(idle, 'ms')}",
        ),
        Row("claim round trip, decode generating", statistics.median(busy), "ms", None, spread(busy, "ms")),
        _effect_row(with_claim, without),
        digest_row(),
        Row(
            "handle, longest",
            max(deployment.handle_bytes),
            "B",
            Target(Bound.AT_MOST, MOST_HANDLE_BYTES),
            f"{len(deployment.handle_bytes)} real handles",
        ),
    ]


def round_trips(client: ControlClient, claim: Claim, number: int) -> list[float]:
    """Milliseconds of so many claims, each granted and released. Raises `UserError` for a refusal."""
    taken = []
    for _ in range(number):
        answer, took_ms = client.timed_ask(claim)
        if not isinstance(answer, Granted):
            raise UserError(f"decode answered a claim for its own tokens with {answer}")
        client.ask(Release(answer.claim_id))
        taken.append(took_ms)
    return taken


def _while_generating(deployment: Deployment, client: ControlClient, claim: Claim) -> list[float]:
    thread = threading.Thread(target=deployment.generate)
    thread.start()
    taken: list[float] = []
    while thread.is_alive():
        taken += round_trips(client, claim, 1)
        time.sleep(PACE_S)
    thread.join()
    return taken


def _effect(deployment: Deployment, filed: dict[str, Any], pairs: int) -> tuple[list[float], list[float]]:
    """Milliseconds of prefill hops with a refused claim and without one, pair by pair."""
    handle = decode_handle(str(filed["kvloop_handle"]), deployment.key)
    unknown = {"kvloop_handle": encode_handle(replace(handle, lease_id="0" * 16), deployment.key)}
    with_claim: list[float] = []
    without: list[float] = []
    for pair in range(pairs + 1):
        order: Sequence[tuple[dict[str, Any], list[float], str]] = (
            (unknown, with_claim, RefusalReason.UNKNOWN_LEASE.value),
            ({}, without, "no_handle"),
        )
        for params, taken, reason in order if pair % 2 else order[::-1]:
            began_ns = time.perf_counter_ns()
            handover = deployment.prefill(SHORT_PROMPT, params)
            took_ms = (time.perf_counter_ns() - began_ns) / 1e6
            deployment.decode(SHORT_PROMPT, handover, 1)
            if handover["kvloop_turn"]["reason"] != reason:
                raise UserError(f"a prefill that should have said {reason} said {handover['kvloop_turn']}")
            taken.append(took_ms)
    return with_claim[1:], without[1:]


def _effect_row(with_claim: list[float], without: list[float]) -> Row:
    """The median of the paired differences; a pair was taken within a second."""
    differences = [more - less for more, less in zip(with_claim, without, strict=True)]
    quarters = statistics.quantiles(differences, n=4)
    return Row(
        "claim's effect on TTFT, median",
        statistics.median(differences),
        "ms",
        Target(Bound.AT_MOST, MOST_EFFECT_MS),
        f"{len(differences)} pairs, middle half {quarters[0]:.1f} to {quarters[2]:.1f} ms; "
        f"hop without claim {statistics.median(without):.1f} ms",
    )


def digest_row() -> Row:
    """How long a chain over `DIGEST_TOKENS` tokens takes to build."""
    key = bytes(range(32))
    root = root_digest(key, Identity("model", "revision", "layout", "", "salt"))
    draw = random.Random(0)
    tokens = [draw.randrange(50_000) for _ in range(DIGEST_TOKENS)]
    taken = []
    for _ in range(DIGESTS):
        began_ns = time.perf_counter_ns()
        build_chain(key, root, tokens)
        taken.append((time.perf_counter_ns() - began_ns) / 1e6)
    return Row(
        f"digest of {DIGEST_TOKENS:,} tokens, median",
        statistics.median(taken),
        "ms",
        Target(Bound.UNDER, MOST_DIGEST_MS),
        spread(taken, "ms"),
    )
