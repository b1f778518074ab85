"""The flags of `kvloop bench` that say what is asked: a generated workload or a recorded one."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvloop.bench.trace import DEFAULT_TRACE
from kvloop.bench.workload.agent import AgentOptions, made_up
from kvloop.bench.workload.by_length import NAME as LENGTHS
from kvloop.bench.workload.by_length import by_length
from kvloop.bench.workload.distributions import Fixed
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.read import AGENT, FORMATS, read_workload
from kvloop.bench.workload.turns import Conversation, Workload, planned_tokens
from kvloop.errors import UserError

DEFAULT_CONVERSATIONS = 8
TEMPLATE_TOKENS = 100
"""What a chat template may add to a prompt of some messages, reckoned generously."""
_FIXED = ("turns", "system_tokens", "user_tokens", "tool_tokens", "answer_tokens", "think_s", "tool_s")
_SHARES = ("single_share", "fork_share", "tool_share", "edit_share", "agents", "tenants")


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """What is asked, how much of it, and how large."""
    group = parser.add_argument_group("what is asked")
    group.add_argument(
        "--workload",
        choices=(*FORMATS, LENGTHS),
        default=AGENT,
        help="made-up agents, two turns of given lengths, or the format of --trace (default: %(default)s)",
    )
    group.add_argument(
        "--trace", type=Path, metavar="FILE", help="a recording (agent-sessions: default is the one shipped)"
    )
    group.add_argument(
        "--conversations",
        type=int,
        metavar="N",
        help=f"how many (default: {DEFAULT_CONVERSATIONS} made-up ones, or all of a recording)",
    )
    group.add_argument(
        "--scale", type=float, default=1.0, metavar="F", help="divide all lengths by this (default: 1)"
    )
    group.add_argument(
        "--max-prompt-tokens", type=int, metavar="N", help="end a conversation before a longer prompt"
    )
    group.add_argument("--max-answer-tokens", type=int, metavar="N", help="ask for no longer answers")
    group.add_argument("--seed", type=int, default=1, metavar="N", help="of all that is drawn (default: 1)")
    group.add_argument(
        "--prompt-tokens",
        type=_sizes,
        metavar="N,N",
        help="lengths: of the second turns, --conversations of each (default: 1)",
    )
    made = parser.add_argument_group(
        "made-up agents", "Lengths and gaps are distributions, or fixed by these."
    )
    made.add_argument("--turns", type=int, metavar="N", help="turns of a conversation")
    made.add_argument("--system-tokens", type=int, metavar="N", help="system prompt and tools")
    made.add_argument("--user-tokens", type=int, metavar="N", help="what a person says")
    made.add_argument("--tool-tokens", type=int, metavar="N", help="a tool's result")
    made.add_argument("--answer-tokens", type=int, metavar="N", help="an answer")
    made.add_argument("--think-s", type=float, metavar="S", help="before a person says something")
    made.add_argument("--tool-s", type=float, metavar="S", help="before a tool's result")
    made.add_argument("--tool-share", type=float, metavar="F", help="turns that bring a tool's result")
    made.add_argument("--fork-share", type=float, metavar="F", help="conversations that fork")
    made.add_argument("--edit-share", type=float, metavar="F", help="turns that change what was said")
    made.add_argument("--single-share", type=float, metavar="F", help="conversations of a single turn")
    made.add_argument("--agents", type=int, metavar="N", help="different system prompts")
    made.add_argument("--tenants", type=int, metavar="N", help="tenants, each with prompts of its own")


def workload_of(args: argparse.Namespace, time_scale: float, warm_up: int) -> Workload:
    """What the flags describe, and `warm_up` conversations more. Raises `UserError`."""
    if args.workload == LENGTHS:
        return by_length(args.prompt_tokens or (), args.conversations or 1, more=warm_up, **_given(args))
    if args.prompt_tokens is not None:
        raise UserError("--prompt-tokens is for --workload lengths")
    if args.workload == AGENT:
        if args.trace is not None:
            raise UserError("--trace needs --workload with the file's format, or auto")
        return made_up(_agents(args, time_scale, warm_up))
    given = [name for name in (*_FIXED, *_SHARES) if getattr(args, name) is not None]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise UserError(f"{flag} is for made-up agents; a recording is as it was recorded, or --scale")
    path = args.trace or (DEFAULT_TRACE if args.workload == "agent-sessions" else None)
    if path is None:
        raise UserError(f"--workload {args.workload} needs --trace FILE")
    options = RecordingOptions(
        scale=args.scale,
        time_scale=time_scale,
        max_prompt_tokens=args.max_prompt_tokens,
        conversations=None if args.conversations is None else args.conversations + warm_up,
        seed=args.seed,
    )
    return _shortened(read_workload(args.workload, path, options), args.max_answer_tokens)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"numbers of tokens, separated by commas, not {text!r}") from None


def _given(args: argparse.Namespace) -> dict[str, int]:
    given = {"answer_tokens": args.answer_tokens, "new_tokens": args.user_tokens}
    if any(value is not None and value < 1 for value in given.values()):
        raise UserError("--answer-tokens and --user-tokens must be at least 1")
    return {name: value for name, value in given.items() if value is not None}


def _agents(args: argparse.Namespace, time_scale: float, warm_up: int) -> AgentOptions:
    wanted = DEFAULT_CONVERSATIONS if args.conversations is None else args.conversations
    chosen: dict[str, Any] = {"seed": args.seed, "conversations": wanted + warm_up, "time_scale": time_scale}
    chosen["scale"] = args.scale
    for name in ("max_prompt_tokens", "max_answer_tokens", *_SHARES):
        if (value := getattr(args, name)) is not None:
            chosen[name] = value
    for name in _FIXED:
        if (value := getattr(args, name)) is not None:
            # A length that was given is meant as it is, whatever the rest is divided by.
            chosen[name] = Fixed(value * args.scale if name.endswith("_tokens") else value)
    return AgentOptions(**chosen)


def _shortened(workload: Workload, max_answer_tokens: int | None) -> Workload:
    if max_answer_tokens is None:
        return workload
    if max_answer_tokens < 1:
        raise UserError(f"--max-answer-tokens must be at least 1, not {max_answer_tokens}")
    cut = [
        replace(
            one,
            turns=tuple(
                replace(turn, answer_tokens=min(turn.answer_tokens, max_answer_tokens)) for turn in one.turns
            ),
        )
        for one in workload.conversations
    ]
    return replace(workload, conversations=tuple(cut))


def split_warm_up(workload: Workload, warm_up: int) -> tuple[tuple[Conversation, ...], Workload]:
    """The last `warm_up` conversations, of which two turns are enough for engines to meet, and the rest.
    UserError where nothing would be left."""
    if not warm_up:
        return (), workload
    if len(workload.conversations) <= warm_up:
        raise UserError(
            f"the workload has {len(workload.conversations)} conversations, and {warm_up} are to warm up: "
            "--warm-up 0 does without"
        )
    kept, first = workload.conversations[:-warm_up], workload.conversations[-warm_up:]
    return tuple(replace(one, turns=one.turns[:2]) for one in first), replace(workload, conversations=kept)


def require_room(workload: Workload, max_tokens: int | None) -> None:
    """UserError where a planned prompt with its answer is longer than a model takes."""
    if max_tokens is None:
        return
    for one in workload.conversations:
        for number, turn in enumerate(one.turns):
            prompt = planned_tokens(one, number)
            if prompt is not None and prompt + turn.answer_tokens + TEMPLATE_TOKENS > max_tokens:
                raise UserError(
                    f"{one.name}, turn {number}: {prompt} tokens and an answer of {turn.answer_tokens} do "
                    f"not fit into the model's {max_tokens}: use --scale or --max-prompt-tokens"
                )
