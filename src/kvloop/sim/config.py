"""What a simulated engine is told at its start; the defaults are those of the connector's settings."""

from dataclasses import dataclass

from kvloop.sim.request import Address

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine. `revision` and `layout` go into the digest chain's root beside the model's name.

    `incarnation` is never the same for two engines, or for one before and after a restart. `max_bulk_steps`:
    decode steps taken at once where nothing can come between them; what is answered does not depend on it.
    """

    engine_id: str
    incarnation: str
    key: bytes
    control: Address
    side_channel: Address
    reads: bool = True
    retains: bool = True
    prefix_cache: bool = True
    recompute_threshold_tokens: int = 64
    lease_term_ns: int = 60 * NS_PER_S
    lease_ttl_ns: int = 480 * NS_PER_S
    claim_timeout_ns: int = 1 * NS_PER_S
    claim_term_ns: int = 5 * NS_PER_S
    claim_margin_ns: int = 100 * NS_PER_MS
    handover_ns: int = 480 * NS_PER_S  # vLLM's own bound on blocks that decode never reads
    max_retained_permille: int = 900
    max_leases: int = 100_000
    max_claims: int = 10_000
    max_reads: int = 10_000
    max_bulk_steps: int = 1
    revives: bool = True  # a claim on a lease that has ended may have it again
    revision: str = "sim"
    layout: str = "sim"
