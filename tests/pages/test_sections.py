from __future__ import annotations

import pytest

from loopinterp.core.results import Finding
from loopinterp.pages import RunRecord
from loopinterp.pages.sections import SectionView, section_views, tiles
from tests.pages import synthetic


def shown(monkeypatch: pytest.MonkeyPatch, **said: list[Finding]) -> dict[str, SectionView]:
    """The sections of a run whose studies, by name, say so much."""
    for name, findings in said.items():
        monkeypatch.setitem(synthetic._FINDINGS, name, findings)
        monkeypatch.setitem(synthetic._FIGURES, name, list)
    results = {name: synthetic.made_up(name) for name in said}
    views, problems = section_views(RunRecord(name="run", results=results))
    assert not problems
    return {view.section.key: view for view in views}


def test_the_study_named_as_the_section_or_naming_the_program_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views = shown(
        monkeypatch,
        another=[Finding("Theirs.", kind="wavefront"), Finding("Held.", kind="program")],
        named=[Finding("It is.", kind="verdict"), Finding("By how much.", kind="program")],
        wavefront=[Finding("Ours.", kind="wavefront")],
    )
    assert [f.text for f in views["wavefront"].findings] == ["Ours."]
    assert [f.text for f in views["program"].findings] == ["By how much."]
    folded = [finding.text for view in views.values() for _, finding in view.places()[1:]]
    assert folded == ["Theirs.", "Held."]


def test_the_summary_shows_labelled_values_and_one_of_each_section_without_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    labelled = Finding("Held.", kind="program", value="2", label="Hold time")
    views = shown(
        monkeypatch,
        convergence=[Finding("It settles.", kind="convergence")],
        program=[
            Finding("It is.", kind="verdict", value="Ripple"),
            Finding("By how much.", kind="program", value="0.9"),
            labelled,
        ],
        wavefront=[
            Finding("No number.", kind="wavefront"),
            Finding("Its own.", kind="wavefront", value="7", label="Delay"),
            Finding("The first.", kind="wavefront", value="1 a loop"),
            Finding("A later one.", kind="wavefront", value="8"),
        ],
    )
    large = [(anchor, name, finding.value) for anchor, name, finding in tiles([*views.values()])]
    assert large == [
        ("wavefront", "Delay", "7"),
        ("program", "Hold time", "2"),
        ("wavefront-fold-0", "Carry wavefront", "1 a loop"),
    ]
