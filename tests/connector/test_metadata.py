"""Deadlines cross processes and machines without getting longer, and nothing of NIXL's orders is lost."""

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from kvloop.connector import metadata as module
from kvloop.connector.metadata import ClockReading, KvloopMetadata

S = 1_000_000_000


def clocks(monkeypatch: pytest.MonkeyPatch, monotonic_ns: int, wall_ns: int, boot_id: str = "here") -> None:
    """What this process's clocks show."""
    shown = SimpleNamespace(monotonic_ns=lambda: monotonic_ns, time_ns=lambda: wall_ns)
    monkeypatch.setattr(module, "time", shown)
    monkeypatch.setattr(module, "_boot_id", lambda: boot_id)


def test_on_one_machine_an_instant_is_an_instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the order was on its way, and wherever somebody sets the wall clock meanwhile."""
    clocks(monkeypatch, monotonic_ns=100 * S, wall_ns=9_000 * S)
    reading = ClockReading.now()
    clocks(monkeypatch, monotonic_ns=103 * S, wall_ns=1 * S)
    assert reading.placed_here(105 * S) == 105 * S


@pytest.mark.parametrize(
    ("sent_boot", "here_boot"), [("there", "here"), ("", "here"), ("there", ""), ("", "")]
)
def test_between_machines_wall_clocks_tell_the_order_s_age(
    monkeypatch: pytest.MonkeyPatch, sent_boot: str, here_boot: str
) -> None:
    """Five seconds were left, three have passed on the way: two are left, whatever the monotonic clocks show.
    Machines that cannot be told apart are taken for two."""
    clocks(monkeypatch, monotonic_ns=100 * S, wall_ns=9_000 * S, boot_id=sent_boot)
    reading = ClockReading.now()
    clocks(monkeypatch, monotonic_ns=7 * S, wall_ns=9_003 * S, boot_id=here_boot)
    assert reading.placed_here(105 * S) == (7 + 2) * S


def test_an_order_is_never_younger_than_just_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wall clock that is behind the sender's adds nothing to the time left."""
    clocks(monkeypatch, monotonic_ns=100 * S, wall_ns=9_000 * S, boot_id="there")
    reading = ClockReading.now()
    clocks(monkeypatch, monotonic_ns=7 * S, wall_ns=8_000 * S)
    assert reading.placed_here(105 * S) == (7 + 5) * S


def test_a_machine_that_does_not_say_its_boot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has none, and that is no error."""
    module._boot_id.cache_clear()
    monkeypatch.setattr(module, "BOOT_ID", tmp_path / "gone")
    assert ClockReading.now().boot_id == ""
    module._boot_id.cache_clear()


def test_a_step_s_orders_survive_the_way_to_the_worker() -> None:
    """NIXL's own and kvloop's, and the clock that they are counted on."""
    base = NixlConnectorMetadata()  # type: ignore[no-untyped-call]
    base.reqs_to_send["sent"] = 1.0
    base.reqs_in_batch.add("in batch")
    meta = KvloopMetadata.extend(base)
    meta.deadlines_ns["r"] = meta.clock.monotonic_ns + S
    meta.incarnations["decode-0"] = "i1"
    arrived = pickle.loads(pickle.dumps(meta))
    assert vars(arrived) == vars(meta)
    assert arrived.reqs_to_send == {"sent": 1.0}
    assert arrived.clock.placed_here(arrived.deadlines_ns["r"]) == meta.deadlines_ns["r"]
    assert set(vars(base)) | {"clock", "deadlines_ns", "incarnations"} == set(vars(meta))
