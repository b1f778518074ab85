"""`kvloop up` with fake engines: `python fake_up.py [flags of kvloop up] [-- flags of fake_server]`.

Everything is the product's own, the router too, except the command that an engine's options turn into.
"""

import argparse
import sys
from collections.abc import Mapping

from kvloop.errors import UserError
from kvloop.local import up
from kvloop.local.engine import EngineCommand, EngineOptions
from kvloop.local.stack import Stack
from tests.local.processes import FAKE_SERVER


def main(words: list[str]) -> int:
    """What `kvloop.cli` does, for this one command."""
    ours, _, theirs = " ".join(words).partition(" -- ")

    def build(options: EngineOptions, environment: Mapping[str, str]) -> EngineCommand:
        argv = (sys.executable, str(FAKE_SERVER), options.flags.value("--port") or "", *theirs.split())
        return EngineCommand(argv, environment, {})

    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    args = parser.parse_args(ours.split())
    try:
        return up.serve(Stack(up.stack_config(args), build=build, say=up.say), args)
    except UserError as error:
        sys.stderr.write(f"kvloop up: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
