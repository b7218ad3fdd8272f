"""The list of studies."""

from __future__ import annotations

from loopinterp.studies import STUDIES


def test_a_traceback_says_which_study_failed():
    names = [study.run.__name__ for study in STUDIES]
    assert names == ["_" + study.name.replace("-", "_") for study in STUDIES]
