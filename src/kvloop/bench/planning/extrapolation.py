"""What of a plan is extrapolated, and why: everything that was neither recorded nor measured.

A simulation answers every question to the millisecond. What the answer rests on is said beside it, each time
with how much of the traffic it concerns.
"""

from collections.abc import Iterator, Sequence

from kvloop.bench.planning.arrangement import UPSTREAM_TTL_S, Way
from kvloop.bench.planning.run import Came
from kvloop.bench.planning.traffic import Traffic
from kvloop.sim.profile import Profile

FEW_PROMPTS = 8  # of the longest, that an engine should hold at a time


def extrapolated(traffic: Traffic, profile: Profile, name: str, came: Sequence[Came]) -> list[str]:
    """A sentence for each, none of which is about what did not happen."""
    return [
        *_times(traffic, profile, name),
        *_sizes(traffic, profile, name, came),
        *_recording(traffic),
        *_model(came),
    ]


def _times(traffic: Traffic, profile: Profile, name: str) -> Iterator[str]:
    if profile.caveat:
        yield f"the profile {name} is {profile.caveat}"
    fitted = profile.fitted_tokens
    if not fitted:
        yield f"the profile {name} does not say up to which prompts its times were fitted"
        return
    prompts = [turn.prompt_tokens for one in traffic.sessions for turn in one.turns]
    longer = sum(tokens > fitted for tokens in prompts)
    if longer:
        yield (
            f"{longer:,} of {len(prompts):,} prompts ({100 * longer / len(prompts):.0f} %) are longer than "
            f"{fitted:,} tokens, the longest that the profile was fitted at: their times go on as "
            "its formula does"
        )


def _sizes(traffic: Traffic, profile: Profile, name: str, came: Sequence[Came]) -> Iterator[str]:
    limits = profile.limits
    room, longest = limits.blocks * limits.block_tokens, traffic.longest_tokens
    if room < FEW_PROMPTS * longest:
        yield (
            f"an engine of {name} holds {room:,} tokens, {room / longest:.1f} times the longest turn here: "
            "one with more or less memory keeps, caches and preempts otherwise"
        )
    if not profile.kv_token_bytes:
        yield f"the profile {name} does not say how large a token's KV is: memory is in tokens only"
    for one in came:
        if not one.is_through:
            yield (
                f"{one.arrangement.way}, {one.arrangement.ratio}, does not keep up: only "
                f"{one.tokens.prompt:,} tokens of prompts were answered when the run was ended"
            )
        if one.tokens.unaccounted_turns:
            yield (
                f"{one.arrangement.way}, {one.arrangement.ratio}: {one.tokens.unaccounted_turns:,} turns "
                "that decode served alone left no account, and count as computed"
            )


def _recording(traffic: Traffic) -> Iterator[str]:
    played, asked = len(traffic.sessions), traffic.asked
    if played < traffic.recorded:
        yield (
            f"{played:,} of {traffic.recorded:,} conversations were played ({traffic.turns:,} of "
            f"{traffic.recorded_turns:,} turns), evenly taken, at the rate of all: in {traffic.lasts_s:,.0f} "
            "s fewer of them are open at a time than in a longer run, so queues and memory come out smaller"
        )
    if asked.scale != 1:
        yield f"all lengths are the recorded ones divided by {asked.scale:g}, gaps are not"
    if asked.max_prompt_tokens is not None:
        yield f"conversations end before their first prompt of more than {asked.max_prompt_tokens:,} tokens"
    if not traffic.has_starts:
        why = "as you said" if asked.per_hour is not None else "which was not recorded: it is all in one hour"
        yield (
            f"conversations begin at random, {traffic.per_hour:,.0f} an hour, {why} "
            "(--conversations-per-hour)"
        )
    if not traffic.has_gaps and traffic.turns > played:
        yield "how long people and tools took was not recorded: every turn comes as soon as it can"
    elif traffic.has_starts and traffic.span_s < UPSTREAM_TTL_S:
        yield (
            f"the recording lasts {traffic.span_s:,.0f} s, less than a TTL of {UPSTREAM_TTL_S} s: who "
            "returns later than that is not in it"
        )
    if traffic.estimates_lengths:
        yield "of some texts only the bytes are known: four make a token"
    share = traffic.answer_tokens / max(1, traffic.prompt_tokens)
    yield (
        f"what answers said was not recorded, so they ({traffic.answer_tokens:,} tokens, "
        f"{100 * share:.1f} % of the prompts') are computed again in every way when they come back: less "
        "reuse than there would be"
    )


def _model(came: Sequence[Came]) -> Iterator[str]:
    yield "conversations have nothing in common here: that a system prompt is cached once for all is left out"
    if any(one.arrangement.way is Way.UPSTREAM and one.reclaimed for one in came):
        yield (
            "upstream's blocks are given up to live work here, as kvloop's are; its own are pinned, so that "
            "requests would wait for them instead"
        )
    yield "all ways have kvloop's router, and upstream kvloop's proof of what is the same"
    yield "one run of one seed each: differences of a few percent may be chance"
