"""Every figure can be drawn from a saved result, says how to read it, and names its control."""

from __future__ import annotations

import pytest
import torch

from loopinterp.circuits import compare_programs, decodability, head_study, subspace_study
from loopinterp.results import load_result


@pytest.fixture(scope="module")
def results(program_model, untrained, additions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    model = program_model("ripple")
    made = [
        compare_programs(model, ["ripple", "latched_chain"], n=12, per_place=6, max_chain=5),
        subspace_study(model, "ripple", n=12, per_place=8, max_chain=5, ranks=(1, 2)),
        decodability(untrained, additions, ["ripple", "latched_chain"], n_loops=3),
        head_study(untrained, additions[torch.arange(6)]),
    ]
    return [load_result(result.save(folder)) for result in made]


def test_all_figures_are_drawn_and_explained(results):
    figures = [figure for result in results for figure in result.figures()]
    assert len(figures) == 7
    for figure in figures:
        assert figure.section == "program"
        assert figure.plot.data
        assert len(figure.caption) > 80
        assert figure.plot.to_json()
    measured = [figure for figure in figures if not figure.title.endswith("as a program")]
    assert len(measured) == 6
    for figure in measured:
        assert len(figure.control) > 40
        assert figure.data is not None and len(figure.data)


def test_titles_are_all_different(results):
    titles = [figure.title for result in results for figure in result.figures()]
    assert len(set(titles)) == len(titles)


def test_bars_show_the_scores_of_the_result(results):
    comparison = results[0]
    bars = {bar.name: bar for bar in comparison.figures()[0].plot.data}
    order = [comparison.programs.index(y.replace(" ", "_")) for y in bars["one loop later"].y]
    assert list(bars["one loop later"].x) == comparison.iia[-1, order, -1, 1].tolist()
    assert list(bars["random directions"].x) == comparison.control[-1, order, -1, 1].tolist()


def test_findings_are_sentences(results):
    findings = [finding for result in results for finding in result.summary()]
    assert sum(finding.kind == "verdict" for finding in findings) == 1
    for finding in findings:
        assert finding.kind in ("verdict", "program")
        assert finding.text.endswith(".")
        assert finding.value
