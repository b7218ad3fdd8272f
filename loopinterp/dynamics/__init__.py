"""Fixed points of the loop: solvers, convergence, regimes, stability, readout, extrapolation."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.dynamics.attention_stabilisation import (
        AttentionStabilisationResult as AttentionStabilisationResult,
    )
    from loopinterp.dynamics.attention_stabilisation import attention_change as attention_change
    from loopinterp.dynamics.attention_stabilisation import (
        attention_stabilisation_study as attention_stabilisation_study,
    )
    from loopinterp.dynamics.convergence import ConvergenceResult as ConvergenceResult
    from loopinterp.dynamics.convergence import convergence_study as convergence_study
    from loopinterp.dynamics.extrapolation import ExtrapolationResult as ExtrapolationResult
    from loopinterp.dynamics.extrapolation import extrapolation_study as extrapolation_study
    from loopinterp.dynamics.fixed_point import FixedPoint as FixedPoint
    from loopinterp.dynamics.fixed_point import find_fixed_point as find_fixed_point
    from loopinterp.dynamics.jacobian import Spectrum as Spectrum
    from loopinterp.dynamics.jacobian import dense_jacobian as dense_jacobian
    from loopinterp.dynamics.jacobian import jvp as jvp
    from loopinterp.dynamics.jacobian import spectral_radius as spectral_radius
    from loopinterp.dynamics.measures import ContractionRates as ContractionRates
    from loopinterp.dynamics.measures import contraction_rates as contraction_rates
    from loopinterp.dynamics.measures import distance_to_limit as distance_to_limit
    from loopinterp.dynamics.measures import relative_residual as relative_residual
    from loopinterp.dynamics.measures import settling_time as settling_time
    from loopinterp.dynamics.measures import update_cosine as update_cosine
    from loopinterp.dynamics.readouts import correctness as correctness
    from loopinterp.dynamics.readouts import exact_match as exact_match
    from loopinterp.dynamics.readouts import readout_entropy as readout_entropy
    from loopinterp.dynamics.readouts import readout_kl as readout_kl
    from loopinterp.dynamics.readouts import readout_margin as readout_margin
    from loopinterp.dynamics.readouts import stable_from as stable_from
    from loopinterp.dynamics.regimes import Regime as Regime
    from loopinterp.dynamics.regimes import RegimeCriteria as RegimeCriteria
    from loopinterp.dynamics.regimes import Regimes as Regimes
    from loopinterp.dynamics.regimes import classify_regimes as classify_regimes
    from loopinterp.dynamics.solvers.anderson import Anderson as Anderson
    from loopinterp.dynamics.solvers.picard import Picard as Picard
    from loopinterp.dynamics.solvers.protocol import Solver as Solver
    from loopinterp.dynamics.solvers.protocol import Status as Status
    from loopinterp.dynamics.solvers.registry import get_solver as get_solver
    from loopinterp.dynamics.solvers.registry import list_solvers as list_solvers
    from loopinterp.dynamics.state_trajectories import run_loops as run_loops

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "Anderson": ".solvers.anderson",
        "AttentionStabilisationResult": ".attention_stabilisation",
        "ContractionRates": ".measures",
        "ConvergenceResult": ".convergence",
        "ExtrapolationResult": ".extrapolation",
        "FixedPoint": ".fixed_point",
        "Picard": ".solvers.picard",
        "Regime": ".regimes",
        "RegimeCriteria": ".regimes",
        "Regimes": ".regimes",
        "Solver": ".solvers.protocol",
        "Spectrum": ".jacobian",
        "Status": ".solvers.protocol",
        "attention_change": ".attention_stabilisation",
        "attention_stabilisation_study": ".attention_stabilisation",
        "classify_regimes": ".regimes",
        "contraction_rates": ".measures",
        "convergence_study": ".convergence",
        "correctness": ".readouts",
        "dense_jacobian": ".jacobian",
        "distance_to_limit": ".measures",
        "exact_match": ".readouts",
        "extrapolation_study": ".extrapolation",
        "find_fixed_point": ".fixed_point",
        "get_solver": ".solvers.registry",
        "jvp": ".jacobian",
        "list_solvers": ".solvers.registry",
        "readout_entropy": ".readouts",
        "readout_kl": ".readouts",
        "readout_margin": ".readouts",
        "relative_residual": ".measures",
        "run_loops": ".state_trajectories",
        "settling_time": ".measures",
        "spectral_radius": ".jacobian",
        "stable_from": ".readouts",
        "update_cosine": ".measures",
    },
)
