"""Read a run's configuration: strict YAML into frozen dataclasses, with the line of each mistake.

A dataclass is a section, its fields are the section's keys; nothing else is accepted. Scalars
follow YAML 1.2, where YAML 1.1 surprises people: `1e-4` is a number, `on`, `yes`, `1:30` and dates
are text. Fields may be int, float, bool, str, Path, Literal, list[...], tuple[...], another
dataclass, and unions of these with each other and with None.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar, Union, get_args, get_origin
from typing import get_type_hints as type_hints

import yaml

from dynapar.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)
else:
    Config = TypeVar("Config")


class _Loader(yaml.SafeLoader):
    """Knows the scalars of YAML 1.2's core schema, and underscores in integers."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^({_pattern})$"), _first
    )
_Loader.add_constructor(
    "tag:yaml.org,2002:float",
    lambda loader, node: float(
        str(node.value).lower().replace(".inf", "inf").replace(".nan", "nan")
    ),
)


def load_config(kind: type[Config], path: str | Path) -> Config:
    """Read a YAML file into a `kind`.

    Args:
        kind: A dataclass; its fields without a default are the required keys.
        path: The file. Relative paths inside it stay as they are written, so they start at the
            working directory, as on the command line; `~` is expanded.

    Raises:
        ConfigError: The file cannot be read or is not YAML; a key is unknown (the nearest known
            one is named), missing or given twice; a value has another type than its field; or a
            section's own check fails. The message names file, line, section and value.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    try:
        loader = _Loader(text)
        return _Reader(loader, str(path)).section(loader.get_single_node(), kind, "")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error


class _MismatchError(ConfigError):
    """A value is not of its field's type; another member of a union may still take it."""


class _Reader:
    """Turns the nodes of one file into values of the types that the fields ask for."""

    def __init__(self, loader: _Loader, path: str) -> None:
        self._loader = loader
        self._path = path

    def section(self, node: yaml.Node | None, kind: type[Config], name: str) -> Config:
        """Make a `kind` from a mapping; `name` is the section's dotted name, "" for the file."""
        section = f"section {name!r}" if name else "the configuration"
        if node is None:
            raise ConfigError(f"{self._path}: the file is empty; expected {_keys(kind)}")
        if not isinstance(node, yaml.MappingNode):
            text = f"{section} is {self._shown(node)}; expected {_keys(kind)}"
            raise _MismatchError(self._at(node, text))
        hints = type_hints(kind)
        fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key not in fields:
                nearest = _nearest(key, fields)
                text = f"{section} has no key {key!r}; the nearest is {nearest!r}"
                self._fail(key_node, f"{text}, all are: {', '.join(fields)}")
            if key in values:
                self._fail(key_node, f"{section} has the key {key!r} twice; remove one")
            inner = f"{name}.{key}" if name else key
            values[key] = self._value(value_node, hints[key], inner)
        for key, field in fields.items():
            if key not in values and _required(field):
                self._fail(node, f"{section} lacks {key!r}; expected {_described(hints[key])}")
        try:
            return kind(**values)
        except ValueError as error:
            self._fail(node, f"{section}: {error}", error)

    def _value(self, node: yaml.Node, hint: object, name: str) -> object:
        """Convert a node to the type `hint`; `name` is the field's dotted name."""
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            return self.section(node, hint, name)
        origin = get_origin(hint)
        if origin in (Union, types.UnionType):
            return self._union(node, hint, name)
        if origin in (list, tuple):
            return self._sequence(node, hint, name)
        return self._scalar(node, hint, name)

    def _union(self, node: yaml.Node, hint: object, name: str) -> object:
        members = [member for member in get_args(hint) if member is not types.NoneType]
        if len(members) < len(get_args(hint)) and self._constructed(node) is None:
            return None
        if len(members) == 1:
            return self._value(node, members[0], name)
        for member in members:
            try:
                return self._value(node, member, name)
            except _MismatchError:
                continue
        self._mismatch(node, hint, name)

    def _sequence(self, node: yaml.Node, hint: object, name: str) -> object:
        arguments = get_args(hint)
        if not isinstance(node, yaml.SequenceNode):
            self._mismatch(node, hint, name)
        if get_origin(hint) is list or arguments[-1] is Ellipsis:
            wanted: tuple[object, ...] = (arguments[0],) * len(node.value)
        elif len(arguments) == len(node.value):
            wanted = arguments
        else:
            self._mismatch(node, hint, name)
        pairs = enumerate(zip(node.value, wanted, strict=True))
        items = [self._value(item, kind, f"{name}[{place}]") for place, (item, kind) in pairs]
        return items if get_origin(hint) is list else tuple(items)

    def _scalar(self, node: yaml.Node, hint: object, name: str) -> object:
        value = self._constructed(node)
        if get_origin(hint) is Literal:
            for choice in get_args(hint):
                if type(choice) is type(value) and choice == value:
                    return value
        elif hint is Path and isinstance(value, str):
            return Path(value).expanduser()
        elif hint is float and isinstance(value, int | float) and type(value) is not bool:
            if math.isfinite(value):
                return float(value)
        elif hint in (int, bool, str) and type(value) is hint:
            return value
        self._mismatch(node, hint, name)

    def _constructed(self, node: yaml.Node) -> object:
        """The scalar of a node as YAML reads it; the node itself when it is no scalar."""
        if not isinstance(node, yaml.ScalarNode):
            return node
        value: object = self._loader.construct_object(node, deep=True)
        return value

    def _shown(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode):
            value = self._constructed(node)
            return "empty" if value is None else f"{value!r} ({type(value).__name__})"
        return "a list" if isinstance(node, yaml.SequenceNode) else "a section"

    def _at(self, node: yaml.Node, text: str) -> str:
        return f"{self._path}:{node.start_mark.line + 1}: {text}"

    def _fail(self, node: yaml.Node, text: str, cause: Exception | None = None) -> NoReturn:
        raise ConfigError(self._at(node, text)) from cause

    def _mismatch(self, node: yaml.Node, hint: object, name: str) -> NoReturn:
        text = f"{name} is {self._shown(node)}; expected {_described(hint)}"
        raise _MismatchError(self._at(node, text))


def _required(field: dataclasses.Field[object]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _nearest(key: str, known: dict[str, dataclasses.Field[object]]) -> str:
    return difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]


def _keys(kind: type[DataclassInstance]) -> str:
    names = (field.name for field in dataclasses.fields(kind) if field.init)
    return f"a section with the keys {', '.join(names)}"


def _described(hint: object) -> str:
    """Words for what a field takes."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(repr(choice) for choice in arguments)}"
    if origin in (Union, types.UnionType):
        return " or ".join(_described(member) for member in arguments)
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return f"a list of {_described(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}: {', '.join(map(_described, arguments))}"
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _keys(hint)
    names: dict[object, str] = {
        int: "an integer",
        float: "a finite number",
        bool: "true or false",
        str: "text (in quotes where it looks like something else)",
        Path: "a path",
        types.NoneType: "nothing (null)",
    }
    return names[hint]
