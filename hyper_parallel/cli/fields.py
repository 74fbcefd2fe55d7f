"""Reading YAML with positions: every complaint names the file, the line, the field and what is accepted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml  # type: ignore[import-untyped]


class DescriptionError(ValueError):
    """Something that was asked for or described is not accepted; the message says what is."""


@dataclass(frozen=True, slots=True)
class Field:
    """One value in a file; ``path`` is how it is reached, ``parameters[2].shape`` say."""

    file: str
    path: str
    node: Any

    def fail(self, message: str) -> NoReturn:
        """Raise a ``DescriptionError`` about this value."""
        line = self.node.start_mark.line + 1
        raise DescriptionError(f"{self.file}:{line}: {self.path + ': ' if self.path else ''}{message}")

    def mapping(self) -> dict[str, Field]:
        """The fields of a mapping, by key."""
        if not isinstance(self.node, yaml.MappingNode):
            self.fail(f"expected a mapping (key: value), got {self._shown()}")
        fields: dict[str, Field] = {}
        for key, value in self.node.value:
            name = str(key.value)
            field = Field(self.file, f"{self.path}.{name}" if self.path else name, value)
            if name in fields:
                Field(self.file, field.path, key).fail("this key stands here twice")
            fields[name] = field
        return fields

    def record(self, required: Collection[str], optional: Collection[str]) -> dict[str, Field]:
        """The fields of a mapping that has certain keys only."""
        fields = self.mapping()
        for name, field in fields.items():
            if name not in required and name not in optional:
                field.fail(f"unknown key {name!r}; accepted: {', '.join([*required, *optional])}")
        missing = [name for name in required if name not in fields]
        if missing:
            self.fail(f"missing {', '.join(missing)}")
        return fields

    def items(self) -> list[Field]:
        """The entries of a sequence."""
        if not isinstance(self.node, yaml.SequenceNode):
            self.fail(f"expected a list, got {self._shown()}")
        return [
            Field(self.file, f"{self.path}[{number}]", node) for number, node in enumerate(self.node.value)
        ]

    @property
    def is_list(self) -> bool:
        return isinstance(self.node, yaml.SequenceNode)

    def text(self) -> str:
        """A scalar, as it is written."""
        if not isinstance(self.node, yaml.ScalarNode) or not self.node.value:
            self.fail(f"expected a word, got {self._shown()}")
        return str(self.node.value)

    def integer(self, least: int) -> int:
        """A whole number; underscores may group its digits."""
        text = self.text()
        if not text.replace("_", "").isdecimal() or int(text) < least:
            self.fail(f"expected a whole number of at least {least}, got {text!r}")
        return int(text)

    def choice(self, accepted: Collection[str]) -> str:
        """One of some words."""
        if self.text() not in accepted:
            self.fail(f"got {self.text()!r}; accepted: {', '.join(accepted)}")
        return self.text()

    def _shown(self) -> str:
        if isinstance(self.node, yaml.ScalarNode):
            return repr(self.node.value) if self.node.value else "nothing"
        return "a list" if self.is_list else "a mapping"


def read_fields(text: str, file: str) -> Field:
    """The document in ``text``.

    Raises:
        DescriptionError: it is empty or no YAML.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = file if mark is None else f"{file}:{mark.line + 1}"
        raise DescriptionError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from error
    if node is None:
        raise DescriptionError(f"{file}: empty; a description has world_size, meshes and parameters")
    return Field(file, "", node)
