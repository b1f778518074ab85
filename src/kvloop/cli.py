"""The `kvloop` command: a table of subcommands, each with its own flags, none of which costs anything unless
chosen.

A mistake of the user's (`UserError`) is one line on stderr and exit status 2, never a traceback. Unknown
flags are errors, except for `kvloop engine`, which passes them to vLLM.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType

from kvloop.errors import UserError

USER_ERROR_STATUS = 2


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand. `prepare` fills its parser and returns what runs it: `(args, unknown words) -> exit
    status`."""

    summary: str
    prepare: Callable[[argparse.ArgumentParser], Callable[[argparse.Namespace, list[str]], int]]
    passes_unknown_on: bool = False


def _up(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace, list[str]], int]:
    from kvloop.local import up

    up.add_arguments(parser)
    return lambda args, _: up.run(args)


def _engine(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace, list[str]], int]:
    from kvloop.local import engine_command

    engine_command.add_arguments(parser)
    return engine_command.run


def _route(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace, list[str]], int]:
    from kvloop.router import flags, serve

    flags.add_arguments(parser)

    def run(args: argparse.Namespace, _: list[str]) -> int:
        serve.run(flags.from_args(args, os.environ.get("KVLOOP_API_KEY")))
        return 0

    return run


def _explain(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace, list[str]], int]:
    from kvloop.router import explain_command

    explain_command.add_arguments(parser)
    return lambda args, _: explain_command.run(args)


def _sim(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace, list[str]], int]:
    from kvloop.local import simulation

    simulation.add_arguments(parser)
    return lambda args, _: simulation.run(args)


def _bench(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace, list[str]], int]:
    from kvloop.bench.load import command

    command.add_arguments(parser)
    return lambda args, _: command.run(args)


def _plan(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace, list[str]], int]:
    from kvloop.bench.planning import command

    command.add_arguments(parser)
    return lambda args, _: command.run(args)


def _keygen(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace, list[str]], int]:
    from kvloop.local import api_key, secret

    parser.add_argument("file", metavar="FILE", help="where to write it; an existing secret is left alone")
    parser.add_argument(
        "--api-key",
        metavar="NAME",
        help="add an API key of this name to a file for `kvloop route --api-keys-file`, and print it",
    )

    def run(args: argparse.Namespace, _: list[str]) -> int:
        if args.api_key is None:
            secret.write_secret(args.file)
        else:
            sys.stdout.write(api_key.add_api_key(args.file, args.api_key) + "\n")
        return 0

    return run


COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "up": Command("start prefill and decode engines and a router on this machine", _up),
        "route": Command("run the router in front of engines that are already there", _route),
        "explain": Command("say why a request went the way it did", _explain),
        "engine": Command(
            "run one vLLM server with the settings of its role", _engine, passes_unknown_on=True
        ),
        "sim": Command("simulate engines: the same protocols, modelled time, no model", _sim),
        "bench": Command("measure conversations against endpoints, and compare deployments", _bench),
        "plan": Command("say what each way to serve recorded traffic would give, and choose settings", _plan),
        "keygen": Command(
            "write the secret that engines of one deployment share, or add an API key", _keygen
        ),
    }
)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: kvloop COMMAND [flags] | kvloop --version",
            "",
            *lines,
            "",
            "`kvloop COMMAND --help` lists a command's flags.",
        ]
    )


def build_parser(name: str) -> tuple[argparse.ArgumentParser, Callable[[argparse.Namespace, list[str]], int]]:
    """The parser of one subcommand and the function that runs it. Raises `KeyError` for a name not in
    `COMMANDS`."""
    command = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"kvloop {name}", description=command.summary, allow_abbrev=False)
    return parser, command.prepare(parser)


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; the return value is the process's exit status."""
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        sys.stdout.write(_usage() + "\n")
        return 0 if words else USER_ERROR_STATUS
    if words[0] == "--version":
        sys.stdout.write(f"kvloop {version('kvloop')}\n")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        sys.stderr.write(f"kvloop: there is no command {name!r}: choose from {', '.join(COMMANDS)}\n")
        return USER_ERROR_STATUS
    try:
        parser, run = build_parser(name)
        args, unknown = parser.parse_known_args(rest)
        if unknown and not COMMANDS[name].passes_unknown_on:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        return run(args, unknown)
    except UserError as error:
        sys.stderr.write(f"kvloop {name}: {error}\n")
        return USER_ERROR_STATUS


if __name__ == "__main__":
    sys.exit(main())
