"""The simulation beside this machine's real engines: the same turns, token for token, through both.

A real prefill and a real decode engine with SmolLM2, and the same pair simulated with the profile that was
calibrated for such a machine (`python -m kvloop.bench.calibrate`), each behind its own routers, as
`kvloop up` and `kvloop up --sim` start them. Turns alternate between the two, and only one is under way at a
time. Judged are

* the time to the first token, with the history read back and computed anew, at prompt sizes at which the
  profile was not calibrated: medians, and the simulated one's error;
* the tokens that every turn of a few scripted conversations reuses: equal on both sides, and equal to what
  decode must hold of the prompt (`token_turn.known_reuse`).
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvloop.bench.report import Bound, Row, Target, spread
from kvloop.bench.token_turn import (
    ANSWER_TOKENS,
    Forks,
    Side,
    TokenTurn,
    known_reuse,
    token_ids,
)
from kvloop.bench.ttft import PATIENT
from kvloop.errors import UserError
from kvloop.local.simulated import DEFAULT_PROFILE, build_simulated, simulated_model
from kvloop.local.stack import Stack
from kvloop.local.stack_config import StackConfig
from kvloop.local.up import CLAIM_TIMEOUT_MS

Say = Callable[[str], None]

MODEL = "smollm2"
MOST_PERCENT = 15
REPETITIONS: Mapping[int, int] = {570: 5, 1_900: 3, 5_600: 2}
"""Conversations of each prompt size: a long one takes a minute, and its spread is small."""
QUICK_REPETITIONS: Mapping[int, int] = {570: 1}
MAX_DISCARDED = 2
"""Conversations per size that may not be as planned: on a loaded machine a claim can time out."""


@dataclass(frozen=True, slots=True)
class Step:
    """A turn of a script: so much of the conversation so far stays (a slice's end), so much is new."""

    new_tokens: int
    answer_tokens: int = ANSWER_TOKENS
    keep: int | None = None


SCRIPTS: Mapping[str, tuple[Step, ...]] = {
    "continued": (Step(300, 20), Step(150), Step(77, 40), Step(200, 8)),
    "longer than a few blocks": (Step(1_100), Step(64), Step(131)),
    "edited at token 200": (Step(500), Step(100), Step(450, keep=200), Step(90)),
    "compacted to 30 tokens": (Step(400), Step(100, keep=30), Step(150)),
    "asked again": (Step(400), Step(80), Step(0, keep=-ANSWER_TOKENS), Step(90)),
    "short": (Step(40, 10), Step(60, 10), Step(50)),
}
"""Conversations whose reuse is known: continued, changed in their past, and too short to be read back."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Tokens that one turn of a script reused, and how many are known to be held."""

    reused: int
    known: int


@dataclass(slots=True)
class Times:
    """Seconds to the first token by prompt size, each way, and per token after it; in the order taken."""

    returned: dict[int, list[float]] = field(default_factory=dict)
    one_way: dict[int, list[float]] = field(default_factory=dict)
    per_token: dict[int, list[float]] = field(default_factory=dict)

    def add(self, tokens: int, forks: Forks) -> None:
        """One more conversation's."""
        self.returned.setdefault(tokens, []).append(forks.returned.first_token_s)
        self.one_way.setdefault(tokens, []).append(forks.one_way.first_token_s)
        taken = self.per_token.setdefault(tokens, [])
        taken += [forks.returned.per_token_s, forks.one_way.per_token_s]


def measure(seed: str, is_quick: bool, say: Say) -> list[Row]:
    """The rows. Raises `UserError` where something does not start, or turns are not as planned."""
    with real_side(say) as real, simulated_side(DEFAULT_PROFILE, say) as simulated:
        sides = (real, simulated)
        reused = [_scripts(side, seed, say) for side in sides]
        times = sample(sides, seed, QUICK_REPETITIONS if is_quick else REPETITIONS, say)
    return [*time_rows(*times), *reuse_rows(*reused)]


@contextmanager
def real_side(say: Say) -> Iterator[Side]:
    """This machine's engines, and the two routers in front of them."""
    with Stack(_config(), say=say) as stack:
        yield _side("real", stack)


@contextmanager
def simulated_side(profile: str, say: Say) -> Iterator[Side]:
    """The same, simulated."""
    model = simulated_model(profile)
    with Stack(_config(), build=build_simulated(profile), model=model, say=say) as stack:
        yield _side("simulated", stack)


def _config() -> StackConfig:
    return StackConfig(
        model=MODEL,
        prefill_flags=("--no-enable-prefix-caching",),
        prefill_extra={"kvloop_claim_timeout_ms": CLAIM_TIMEOUT_MS},
        router_flags=PATIENT,
    )


def _side(name: str, stack: Stack) -> Side:
    one_way = stack.add_router("one-way", ("--return", "off", *PATIENT))
    return Side(name, stack, one_way.url)


def sample(sides: Sequence[Side], seed: str, repetitions: Mapping[int, int], say: Say) -> list[Times]:
    """Each side's times, taken in turns. The first conversation pays for handshakes and is thrown away.
    Raises `UserError` after too many that were not as planned."""
    found = [Times() for _ in sides]
    for side in sides:
        side.forks(f"{seed} first", min(repetitions), returned_first=True)
    for tokens, wanted in repetitions.items():
        done = discarded = 0
        while done < wanted:
            named = f"{seed} {tokens} {done + discarded}"
            try:
                taken = [side.forks(named, tokens, returned_first=done % 2 == 0) for side in sides]
            except UserError as error:
                discarded += 1
                say(f"a sample is thrown away: {error}")
                if discarded > MAX_DISCARDED:
                    raise
                continue
            done += 1
            for side, times, forks in zip(sides, found, taken, strict=True):
                times.add(tokens, forks)
                one_way_s, returned_s = forks.one_way.first_token_s, forks.returned.first_token_s
                say(f"{side.name}, {tokens} tokens: {one_way_s:.2f} s one-way, {returned_s:.2f} s returned")
    return found


def _scripts(side: Side, seed: str, say: Say) -> dict[str, list[Reuse]]:
    found: dict[str, list[Reuse]] = {}
    for name, steps in SCRIPTS.items():
        found[name] = play(side.turn, steps, f"{seed} {name}")
        say(f"{side.name}, {name}: {', '.join(str(turn.reused) for turn in found[name])} tokens reused")
    return found


def play(
    send: Callable[[Sequence[int], int, str], TokenTurn], steps: Sequence[Step], seed: str
) -> list[Reuse]:
    """A scripted conversation, turn by turn; `send` gets the prompt, the answer's length and the session."""
    history: list[int] = []
    found: list[Reuse] = []
    for number, step in enumerate(steps):
        prompt = [*history[: step.keep], *token_ids(f"{seed} {number}", step.new_tokens)]
        turn = send(prompt, step.answer_tokens, seed)
        found.append(Reuse(turn.reused_tokens, known_reuse(history, prompt)))
        history = [*prompt, *turn.answer]
    return found


def time_rows(real: Times, simulated: Times) -> list[Row]:
    """Each prompt size and way: how far the simulated median is from the real one."""
    rows: list[Row] = []
    for way in ("one_way", "returned"):
        theirs, ours = getattr(real, way), getattr(simulated, way)
        for tokens, taken in theirs.items():
            error = error_percent(statistics.median(taken), statistics.median(ours[tokens]))
            rows.append(
                Row(
                    f"TTFT, {tokens} tokens, {way.replace('_', '-')}: error",
                    abs(error),
                    "%",
                    Target(Bound.AT_MOST, MOST_PERCENT),
                    f"real {spread(taken, 's')}, simulated {spread(ours[tokens], 's')}: {error:+.1f} %",
                )
            )
    return rows


def error_percent(real_s: float, simulated_s: float) -> float:
    """By how much more the simulation takes, in percent of the real time."""
    return 100 * (simulated_s / real_s - 1)


def reuse_rows(real: Mapping[str, list[Reuse]], simulated: Mapping[str, list[Reuse]]) -> list[Row]:
    """Each turn but the first of each script: tokens by which the three counts differ at most."""
    rows: list[Row] = []
    for name, turns in real.items():
        both = list(zip(turns, simulated[name], strict=True))
        for number, (theirs, ours) in enumerate(both[1:], 2):
            counts = (theirs.reused, ours.reused, theirs.known)
            rows.append(
                Row(
                    f"tokens reused, {name}, turn {number}: difference",
                    max(counts) - min(counts),
                    "",
                    Target(Bound.AT_MOST, 0),
                    "{} real, {} simulated, {} known".format(*counts),
                )
            )
    return rows
