"""A cost that is linear in a few sizes, learned from what was measured, one observation at a time.

Weighted least squares with forgetting (recursive least squares, e.g. Ljung, System Identification, 11.2) and
a ridge towards a prior (Hoerl and Kennard 1970): with few observations, or observations that are all alike,
the answer stays near what is believed of such costs in general. What is believed is how the parts compare,
not how fast the machine is: the prior is scaled to the observations' level. Errors count relative to what was
expected, for costs span decades. No coefficient is negative: more work never takes less time. An observation
far off what was expected is taken as a factor of `MAX_SURPRISE` off: one pause of a machine is no news,
several are.
"""

import math
from collections.abc import Callable, Sequence

Coefficients = tuple[float, ...]

MEMORY = 0.95  # of an observation's weight that is left after the next: some 20 count
PRIOR_OBSERVATIONS = 0.1  # of each coefficient by itself
MAX_SURPRISE = 4.0
SETTLED_OBSERVATIONS = 64  # from here on one of `TAKEN_OF` is as good as all, and costs a part of the time
TAKEN_OF = 4
FIRST_OBSERVATIONS = 5  # are believed as they are: the prior may be a factor of a hundred off
MIN_PIVOT = 1e-12  # of what it was: below that a number's last digits decide
MAX_VALUE = 1e15  # eleven days in nanoseconds


class Regression:
    """One cost: `value = sum(coefficient * feature)`. Deterministic in the order of its observations."""

    def __init__(self, prior: Callable[[], Coefficients]) -> None:
        """`prior`: what is believed without observations, asked for whenever it counts."""
        self.count = 0
        self._seen = 0
        self._prior = prior
        size = len(prior())
        self._products = [[0.0] * size for _ in range(size)]
        self._targets = [0.0] * size
        self._mass = 0.0
        self._level = 0.0
        self._solved: Coefficients | None = None

    @property
    def coefficients(self) -> Coefficients:
        """One per feature, none negative."""
        if not self.count:
            return self._prior()
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    def predict(self, features: Sequence[float]) -> int:
        """The value expected for these features."""
        weights = self._solved or self.coefficients
        if len(weights) == 3:  # most have, and each choice asks some twenty times
            total = weights[0] * features[0] + weights[1] * features[1] + weights[2] * features[2]
        else:
            total = 0.0
            for weight, size in zip(weights, features, strict=True):
                total += weight * size
        return int(total) if total < MAX_VALUE else int(MAX_VALUE)

    def observe(self, features: Sequence[float], value: int) -> None:
        """These features took `value`; what is not positive says nothing."""
        if value <= 0:
            return
        self._seen += 1
        if self.count >= SETTLED_OBSERVATIONS and self._seen % TAKEN_OF:
            return
        expected, clipped = max(1.0, float(self.predict(features))), float(value)
        if self.count >= FIRST_OBSERVATIONS:
            clipped = min(max(clipped, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        else:
            expected = clipped
        weight = 1 / (expected * expected)
        believed = sum([weight * size for weight, size in zip(self._prior(), features, strict=True)])
        self._mass = self._mass * MEMORY + 1
        self._level = self._level * MEMORY + math.log(clipped / max(1.0, believed))
        for row, size in enumerate(features):
            products = self._products[row]
            for column, other in enumerate(features):
                products[column] = products[column] * MEMORY + weight * size * other
            self._targets[row] = self._targets[row] * MEMORY + weight * size * clipped
        self.count += 1
        self._solved = None

    def _solve(self) -> Coefficients:
        """The ridge's normal equations; features whose coefficient comes out negative are left out."""
        level = math.exp(self._level / self._mass)
        prior = [max(1.0, weight * level) for weight in self._prior()]
        size = len(prior)
        used = list(range(size))
        found = [0.0] * size
        while used:
            matrix = [[self._products[row][column] for column in used] for row in used]
            right = [self._targets[row] for row in used]
            for place, feature in enumerate(used):
                ridge = PRIOR_OBSERVATIONS / prior[feature] ** 2
                matrix[place][place] += ridge
                right[place] += ridge * prior[feature]
            values = _eliminated(matrix, right)
            if values is None:
                return tuple(prior)
            if min(values) >= 0:
                for feature, value in zip(used, values, strict=True):
                    found[feature] = value
                break
            used = [feature for feature, value in zip(used, values, strict=True) if value >= 0]
        return tuple(found)


def _eliminated(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss without pivoting: the matrix is positive definite, its diagonal has a ridge. None where sizes
    that are too far apart have left nothing of that."""
    size = len(right)
    sizes = [matrix[row][row] for row in range(size)]
    for pivot in range(size):
        if not matrix[pivot][pivot] > sizes[pivot] * MIN_PIVOT:
            return None
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            for column in range(pivot, size):
                matrix[row][column] -= factor * matrix[pivot][column]
            right[row] -= factor * right[pivot]
    values = [0.0] * size
    for row in range(size - 1, -1, -1):
        known = sum([matrix[row][column] * values[column] for column in range(row + 1, size)])
        values[row] = (right[row] - known) / matrix[row][row]
    return values
