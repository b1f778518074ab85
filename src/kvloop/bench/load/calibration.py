"""How many tokens a made-up word is to an endpoint's model, by the endpoint's own count.

Two prompts of so many words are sent, one longer than the other: what a chat template adds falls out of the
difference. An endpoint that does not count is believed to have a token a word.
"""

from kvloop.bench.load.api import body_of
from kvloop.bench.load.play import Target
from kvloop.bench.workload.texts import Texts
from kvloop.errors import UserError

SHORT_WORDS, LONG_WORDS = 64, 320


async def tokens_per_word(target: Target, seed: int) -> float:
    """Ask. Raises `UserError` where the endpoint does not answer."""
    texts = Texts(f"calibration {seed}", 1.0)
    counts: list[int | None] = []
    for words in (SHORT_WORDS, LONG_WORDS):
        prompt = [("user", texts.stretch("words", words))]
        heard = await target.endpoint.ask(
            target.style.api.path,
            body_of(target.style, target.model, prompt, 1),
            target.timeout_s,
            stream=target.style.stream,
            name="calibration",
            max_tokens=1,
        )
        if not heard.is_good:
            raise UserError(f"{target.endpoint.url} does not answer: {heard.error}")
        counts.append(None if heard.usage is None else heard.usage.prompt_tokens)
    short, long = counts
    if short is None or long is None or long <= short:
        return 1.0
    return (long - short) / (LONG_WORDS - SHORT_WORDS)
