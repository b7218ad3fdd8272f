from .anderson import Anderson as Anderson
from .picard import Picard as Picard
from .protocol import Solver as Solver
from .protocol import SolverState as SolverState
from .protocol import Status as Status
from .protocol import Termination as Termination
from .registry import get_solver as get_solver
from .registry import list_solvers as list_solvers
