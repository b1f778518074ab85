"""A stand-in for an engine or a router: answers /health and /v1/models after a delay, and misbehaves on
request.

Run as `python fake_server.py PORT [--delay S] [--fail STATUS] [--stubborn] [--family FILE]`. `--stubborn`
ignores SIGTERM and SIGINT; `--family` starts a child in the same group and an orphaned grandchild in a
session of its own, and writes their process ids into FILE.
"""

import argparse
import http.server
import signal
import subprocess
import sys
import time
from pathlib import Path

SLEEP = "import time; time.sleep(600)"
ORPHAN = (
    "import subprocess, sys; "
    f"p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True, stdout=-3, stderr=-3); "
    "print(p.pid, flush=True)"
)


MODELS = b'{"object":"list","data":[{"id":"fake","object":"model"}]}'


class Health(http.server.BaseHTTPRequestHandler):
    """200 and a list of models for every GET, without a log line."""

    def do_GET(self) -> None:
        """Answer."""
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(MODELS)))
        self.end_headers()
        self.wfile.write(MODELS)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def main() -> None:
    """Parse the flags and serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--fail", type=int)
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--family", type=Path)
    args, _ = parser.parse_known_args()
    print("fake server: loading", flush=True)  # noqa: T201 - its log
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if args.family:
        child = subprocess.Popen([sys.executable, "-c", SLEEP])
        orphan = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, check=True).stdout
        args.family.write_text(f"{child.pid} {orphan.decode().strip()}")
    time.sleep(args.delay)
    if args.fail is not None:
        print("fake server: cannot allocate memory", flush=True)  # noqa: T201 - its log
        sys.exit(args.fail)
    http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Health).serve_forever()


if __name__ == "__main__":
    main()
