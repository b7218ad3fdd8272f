"""Linear probes for a whole grid at once, the controls they need, and the carry study."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.probing.linear import PROBES as PROBES
    from loopinterp.probing.linear import LinearProbe as LinearProbe
    from loopinterp.probing.linear import LogisticProbe as LogisticProbe
    from loopinterp.probing.linear import RidgeProbe as RidgeProbe

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "PROBES": ".linear",
        "LinearProbe": ".linear",
        "LogisticProbe": ".linear",
        "RidgeProbe": ".linear",
    },
)
