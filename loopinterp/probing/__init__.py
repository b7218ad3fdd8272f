"""Linear probes for a whole grid at once, the controls they need, and the carry study."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.probing.carry import carry_study as carry_study
    from loopinterp.probing.carry_result import CarryStudyResult as CarryStudyResult
    from loopinterp.probing.chains import ChainSample as ChainSample
    from loopinterp.probing.chains import sample_chains as sample_chains
    from loopinterp.probing.codelength import online_code_length as online_code_length
    from loopinterp.probing.controls import context_types as context_types
    from loopinterp.probing.controls import control_labels as control_labels
    from loopinterp.probing.controls import majority_accuracy as majority_accuracy
    from loopinterp.probing.controls import with_random_weights as with_random_weights
    from loopinterp.probing.grid import probe_study as probe_study
    from loopinterp.probing.grid_result import ProbeResult as ProbeResult
    from loopinterp.probing.linear import PROBES as PROBES
    from loopinterp.probing.linear import LinearProbe as LinearProbe
    from loopinterp.probing.linear import LogisticProbe as LogisticProbe
    from loopinterp.probing.linear import RidgeProbe as RidgeProbe
    from loopinterp.probing.states import states_at as states_at

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "PROBES": ".linear",
        "CarryStudyResult": ".carry_result",
        "ChainSample": ".chains",
        "LinearProbe": ".linear",
        "LogisticProbe": ".linear",
        "ProbeResult": ".grid_result",
        "RidgeProbe": ".linear",
        "carry_study": ".carry",
        "context_types": ".controls",
        "control_labels": ".controls",
        "majority_accuracy": ".controls",
        "online_code_length": ".codelength",
        "probe_study": ".grid",
        "sample_chains": ".chains",
        "states_at": ".states",
        "with_random_weights": ".controls",
    },
)
