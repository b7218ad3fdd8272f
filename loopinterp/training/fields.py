"""Frozen dataclasses to and from plain dicts, with every name and type checked."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from loopinterp.errors import ConfigError, InputError, unknown_name

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """JSON-ready form of a (nested) dataclass: dicts, lists and scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    return value


def from_plain(cls: type[T], values: Any, *, path: str = "") -> T:
    """Build a dataclass from a dict, refusing unknown names and wrong types.

    Args:
        cls: The dataclass.
        values: Its fields; nested dataclasses as nested dicts.
        path: Dotted name of this part of the configuration, for messages.

    Raises:
        ConfigError: If a name is unknown, a needed one is missing, or a type is wrong.
    """
    if not isinstance(values, Mapping):
        raise _wrong(path or "configuration", "an object with named settings", values)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise unknown_name(f"setting of {path or 'a training run'}", name, fields, ConfigError)
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ConfigError(
                f"setting {_join(path, name)}",
                expected="a value",
                given="none",
                fix=f"Set {_join(path, name)}.",
            )
    hints = _hints(cls)
    made = {k: _convert(v, hints[k], _join(path, k)) for k, v in values.items()}
    try:
        return cls(**made)
    except ConfigError as error:
        raise _with_path(error, path) from None


def _convert(value: Any, hint: Any, path: str) -> Any:
    """A plain value as its annotation wants it: nested dataclass, tuple, float from int."""
    if dataclasses.is_dataclass(hint):
        return from_plain(hint, value, path=path)  # type: ignore[arg-type]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            if type(None) in arguments:
                return None
            raise _wrong(path, _spell(hint), value)
        inner = [a for a in arguments if a is not type(None)]
        return _convert(value, inner[0], path)
    if origin is tuple and isinstance(value, (list, tuple)):
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else list(arguments)
        if len(kinds) == len(value):
            return tuple(_convert(v, k, path) for v, k in zip(value, kinds))
    if origin is Literal and value in arguments:
        return value
    if origin is Literal and isinstance(value, str):
        raise unknown_name(path, value, [str(a) for a in arguments], ConfigError)
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    if origin is dict and isinstance(value, Mapping):
        return dict(value)
    raise _wrong(path, _spell(hint), value)


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _spell(hint: Any) -> str:
    if isinstance(hint, type) and get_origin(hint) is None:
        names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
        return names.get(hint, hint.__name__)
    if get_origin(hint) in (Union, types.UnionType):
        parts = ["none" if a is type(None) else _spell(a) for a in get_args(hint)]
        return " or ".join(parts)
    if get_origin(hint) is tuple:
        return f"a list of {len(get_args(hint))}" if ... not in get_args(hint) else "a list"
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(str(a) for a in get_args(hint))
    return "an object with named settings" if get_origin(hint) is dict else str(hint)


def _wrong(path: str, expected: str, value: Any) -> InputError:
    return ConfigError(
        path,
        expected=expected,
        given=repr(value) if not isinstance(value, Mapping) else "an object",
        fix=f"Give {path} a value of that kind.",
    )


def _with_path(error: ConfigError, path: str) -> ConfigError:
    """The same error, its setting named from the root of the configuration."""
    if not path or error.what.startswith(path):
        return error
    what = f"{path}.{error.what}"
    return ConfigError(what, expected=error.expected, given=error.given, fix=error.fix)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
