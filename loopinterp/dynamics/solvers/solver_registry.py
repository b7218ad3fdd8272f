"""Solvers by name."""

from __future__ import annotations

from loopinterp.dynamics.solvers.anderson import Anderson
from loopinterp.dynamics.solvers.broyden import Broyden
from loopinterp.dynamics.solvers.fixed_point_solver import Solver
from loopinterp.dynamics.solvers.newton_krylov import NewtonKrylov
from loopinterp.dynamics.solvers.picard import Picard
from loopinterp.errors import unknown_name

_SOLVERS: dict[str, type[Solver]] = {
    "anderson": Anderson,
    "broyden": Broyden,
    "newton-krylov": NewtonKrylov,
    "picard": Picard,
}


def list_solvers() -> list[str]:
    """Names that :func:`get_solver` knows.

    Example:
        >>> list_solvers()
        ['anderson', 'broyden', 'newton-krylov', 'picard']
    """
    return sorted(_SOLVERS)


def get_solver(solver: str | Solver) -> Solver:
    """A solver from its name, with default settings; an instance is given back as it is.

    Raises:
        InputError: If the name is unknown.

    Example:
        >>> get_solver("picard")
        Picard(damping=1.0)
    """
    if isinstance(solver, Solver):
        return solver
    if solver not in _SOLVERS:
        raise unknown_name("solver", solver, _SOLVERS)
    return _SOLVERS[solver]()
