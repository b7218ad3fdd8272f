"""Figures of the studies of this package, accuracy always beside convergence."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.dynamics.figures.attention import attention_figures as attention_figures
    from loopinterp.dynamics.figures.convergence import convergence_figures as convergence_figures
    from loopinterp.dynamics.figures.extrapolation import (
        extrapolation_figures as extrapolation_figures,
    )

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "attention_figures": ".attention",
        "convergence_figures": ".convergence",
        "extrapolation_figures": ".extrapolation",
    },
)
