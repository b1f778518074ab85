"""The worker half over vLLM's own: no read outlives its claim's deadline, no late byte is forgotten, and
what a peer sends wrong costs a read, never the engine."""

import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvloop.connector import worker as module
from kvloop.connector.metadata import WorkerNews
from tests.connector.nixl_worker import PEER, PEER_BLOCKS, Nixl, Posted, know, make_worker, step

S = 1_000_000_000


class Clock:
    """Stands for the worker's monotonic clock."""

    def __init__(self) -> None:
        self.now_ns = 1_000 * S

    def monotonic_ns(self) -> int:
        """As `time.monotonic_ns`."""
        return self.now_ns


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time for the worker half, moved by hand."""
    stopped = Clock()
    monkeypatch.setattr(module, "time", stopped)
    return stopped


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Nixl, Posted]:
    """A worker half, the NIXL under it, and what it posts."""
    return make_worker(monkeypatch)


def results(worker: Any) -> tuple[set[str], set[str]]:
    """What ended, and what of it failed."""
    ended = worker.get_transfer_results()
    return ended.finished_recving, ended.failed_recving


NOTHING: tuple[set[str], set[str]] = (set(), set())
FAILED = ({"r"}, {"r"})
GOOD = ({"r"}, set[str]())


def start(worker: Any, clock: Clock, term_s: float = 5.0, **changes: Any) -> None:
    """Order one read whose claim ends in `term_s`."""
    worker.start_load_kv(step({"r": clock.now_ns + int(term_s * S)}, **changes))


def test_a_read_that_ends_in_time_is_good(half: Any, clock: Clock) -> None:
    """It is reported once, its handle is released, and there is no news."""
    worker, nixl, _ = half
    start(worker, clock)
    assert results(worker) == NOTHING
    nixl.states[1] = "DONE"
    clock.now_ns += 5 * S - 1
    assert results(worker) == GOOD
    clock.now_ns += 100 * S
    assert results(worker) == NOTHING
    assert nixl.released == [1]
    assert worker.take_news() is None


def test_a_read_that_ended_after_its_deadline_is_reported_as_failed(half: Any, clock: Clock) -> None:
    """Decode may have rewritten the blocks by then. No byte is under way any more: it is not late."""
    worker, nixl, _ = half
    start(worker, clock)
    nixl.states[1] = "DONE"
    clock.now_ns += 5 * S
    assert results(worker) == FAILED
    assert worker.take_news() is None


def test_a_read_in_flight_at_its_deadline_is_late_until_it_ends(half: Any, clock: Clock) -> None:
    """The request goes on at once; the end of the transfer is told when it has come, and not before."""
    worker, nixl, _ = half
    start(worker, clock)
    clock.now_ns += 5 * S
    assert results(worker) == FAILED
    assert worker.take_news() == WorkerNews(Counter(r=1), Counter())
    assert results(worker) == NOTHING
    assert worker.take_news() is None
    nixl.states[1] = "DONE"
    assert results(worker) == NOTHING
    assert worker.take_news() == WorkerNews(Counter(), Counter(r=1))
    assert nixl.released == [1]
    assert results(worker) == NOTHING
    assert worker.take_news() is None


def test_a_late_read_has_ended_when_all_its_transfers_have(half: Any, clock: Clock) -> None:
    """One per rank of the peer; a transfer that broke off counts only once NIXL lets its handle go."""
    worker, nixl, posted = half
    posted.handles_per_read = 3
    start(worker, clock)
    nixl.states[2] = "DONE"
    clock.now_ns += 5 * S
    results(worker)
    assert worker.take_news() == WorkerNews(Counter(r=1), Counter())
    nixl.states |= {1: "DONE", 3: "gone wrong"}
    nixl.stuck.add(3)
    results(worker)
    assert worker.take_news() is None, "a handle that cannot be released may still be written through"
    nixl.stuck.clear()
    results(worker)
    assert worker.take_news() == WorkerNews(Counter(), Counter(r=1))
    assert sorted(nixl.released) == [1, 2, 3]


def test_a_read_that_fails_in_time_is_upstream_s_to_report(half: Any, clock: Clock) -> None:
    """Once, as failed, and with nothing to set aside."""
    worker, nixl, _ = half
    start(worker, clock)
    nixl.states[1] = "gone wrong"
    assert results(worker) == FAILED
    clock.now_ns += 100 * S
    assert results(worker) == NOTHING
    assert worker.take_news() is None


def test_a_read_that_failed_in_part_is_late_if_the_rest_hangs(half: Any, clock: Clock) -> None:
    """The failure alone does not end it: bytes of the other ranks may still come."""
    worker, nixl, posted = half
    posted.handles_per_read = 2
    start(worker, clock)
    nixl.states[1] = "gone wrong"
    assert results(worker) == NOTHING
    clock.now_ns += 5 * S
    assert results(worker) == FAILED
    assert worker.take_news() == WorkerNews(Counter(r=1), Counter())
    nixl.states[2] = "gone wrong"
    assert results(worker) == NOTHING
    assert worker.take_news() == WorkerNews(Counter(), Counter(r=1))


def test_time_on_the_way_to_the_worker_is_not_given_to_the_read(half: Any, clock: Clock) -> None:
    """vLLM begins a step's reads after its forward pass: the deadline was set when the step was built."""
    worker, nixl, _ = half
    orders = step({"r": clock.now_ns + 5 * S})
    clock.now_ns += 3 * S
    worker.start_load_kv(orders)
    nixl.states[1] = "DONE"
    clock.now_ns += 2 * S
    assert results(worker) == FAILED


def test_a_read_whose_deadline_has_passed_is_not_even_posted(half: Any, clock: Clock) -> None:
    """It fails at once, and nothing is late."""
    worker, _, posted = half
    start(worker, clock, term_s=0)
    assert posted.reads == []
    assert results(worker) == FAILED
    assert worker.take_news() is None


def test_a_deadline_from_another_machine_is_placed_by_wall_clocks(
    half: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its monotonic clock began at another time."""
    worker, _, _ = half
    orders = step({"r": 7 * S})
    elsewhere = orders.clock.__class__("another boot", 5 * S, orders.clock.wall_ns)
    orders.clock = elsewhere
    monkeypatch.setattr(
        "kvloop.connector.metadata.time",
        SimpleNamespace(monotonic_ns=lambda: clock.now_ns, time_ns=lambda: elsewhere.wall_ns + S // 2),
    )
    worker.start_load_kv(orders)
    assert worker._deadline_ns == {"r": clock.now_ns + 2 * S - S // 2}


def test_reads_from_prefill_have_no_deadline(half: Any, clock: Clock) -> None:
    """A hand-over waits for as long as upstream lets it."""
    worker, nixl, _ = half
    worker.start_load_kv(step({"r": None}, incarnation=None))
    clock.now_ns += 10_000 * S
    assert results(worker) == NOTHING
    nixl.states[1] = "DONE"
    assert results(worker) == GOOD


def test_a_read_given_up_during_a_handshake_is_never_posted(half: Any, clock: Clock) -> None:
    """The handshake may end much later, when the blocks belong to somebody else."""
    worker, _, posted = half
    worker._remote_agents.clear()
    orders = step({"r": clock.now_ns + 5 * S})
    worker.start_load_kv(orders)
    clock.now_ns += 5 * S
    assert results(worker) == FAILED
    assert worker.take_news() is None
    know(worker)
    worker._ready_requests.put(("r", orders.reqs_to_recv["r"]))
    worker.start_load_kv(step({}))
    assert posted.reads == []
    assert not worker._given_up


def test_a_read_given_up_does_not_stop_a_later_one_of_the_same_name(half: Any, clock: Clock) -> None:
    """Not even one that comes before the first one's handshake has ended."""
    worker, nixl, posted = half
    worker._remote_agents.clear()
    first = step({"r": clock.now_ns + 5 * S})
    worker.start_load_kv(first)
    clock.now_ns += 5 * S
    results(worker)
    know(worker)
    worker.start_load_kv(step({"r": None}))
    assert posted.reads == ["r"]
    worker._ready_requests.put(("r", first.reqs_to_recv["r"]))
    worker.start_load_kv(step({}))
    assert posted.reads == ["r"]
    nixl.states[1] = "DONE"
    assert results(worker) == GOOD


def test_reads_given_up_are_remembered_within_a_bound(
    half: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest go first."""
    monkeypatch.setattr(module, "MAX_GIVEN_UP_REQUESTS", 3)
    worker, _, _ = half
    worker._remote_agents.clear()
    worker.start_load_kv(step({f"r{number}": clock.now_ns + S for number in range(5)}))
    clock.now_ns += S
    results(worker)
    assert list(worker._given_up) == ["r2", "r3", "r4"]


@pytest.mark.parametrize("fail", ["before", "between"])
def test_what_cannot_be_posted_fails_alone(half: Any, clock: Clock, fail: str) -> None:
    """Shapes that do not match come from a peer; a transfer that was posted already is waited for."""
    worker, nixl, posted = half
    posted.handles_per_read, posted.fail = 2, fail
    start(worker, clock)
    if fail == "between":
        assert results(worker) == NOTHING
        nixl.states[1] = "DONE"
    assert results(worker) == FAILED
    posted.fail = ""
    start(worker, clock)
    nixl.states |= dict.fromkeys((1, 2, 3), "DONE")
    assert results(worker) == GOOD


def test_a_hand_over_that_cannot_be_posted_is_upstream_s_to_handle(half: Any) -> None:
    """kvloop changes nothing about it."""
    worker, _, posted = half
    posted.fail = "before"
    with pytest.raises(AssertionError, match="shapes"):
        worker.start_load_kv(step({"r": None}))


@pytest.mark.parametrize("blocks", [[0, PEER_BLOCKS], [-1, 3], [1 << 30]])
def test_block_ids_outside_of_the_peer_s_cache_are_not_read(
    half: Any, clock: Clock, blocks: list[int]
) -> None:
    """They would be another layer's blocks, or no memory at all."""
    worker, _, posted = half
    start(worker, clock, blocks=blocks)
    assert posted.reads == []
    assert results(worker) == FAILED


def test_block_ids_are_counted_in_the_peer_s_own_blocks(half: Any, clock: Clock) -> None:
    """A peer whose attention cuts its blocks in four has a quarter as many of them."""
    worker, _, posted = half
    worker.remote_ratio = 4
    start(worker, clock, blocks=[PEER_BLOCKS // 4])
    assert posted.reads == []
    assert results(worker) == FAILED
    start(worker, clock, blocks=[PEER_BLOCKS // 4 - 1])
    assert posted.reads == ["r"]


def cleaned(nixl: Nixl) -> bool:
    """Whether what is known of the peer was forgotten."""
    return ("remove_remote_agent", (f"{PEER}-agent",)) in nixl.calls


def test_a_restarted_peer_gets_a_new_handshake(half: Any) -> None:
    """It is told by its incarnation, under the same id and address; the same one again is no restart."""
    worker, nixl, _ = half
    for incarnation in ("i1", "i1", "i1"):
        worker.start_load_kv(step({}, incarnation=incarnation))
    assert not cleaned(nixl)
    worker.start_load_kv(step({}, incarnation="i2"))
    assert cleaned(nixl)
    assert PEER not in worker._remote_agents
    know(worker)
    nixl.calls.clear()
    worker.start_load_kv(step({}, incarnation="i2"))
    assert not cleaned(nixl)


@pytest.mark.parametrize("late", [False, True])
def test_a_restarted_peer_is_not_forgotten_while_a_read_is_in_flight(
    half: Any, clock: Clock, late: bool
) -> None:
    """NIXL needs what it knows of it until the transfer has ended; reads of the new one fail meanwhile."""
    worker, nixl, posted = half
    start(worker, clock)
    if late:
        clock.now_ns += 5 * S
        results(worker)
    worker.start_load_kv(step({"new": clock.now_ns + 5 * S}, incarnation="i2"))
    assert not cleaned(nixl)
    assert posted.reads == ["r"]
    assert results(worker) == ({"new"}, {"new"})
    nixl.states[1] = "DONE"
    results(worker)
    worker.start_load_kv(step({"again": clock.now_ns + 5 * S}, incarnation="i2"))
    assert cleaned(nixl)
    know(worker)
    worker.start_load_kv(step({"more": clock.now_ns + 5 * S}, incarnation="i2"))
    assert posted.reads == ["r", "more"]


def test_a_peer_that_was_never_met_is_only_noted(half: Any) -> None:
    """There is nothing to forget."""
    worker, nixl, _ = half
    worker._remote_agents.clear()
    worker.start_load_kv(step({}, incarnation="i1"))
    worker.start_load_kv(step({}, incarnation="i2"))
    assert not nixl.calls
    assert worker._incarnations == {PEER: "i2"}


def test_notifications_of_claimed_reads_are_kept_from_upstream(half: Any) -> None:
    """It would take them for sends that it does not know. All others reach it."""
    worker, nixl, _ = half
    nixl.notifications = {"a": [b"kvloop:c1:1", b"HB:r1", b"kvloop:c2:1"], "b": [b"r2:1"]}
    assert worker.nixl_wrapper.get_new_notifs() == {"a": [b"HB:r1"], "b": [b"r2:1"]}
    nixl.notifications = {"a": [b"kvloop:c1:1"]}
    assert worker.get_transfer_results().finished_sending == set()


def test_shutdown_releases_late_reads_too(half: Any, clock: Clock) -> None:
    """Every handle, once."""
    worker, nixl, _ = half
    start(worker, clock)
    clock.now_ns += 5 * S
    results(worker)
    nixl.states[1] = "DONE"
    worker._handshake_initiation_executor = SimpleNamespace(shutdown=lambda wait: None)  # noqa: ARG005
    worker._finish_shutdown = lambda: None
    worker.shutdown()
    worker.shutdown()
    assert nixl.released == [1]


def test_news_of_several_workers_add_up() -> None:
    """Each rank says for itself what is late and what has ended."""
    one, other = WorkerNews(Counter(a=1), Counter(b=1)), WorkerNews(Counter(a=1, c=1), Counter())
    assert one.aggregate(other) == WorkerNews(Counter(a=2, c=1), Counter(b=1))
    assert replace(one) == WorkerNews(Counter(a=1), Counter(b=1)), "neither is changed"
    with pytest.raises(TypeError, match="cannot add"):
        one.aggregate(SimpleNamespace())  # type: ignore[arg-type]


def test_worker_clock_is_the_one_of_the_metadata() -> None:
    """Both halves of a machine count on one clock."""
    before = time.monotonic_ns()
    assert before <= step({}).clock.monotonic_ns <= time.monotonic_ns()
