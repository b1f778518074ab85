"""Recorded sessions on real engines in real time: what adaptive leases hold and bring, against fixed ones.

The router learns how long conversations stay away in absolute times, so sessions may not be played faster
than recorded: a pause between an answer and the next request lasts as long as it did. What is scaled down is
length: a recorded stretch of `trace.UNIT_TOKENS` tokens is `UNIT_TOKENS` here, so that prefixes match as they
did and everything fits into the engines' blocks. `sessions` of the trace, evenly spread over it, begin within
`begin_within_s`, and what they do within a window is measured, once with each policy, on the same engines.
Prefill caches nothing itself, so what it does not compute it has read back from decode.

What the window measures: block-seconds that leases held in it, by decode's own count, and what the turns that
were answered in it had reused. Both policies begin with nothing and are cut off at the same age, so what a
lease would hold after the window counts for neither. A fixed lease lives for 480 s after its last use, longer
than what is left of the window, and an adaptive one not as long: the ratio counts less against fixed leases
than a longer window would. Two more things count against the adaptive ones: answers here end by their length,
so that the router never sees the tool calls after which most recorded requests come back within seconds; and
it begins the window knowing none of its callers.
"""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

from kvloop.bench import trace
from kvloop.bench.control import ControlClient
from kvloop.bench.held import held_row, ratio, reuse_row
from kvloop.bench.lease_load import RECLAIMS
from kvloop.bench.lease_replay import Policy, Replay
from kvloop.bench.report import Row
from kvloop.bench.token_turn import whole
from kvloop.bench.trace import TraceSession, TraceTurn
from kvloop.errors import UserError
from kvloop.local.chat import return_misses, served_model
from kvloop.local.stack import Router, Stack
from kvloop.local.stack_config import StackConfig
from kvloop.local.up import CLAIM_TIMEOUT_MS
from kvloop.wire.control import Stat, StatReply

UNIT_TOKENS = 32  # a block, and one sixteenth of a recorded stretch
SHRINK = trace.UNIT_TOKENS // UNIT_TOKENS
MAX_MODEL_LEN = 16_384
MAX_ANSWER_TOKENS = 1024
MAX_UNITS = (MAX_MODEL_LEN - MAX_ANSWER_TOKENS) // UNIT_TOKENS
BLOCKS = 15_000  # enough that memory is not short, as in the replay that is judged
HELD = "kvloop_lease_block_seconds_total"
HELD_NOW = "kvloop_lease_blocks"
LEASES_END_WITHIN_S = 600.0  # the TTL of 480 s, and some
_TOKEN_IDS = range(10, 250)  # plain ones of any vocabulary


@dataclass(frozen=True, slots=True)
class Effort:
    """How many sessions, within which time they begin, and how long the window of each policy is."""

    sessions: int = 24
    begin_within_s: float = 60.0
    window_s: float = 480.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn that was answered within the window."""

    prompt_tokens: int
    reused_tokens: int


@dataclass(frozen=True, slots=True)
class Played:
    """What a window came to."""

    turns: int
    turns_reusing: int
    prompt_tokens: int
    reused_tokens: int
    held_block_s: float

    @property
    def held_per_reused(self) -> float:
        """Block-seconds held for each token reused."""
        return ratio(self.held_block_s, self.reused_tokens)

    @property
    def turns_share(self) -> float:
        """Of the turns, those that reused something."""
        return ratio(self.turns_reusing, self.turns)

    @property
    def tokens_share(self) -> float:
        """Of the prompts' tokens, those that were reused."""
        return ratio(self.reused_tokens, self.prompt_tokens)


def config() -> StackConfig:
    """A prefill engine without a cache, and a decode engine with ample blocks."""
    flags = ("--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(UNIT_TOKENS))
    return StackConfig(
        router=False,
        engine_flags=flags,
        prefill_flags=("--no-enable-prefix-caching",),
        decode_flags=("--num-gpu-blocks-override", str(BLOCKS)),
        prefill_extra={"kvloop_claim_timeout_ms": CLAIM_TIMEOUT_MS},
    )


def measure(
    stack: Stack, sessions: Sequence[TraceSession], seed: str, effort: Effort, say: Callable[[str], None]
) -> list[Row]:
    """The rows. Raises `UserError` where a turn fails, or leases were reclaimed: that is another figure."""
    chosen = choose(sessions, effort.sessions)
    played: dict[Policy, Played] = {}
    for policy in (Policy.ADAPTIVE, Policy.FIXED):
        # Adaptive first: nothing that fixed leases still hold is counted in its window.
        wait_for_the_end(stack, LEASES_END_WITHIN_S)
        router = stack.add_router(policy.value, ("--lease-policy", policy.value, "--policy", "sticky"))
        say(f"{policy}: {len(chosen)} sessions for {effort.window_s:.0f} s")
        played[policy] = Window(stack, router, f"{seed} {policy}", effort).play(chosen)
        say(f"{policy}: {played[policy]}; misses: {return_misses(router.admin_url) or 'none'}")
        router.shut_down()
        del stack.routers[router.name]
    if reclaimed := counters(stack)[RECLAIMS]:
        raise UserError(f"{reclaimed} leases were reclaimed: memory was short")
    return [*rows(played[Policy.ADAPTIVE], played[Policy.FIXED], effort), replayed(chosen, effort)]


def replayed(chosen: Sequence[TraceSession], effort: Effort) -> Row:
    """The first row's figure for the same window in virtual time, where the router knows how turns ended."""
    held = {
        policy: Replay(chosen, policy, BLOCKS * trace.UNIT_TOKENS, effort.begin_within_s)
        .run(effort.window_s)
        .held_per_reused
        for policy in (Policy.ADAPTIVE, Policy.FIXED)
    }
    what = "held per reused token, adaptive / fixed, the same window replayed"
    detail = "in virtual time, with recorded endings and durations"
    return Row(what, ratio(held[Policy.ADAPTIVE], held[Policy.FIXED]), "", detail=detail)


def rows(ours: Played, theirs: Played, effort: Effort) -> list[Row]:
    """Adaptive leases against fixed ones."""
    against = "adaptive / fixed, real engines"
    return [
        held_row(
            against,
            ours.held_per_reused,
            theirs.held_per_reused,
            f"{ours.held_per_reused:.4f} against {theirs.held_per_reused:.4f} block-seconds; "
            f"{ours.held_block_s:,.0f} against {theirs.held_block_s:,.0f} in all; "
            f"{effort.sessions} sessions, {effort.window_s:.0f} s",
        ),
        reuse_row(
            f"share of turns that reuse, {against}",
            ours.turns_share,
            theirs.turns_share,
            f"{ours.turns_reusing} of {ours.turns} against {theirs.turns_reusing} of {theirs.turns}",
        ),
        reuse_row(
            f"share of tokens reused, {against}",
            ours.tokens_share,
            theirs.tokens_share,
            f"{ours.reused_tokens:,} of {ours.prompt_tokens:,} against "
            f"{theirs.reused_tokens:,} of {theirs.prompt_tokens:,}",
        ),
    ]


def choose(sessions: Sequence[TraceSession], count: int) -> list[TraceSession]:
    """`count` sessions, spread evenly over the trace, each cut off where a prompt is too long or empty.
    Sessions of which nothing is left are passed over."""
    cut = [TraceSession(one.name, tuple(_playable(one.turns))) for one in sessions]
    found = [one for one in cut if one.turns]
    if len(found) < count:
        raise UserError(f"the trace has {len(found)} sessions that can be played, {count} are needed")
    return [found[number * len(found) // count] for number in range(count)]


def _playable(turns: Sequence[TraceTurn]) -> list[TraceTurn]:
    playable: list[TraceTurn] = []
    for turn in turns:
        if not 0 < len(turn.units) <= MAX_UNITS:
            break
        playable.append(turn)
    return playable


def pauses_s(turns: Sequence[TraceTurn]) -> list[float]:
    """Before each turn but the first, seconds since the end of the one before; 0 where they overlapped."""
    return [max(0.0, after.start_s - before.start_s - before.took_s) for before, after in pairwise(turns)]


def prompt_of(seed: str, session: str, units: Sequence[int]) -> list[int]:
    """The token ids of a prompt: of each stretch as many, always the same for the same one of a session."""
    return [
        token
        for unit in units
        for token in random.Random(f"{seed} {session} {unit}").choices(_TOKEN_IDS, k=UNIT_TOKENS)
    ]


def total(answered: Sequence[Answered], held_block_s: float) -> Played:
    """The turns of a window, summed up."""
    return Played(
        turns=len(answered),
        turns_reusing=sum(one.reused_tokens > 0 for one in answered),
        prompt_tokens=sum(one.prompt_tokens for one in answered),
        reused_tokens=sum(one.reused_tokens for one in answered),
        held_block_s=held_block_s,
    )


def play_session(
    turns: Sequence[TraceTurn], due_s: float, ends_s: float, send: Callable[[TraceTurn], int]
) -> list[Answered]:
    """One turn after the other, the first one due at `due_s`: those that `send` has answered by `ends_s`."""
    answered: list[Answered] = []
    for turn, pause_s in zip(turns, [*pauses_s(turns), 0.0], strict=True):
        if due_s >= ends_s:
            break
        time.sleep(max(0.0, due_s - time.monotonic()))
        reused = send(turn)
        ended_s = time.monotonic()
        if ended_s <= ends_s:
            answered.append(Answered(len(turn.units) * UNIT_TOKENS, reused))
        due_s = ended_s + pause_s
    return answered


class Window:
    """One policy's window on a running stack. `play` may be called once."""

    def __init__(self, stack: Stack, router: Router, seed: str, effort: Effort) -> None:
        self._stack = stack
        self._url = router.url
        self._model = served_model(stack.decode[0].url)
        self._seed = seed
        self._effort = effort

    def play(self, sessions: Sequence[TraceSession]) -> Played:
        """All sessions side by side until the window ends; what is under way then counts for nothing."""
        before = counters(self._stack)[HELD]
        began_s = time.monotonic()
        ends_s = began_s + self._effort.window_s
        spacing_s = self._effort.begin_within_s / len(sessions)
        with ThreadPoolExecutor(len(sessions)) as pool:
            playing = [
                pool.submit(self._session, session, began_s + number * spacing_s, ends_s)
                for number, session in enumerate(sessions)
            ]
            time.sleep(self._effort.window_s)
            held_block_s = counters(self._stack)[HELD] - before
            answered = [turn for one in playing for turn in one.result()]
        return total(answered, held_block_s)

    def _session(self, one: TraceSession, due_s: float, ends_s: float) -> list[Answered]:
        return play_session(one.turns, due_s, ends_s, lambda turn: self._turn(one.name, turn))

    def _turn(self, session: str, turn: TraceTurn) -> int:
        body = {
            "model": self._model,
            "prompt": prompt_of(self._seed, session, turn.units),
            "max_tokens": min(MAX_ANSWER_TOKENS, max(1, turn.output_tokens // SHRINK)),
            "ignore_eos": True,
            "temperature": 0,
        }
        return whole(self._url, body, session).reused_tokens


def counters(stack: Stack) -> dict[str, int]:
    """Decode's own count of its leases: what is held, what has been, and how many were reclaimed."""
    key = (stack.folder / "secret").read_bytes().strip()
    with ControlClient(key, "127.0.0.1", stack.decode[0].control_port) as client:
        answer = client.ask(Stat())
    if not isinstance(answer, StatReply) or HELD not in answer.counters:
        raise UserError(f"decode answered stat with {answer}")
    return {name: answer.counters.get(name, 0) for name in (HELD, HELD_NOW, RECLAIMS)}


def wait_for_the_end(stack: Stack, within_s: float) -> None:
    """Until decode's leases hold nothing. Raises `UserError` where they go on for longer."""
    deadline_s = time.monotonic() + within_s
    while held := counters(stack)[HELD_NOW]:
        if time.monotonic() > deadline_s:
            raise UserError(f"leases outlive the TTL: {held} blocks are still held")
        time.sleep(1)
