"""A turn's books: each thing is given back once, and what engines count and take is learned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloop.core.decision import DECODE, PREFILL, AppendLimits, Ask
from kvloop.core.lineage import Prompt
from kvloop.core.placement import Placement
from kvloop.core.policy import Kv
from kvloop.core.progress import Progress
from kvloop.core.report import TurnReport

MS = 1_000_000
ASK = Ask(1000, held=800, holder="d", can_return=True, local=700, computed_at="p")


def fleet() -> Placement:
    """One engine of each role."""
    placement = Placement(Kv(), AppendLimits())
    placement.add("p", PREFILL)
    placement.add("d", DECODE)
    return placement


def test_a_returned_turn_teaches_each_part() -> None:
    """Prefill's own work without the read, the read, the handover, and the share of local hits."""
    placement = fleet()
    costs = placement.costs
    for turn in range(30):
        began_ns = turn * 1000 * MS
        progress = Progress(placement, ASK)
        progress.sent_prefill("p", with_handle=True, now_ns=began_ns)
        assert placement["p"].queued_tokens == 200 if not turn else placement["p"].queued_tokens > 0
        progress.prefilled(TurnReport(1010, 16, 784, 210, None, 40_000), began_ns + 240 * MS)
        progress.sent_decode("d", whole=False, now_ns=began_ns + 240 * MS)
        progress.began(began_ns + 300 * MS)
        progress.reported(TurnReport(1010, 784, 226, 0))
        progress.ended(began_ns + 900 * MS)
        assert progress.prompt == Prompt(1010, "p", 1010)
    assert costs.compute_ns(PREFILL, "p", 210, 800) == pytest.approx(200 * MS, rel=0.1)
    assert costs.read_ns("d", "p", 784) == pytest.approx(40 * MS, rel=0.1)
    assert costs.handover_ns("p", "d", 226, 0)[0] == pytest.approx(60 * MS, rel=0.1)
    assert costs.local_tokens("p", 700) < 50
    placement.check_integrity()
    assert placement["p"].running == placement["d"].running == 0


def test_an_appended_turn_teaches_what_decode_can_do() -> None:
    """To the first byte; its tokens leave the budget then, and the answer runs on."""
    placement = fleet()
    for turn in range(30):
        began_ns = turn * 1000 * MS
        progress = Progress(placement, ASK)
        progress.sent_decode("d", whole=True, now_ns=began_ns)
        suffix = 200 if not turn else 216  # what decode had of the history was 784 tokens, not 800
        assert (placement["d"].appended_tokens, placement["d"].queued_tokens) == (suffix, suffix)
        progress.began(began_ns + 300 * MS)
        assert (placement["d"].appended_tokens, placement["d"].running) == (0, 1)
        progress.reported(TurnReport(1000, 784, 0, 216))
        progress.ended(began_ns + 900 * MS)
        assert progress.prompt == Prompt(1000, "p", 700), "prefill still has what it had"
    assert placement.costs.compute_ns(DECODE, "d", 216, 784) == pytest.approx(300 * MS, rel=0.1)
    placement.check_integrity()


def test_a_read_of_unknown_length_teaches_nothing_of_the_work() -> None:
    """Upstream's connector, or an older one of ours: the hop's time cannot be divided."""
    placement = fleet()
    before = placement.costs.compute_ns(PREFILL, "p", 200, 800)
    progress = Progress(placement, ASK)
    progress.sent_prefill("p", with_handle=True, now_ns=0)
    progress.prefilled(TurnReport(1000, 0, 800, 200), 9000 * MS)
    assert placement.costs.compute_ns(PREFILL, "p", 200, 800) == before


def test_a_read_that_took_longer_than_its_hop_teaches_nothing() -> None:
    """An engine that says so would look as fast as it likes."""
    placement = fleet()
    before = placement.costs.compute_ns(PREFILL, "p", 200, 800)
    progress = Progress(placement, ASK)
    progress.sent_prefill("p", with_handle=True, now_ns=0)
    progress.prefilled(TurnReport(1000, 0, 800, 200, None, 50_000), 50 * MS)
    assert placement.costs.compute_ns(PREFILL, "p", 200, 800) == before
    assert placement.costs.read_ns("d", "p", 800) == fleet().costs.read_ns("d", "p", 800)
    assert placement["p"].queued_tokens == 0


def test_who_is_gone_teaches_nothing() -> None:
    """An engine that has left with a turn under way is not remembered because of it."""
    placement = fleet()
    progress = Progress(placement, ASK)
    progress.sent_prefill("p", with_handle=False, now_ns=0)
    placement.remove("p")
    progress.prefilled(TurnReport(1000, 0, 0, 1000), 90_000 * MS)
    untouched = fleet().costs.compute_ns(PREFILL, "p", 200, 800)
    assert placement.costs.compute_ns(PREFILL, "p", 200, 800) == untouched


@given(
    st.lists(
        st.sampled_from(["prefill", "prefilled", "silent", "decode", "append", "began", "ended", "close"]),
        max_size=30,
    )
)
def test_any_order_of_steps(steps: list[str]) -> None:
    """However a turn stumbles, what it holds at the end is nothing."""
    placement = fleet()
    progress, now_ns, sent = Progress(placement, ASK), 0, False
    for step in steps:
        now_ns += MS
        if step == "prefill":
            progress.sent_prefill("p", with_handle=True, now_ns=now_ns)
        elif step in ("prefilled", "silent") and sent:
            report = TurnReport(1000, 0, 0, 1000) if step == "prefilled" else None
            progress.prefilled(report, now_ns)
        elif step in ("decode", "append"):
            progress.sent_decode("d", whole=step == "append", now_ns=now_ns)
        elif step == "began":
            progress.began(now_ns)
        elif step == "ended":
            progress.reported(TurnReport(1000, 900, 0, 100))
            progress.ended(now_ns)
        elif step == "close":
            progress.close(now_ns)
        sent = step == "prefill"
        placement.check_integrity()
    progress.close(now_ns)
    for name in "pd":
        load = placement[name]
        assert (load.running, load.queued_tokens, load.appended_tokens) == (0, 0, 0)
