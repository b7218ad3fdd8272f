"""Errors that say what was expected, what was given, and how to mend it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """A user's input cannot be used. The command line prints it and exits with status 2.

    Args:
        what: The thing that is wrong ("n_loops", "checkpoint runs/a/model.safetensors").
        expected: What would have been accepted.
        given: What was given instead.
        fix: One sentence that says what to do.

    Example:
        >>> print(InputError("n_loops", expected="an integer >= 1", given="0", fix="Pass 1."))
        n_loops: expected an integer >= 1, got 0. Pass 1.
    """

    def __init__(self, what: str, *, expected: str, given: str, fix: str) -> None:
        self.what, self.expected, self.given, self.fix = what, expected, given, fix
        super().__init__(f"{what}: expected {expected}, got {given}. {fix}")


class ConfigError(InputError):
    """A configuration value is unknown, out of range, or in conflict with another one."""


class HookError(InputError):
    """A hook name, site or filter matches nothing, or an intervention never fired."""


class CheckpointError(InputError):
    """A saved file is missing, damaged, truncated, mismatched, or of a refused kind."""


def unknown_name(
    what: str, name: str, known: Iterable[str], error: type[InputError] = InputError
) -> InputError:
    """The error for a name that is not in a list of known ones, with the nearest suggested.

    Example:
        >>> print(unknown_name("task", "additon", ["addition", "parity"]))
        task: expected one of addition, parity, got 'additon'. Did you mean 'addition'?
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    shown = ", ".join(names[:12]) + (f", … ({len(names)} in all)" if len(names) > 12 else "")
    fix = f"Did you mean {near[0]!r}?" if near else "Use one of the names listed."
    return error(what, expected=f"one of {shown or '(none)'}", given=repr(name), fix=fix)
