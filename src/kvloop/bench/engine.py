"""What a benchmark asks of one real engine: a request by hand, its counters, its processes' CPU time."""

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from kvloop.errors import UserError
from kvloop.local.chat import TURN_TIMEOUT_S, Message

READ_BACK = "vllm:external_prefix_cache_hits_total"
"""vLLM's own count of prompt tokens that a connector loaded; whoever's connector it is."""


def chat(
    url: str, model: str, messages: list[Message], params: dict[str, Any], max_tokens: int = 1
) -> dict[str, Any]:
    """One greedy chat completion, not streamed, with `kv_transfer_params`. Raises `UserError`."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "kv_transfer_params": params,
    }
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TURN_TIMEOUT_S) as answer:
            return dict(json.loads(answer.read()))
    except (OSError, ValueError) as error:
        detail = error.read(500).decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
        raise UserError(f"{url} did not answer: {error} {detail}") from error


PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""The transfer parameters of a prefill hop; a filed handle is merged in."""
ALONE = {"do_remote_decode": False, "do_remote_prefill": False}


def counted(url: str, metric: str) -> float:
    """One of an engine's Prometheus counters, summed over its labels; 0 where it has not counted yet."""
    with urllib.request.urlopen(url + "/metrics", timeout=TURN_TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((metric + "{", metric + " ")))


def process_tree(pid: int, proc: Path = Path("/proc")) -> list[int]:
    """`pid` and its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdigit() and (fields := _stat(entry)) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    tree = [pid]
    for member in tree:
        tree.extend(children.get(member, ()))
    return tree


def cpu_s(pids: list[int], proc: Path = Path("/proc")) -> float:
    """CPU seconds, user and system, that the processes have used; 0 for one that is gone."""
    ticks = 0
    for pid in pids:
        fields = _stat(proc / str(pid))
        ticks += 0 if fields is None else int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _stat(folder: Path) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, which may itself hold blanks and brackets."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
