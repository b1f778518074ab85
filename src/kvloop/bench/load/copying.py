"""What a plain copy of memory from one process to another reaches on this machine: about the most that a
transfer of KV between two engines on it can come to.

A child process fills a stretch of memory, and this one reads it with one system call (`process_vm_readv`),
which copies once, from page to page; so do shared-memory transports at best. The first copy pays for the
pages and counts for nothing.
"""

import ctypes
import os
import statistics
import subprocess
import sys
import time

COPIED_BYTES = 128 * 1024 * 1024  # about the KV of 3,000 tokens of the demo's model
COPIES = 5
_CHILD = (
    "import ctypes, sys; held = (ctypes.c_char * int(sys.argv[1]))(); ctypes.memset(held, 1, len(held));"
    "print(ctypes.addressof(held), flush=True); sys.stdin.read()"
)


class _Stretch(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def copy_bytes_per_s() -> float | None:
    """The median of a few copies; None where the machine does not allow one."""
    command = [sys.executable, "-I", "-S", "-c", _CHILD, str(COPIED_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            address = child.stdout.readline()
            return _measured(child.pid, int(address)) if address.strip().isdigit() else None
        except (OSError, AttributeError):  # not allowed, or a system without the call
            return None
        finally:
            child.kill()


def _measured(pid: int, address: int) -> float:
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    here = (ctypes.c_char * COPIED_BYTES)()
    to, source = _Stretch(ctypes.addressof(here), COPIED_BYTES), _Stretch(address, COPIED_BYTES)
    taken_s: list[float] = []
    for _ in range(1 + COPIES):
        began_s = time.perf_counter()
        got = read(pid, ctypes.byref(to), 1, ctypes.byref(source), 1, 0)
        taken_s.append(time.perf_counter() - began_s)
        if got != COPIED_BYTES:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return COPIED_BYTES / statistics.median(taken_s[1:])
