"""Linear probes for a whole grid at once, the controls they need, and the carry study."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.probing.carry_chains import ChainSample as ChainSample
    from loopinterp.probing.carry_chains import sample_chains as sample_chains
    from loopinterp.probing.carry_wavefront import carry_study as carry_study
    from loopinterp.probing.carry_wavefront_result import CarryStudyResult as CarryStudyResult
    from loopinterp.probing.linear_probes import PROBES as PROBES
    from loopinterp.probing.linear_probes import LinearProbe as LinearProbe
    from loopinterp.probing.linear_probes import LogisticProbe as LogisticProbe
    from loopinterp.probing.linear_probes import RidgeProbe as RidgeProbe
    from loopinterp.probing.prequential_code import online_code_length as online_code_length
    from loopinterp.probing.probe_controls import context_types as context_types
    from loopinterp.probing.probe_controls import control_labels as control_labels
    from loopinterp.probing.probe_controls import majority_accuracy as majority_accuracy
    from loopinterp.probing.probe_controls import with_random_weights as with_random_weights
    from loopinterp.probing.probe_grid import ProbeResult as ProbeResult
    from loopinterp.probing.probe_grid import probe_study as probe_study

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "PROBES": ".linear_probes",
        "CarryStudyResult": ".carry_wavefront_result",
        "ChainSample": ".carry_chains",
        "LinearProbe": ".linear_probes",
        "LogisticProbe": ".linear_probes",
        "ProbeResult": ".probe_grid",
        "RidgeProbe": ".linear_probes",
        "carry_study": ".carry_wavefront",
        "context_types": ".probe_controls",
        "control_labels": ".probe_controls",
        "majority_accuracy": ".probe_controls",
        "online_code_length": ".prequential_code",
        "probe_study": ".probe_grid",
        "sample_chains": ".carry_chains",
        "with_random_weights": ".probe_controls",
    },
)
