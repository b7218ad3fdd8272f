"""The carry study on known models: of additions as long as the study needs, and no shorter."""

from loopinterp.benchmark import known_models
from loopinterp.benchmark.wavefront_scores import LEAST_BITS, score_wavefront


def test_the_shortest_addition_that_the_study_can_be_made_of_is_asked():
    (known,) = known_models(["ripple"], n=LEAST_BITS, examples=8)
    score = score_wavefront(known)["wavefront"]
    assert score.value >= 0.95 > score.control
    (shorter,) = known_models(["ripple"], n=LEAST_BITS - 1, examples=8)
    assert score_wavefront(shorter) == {}
