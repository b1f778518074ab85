"""The input of vLLM's own multi-turn benchmark (`benchmarks/multi_turn`), both kinds of file.

One is a list of conversations with `messages`, as its converter writes it; it is read as ShareGPT's form is.
The other says how conversations are to be made up:

    {"filetype": "generate_conversations", "num_conversations": 24, "text_files": ["pg1184.txt"],
     "prompt_input": {"num_turns": D, "common_prefix_num_tokens": D, "prefix_num_tokens": D, "num_tokens": D},
     "prompt_output": {"num_tokens": D}}

where each D is a distribution, `{"distribution": "uniform", "min": 12, "max": 18}`. `num_turns` counts users'
and assistants' messages; the common prefix stands in front of all conversations, the other prefix in front of
one. The lengths are drawn as told, from our seed, so they are others than vLLM's tool draws. Text is made up,
and `text_files` are not looked at."""

import math
import random
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvloop.bench.workload.agent import MAX_CONVERSATIONS, MAX_TURNS
from kvloop.bench.workload.distributions import (
    MAX_DRAWN,
    Distribution,
    Fixed,
    Lognormal,
    Poisson,
    Uniform,
    Zipf,
)
from kvloop.bench.workload.files import decoded, is_list, read_bytes
from kvloop.bench.workload.options import RecordingOptions
from kvloop.bench.workload.recording import Asked, Recorded, workload
from kvloop.bench.workload.sharegpt import read_sharegpt
from kvloop.bench.workload.turns import Workload
from kvloop.core.chain import MAX_CHAIN_TOKENS
from kvloop.errors import UserError

MEDIAN_RATIO = 0.85
"""Of a lognormal that is given by its average alone: vLLM's default."""

Number = Annotated[float, msgspec.Meta(ge=0, le=MAX_DRAWN)]
Most = Annotated[float, msgspec.Meta(ge=1, le=MAX_DRAWN)]
Alpha = Annotated[float, msgspec.Meta(ge=1.001, le=100)]
Ratio = Annotated[float, msgspec.Meta(gt=0, lt=1)]
Sigma = Annotated[float, msgspec.Meta(ge=0, le=20)]
Mean = Annotated[float, msgspec.Meta(gt=0, le=20)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_CONVERSATIONS)]


class _Constant(msgspec.Struct, tag_field="distribution", tag="constant", forbid_unknown_fields=True):
    value: Number


class _Uniform(msgspec.Struct, tag_field="distribution", tag="uniform", forbid_unknown_fields=True):
    low: int | Number = msgspec.field(name="min")
    high: int | Number = msgspec.field(name="max")


class _Lognormal(msgspec.Struct, tag_field="distribution", tag="lognormal", forbid_unknown_fields=True):
    average: Most | None = None
    median_ratio: Ratio | None = None
    mean: Mean | None = None
    sigma: Sigma | None = None
    most: Most | None = msgspec.field(name="max", default=None)


class _Zipf(msgspec.Struct, tag_field="distribution", tag="zipf", forbid_unknown_fields=True):
    alpha: Alpha
    most: Most | None = msgspec.field(name="max", default=None)


class _Poisson(msgspec.Struct, tag_field="distribution", tag="poisson", forbid_unknown_fields=True):
    alpha: Number
    most: Most | None = msgspec.field(name="max", default=None)


_Drawn = _Constant | _Uniform | _Lognormal | _Zipf | _Poisson


class _Input(msgspec.Struct, forbid_unknown_fields=True):
    num_turns: _Drawn
    prefix_num_tokens: _Drawn
    num_tokens: _Drawn
    common_prefix_num_tokens: _Drawn = msgspec.field(default_factory=lambda: _Constant(0))


class _Output(msgspec.Struct, forbid_unknown_fields=True):
    num_tokens: _Drawn


class _Generate(msgspec.Struct, forbid_unknown_fields=True):
    filetype: Literal["generate_conversations"]
    num_conversations: Count
    prompt_input: _Input
    prompt_output: _Output
    text_files: list[str] = msgspec.field(default_factory=list)
    print_stats: bool = False


def read_multi_turn(path: Path, options: RecordingOptions | None = None) -> Workload:
    """The conversations of a file, or those that it describes. UserError that names the field."""
    options = options or RecordingOptions()
    data = read_bytes(path)
    if is_list(data):
        return read_sharegpt(path, options, "multi-turn")
    plan = decoded(data, _Generate, f"{path}")
    try:
        found = _made_up(plan, options.seed)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return workload("multi-turn", path.name, found, options)


def _made_up(plan: _Generate, seed: int) -> list[Recorded]:
    turns = _distribution(plan.prompt_input.num_turns)
    prefix = _distribution(plan.prompt_input.prefix_num_tokens)
    tokens = _distribution(plan.prompt_input.num_tokens)
    answer = _distribution(plan.prompt_output.num_tokens)
    everybodys = _tokens(
        _distribution(plan.prompt_input.common_prefix_num_tokens), random.Random(f"{seed}/everybody"), 0
    )
    found = []
    for number in range(plan.num_conversations):
        name = f"multi-turn-{number}"
        chance = random.Random(f"{seed}/{name}")
        users = min(MAX_TURNS, math.ceil(max(2, turns.draw(chance)) / 2))
        own = _tokens(prefix, chance, 0)
        found.append(Recorded(name, _asked(users, everybodys, own, tokens, answer, chance)))
    return found


def _asked(
    users: int, everybodys: int, own: int, tokens: Distribution, answer: Distribution, chance: random.Random
) -> list[Asked]:
    """A line of turns, each due when the one before it is answered; none beyond what any engine holds."""
    asked: list[Asked] = []
    shared = everybodys + own
    beginning = (("multi-turn/everybody", everybodys),) if everybodys else ()
    for number in range(users):
        prompt = shared + _tokens(tokens, chance, 1)
        if prompt > MAX_CHAIN_TOKENS:
            break
        said = _tokens(answer, chance, 1)
        if number:
            asked.append(Asked(0.0, 0.0, prompt, said, number - 1, shared, number - 1))
        else:
            asked.append(Asked(0.0, 0.0, prompt, said, beginning=beginning))
        shared = prompt + said
    return asked


def _tokens(distribution: Distribution, chance: random.Random, least: int) -> int:
    return max(least, min(MAX_CHAIN_TOKENS, round(distribution.draw(chance))))


def _distribution(drawn: _Drawn) -> Distribution:
    match drawn:
        case _Constant(value):
            return Fixed(value)
        case _Uniform(low, high):
            return Uniform(low, high, whole=isinstance(low, int) and isinstance(high, int))
        case _Zipf(alpha, most):
            return Zipf(alpha, most or MAX_DRAWN)
        case _Poisson(alpha, most):
            return Poisson(alpha, most or MAX_DRAWN)
        case _Lognormal(average, ratio, mean, sigma, most):
            return _lognormal(average, ratio, mean, sigma, most or MAX_DRAWN)


def _lognormal(
    average: float | None, ratio: float | None, mean: float | None, sigma: float | None, most: float
) -> Lognormal:
    """By its average and the median's part of it, or by the normal distribution beneath."""
    if average is not None and mean is None and sigma is None:
        ratio = ratio or MEDIAN_RATIO
        return Lognormal(average * ratio, math.sqrt(2 * math.log(1 / ratio)), most)
    if average is None and ratio is None and mean is not None and sigma is not None:
        return Lognormal(math.exp(mean), sigma, most)
    raise UserError("a lognormal needs `average` (and `median_ratio`), or else `mean` and `sigma`")
