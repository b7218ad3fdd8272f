"""Checks of a public call's plain arguments against their annotations.

The types are those of settings: ``n: PositiveInt``, ``norm: Literal["2", "max"]``.
"""

from __future__ import annotations

import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from loopinterp.core.errors import MOST_LOOPS
from loopinterp.core.settings import schema_error

P = ParamSpec("P")
R = TypeVar("R")

Loops = Annotated[int, Field(ge=1, le=MOST_LOOPS)]
"""A number of loops of one run."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a public function or method when it is called.

    Numbers, booleans, texts, choices, ``None`` and sequences of these are checked; NumPy's numbers
    become Python's, its arrays and ranges lists. Other arguments (models, tensors) pass unchecked.

    Example:
        >>> from pydantic import PositiveInt
        >>> @checked
        ... def repeat(text: str, times: PositiveInt = 1) -> str:
        ...     return text * times
        >>> repeat("ab", times=0)
        Traceback (most recent call last):
        loopinterp.core.errors.InputError: times: expected an integer >= 1, got 0. Change times.
    """
    signature = inspect.signature(function)

    @functools.cache
    def arguments() -> dict[str, _Argument]:
        # At the first call: annotations may name later imports and definitions.
        hints = {p.name: _resolve(p.annotation, function) for p in signature.parameters.values()}
        plain = {int, float, bool, str, type(None)}
        return {
            name: _Argument(name, hint)
            for name, hint in hints.items()
            if hint is not None and _parts(hint) <= plain
        }

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        for name, argument in arguments().items():
            if name in bound.arguments:
                bound.arguments[name] = argument.check(bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return call


class _Argument:
    def __init__(self, name: str, hint: Any) -> None:
        self.name = name
        self.adapter = TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))

    def check(self, value: Any) -> Any:
        try:
            return self.adapter.validate_python(_python_value(value))
        except ValidationError:
            raise schema_error(self.name, value, self.adapter.json_schema()) from None


def _python_value(value: Any) -> Any:
    if isinstance(value, (bool, str, bytes)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (list, tuple, range)):
        items = map(_python_value, value)
        return tuple(items) if isinstance(value, tuple) else list(items)
    return value


def _resolve(annotation: Any, function: Callable[..., Any]) -> Any:
    """The type of an annotation; None for names that only type checkers import."""
    if not isinstance(annotation, str):
        return None if annotation is inspect.Parameter.empty else annotation
    try:
        return eval(annotation, getattr(inspect.unwrap(function), "__globals__", {}))
    except (NameError, TypeError, SyntaxError):  # SyntaxError: jaxtyping's shapes
        return None


def _parts(hint: Any) -> set[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _parts(args[0])
    if origin is Literal:
        return {str}
    if origin in (Union, types.UnionType, Sequence):
        return set().union(*(_parts(arg) for arg in args))
    return {hint}
