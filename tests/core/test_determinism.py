"""The same seed gives the same decisions, whatever seed Python hashes strings with."""

import os
import subprocess
import sys

SCRIPT = """
import hashlib, random
from kvloop.core.chain import Identity, build_chain, root_digest
from kvloop.core.handle import LeaseRef
from kvloop.core.keeper import Ending, Keeper, KeeperTimes
from kvloop.core.lease import LeaseTable
from kvloop.core.returns import ReturnModel
from kvloop.core.soft import SoftTable

S = 10**9
chance, told = random.Random(5), hashlib.blake2b()
keeper = Keeper(ReturnModel(480 * S, max_tables=20), KeeperTimes(), max_leases=100)
table, soft = LeaseTable(16, 480 * S, 5 * S, 80, 10), SoftTable(16, max_leases=30)
chain = build_chain(bytes(32), root_digest(bytes(32), Identity("m", "", "", "", "")), range(64))
now, names = 0, []
for number in range(3000):
    now += chance.randrange(3 * S)
    name, ending = f"lease {number}", chance.choice(list(Ending))
    keeper.filed(LeaseRef(name, "i", ("d", number % 3), 64, 60_000), f"t{number % 17}", ending, now)
    table.grant(name, chain, ((1, 2, 3, 4),), now, 60 * S, chance=chance.randrange(1001))
    names.append(name)
    other = chance.choice(names[-60:])
    for act in (keeper.used, keeper.done, keeper.ended)[: chance.randrange(4)]:
        act(other, now)
    while (due := keeper.next_due_ns()) is not None and due <= now:
        sends = keeper.due(now, 7)
        told.update(repr(sends).encode())
        for send in sends:
            for lease in getattr(send, "leases", ()):
                table.renew(lease[0], now, lease[1], lease[2])
    if chance.random() < 0.3 and (least := table.least_worth()):
        table.reclaim(least, now)
    for freed in table.take_freed():
        told.update(repr(freed).encode())
        soft.keep(freed, ((0, 0, 0, 0),))
    told.update(repr([name for name in names[-200:] if soft.get(name)]).encode())
print(told.hexdigest(), keeper.counts)
"""


def test_hash_seeds_change_nothing() -> None:
    """What is renewed, dropped, reclaimed and remembered, and in which order."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert "renewed=0" not in outputs[0]
    assert "dropped=0" not in outputs[0]
