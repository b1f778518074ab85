"""Text for stretches of which only a name and a length are known.

The words of a stretch are drawn by an extendable hash of the seed and the name: the same for the same name,
unrelated for another, and a shorter stretch is the beginning of a longer one. Every word comes with the space
before it. The tokenizers in use split text at spaces before they merge anything, so that a stretch comes to
the same tokens wherever it stands, and one cut short to the first of them.

All words have three letters and are one token each, space included, in the vocabularies that were looked at
(SmolLM2's 49k and Tekken's 131k); the simulated engines' tokens are four bytes. So a word is a token, unless
`tokens_per_word` says otherwise for the model at hand.
"""

import hashlib

from kvloop.bench.workload.turns import MadeUp
from kvloop.errors import UserError

WORDS = """
the and for you are can was not man has but per out one who pre how his our may act new any off get two set
see way art own she car end pop too day now air ten bit top leg law bus due old try beg non low say key run
why arm men put age far net log ask sum dig lay big dom job pay cut fig pie red sun yet sat cat oil aim bar
dog gas tax six fit eye hot mix sea cam tim won ice pow box fix son map rat pen hop row buy win dry kid hit
raw bow wet tun sky kit pip fly ear tap cup tea gap joy boy van tip tow bag fan him use did her all led met
its had got egg saw ran ago wid hom lip jar jet pet rod rug sit tie toy tag web zip zoo ace aid arc awe bay
bee bid bin bud cab cap cow cue den dew dim dot eat elk elm eve fee few fir flu fog fox fur gem gym hat hay
hen hip hut ink jam jaw jog jug lap lid nap nod oak odd ore owl pad pal paw peg ram rap ray rib rim rip rot
ski soy tar tin ton tug vet vow wax yes bat bet doc gel hey ion lag max par tab tom vol cur dad fat bad sad
mud mad bug pin pit sub lab pan rid ash sap sir wed
""".split()  # noqa: SIM905 (a list of them would be 256 lines)
"""256 of them: a byte chooses one."""

_SPACED = [f" {word}" for word in WORDS]


class Texts:
    """Makes text up, for one seed and one tokenizer."""

    def __init__(self, seed: int | str = 0, tokens_per_word: float = 1.0) -> None:
        """`tokens_per_word`: measured for the model, template aside. UserError for none above zero."""
        if not 0.01 <= tokens_per_word <= 100:
            raise UserError(f"a word cannot be {tokens_per_word:g} tokens: 0.01 to 100 are possible")
        self._seed = str(seed)
        self._tokens_per_word = tokens_per_word

    def stretch(self, name: str, tokens: int) -> str:
        """The text of a stretch, as long as whole words allow; one at least. Takes 3 ms for 100k tokens."""
        if tokens < 1:
            return ""
        words = max(1, int(tokens / self._tokens_per_word))
        drawn = hashlib.shake_128(f"{self._seed}/{name}".encode(errors="surrogatepass")).digest(words)
        return "".join(map(_SPACED.__getitem__, drawn))

    def message(self, made_up: MadeUp) -> str:
        """The text of a message."""
        return "".join(self.stretch(name, tokens) for name, tokens in made_up.stretches)
