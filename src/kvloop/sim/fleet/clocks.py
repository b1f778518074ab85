"""The clocks of one machine: a monotonic one that began somewhere, and a wall clock that can be set."""

from dataclasses import dataclass

from kvloop.sim.fleet.plan import MS

PPM = 1_000_000
_EPOCH_MS = 1_000_000_000_000  # some day


@dataclass(slots=True)
class Clocks:
    """`slow_ppm`: by so much the monotonic clock is slow. `wall_off_ms`: so far the wall clock is off."""

    began_ns: int = 0
    slow_ppm: int = 0
    wall_off_ms: int = 0

    def monotonic_ns(self, true_ns: int) -> int:
        """What the monotonic clock shows."""
        if not self.slow_ppm:
            return self.began_ns + true_ns
        return self.began_ns + true_ns * (PPM - self.slow_ppm) // PPM

    def true_ns(self, monotonic_ns: int) -> int:
        """When it will show at least that."""
        if not self.slow_ppm:
            return monotonic_ns - self.began_ns
        return -(-(monotonic_ns - self.began_ns) * PPM // (PPM - self.slow_ppm))

    def wall_ms(self, true_ns: int) -> int:
        """What the wall clock shows."""
        return _EPOCH_MS + true_ns // MS + self.wall_off_ms
