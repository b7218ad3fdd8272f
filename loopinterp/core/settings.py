"""Settings: frozen dataclasses checked by pydantic, with this project's errors.

A declaration gives type, range (``Annotated[float, Field(ge=0, lt=1)]``), default and place in the
JSON. :class:`OnlyWith` and ``__post_init__`` relate settings.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import pydantic
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import dataclass_transform

from loopinterp.core.errors import (
    GREATEST_SEED,
    ConfigError,
    InputError,
    shown_value,
    spell_choices,
    spell_range,
    unknown_name,
)
from loopinterp.core.text import MOST, ShortRepr

if TYPE_CHECKING:
    from typing_extensions import Self


T = TypeVar("T")

Seed = Annotated[int, pydantic.Field(ge=0, le=GREATEST_SEED)]

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """Make a subclass of :class:`Settings` a frozen dataclass whose values are checked.

    Example:
        >>> @settings
        ... class Size(Settings):
        ...     width: int = pydantic.Field(8, ge=1)
        >>> Size(width=0)
        Traceback (most recent call last):
        loopinterp.core.errors.ConfigError: width: expected an integer >= 1, got 0. Change width.
    """
    config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    declared: Any = pydantic.dataclasses.dataclass(
        cls, frozen=True, kw_only=True, repr=False, config=config
    )
    unexplained = declared.__init__

    @functools.wraps(unexplained)
    def __init__(self: Any, *args: Any, **values: Any) -> None:
        try:
            unexplained(self, *args, **values)
        except ValidationError as error:
            raise _explain(error, type(self)) from None

    declared.__init__ = __init__
    return declared


class Settings(ShortRepr):
    """Base of declarations made with :func:`settings`."""

    def __post_init__(self) -> None:
        for name, (condition, default) in _conditions(type(self)).items():
            condition.check(self, name, default)

    def _shown(self) -> list[tuple[str, Any]]:
        """All settings; if these are too many, those that differ from the default."""
        fields: Mapping[str, Any] = type(self).__pydantic_fields__  # type: ignore[attr-defined]
        shown = [(name, getattr(self, name)) for name in fields]
        if sum(len(name) + len(repr(value)) + 3 for name, value in shown) < MOST:
            return shown
        usual = {name: f.get_default(call_default_factory=True) for name, f in fields.items()}
        return [(name, value) for name, value in shown if value != usual[name]]

    def to_dict(self, *, defaults: bool = True) -> dict[str, Any]:
        """JSON-ready form, with or without defaults; see :meth:`from_dict`."""
        without = not defaults
        return _adapter(type(self)).dump_python(self, mode="json", exclude_defaults=without)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from plain values, as in JSON."""
        try:
            return _adapter(cls).validate_json(json.dumps(values, default=repr))
        except ValidationError as error:
            raise _explain(error, cls) from None

    def replace(self, **changes: Any) -> Self:
        """A copy with changed settings, checked again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def choices(cls, path: Sequence[str]) -> tuple[str, ...]:
        """The choices of a setting, if any; ``path`` goes from the outermost in."""
        return _choices_of(_schema(cls, path))


class OnlyWith:
    """Marks a setting (in ``Annotated``) that has an effect only with some values of another.

    With ``needed``, it must then be set.
    """

    def __init__(self, setting: str, *values: Any, needed: bool = False) -> None:
        self.setting, self.values, self.needed = setting, values, needed

    def check(self, settings: Settings, name: str, default: Any) -> None:
        value, other = getattr(settings, name), getattr(settings, self.setting)
        effective = other in self.values
        if effective and self.needed and value == default:
            expected, fix = f"a value with {self.setting}={other}", f"Set {name}."
            raise ConfigError(name, expected=expected, given=repr(value), fix=fix)
        if not effective and value != default:
            expected = f"no {name} with {self.setting}={other}, where it has no effect"
            fix = f"Leave {name} out, or set it to {'none' if default is None else default}."
            raise ConfigError(name, expected=expected, given=repr(value), fix=fix)


def flatten_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten_settings(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


@functools.cache
def _adapter(cls: type) -> Any:
    return TypeAdapter(cls)


@functools.cache
def _conditions(cls: type) -> dict[str, tuple[OnlyWith, Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    return {
        name: (mark, defaults[name])
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, OnlyWith)
    }


def _explain(error: ValidationError, cls: type) -> InputError:
    """The first fault as this project's error, unknown names first."""
    fault = min(error.errors(), key=lambda fault: fault["type"] not in _UNKNOWN)
    names = [part for part in fault["loc"] if isinstance(part, str)]
    path, value = _dotted(names), fault["input"]
    raised = fault.get("ctx", {}).get("error")
    if isinstance(raised, InputError):  # by a check of ours, which knows the setting's own name
        return raised.renamed(f"{path}.{raised.what}" if path else raised.what)
    if fault["type"] in _UNKNOWN:
        owner = _dotted(names[:-1]) or cls.__name__
        known = _schema(cls, names[:-1]).get("properties", {})
        return unknown_name(f"setting of {owner}", names[-1], known, ConfigError)
    schema = _schema(cls, names)
    if fault["type"] in ("missing", "missing_keyword_only_argument", "missing_argument"):
        expected, fix = spell_schema(schema), f"Set {path}."
        return ConfigError(path, expected=expected, given="nothing", fix=fix)
    return schema_error(path or cls.__name__, value, schema, ConfigError)


def schema_error(
    name: str, value: Any, schema: Mapping[str, Any], error: type[InputError] = InputError
) -> InputError:
    choices = _choices_of(schema)
    if isinstance(value, str) and choices:
        return unknown_name(name, value, choices, error)
    shown = repr if isinstance(value, str) else shown_value
    got = "an object" if isinstance(value, dict) else shown(value)
    return error(name, expected=spell_schema(schema), given=got, fix=f"Change {name}.")


def option(number: int) -> str:
    """The tag of one of several kinds of settings."""
    return f"({number})"


def _dotted(names: Sequence[str]) -> str:
    return ".".join(name for name in names if not name.startswith("("))


@functools.cache  # it takes a tenth of a second, and is asked for each setting that is changed
def _whole_schema(cls: type) -> dict[str, Any]:
    return _adapter(cls).json_schema()


def _schema(cls: type, path: Sequence[str]) -> dict[str, Any]:
    root = _whole_schema(cls)

    def resolved(schema: dict[str, Any]) -> dict[str, Any]:
        ref = schema.get("$ref")
        return schema if ref is None else root["$defs"][ref.rpartition("/")[2]]

    schema = root
    for name in path:
        options = [resolved(each) for each in schema.get("oneOf", [schema])]
        if name.startswith("("):
            schema = options[int(name[1:-1])]
            continue
        # Without a tag, the first option that has the setting.
        schema = next((x for x in options if name in x.get("properties", {})), options[0])
        of_any = schema.get("additionalProperties")  # of a mapping, whatever the name
        unnamed = of_any if isinstance(of_any, dict) else {}
        schema = resolved(schema.get("properties", {}).get(name, unnamed))
    return schema


def _choices_of(schema: Mapping[str, Any]) -> tuple[str, ...]:
    choices: list[str] = []
    for part in schema.get("anyOf", [schema]):
        # A choice of one is a constant in the schema.
        choices += part.get("enum", [part["const"]] if "const" in part else [])
    return tuple(choices)


def spell_schema(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema takes, in words."""
    if "anyOf" in schema:
        return " or ".join(spell_schema(part) for part in schema["anyOf"])
    if choices := _choices_of(schema):
        return spell_choices(choices)
    kind = schema.get("type")
    if kind == "array":
        each, number = schema.get("items") or schema["prefixItems"][0], schema.get("minItems")
        more = "" if schema.get("maxItems") == number else " or more"
        return f"a list{f' of {number}{more}' if number else ''}, each {spell_schema(each)}"
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    if kind == "integer" and above is not None:
        least, above = above + 1, None
    words = {
        "integer": "an integer",
        "number": "a number",
        "string": "text",
        "boolean": "true or false",
        "null": "none",
    }.get(kind or "", "an object with named settings")
    return words + spell_range(least, schema.get("maximum"), above, schema.get("exclusiveMaximum"))
