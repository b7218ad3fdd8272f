"""Tasks by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from loopinterp.core.errors import ConfigError, InputError, check_new_name, need, unknown_name
from loopinterp.tasks.abacus import AbacusAddition, AbacusMultiplication, AbacusSum
from loopinterp.tasks.addition import Addition, Multiplication, TokenAddition
from loopinterp.tasks.chess import ChessPuzzles
from loopinterp.tasks.full_output import BinarySum, Copy, Parity, UniqueSet
from loopinterp.tasks.hops import PHop
from loopinterp.tasks.maze import Maze
from loopinterp.tasks.prefixes import PrefixSum, RegularLanguage
from loopinterp.tasks.sorting import AbacusSorting
from loopinterp.tasks.sudoku import Sudoku
from loopinterp.tasks.task import Task
from loopinterp.tasks.token_by_token import NextToken

_FACTORIES: dict[str, Callable[..., Task]] = {
    task.name: task
    for task in (
        AbacusAddition,
        AbacusMultiplication,
        AbacusSorting,
        AbacusSum,
        Addition,
        BinarySum,
        ChessPuzzles,
        Copy,
        Maze,
        Multiplication,
        NextToken,
        PHop,
        Parity,
        PrefixSum,
        RegularLanguage,
        Sudoku,
        TokenAddition,
        UniqueSet,
    )
}


def list_tasks() -> list[str]:
    """Names of the registered tasks, sorted."""
    return sorted(_FACTORIES)


def get_task(name: str, **settings: object) -> Task:
    """The task of a name (see :func:`list_tasks`), with some settings.

    Example:
        >>> get_task("addition", format="features").d_features
        2
    """
    if name not in _FACTORIES:
        error = unknown_name("task", name, _FACTORIES)
        fix = f"{error.fix} A task of your own is known once the file that registers it is run."
        raise InputError("task", expected=error.expected, given=error.given, fix=fix)
    factory = _FACTORIES[name]
    known = inspect.signature(factory).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    for setting in settings:
        if setting not in known and not open_ended:
            raise unknown_name(f"setting of task {name}", setting, known, ConfigError)
    return factory(**settings)


def register_task(name: str, factory: Callable[..., Task], *, replace: bool = False) -> None:
    """Register a task for :func:`get_task` and the command line; a taken name needs ``replace``.

    ``factory`` is the task's class, or a function of its settings.
    """
    expected, fix = "a class or function that makes the task", "Pass the class itself."
    need(callable(factory), "factory", expected, type(factory).__name__, fix)
    if not replace:
        check_new_name("task name", name, _FACTORIES)
    _FACTORIES[name] = factory
