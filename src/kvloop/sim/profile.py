"""How long a simulated engine takes for what: the numbers of one model on one machine.

A step either waits for the weights to be read, which takes the same whatever goes through them, or for the
arithmetic of its tokens, whichever is longer: the roofline. On top of that comes a part for each pair of a
token and an earlier one that it attends to, which grows with the square of the prompt, and one for a prompt's
chunk as such. A transfer costs a fixed part, a part for each block (its descriptors) and a part for each
token (its bytes). Files under `profiles/` say where each number is from; a field that is missing, unknown or
negative is an error.
"""

from importlib import resources
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from kvloop.errors import UserError
from kvloop.sim.memory import cell_size

NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Nanoseconds = NotNegative
Positive = Annotated[int, msgspec.Meta(ge=1)]
_SUFFIX = ".toml"


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pass through the model: reading its weights (`base_ns`), or its tokens' arithmetic (`token_ns`
    each), whichever is longer; attention over pairs of tokens; and `prompt_ns` if there is a prompt in it.
    """

    base_ns: Nanoseconds
    prompt_ns: Nanoseconds
    token_ns: Nanoseconds
    pair_ps: Nanoseconds  # picoseconds: one pair takes less than a nanosecond

    def takes_ns(self, parts: list[tuple[int, int]]) -> int:
        """Nanoseconds of a step whose requests compute so many tokens behind so many others each."""
        tokens = sum([count for count, _ in parts])
        pairs = 0
        if self.pair_ps:
            pairs = sum([count * before + count * (count + 1) // 2 for count, before in parts])
        prompt_ns = self.prompt_ns if tokens > len(parts) else 0
        return max(self.base_ns, self.token_ns * tokens) + self.pair_ps * pairs // 1000 + prompt_ns


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One read of another engine's blocks. Reads of one engine follow one another on its link.

    `setup_ns` passes before the first byte and keeps no link busy.
    """

    setup_ns: Nanoseconds
    block_ns: Nanoseconds
    token_ns: Nanoseconds

    def busy_ns(self, blocks: int, block_tokens: int) -> int:
        """Nanoseconds that reading so many blocks keeps the link busy."""
        return blocks * (self.block_ns + block_tokens * self.token_ns)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine holds, and how much it does at once."""

    block_tokens: Positive
    blocks: Positive
    batch_tokens: Positive  # in one step; a longer prompt takes several (chunked prefill)
    running: Positive  # requests in one step
    model_tokens: Positive  # prompt and answer together


class Frontend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The API server in front: nanoseconds from a request's arrival to its place in the queue."""

    request_ns: Nanoseconds
    token_ns: Nanoseconds


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model on a machine, as time and space.

    `fitted_tokens`: the longest prompt that its times were fitted at, 0 where that is not known. `caveat`:
    what else to know before believing them.
    """

    title: str
    model: str
    kv_token_bytes: NotNegative  # 0: not known
    limits: Limits
    frontend: Frontend
    step: Step
    transfer: Transfer
    fitted_tokens: NotNegative = 0
    caveat: str = ""

    def __post_init__(self) -> None:
        cell_size(self.limits.block_tokens)
        if self.limits.blocks * self.limits.block_tokens < self.limits.model_tokens:
            raise UserError(f"{self.limits.blocks} blocks do not hold one request of {self.model}")

    def faster(self, factor: float) -> "Profile":
        """The same, with every duration divided by `factor`."""
        if factor <= 0:
            raise UserError("a speed must be positive")

        return msgspec.structs.replace(
            self,
            frontend=_faster(self.frontend, factor),
            step=_faster(self.step, factor),
            transfer=_faster(self.transfer, factor),
        )


Timed = TypeVar("Timed", Frontend, Step, Transfer)


def _faster(timed: Timed, factor: float) -> Timed:
    changed = {name: round(getattr(timed, name) / factor) for name in timed.__struct_fields__}
    return msgspec.structs.replace(timed, **changed)


def built_in() -> list[str]:
    """The names of the profiles that come with the package."""
    folder = resources.files("kvloop.sim") / "profiles"
    return sorted(
        entry.name.removesuffix(_SUFFIX) for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)
    )


def load_profile(name: str) -> Profile:
    """A built-in profile by its name, or one from a file. UserError for none, or one that is not whole."""
    if name in built_in():
        text = (resources.files("kvloop.sim") / "profiles" / f"{name}{_SUFFIX}").read_text()
    else:
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            known = ", ".join(built_in())
            raise UserError(f"there is no profile {name!r}: choose from {known}, or name a file") from error
    try:
        return msgspec.toml.decode(text, type=Profile)
    except (msgspec.MsgspecError, ValueError) as error:
        raise UserError(f"profile {name}: {error}") from error
