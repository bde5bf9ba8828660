"""Turns YAML and JSON into frozen dataclasses: the one place where a written specification is checked.

Nothing is coerced but int to float, nothing unknown is passed over, and every refusal names the file, the key path and
what would have been accepted. Standard library only (YAML is imported when a file is read).
"""

import dataclasses
import difflib
import functools
import hashlib
import importlib
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

Registry = Mapping[str, str]
"""NAME -> "module:Class": what an entry with a `name` key may be built as."""
Registries = Mapping[type, Registry]
"""The base class a field is annotated with -> the registry its entries are looked up in."""


class ReadError(ValueError):
    """A written specification that cannot be accepted; the message says where, why, and what to write instead."""

    exit_code = 2


@dataclasses.dataclass(frozen=True)
class _Context:
    source: str
    registries: Registries

    def error(self, path: str, reason: str) -> ReadError:
        where = ": ".join(part for part in (self.source, path) if part)
        return ReadError(f"{where}: {reason}" if where else reason)


def build(cls: type[T], mapping: object, *, source: str = "", registries: Registries | None = None) -> T:
    """Builds `cls` (a frozen dataclass) from a plain mapping.

    `source` is named in errors (a file, a URL). `registries` says, by the base class a field is annotated with, which
    names its entries may carry. Raises ReadError; a ValueError of a `__post_init__` is re-raised as one with its path.
    """
    value = _read(cls, mapping, "", context=_Context(source, registries or {}))
    return typing.cast(T, value)


def load(cls: type[T], path: Path, *, registries: Registries | None = None) -> T:
    """Reads one YAML or JSON file and builds `cls` from it. Raises ReadError, also for a missing or malformed file."""
    return build(cls, parse(path), source=str(path), registries=registries)


def parse(path: Path) -> Any:
    """What stands in one YAML or JSON file, not checked yet. Raises ReadError for a missing or malformed file."""
    import yaml  # here, so that those who only build from JSON need no YAML

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ReadError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ReadError(f"{path}: is not UTF-8 text") from None
    try:
        return yaml.load(text, _strict_loader())
    except yaml.YAMLError as error:
        raise ReadError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None


def plain(value: object) -> Any:
    """The JSON form of a built value: dataclasses become dicts with every default filled in, tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value


def canonical_json(value: object) -> str:
    """Sorted keys, no blanks, no NaN: equal values give equal text on every machine."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: object) -> str:
    """SHA-256 (hex) of the canonical JSON of a built value."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def lookup(registry: Registry, name: str) -> Any:
    """Imports what `name` stands for. Raises KeyError for a name that the registry lacks."""
    module, _, attribute = registry[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def nearest(name: str, candidates: typing.Iterable[str]) -> str:
    """A " (did you mean 'x'?)" suffix, or nothing where no candidate is close."""
    close = difflib.get_close_matches(name, list(candidates), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


@functools.cache
def _strict_loader() -> Any:
    import yaml

    class StrictLoader(yaml.SafeLoader):
        """Refuses a key that stands twice in one mapping: plain YAML lets the last one win in silence."""

    def construct_mapping(loader: Any, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = loader.construct_object(key_node, deep=True)
            if isinstance(key, str) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' stands twice", key_node.start_mark
                )
            seen.add(key if isinstance(key, str) else id(key_node))
        return dict(yaml.SafeLoader.construct_mapping(loader, node, deep=True))

    StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, construct_mapping)
    return StrictLoader


def _read(kind: Any, value: object, path: str, *, context: _Context) -> object:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any or kind is object:
        return value
    if origin in (typing.Union, types.UnionType):
        return _read_union(arguments, value, path, context=context)
    if origin is typing.Literal:
        if not any(value == choice and type(value) is type(choice) for choice in arguments):
            hint = nearest(value, [str(a) for a in arguments]) if isinstance(value, str) else ""
            raise context.error(path, f"{value!r} is not one of {', '.join(map(repr, arguments))}{hint}")
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise context.error(path, f"must be a list, not {_describe(value)}")
        return tuple(_read(arguments[0], item, f"{path}[{index}]", context=context) for index, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise context.error(path, f"must be a mapping, not {_describe(value)}")
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise context.error(path, f"the key {wrong[0]!r} must be text: put it in quotes")
        return {key: _read(arguments[1], item, _join(path, key), context=context) for key, item in value.items()}
    if kind in context.registries:
        return _read_named(context.registries[kind], value, path, context=context)
    if dataclasses.is_dataclass(kind):
        return _read_dataclass(typing.cast(type, kind), value, path, context=context)
    return _read_scalar(kind, value, path, context=context)


def _read_union(choices: tuple[Any, ...], value: object, path: str, *, context: _Context) -> object:
    if value is None and type(None) in choices:
        return None
    rest = [choice for choice in choices if choice is not type(None)]
    if value is None:
        raise context.error(path, f"must be {' or '.join(map(_name, rest))}, not null")
    failures = []
    for choice in rest:
        try:
            return _read(choice, value, path, context=context)
        except ReadError as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    raise context.error(path, f"must be {' or '.join(map(_name, rest))}, not {_describe(value)}")


def _read_named(registry: Registry, value: object, path: str, *, context: _Context) -> object:
    if not isinstance(value, Mapping) or "name" not in value:
        raise context.error(path, f"needs a 'name', one of: {', '.join(sorted(registry))}")
    name = value["name"]
    if not isinstance(name, str) or name not in registry:
        hint = nearest(name, registry) if isinstance(name, str) else ""
        raise context.error(path, f"unknown name {name!r}{hint}; known: {', '.join(sorted(registry))}")
    return _read_dataclass(lookup(registry, name), value, path, context=context)


def _read_dataclass(cls: type, value: object, path: str, *, context: _Context) -> object:
    if not isinstance(value, Mapping):
        raise context.error(path, f"must be a mapping with the keys of {cls.__name__}, not {_describe(value)}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in value:
        if key not in fields:
            raise context.error(
                _join(path, str(key)), f"unknown key{nearest(str(key), fields)}; allowed: {', '.join(fields)}"
            )
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _read(hints[name], value[name], _join(path, name), context=context)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise context.error(_join(path, name), f"is missing; {cls.__name__} needs it ({_name(hints[name])})")
    try:
        return cls(**arguments)
    except ReadError:
        raise
    except ValueError as error:
        raise context.error(path, str(error)) from None


def _read_scalar(kind: Any, value: object, path: str, *, context: _Context) -> object:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        hint = ""
        if kind is float and isinstance(value, str) and _is_number(value):
            hint = f"; YAML reads {value} as text: write {float(value)!r}"
        raise context.error(path, f"must be {_name(kind)}, not {_describe(value)}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise context.error(path, f"must be a finite number, not {value}")
    return value


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _name(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if kind in names:
        return names[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(argument) for argument in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if origin is tuple:
        return f"a list of {_name(arguments[0])}"
    return getattr(kind, "__name__", str(kind))


def _describe(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
