"""vLLM's flags as the user typed them: looked at, never re-parsed.

`kvloop engine` passes on every flag that it does not know, so it must answer one question without vLLM's own
parser (which takes seconds to import): did the user set this one, and to what? vLLM reads `--a-b` and `--a_b`
as the same flag, `--x=1` like `--x 1`, `--no-x` as x set to false, and the last of several wins.
"""

from dataclasses import dataclass


def _name(word: str) -> str:
    """The flag's canonical name (`--kv_cache_dtype=fp8` -> `--kv-cache-dtype`), or "" for a value."""
    if not word.startswith("-") or word == "-" or word == "--" or word[1:2].isdigit():
        return ""
    name = word.split("=", 1)[0]
    return name.replace("_", "-") if name.startswith("--") else name


@dataclass(frozen=True, slots=True)
class VllmFlags:
    """The pass-through part of a command line, in order."""

    words: tuple[str, ...] = ()

    def has(self, *names: str) -> bool:
        """Whether any of the flags (long ones also as `--no-...`) was given."""
        wanted = set(names) | {"--no-" + name[2:] for name in names if name.startswith("--")}
        return any(_name(word) in wanted for word in self.words)

    def value(self, *names: str) -> str | None:
        """The last value given under any of the names; None where none was given, "" for a bare switch."""
        found: str | None = None
        for index, word in enumerate(self.words):
            if _name(word) not in names:
                continue
            if "=" in word:
                found = word.split("=", 1)[1]
            else:
                following = self.words[index + 1] if index + 1 < len(self.words) else ""
                found = "" if _name(following) else following
        return found

    def dotted(self, name: str) -> str | None:
        """The first flag of the form `--name.key`, which vLLM would merge with `--name`; else None."""
        return next((word for word in self.words if _name(word).startswith(name + ".")), None)

    def without(self, name: str) -> "VllmFlags":
        """The same flags, less every `--name VALUE` and `--name=VALUE`."""
        kept: list[str] = []
        skip_value = False
        for word in self.words:
            if skip_value and not _name(word):
                skip_value = False
                continue
            skip_value = False
            if _name(word) == name:
                skip_value = "=" not in word
                continue
            kept.append(word)
        return VllmFlags(tuple(kept))
