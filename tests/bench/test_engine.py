"""CPU time is counted over a whole process tree."""

import subprocess
import sys
import time
from pathlib import Path

from kvloop.bench.engine import cpu_s, process_tree

BURN = "import time\nend = time.process_time() + {}\nwhile time.process_time() < end: pass\ninput()"


def stat(proc: Path, pid: int, parent: int, user: int, system: int, name: str = "python") -> None:
    """One process as /proc shows it."""
    folder = proc / str(pid)
    folder.mkdir()
    rest = f"S {parent} 0 0 0 0 0 0 0 0 0 {user} {system} 0 0"
    (folder / "stat").write_text(f"{pid} ({name}) {rest}\n")


def test_a_tree_is_a_process_and_all_that_descends_from_it(tmp_path: Path) -> None:
    """Children of children count, whatever they are called; strangers do not."""
    (tmp_path / "self").mkdir()
    stat(tmp_path, 10, 1, 100, 50)
    stat(tmp_path, 11, 10, 200, 0, name="a (b) c")
    stat(tmp_path, 12, 11, 0, 300)
    stat(tmp_path, 13, 1, 999, 999)
    tree = process_tree(10, tmp_path)
    assert sorted(tree) == [10, 11, 12]
    one, all_of_them = cpu_s([10], tmp_path), cpu_s(tree, tmp_path)
    assert all_of_them / one == 650 / 150
    assert cpu_s([404], tmp_path) == 0


def test_what_a_child_burns_is_seen() -> None:
    """A process of ours that uses CPU is found under us with the seconds that it used."""
    command = [sys.executable, "-c", BURN.format(0.3)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
        deadline_s = time.monotonic() + 30
        while cpu_s([child.pid]) < 0.3 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        used_s = cpu_s(process_tree(child.pid))
        child.communicate(b"\n")
    assert 0.3 <= used_s < 1.5
