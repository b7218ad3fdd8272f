"""Fixed-point solvers, one per file, behind one protocol: ``init``, ``step``, ``terminate``."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.dynamics.solvers.anderson import Anderson as Anderson
    from loopinterp.dynamics.solvers.picard import Picard as Picard
    from loopinterp.dynamics.solvers.protocol import Solver as Solver
    from loopinterp.dynamics.solvers.protocol import SolverState as SolverState
    from loopinterp.dynamics.solvers.protocol import Status as Status
    from loopinterp.dynamics.solvers.protocol import Termination as Termination
    from loopinterp.dynamics.solvers.registry import get_solver as get_solver
    from loopinterp.dynamics.solvers.registry import list_solvers as list_solvers

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Anderson": ".anderson",
        "Picard": ".picard",
        "Solver": ".protocol",
        "SolverState": ".protocol",
        "Status": ".protocol",
        "Termination": ".protocol",
        "get_solver": ".registry",
        "list_solvers": ".registry",
    },
)
