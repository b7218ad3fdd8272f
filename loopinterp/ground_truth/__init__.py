"""The tools themselves, put to the test on compiled models, whose circuit is known."""

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.ground_truth.checks import CHECKS as CHECKS
    from loopinterp.ground_truth.checks import Check as Check
    from loopinterp.ground_truth.checks import Score as Score
    from loopinterp.ground_truth.result import GroundTruth as GroundTruth
    from loopinterp.ground_truth.robustness import Robustness as Robustness
    from loopinterp.ground_truth.robustness import robustness_study as robustness_study
    from loopinterp.ground_truth.study import ground_truth_study as ground_truth_study
    from loopinterp.ground_truth.subjects import Subject as Subject
    from loopinterp.ground_truth.subjects import make_subjects as make_subjects

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "CHECKS": ".checks",
        "Check": ".checks",
        "GroundTruth": ".result",
        "Robustness": ".robustness",
        "Score": ".checks",
        "Subject": ".subjects",
        "ground_truth_study": ".study",
        "make_subjects": ".subjects",
        "robustness_study": ".robustness",
    },
)
