"""Arguments of a public call, checked once against their annotations.

The types are those of settings: ``n: PositiveInt``, ``norm: Literal["2", "max"]``.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import numbers
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar, Union

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from loopinterp.core.errors import MOST_LOOPS, ArgumentError, InputError, shown_value, unknown_name
from loopinterp.core.settings import schema_error, spell_schema

if TYPE_CHECKING:
    import torch

P = ParamSpec("P")
R = TypeVar("R")

_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Loops = Annotated[int, Field(ge=1, le=MOST_LOOPS)]


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a public function or method when it is called.

    Numbers, truth values, texts, choices, ``None``, sequences of these, tensors, mappings,
    functions and paths are checked. An ``InputError`` names a wrong type or value, an
    ``ArgumentError`` a missing or unknown argument. NumPy's numbers and arrays become Python's;
    lists and arrays become tensors where a tensor is expected.

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
        plain = [p for p in signature.parameters.values() if p.kind not in _SEVERAL]
        hints = {p.name: _resolve(p.annotation, function) for p in plain}
        every = {name: _Argument(name, hint) for name, hint in hints.items() if hint is not None}
        return {name: argument for name, argument in every.items() if argument.is_known}

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            wrong = _wrong_call(function, signature, arguments(), args, kwargs)
            raise (wrong or error) from None
        for name, argument in arguments().items():
            if name in bound.arguments:
                bound.arguments[name] = argument.check(bound.arguments[name])
        return function(*bound.args, **bound.kwargs)

    return call


def _wrong_call(
    function: Callable[..., Any],
    signature: inspect.Signature,
    arguments: Mapping[str, _Argument],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> ArgumentError | None:
    names = [name for name in signature.parameters if name != "self"]
    name = function.__qualname__.rpartition("<locals>.")[2]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for option in kwargs:
        if option not in names and not takes_any:
            return unknown_name(f"argument of {name}", option, names, ArgumentError)  # type: ignore[return-value]
    try:
        there = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return None
    missing = next(
        key
        for key, parameter in signature.parameters.items()
        if key not in there
        and parameter.default is parameter.empty
        and parameter.kind not in _SEVERAL
    )
    expected = arguments[missing].expected if missing in arguments else "a value"
    fix = f"Pass {missing} to {name}."
    return ArgumentError(missing, expected=expected, given="nothing", fix=fix)


# Types checked by their class alone (as tensors are), with their names in errors.
_CLASSES: dict[Any, str] = {
    Mapping: "a mapping",
    Callable: "a function",
    Path: "a path",
    np.ndarray: "an array",
}


class _Argument:
    """One argument, with the alternatives of its annotation: plain types and classes."""

    def __init__(self, name: str, hint: Any) -> None:
        self.name = name
        words = dict(_CLASSES)
        self._torch: Any = sys.modules.get("torch")  # without it there are no tensors to check
        if self._torch is not None:
            words[self._torch.Tensor] = "a tensor"
        is_union = typing.get_origin(hint) in (Union, types.UnionType)
        alternatives = typing.get_args(hint) if is_union else (hint,)
        plain = [x for x in alternatives if _parts(x) <= {int, float, bool, str, type(None)}]
        rest = [typing.get_origin(x) or x for x in alternatives if x not in plain]
        self.is_known = all(x in words for x in rest)
        self.classes = tuple(x for x in rest if x in words)
        self.adapter, spelled = None, []
        if plain and self.is_known:
            union: Any = Union[tuple(plain)]  # noqa: UP007
            self.adapter = TypeAdapter(union, config=ConfigDict(strict=True, allow_inf_nan=False))
            spelled = [spell_schema(self.adapter.json_schema())]
        self.expected = " or ".join([*spelled, *(words[x] for x in self.classes)])
        # A list is a tensor's numbers, unless lists are asked for beside tensors.
        listed = any(typing.get_origin(x) is Sequence for x in plain)
        self.takes_lists = "a tensor" in self.expected and not listed
        # The type of a mapping's values, where it can be checked.
        of = next((typing.get_args(x) for x in alternatives if typing.get_origin(x) is Mapping), ())
        self.values = _Argument(name, of[1]) if len(of) == 2 else None

    def check(self, value: Any, place: str = "") -> Any:
        name = f"{self.name}{place}"
        if isinstance(value, self.classes):
            if self.values is None or not self.values.is_known or not isinstance(value, Mapping):
                return value
            return {name: self.values.check(x, f"[{name!r}]") for name, x in value.items()}
        if self.takes_lists and isinstance(value, (list, tuple, range, np.ndarray)):
            try:
                return self._torch.as_tensor(value if isinstance(value, np.ndarray) else [*value])
            except (TypeError, ValueError, RuntimeError, OverflowError):
                pass  # no numbers, or rows of different lengths
        schema: dict[str, Any] = {}
        if self.adapter is not None:
            try:
                return self.adapter.validate_python(_python_value(value))
            except ValidationError:
                schema = self.adapter.json_schema()
        if schema and not self.classes:
            raise schema_error(name, value, schema)
        fix = f"Change {name}."
        raise InputError(name, expected=self.expected, given=shown_value(value), fix=fix)


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
    """The type of an annotation; None if it cannot be told."""
    if not isinstance(annotation, str):
        return None if annotation is inspect.Parameter.empty else annotation
    names = _Names(Mapping=Mapping, Sequence=Sequence, Callable=Callable, Path=Path)
    if "torch" in sys.modules:
        names["Tensor"] = sys.modules["torch"].Tensor
    names |= getattr(inspect.unwrap(function), "__globals__", {})
    names |= dict.fromkeys(("Bool", "Complex", "Float", "Int", "Integer", "Shaped"), _Shaped)
    try:
        return eval(annotation, {}, names)
    except (AttributeError, TypeError, SyntaxError):  # SyntaxError: jaxtyping's shapes
        return None


class _Names(dict[str, Any]):
    """Names of an annotation; those that only type checkers import stand for a type unknown."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return _Unknown


class _UnknownType(type):
    def __getattr__(cls, name: str) -> Any:  # a type of a module, as xr.Dataset
        if name.startswith("_"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, _: Any) -> Any:
        return cls


class _Unknown(metaclass=_UnknownType): ...


class _Shaped:
    """Stands for jaxtyping's types, which only type checkers import."""

    def __class_getitem__(cls, of: tuple[Any, str]) -> Any:
        return of[0]


def _parts(hint: Any) -> set[Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _parts(args[0])
    if origin is Literal:
        return {str}
    if origin in (Union, types.UnionType, Sequence):
        return set().union(*(_parts(arg) for arg in args))
    return {hint}


def resolve_device(device: str | torch.device) -> torch.device:
    """The device of a name; ``auto`` is the GPU if there is one.

    Raises:
        InputError: If the name is unknown, or the device is missing.
    """
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        there = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        there = None
    if there is None or device == "meta":  # which holds no values
        raise unknown_name("device", device, ("auto", "cpu", "cuda"))
    got, fix = "none on this machine", "Use the device cpu."
    if there.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        # PyTorch keeps a number in 8 bits: cuda:256 would be cuda:0, and cuda:999 negative.
        if 0 <= (there.index or 0) < count and str(there) == str(device):
            return there
        if count:
            got, fix = f"only {count} of them", f"Use a number below {count}."
    else:
        try:
            torch.empty(0, device=there)
            return there
        except (RuntimeError, AssertionError, NotImplementedError):
            pass
    kind = "GPU" if there.type == "cuda" else f"{there.type} device"
    expected = f"a {kind} that PyTorch can use"
    raise InputError(f"device {str(device)!r}", expected=expected, given=got, fix=fix)
