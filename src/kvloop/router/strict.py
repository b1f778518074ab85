"""YAML files read strictly: what nobody asked for is an error, and every error says where.

The document is taken as its tree of nodes, each of which knows its line. A `Section` is a mapping that is
told which keys there are, and is asked for them one by one. Keys that occur twice, anchors, aliases and tags
are refused: a file of a few lines could mean something else to every reader, or gigabytes to this one.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

import yaml

from kvloop.errors import UserError

MAX_FILE_BYTES = 1024 * 1024  # thousands of entries
MAX_DEPTH = 8  # PyYAML's time grows with the square of it
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is ten times as fast
_KINDS = {str: "a text", int: "a whole number", float: "a number"}


class Section:
    """A mapping of a file, and where it stands."""

    def __init__(self, path: str, where: str, node: yaml.Node) -> None:
        """UserError if it is no mapping, or has a key twice."""
        self._path = path
        self._where = where
        self._node = node
        if not isinstance(node, yaml.MappingNode):
            self._fail(node, f"{where or 'the file'} must be a mapping")
        self._values: dict[str, yaml.Node] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else "?"
            if name in self._values:
                self._fail(key, f"{self._name(name)} is there twice")
            self._values[name] = value

    def only(self, *keys: str) -> None:
        """UserError if there is a key that is none of these."""
        for key, _ in self._node.value:
            if key.value not in keys:
                self._fail(
                    key, f"there is no {self._name(str(key.value)[:100])}; choose from {', '.join(keys)}"
                )

    def text(self, key: str, default: str | None = None) -> str | None:
        """A text."""
        value: str | None = self._scalar(key, str, default)
        return value

    def needed(self, key: str) -> str:
        """A text that has to be there."""
        value = self.text(key)
        if value is None:
            self._fail(self._node, f"{self._name(key)} is missing")
        return value

    def whole(self, key: str, default: int | None = None, least: int = 0) -> int | None:
        """A whole number of at least `least`."""
        value: int | None = self._scalar(key, int, default)
        if value is not None and value < least:
            self.refuse(key, f"must be at least {least}")
        return value

    def positive(self, key: str, default: float) -> float:
        """A number greater than nothing."""
        value = self._scalar(key, float, default)
        if not 0 < value < float("inf"):
            self.refuse(key, "must be positive")
        return float(value)

    def texts(self, key: str) -> tuple[tuple[str, str], ...]:
        """A mapping of texts to texts."""
        if key not in self._values:
            return ()
        section = Section(self._path, self._name(key), self._values[key])
        return tuple((name, section.needed(name)) for name in section._values)

    def sections(self, key: str) -> Iterator["Section"]:
        """A list of mappings, which has to be there: a file that is being written may still be empty."""
        node = self._values.get(key)
        if node is None:
            self._fail(self._node, f"{self._name(key)} is missing")
        if not isinstance(node, yaml.SequenceNode):
            self.refuse(key, "must be a list")
        for index, item in enumerate(node.value):
            yield Section(self._path, f"{self._name(key)}[{index}]", item)

    def whole_or_list(self, key: str) -> int | list[int] | None:
        """A whole number, or a list of them, none below 0."""
        node = self._values.get(key)
        if not isinstance(node, yaml.SequenceNode):
            return self.whole(key)
        numbers = [_value(item) for item in node.value]
        if not all(type(number) is int and number >= 0 for number in numbers):
            self.refuse(key, "must be whole numbers")
        return numbers

    def refuse(self, key: str, why: str) -> NoReturn:
        """UserError about a key's value."""
        self._fail(self._values.get(key, self._node), f"{self._name(key)} {why}")

    def _scalar(self, key: str, kind: type, default: Any) -> Any:
        if key not in self._values:
            return default
        value = _value(self._values[key])
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        return self.refuse(key, f"must be {_KINDS[kind]}")

    def _name(self, key: str) -> str:
        return f"{self._where}.{key}" if self._where else key

    def _fail(self, node: yaml.Node, why: str) -> NoReturn:
        line = node.start_mark.line + 1 if node.start_mark else 1
        raise UserError(f"{self._path}:{line}: {why}")


def read_strictly(path: str, data: bytes) -> Section:
    """A file's content as its outermost mapping. UserError for what is no such YAML."""
    if len(data) > MAX_FILE_BYTES:
        raise UserError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode()
        depth = 0
        for event in yaml.parse(text, _LOADER):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise UserError(f"{path}:{event.start_mark.line + 1}: this is nested too deeply")
            anchored = getattr(event, "anchor", None) is not None
            tagged = (getattr(event, "tag", None) or "!") != "!"
            if anchored or tagged:
                line = event.start_mark.line + 1
                raise UserError(f"{path}:{line}: anchors, aliases and tags are not taken")
        root = yaml.compose(text, _LOADER)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(f"{path}:{line}: this is not YAML: {error.problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: this is not YAML: {type(error).__name__}") from None
    return Section(path, "", root if root is not None else yaml.MappingNode("", []))


def _value(node: yaml.Node) -> Any:
    """A scalar's value, as a safe loader makes it; None for what is no scalar, or no value of its kind."""
    if not isinstance(node, yaml.ScalarNode):
        return None
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError):
        return None
