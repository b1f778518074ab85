"""What each part of a turn takes, learned per engine and per pair of engines from the turns that went by.

Four costs, each linear in a few sizes (see `regression`):

    compute   an engine's pass over a prompt's uncached tokens: fixed, per token, per token and 1,000 earlier
              ones that it attends to
    read      a prefill engine's claim and read of KV from a decode engine: fixed, per token
    handover  decode's way from the request to its first token with prefill's KV: fixed, per token that
              it pulls, per request that runs there already
    hit       no time: the share of the tokens that an engine's own cache was believed to hold and did

What is left, whatever it is (a tokenizer, a network, a habit of the batch), is taken as a factor per route.

An engine of which little was seen is believed to be like the others of its role, and roles without a past are
believed to be like `PRIOR_*`, a GPU of no particular make. A pair is believed to be like all pairs. What an
engine was is forgotten when it starts anew.
"""

from collections import OrderedDict
from collections.abc import Callable

from kvloop.core.load import Work, pairs_of
from kvloop.core.regression import Coefficients, Regression

PRIOR_COMPUTE: Coefficients = (20e6, 100e3, 5e3)  # 20 ms, 10,000 tokens a second, half of it at 20,000
PRIOR_READ: Coefficients = (5e6, 5e3)  # 5 ms, 200,000 tokens a second
PRIOR_HANDOVER: Coefficients = (20e6, 5e3, 500e3)
MAX_PAIRS = 20_000  # some 2 KB each; the least recently used is forgotten
PERMILLE = 1000
HIT_MEMORY = 7  # of eight parts of what was believed of local hits, these are left after each look
MIN_FACTOR, MAX_FACTOR = 500, 2000  # permille: what is further off is no matter of a factor
FACTOR_PARTS = 16  # an observation's weight is one part of so many
CONTEXT_UNIT = 1000.0


class Costs:
    """All learned costs. Engines are names; times are nanoseconds."""

    def __init__(self) -> None:
        self._computes: dict[str, Regression] = {}
        self._pools: dict[str, Regression] = {}
        self._reads = _Pairs(PRIOR_READ)
        self._handovers = _Pairs(PRIOR_HANDOVER)
        self._hits: dict[str, int] = {}
        self._factors: dict[str, int] = {}
        self._anyone = Regression(lambda: PRIOR_COMPUTE)

    def compute_ns(self, role: str, engine: str, tokens: int, before: int) -> int:
        """For `engine` to compute `tokens` behind `before` others."""
        model = self._computes.get(engine) or self._pools.get(role) or self._anyone
        return model.predict((1.0, tokens, pairs_of(tokens, before) / CONTEXT_UNIT))

    def computed(self, role: str, engine: str, work: Work) -> None:
        """`engine` has done this work."""
        features = (float(work.jobs), float(work.tokens), work.pairs / CONTEXT_UNIT)
        pool = self._pools.get(role)
        if pool is None:
            pool = self._pools[role] = Regression(self._coefficients_of_anyone)
        own = self._computes.get(engine)
        if own is None:
            own = self._computes[engine] = Regression(_coefficients_of(pool))
        for model in (own, pool, self._anyone):
            model.observe(features, work.took_ns)

    def read_ns(self, source: str, target: str, tokens: int) -> int:
        """For prefill engine `target` to read `tokens` back from decode engine `source`."""
        return self._reads.model(source, target).predict((1.0, float(tokens)))

    def was_read(self, source: str, target: str, tokens: int, took_ns: int) -> None:
        """It took so long."""
        self._reads.observe(source, target, (1.0, float(tokens)), took_ns)

    def handover_ns(self, source: str, target: str, tokens: int, running: int) -> tuple[int, int]:
        """For decode engine `target` to pull `tokens` from prefill engine `source` and say its first word;
        and the part of it that is the same for every prompt."""
        model = self._handovers.model(source, target)
        return model.predict((1.0, tokens, running)), int(model.coefficients[0])

    def handed_over(self, source: str, target: str, tokens: int, running: int, took_ns: int) -> None:
        """It took so long."""
        features = (1.0, float(tokens), float(running))
        self._handovers.observe(source, target, features, took_ns)

    def local_tokens(self, engine: str, believed: int) -> int:
        """Of `believed` tokens that `engine` computed once, those that it is expected to have still."""
        return believed * self._hits.get(engine, PERMILLE) // PERMILLE

    def local_hit(self, engine: str, believed: int, found: int) -> None:
        """`engine` had `found` of them."""
        if believed > 0:
            share = min(PERMILLE, PERMILLE * found // believed)
            was = self._hits.get(engine, share)
            self._hits[engine] = (HIT_MEMORY * was + share) // (HIT_MEMORY + 1)

    def corrected_ns(self, route: str, predicted_ns: int) -> int:
        """A sum of parts, by how such sums compared with what came."""
        return predicted_ns * self._factors.get(route, PERMILLE) // PERMILLE

    def came(self, route: str, predicted_ns: int, took_ns: int) -> None:
        """A sum of parts, uncorrected, and what it was in the end."""
        if predicted_ns > 0:
            seen = min(max(PERMILLE * took_ns // predicted_ns, MIN_FACTOR), MAX_FACTOR)
            was = self._factors.get(route, PERMILLE)
            self._factors[route] = was + (seen - was) // FACTOR_PARTS

    def forget(self, engine: str) -> None:
        """`engine` starts anew, or is gone for good."""
        self._computes.pop(engine, None)
        self._hits.pop(engine, None)
        self._reads.forget(engine)
        self._handovers.forget(engine)

    def _coefficients_of_anyone(self) -> Coefficients:
        return self._anyone.coefficients


class _Pairs:
    """A cost of pairs, each believed to be like all together."""

    def __init__(self, prior: Coefficients) -> None:
        self._pool = Regression(lambda: prior)
        self._own: OrderedDict[tuple[str, str], Regression] = OrderedDict()

    def model(self, source: str, target: str) -> Regression:
        """The pair's own, or everybody's."""
        return self._own.get((source, target), self._pool)

    def observe(self, source: str, target: str, features: tuple[float, ...], took_ns: int) -> None:
        """A pair's observation counts for it and for all."""
        own = self._own.get((source, target))
        if own is None:
            own = self._own[source, target] = Regression(_coefficients_of(self._pool))
            if len(self._own) > MAX_PAIRS:
                self._own.popitem(last=False)
        else:
            self._own.move_to_end((source, target))
        own.observe(features, took_ns)
        self._pool.observe(features, took_ns)

    def forget(self, engine: str) -> None:
        """Nothing is known any more of pairs with `engine`."""
        for pair in [pair for pair in self._own if engine in pair]:
            del self._own[pair]


def _coefficients_of(model: Regression) -> Callable[[], Coefficients]:
    return lambda: model.coefficients
