"""The promises, one class each: see `kvloop.sim.fleet.watch` for what they are told."""

from kvloop.sim.fleet.checkers.answers import ClientsSeeNoMetadata, LossCostsTime, NeverAWrongToken
from kvloop.sim.fleet.checkers.claims import LateReadsAreFenced, QuestionsEnd, ReadersHoldClaims
from kvloop.sim.fleet.checkers.holdings import BlocksBalance, IdleIsIdle, RetentionYields
from kvloop.sim.fleet.checkers.leases import TenantsAreApart, TensorsGoDirectly, TermsEnd
from kvloop.sim.fleet.watch import Checker

ALL: tuple[type[Checker], ...] = (
    NeverAWrongToken,
    ReadersHoldClaims,
    LateReadsAreFenced,
    QuestionsEnd,
    LossCostsTime,
    ClientsSeeNoMetadata,
    TensorsGoDirectly,
    TenantsAreApart,
    RetentionYields,
    IdleIsIdle,
    BlocksBalance,
    TermsEnd,
)
