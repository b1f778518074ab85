"""Traces of blocks as hypothesis draws them: prompts that go on from others, leave them, repeat them."""

from dataclasses import dataclass

from hypothesis import strategies as st


@dataclass(frozen=True)
class Prompt:
    """One request: the names of its whole blocks, tokens after them, a name for these, when it came."""

    whole: tuple[int, ...]
    tail_tokens: int
    tail: int
    at_ms: int


@st.composite
def traces(draw: st.DrawFn, block_tokens: int, least_blocks: int = 0) -> list[Prompt]:
    """Up to a dozen prompts, in order. Names of blocks are unique to what is before them, as hashes are."""
    prompts: list[Prompt] = []
    fresh = 0
    at_ms = 0
    for _ in range(draw(st.integers(1, 12))):
        at_ms += draw(st.sampled_from((0, 1, 5000, 100_000)))
        whole: list[int] = []
        if prompts and draw(st.integers(0, 9)):
            other = draw(st.sampled_from(prompts))
            if not draw(st.integers(0, 7)):
                prompts.append(Prompt(other.whole, other.tail_tokens, other.tail, at_ms))
                continue
            kept = len(other.whole) if draw(st.booleans()) else draw(st.integers(0, len(other.whole)))
            whole += other.whole[:kept]
        for _ in range(draw(st.integers(0, 6))):
            fresh += draw(st.sampled_from((1, 1, 1, 5)))
            whole.append(fresh)
        while len(whole) < least_blocks:
            fresh += 1
            whole.append(fresh)
        tail_tokens = draw(st.integers(0 if whole else 1, block_tokens - 1))
        fresh += 1
        prompts.append(Prompt(tuple(whole), tail_tokens, fresh, at_ms))
    return prompts
