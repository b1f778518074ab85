"""Recorded sessions on real engines, scaled down to what one machine holds: adaptive leases against fixed.

A prompt consists of the recorded stretches, `UNIT_TOKENS` tokens each instead of `trace.UNIT_TOKENS`, so that
prefixes match as they did; every time is divided by `SPEED`: the sessions', and the leases'. Answers are as
long as recorded, in that scale, and end by their length, so the router learns from one kind of ending only.
A session's turns follow each other, at the recorded times or as soon as the engines are done with the one
before; sessions run side by side. Prefill caches nothing itself, so what it does not compute it has read back
from decode. What decode holds is its own count.

The same sessions, as recorded, go through the replay in virtual time, whose ratio stands beside the measured
one.
"""

import http.client
import json
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvloop.bench import trace
from kvloop.bench.engine import counted
from kvloop.bench.lease_replay import Policy, Replay
from kvloop.bench.report import Bound, Row, Target
from kvloop.bench.trace import TraceSession, TraceTurn
from kvloop.errors import UserError
from kvloop.local.chat import TURN_TIMEOUT_S, return_misses, served_model
from kvloop.local.stack import Router, Stack
from kvloop.local.stack_config import StackConfig

SPEED = 40
"""How much faster than recorded everything happens."""
UNIT_TOKENS = 32
"""A block, and one sixteenth of a recorded stretch."""
SHRINK = trace.UNIT_TOKENS // UNIT_TOKENS
MAX_MODEL_LEN = 16_384
MAX_UNITS = (MAX_MODEL_LEN - 1024) // UNIT_TOKENS
TTL_S, TERM_S, INTERVAL_S, BREAK_EVEN_S = (seconds / SPEED for seconds in (480, 60, 20, 20))
BLOCKS = 6_000
"""Enough that memory is not short, as in the replay that is judged."""
AMPLE_TOKENS = BLOCKS * trace.UNIT_TOKENS
"""As many blocks, in the replay's size."""
MOST_HELD, LEAST_REUSE = 0.25, 0.98
HELD = "kvloop_lease_block_seconds_total"
HELD_NOW = "kvloop_lease_blocks"
_TOKEN_IDS = range(10, 250)  # plain ones of any vocabulary


@dataclass(frozen=True, slots=True)
class Effort:
    """Sessions, over which time they begin, and how much of each is played, in recorded seconds."""

    sessions: int = 12
    start_within_s: float = 1_200.0
    play_s: float = 4_800.0


@dataclass(frozen=True, slots=True)
class Played:
    """What a run came to."""

    turns: int
    turns_reusing: int
    reused_tokens: int
    prompt_tokens: int
    held_block_s: float
    misses: str

    @property
    def held_per_reused(self) -> float:
        """Token-seconds held for each token reused, in recorded seconds."""
        held = self.held_block_s * UNIT_TOKENS * SPEED
        return held / self.reused_tokens if self.reused_tokens else float("nan")


def config() -> StackConfig:
    """A prefill engine without a cache, and a decode engine with ample blocks and short leases."""
    flags = ("--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(UNIT_TOKENS))
    return StackConfig(
        router=False,
        engine_flags=flags,
        prefill_flags=("--no-enable-prefix-caching",),
        decode_flags=("--num-gpu-blocks-override", str(BLOCKS)),
        engine_extra={"kvloop_lease_term": TERM_S, "decoder_kv_blocks_ttl": TTL_S},
    )


def router_flags(policy: Policy) -> tuple[str, ...]:
    """A router whose leases live `SPEED` times as fast."""
    times = {
        "retention": TTL_S,
        "lease-term": TERM_S,
        "renew-interval": INTERVAL_S,
        "break-even": BREAK_EVEN_S,
    }
    words = (word for name, seconds in times.items() for word in (f"--{name}-s", str(seconds)))
    return (*words, "--lease-policy", policy.value)


def measure(
    stack: Stack, sessions: Sequence[TraceSession], seed: str, effort: Effort, say: Callable[[str], None]
) -> list[Row]:
    """The rows. Raises `UserError` where a turn fails."""
    chosen = choose(sessions, effort)
    say(f"{len(chosen)} sessions with {sum(len(one.turns) for one in chosen)} turns, {SPEED} times as fast")
    played, replayed = {}, {}
    for policy in (Policy.ADAPTIVE, Policy.FIXED):
        router = stack.add_router(policy.value, router_flags(policy))
        played[policy] = _play(stack, router, chosen, f"{seed} {policy}", effort)
        router.shut_down()
        replayed[policy] = Replay(chosen, policy, AMPLE_TOKENS, effort.start_within_s).run()
        say(f"{policy}: {played[policy]}")
    ours, theirs = played[Policy.ADAPTIVE], played[Policy.FIXED]
    expected = replayed[Policy.ADAPTIVE].held_per_reused / replayed[Policy.FIXED].held_per_reused
    return [
        Row(
            "held per reused token, adaptive / fixed, real engines",
            ours.held_per_reused / theirs.held_per_reused,
            "",
            Target(Bound.AT_MOST, MOST_HELD),
            f"{ours.held_per_reused:.1f} against {theirs.held_per_reused:.1f} token-seconds as recorded; "
            f"the same sessions replayed: {expected:.3f}",
        ),
        Row(
            "tokens reused, adaptive / fixed, real engines",
            ours.reused_tokens / theirs.reused_tokens if theirs.reused_tokens else float("nan"),
            "",
            Target(Bound.AT_LEAST, LEAST_REUSE),
            f"{ours.reused_tokens:,} of {ours.prompt_tokens:,} prompt tokens against "
            f"{theirs.reused_tokens:,}; {ours.turns_reusing} of {ours.turns} turns against "
            f"{theirs.turns_reusing}",
        ),
    ]


def choose(sessions: Sequence[TraceSession], effort: Effort) -> list[TraceSession]:
    """As many sessions as are asked for, spread evenly over the trace, each cut off where its time is up or a
    prompt is too long. Sessions of which nothing is left are passed over."""
    cut = [TraceSession(one.name, tuple(_playable(one.turns, effort.play_s))) for one in sessions]
    found = [one for one in cut if one.turns]
    if len(found) < effort.sessions:
        raise UserError(
            f"the trace has {len(found)} sessions that can be played, {effort.sessions} are needed"
        )
    return [found[number * len(found) // effort.sessions] for number in range(effort.sessions)]


def _playable(turns: Sequence[TraceTurn], play_s: float) -> list[TraceTurn]:
    playable: list[TraceTurn] = []
    for turn in turns:
        if turn.start_s - turns[0].start_s > play_s or not 0 < len(turn.units) <= MAX_UNITS:
            break
        playable.append(turn)
    return playable


def prompt_of(seed: str, session: str, units: Sequence[int]) -> list[int]:
    """The token ids of a prompt: of each stretch as many, always the same for the same one of a session."""
    return [
        token
        for unit in units
        for token in random.Random(f"{seed} {session} {unit}").choices(_TOKEN_IDS, k=UNIT_TOKENS)
    ]


def _play(
    stack: Stack, router: Router, sessions: Sequence[TraceSession], seed: str, effort: Effort
) -> Played:
    decode, model = stack.decode[0].url, served_model(stack.decode[0].url)
    before = counted(decode, HELD)
    began_s = time.monotonic()
    spacing_s = effort.start_within_s / len(sessions)

    def play(number: int) -> list[tuple[int, int]]:
        session = sessions[number]
        turns = []
        for turn in session.turns:
            due_s = (number * spacing_s + turn.start_s - session.turns[0].start_s) / SPEED
            time.sleep(max(0.0, began_s + due_s - time.monotonic()))
            body = {
                "model": model,
                "prompt": prompt_of(seed, session.name, turn.units),
                "max_tokens": max(1, turn.output_tokens // SHRINK),
                "ignore_eos": True,
                "temperature": 0,
            }
            turns.append((len(turn.units) * UNIT_TOKENS, _reused(router.url, body, session.name)))
        return turns

    with ThreadPoolExecutor(len(sessions)) as pool:
        turns = [turn for played in pool.map(play, range(len(sessions))) for turn in played]
    _wait_for_the_end(decode)
    return Played(
        turns=len(turns),
        turns_reusing=sum(reused > 0 for _, reused in turns),
        reused_tokens=sum(reused for _, reused in turns),
        prompt_tokens=sum(tokens for tokens, _ in turns),
        held_block_s=counted(decode, HELD) - before,
        misses=return_misses(router.admin_url),
    )


def _reused(url: str, body: dict[str, object], session: str) -> int:
    """The tokens that the router says were read back for a turn."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TURN_TIMEOUT_S)
    try:
        headers = {"content-type": "application/json", "x-session-id": session}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"a turn was not answered: {error}") from error
    finally:
        connection.close()
    if answer.status != 200:
        raise UserError(f"a turn was answered with {answer.status}: {text[:500]!r}")
    return int(answer.getheader("x-kvloop-reused-tokens") or 0)


def _wait_for_the_end(decode: str) -> None:
    """Until decode holds nothing any more: what is held is counted to its end."""
    deadline_s = time.monotonic() + 3 * TTL_S
    while counted(decode, HELD_NOW):
        if time.monotonic() > deadline_s:
            raise UserError(f"leases outlive the TTL: {counted(decode, HELD_NOW):.0f} blocks are still held")
        time.sleep(0.2)
