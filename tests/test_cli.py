"""The command line: what it says, and that a mistake is one line and a status."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvloop.cli import COMMANDS, build_parser, main


def test_without_a_command_it_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Every one with its summary; asked for, it is a success."""
    assert main([]) == 2
    assert main(["--help"]) == 0
    usage = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.summary)}$", usage, re.MULTILINE)


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    """That of the installed package."""
    assert main(["--version"]) == 0
    assert re.fullmatch(r"kvloop \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_an_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With the ones that exist."""
    assert main(["start"]) == 2
    assert capsys.readouterr().err == (
        "kvloop: there is no command 'start': choose from up, route, explain, engine, sim, bench, plan, "
        "keygen\n"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_explained(name: str) -> None:
    """Each has a help text, which starts small and has no full stop, as the others do."""
    parser, _ = build_parser(name)
    for action in parser._actions:
        assert action.help, action.dest
        assert not action.help.endswith("."), action.help
    assert "  " not in (parser.description or "")


FLAGS = {
    "up": """--prefill --decode --model --port --admin-port --no-demo --demo-only --connector --return
        --prefill-cache --policy --folder""",
    "engine": """--role --model --connector --control-host --control-port --side-channel-port --secret-file
        --engine-id --cores --print-command""",
    "route": """--prefill --decode --host --port --admin-host --admin-port --return --policy
        --append-max-tokens --append-budget-tokens --append-stall-weight --explain-log-every""",
    "explain": "--admin --json",
}


@pytest.mark.parametrize(("name", "flags"), FLAGS.items())
def test_help_names_the_flags(name: str, flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that the docs promise."""
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for flag in flags.split():
        assert re.search(rf"^  {flag}\b", text, re.MULTILINE), flag


def test_only_engine_passes_unknown_flags_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A typo elsewhere is an error, and an abbreviation is a typo."""
    for words in (["up", "--max-model-len", "1"], ["up", "--deco", "2"], ["keygen", "f", "--force"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err
    assert COMMANDS["engine"].passes_unknown_on


def test_keygen_writes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """256 bits that only the owner can read; an existing file is left as it is."""
    path = tmp_path / "kvloop.key"
    assert main(["keygen", str(path)]) == 0
    text = path.read_text()
    assert re.fullmatch(r"[0-9a-f]{64}\n", text)
    assert path.stat().st_mode & 0o777 == 0o600
    assert main(["keygen", str(path)]) == 2
    assert capsys.readouterr().err == f"kvloop keygen: {path} exists already and is left as it is\n"
    assert path.read_text() == text
    assert main(["keygen", str(tmp_path / "none" / "key")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--prefill", "0"], "kvloop up: --prefill must be from 1 to 64, not 0\n"),
        (["up", "--port", "70000"], "kvloop up: the router's --port: 70000 is not a port number\n"),
        (
            ["route"],
            "kvloop route: at least one --decode URL is needed, or a --config file that names engines\n",
        ),
        (["route", "--decode", "nonsense"], "kvloop route: 'nonsense' is not an engine's base URL"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, the command's name, no traceback."""
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == 1


def test_choosing_a_command_costs_nothing_else() -> None:
    """Neither torch nor vLLM is imported to find out what a command is called."""
    script = (
        "import sys; from kvloop.cli import COMMANDS, build_parser; [build_parser(n) for n in COMMANDS]; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'vllm', 'numpy', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
