"""`kvloop sim`: one simulated engine as a process, whole fleets out of a seed, one seed again.

The fleet's routers decide with the router's own turn machine, which is put in here: `kvloop.sim` imports
nothing of the router.
"""

import argparse
from collections.abc import Callable

from kvloop.local.fleet_turns import RouterTurn
from kvloop.sim import command as engine_command
from kvloop.sim.fleet import command as fleet_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The parts of `kvloop sim`, each with its flags."""
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART", help="what to run")

    def part(name: str, text: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        made = parts.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.set_defaults(run=run)
        return made

    engine_command.add_arguments(part("engine", "one engine behind HTTP", engine_command.run))
    fleet_command.add_fleet_arguments(
        part("fleet", "a whole fleet in virtual time", lambda args: fleet_command.run_fleet(args, RouterTurn))
    )
    fleet_command.add_replay_arguments(
        part("replay", "a seed again, and its end", lambda args: fleet_command.run_replay(args, RouterTurn))
    )


def run(args: argparse.Namespace) -> int:
    """Run the part; the exit status. Raises `UserError`."""
    status: int = args.run(args)
    return status
