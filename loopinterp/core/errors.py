"""Errors that say what was expected, what was given, and the fix."""

from __future__ import annotations

import difflib
import math
import numbers
import reprlib
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

GREATEST_SEED = 2**63 - 1  # fits into 64 bits
MOST_THREADS = 256
MOST_LOOPS = 100_000  # of one run


class InputError(ValueError):
    """A user's input cannot be used. The command line prints it and exits with status 2.

    Example:
        >>> print(InputError("n_loops", expected="an integer >= 1", given="0", fix="Pass 1."))
        n_loops: expected an integer >= 1, got 0. Pass 1.
    """

    def __init__(self, what: str, *, expected: str, given: str, fix: str) -> None:
        what, given, fix = (
            text if len(text) <= 400 else f"{text[:400]}… ({len(text)} characters)"
            for text in (what, given, fix)
        )
        self.what, self.expected, self.given, self.fix = what, expected, given, fix
        super().__init__(f"{what}: expected {expected}, got {given}. {fix}")

    def renamed(self, what: str) -> InputError:
        """The same error of the same class, with another name of what it is about."""
        return type(self)(what, expected=self.expected, given=self.given, fix=self.fix)


class ArgumentError(InputError, TypeError):
    """An argument of a call is missing or unknown; Python's own error is a TypeError."""


class UnknownKeyError(InputError, KeyError):
    """A name in square brackets is unknown; mappings raise a KeyError."""

    def __str__(self) -> str:
        return str(self.args[0])


class ConfigError(InputError):
    """A configuration value is unknown, out of range, or in conflict."""


class HookError(InputError):
    """A hook name, site or filter matches nothing, or an intervention never fired."""


class CheckpointError(InputError):
    """A saved file is missing, damaged, mismatched, or of a refused kind."""


def need(
    holds: object,
    what: str,
    expected: str,
    given: object,
    fix: str,
    *,
    error: type[InputError] = InputError,
) -> None:
    """Raise unless something holds; ``given`` is a text, or described."""
    if not holds:
        got = given if isinstance(given, str) else describe_tensor(given)
        raise error(what, expected=expected, given=got, fix=fix)


def need_distinct(what: str, values: Sequence[Any], fix: str) -> None:
    """Raise unless there are values, each once."""
    again = [repr(x) for k, x in enumerate(values) if x in values[:k]]
    if again or not values:
        got = f"{again[0]} twice" if again else "none"
        raise InputError(what, expected="at least one, each once", given=got, fix=fix)


def describe_tensor(values: Any) -> str:
    """Dtype, shape, range and device of a tensor; else the type."""
    torch = sys.modules.get("torch")  # without it there are no tensors
    if torch is None or not isinstance(values, torch.Tensor):
        return type(values).__name__
    ends = f" from {values.min().item()} to {values.max().item()}" if values.numel() else ""
    where = "" if values.device.type == "cpu" else f" on {values.device}"
    return f"{values.dtype} of shape {list(values.shape)}{ends}{where}"


def unknown_name(
    what: str, name: Any, known: Iterable[str], error: type[InputError] = InputError
) -> InputError:
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    fix = f"Did you mean {near[0]!r}?" if near else "Use one of the names listed."
    if len(names) == 1 and not near:
        fix = f"Pass {names[0]!r}."
    return error(what, expected=spell_choices(names), given=repr(name), fix=fix)


def spell_choices(names: Sequence[str]) -> str:
    """The first twelve names to choose from.

    Example:
        >>> spell_choices(["each"]), spell_choices(["cpu", "cuda"])
        ("'each'", 'one of cpu, cuda')
    """
    if len(names) == 1:
        return repr(names[0])
    shown = ", ".join(names[:12]) + (f", … ({len(names)} in all)" if len(names) > 12 else "")
    return f"one of {shown or '(none)'}"


def check_choice(
    what: str, value: Any, choices: Iterable[str], *, error: type[InputError] = InputError
) -> str:
    known = tuple(choices)
    if not isinstance(value, str) or value not in known:
        raise unknown_name(what, value, known, error)
    return value


def check_new_name(what: str, name: str, known: Collection[str]) -> None:
    if name in known:
        expected, fix = "a name that is not registered yet", "Choose another, or pass replace=True."
        raise InputError(what, expected=expected, given=repr(name), fix=fix)


def check_integer(
    what: str,
    value: Any,
    *,
    least: int | None = None,
    most: int | None = None,
    far: int | None = None,
    fix: str | None = None,
) -> int:
    """The value as an ``int``, if it is an integer (NumPy's too, no bool) in ``least .. most``.

    Only for a value above ``far`` does the message name ``far`` as the upper end.
    """
    integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    number = int(value) if integer else 0
    if far is not None and number > far:
        most = far
    below, above = least is not None and number < least, most is not None and number > most
    if not integer or below or above:
        example = next((end for end in (least, most) if end is not None), 0)
        expected, fix = "an integer" + spell_range(least, most), fix or f"Pass e.g. {example}."
        raise InputError(what, expected=expected, given=shown_value(value), fix=fix)
    return number


def check_seed(seed: Any) -> int:
    return check_integer("seed", seed, least=0, most=GREATEST_SEED)


def check_number(
    what: str, value: Any, *, least: float | None = None, most: float | None = None
) -> float:
    """The value as a ``float``, if finite (NumPy's too) and in ``least .. most``."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    try:
        number = float(value) if real else math.nan
    except OverflowError:  # an integer above every float
        number = math.inf
    below, above = least is not None and number < least, most is not None and number > most
    if not math.isfinite(number) or below or above:
        expected, fix = "a number" + spell_range(least, most), "Pass a finite number in that range."
        raise InputError(what, expected=expected, given=shown_value(value), fix=fix)
    return number


def shown_value(value: Any) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a {type(value).__name__} too long to be written"


def spell_error(error: Exception) -> str:
    """The message of an error; of one that is not ours, after its type."""
    if isinstance(error, InputError):
        return str(error)
    return f"{type(error).__name__}: {str(error) or 'without a message'}"


def spell_range(
    least: float | None,
    most: float | None,
    above: float | None = None,
    below: float | None = None,
) -> str:
    if least is not None and most is not None:
        return f" in {least}..{most}"
    ends = {">": above, ">=": least, "<": below, "<=": most}
    words = " and ".join(f"{sign} {end}" for sign, end in ends.items() if end is not None)
    return words and f" {words}"
