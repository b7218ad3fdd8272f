from .anderson import Anderson as Anderson
from .fixed_point_solver import Solver as Solver
from .fixed_point_solver import SolverState as SolverState
from .fixed_point_solver import Status as Status
from .fixed_point_solver import Termination as Termination
from .picard import Picard as Picard
from .solver_registry import get_solver as get_solver
from .solver_registry import list_solvers as list_solvers
