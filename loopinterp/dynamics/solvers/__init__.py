"""Fixed-point solvers, one per file, behind one protocol: ``init``, ``step``, ``terminate``.

Which one? :class:`Picard` is the loop itself: it ends where the model ends, and fails where the
model does not settle. :class:`Anderson` needs far fewer steps on slow contractions and also finds
fixed points that the loop never reaches; a limit found by it alone says that a fixed point exists,
not that the model goes there.
"""

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
