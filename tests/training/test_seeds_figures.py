"""Findings and figures of a sweep."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loopinterp.core.results import Figure, study
from loopinterp.training import SweepResult

NAMES = ["base", "no noise", "broken"]


def made_up(show: dict[str, str], *, settings: list[str] = NAMES) -> SweepResult:
    """Two distributions, two lengths, two loops; the last setting has no seed, others 2 and 1."""
    n = len(settings)
    shape = (n, 2, 2, 2)
    counts = [2, *[1] * (n - 2), 0]
    mean = np.linspace(0.1, 0.9, int(np.prod(shape))).reshape(shape)
    mean[-1] = np.nan
    error = np.full(shape, 0.05)
    error[1:] = np.nan
    arrays = {m + end: a for m in ("exact_match", "bit_accuracy", "loop_exact_match")
              for end, a in (("", mean), ("_se", error))}  # fmt: skip
    arrays |= {"loop_perplexity": mean * 30, "loop_perplexity_se": error}
    coords = {"setting": settings, "extra_loop": [-1, 0], "distribution": ["uniform", "chain"]}
    with study(0) as watch:
        return SweepResult.of(
            watch,
            coords={**coords, "length": [4, 8], "loop": [1, 2]},
            **arrays,
            n_seeds=counts,
            trained_up_to=[4.0] * (n - 1) + [np.nan],
            seconds=[1.0] * n,
            about="Does it matter?",
            task="addition",
            n_samples=16,
            seeds=[0, 1],
            figure_axes=show,
            failed={"broken, seed 0": "it is bad", "broken, seed 1": "it is bad"},
            missing=["no noise, seed 1"],
        )


def traces(figure: Figure, mode: str, name: str = "") -> list[Any]:
    drawn: Any = figure.plot.data
    return [t for t in drawn if t.mode == mode and t.name.startswith(name)]


def test_each_setting_is_a_line_with_its_band_along_length() -> None:
    result = made_up({"exact_match": "length"})
    (figure,) = result.figures()
    line = traces(figure, "lines+markers", "base")
    at = result.data.sel(setting="base", extra_loop=0)
    for trace, distribution in zip(line, ["uniform", "chain"]):
        assert list(trace.y) == at["exact_match"].sel(distribution=distribution).values.tolist()
    band, _ = traces(figure, "lines", "base")
    mean = at["exact_match"].sel(distribution="uniform").values
    np.testing.assert_allclose(band.y, [*(mean + 0.05), *(mean - 0.05)[::-1]])
    assert not traces(figure, "lines+markers", "broken"), "nothing is drawn"
    layout = figure.plot.to_dict()["layout"]
    assert "longest in training" in figure.caption and layout["shapes"][0]["x0"] == 4
    assert figure.section == "generalisation" and "Does it matter?" in figure.caption


@pytest.mark.parametrize(
    ("show", "panels"), [({"bit_accuracy": "extra_loop"}, 4), ({"perplexity": "loop"}, 4)]
)
def test_along_loops_each_length_has_a_panel(show: dict[str, str], panels: int) -> None:
    (figure,) = made_up(show).figures()
    assert figure.plot.to_dict()["layout"]["meta"]["loopinterp"]["panels"] == panels
    titles = {note.text for note in figure.plot.layout.annotations}
    kinds = ("random inputs", "full carry chains")
    assert {f"<b>{kind}, n = {n}</b>" for kind in kinds for n in (4, 8)} <= titles
    assert "longest in training" not in figure.caption


MANY = [f"s{k}" for k in range(12)]


def panels_of(figure: Figure) -> dict[str, list[Any]]:
    """Lines (with markers) of each panel, by its title."""
    layout = figure.plot.to_dict()["layout"]
    titles = [a["text"] for a in layout["annotations"] if a.get("name") == "panel title"]
    lines = traces(figure, "lines+markers")
    places = [f"x{k + 1}" if k else "x" for k in range(len(titles))]
    return {t: [a for a in lines if a.xaxis == x] for t, x in zip(titles, places)}


def test_many_settings_are_small_multiples_a_panel_each() -> None:
    result = made_up({"exact_match": "length"}, settings=MANY)
    (figure,) = result.figures()
    panels = panels_of(figure)
    # The last has no seed.
    assert list(panels) == [f"<b>{name}</b>" for name in MANY[:-1]]
    for name, lines in zip(MANY, panels.values()):
        at = result.data["exact_match"].sel(setting=name, extra_loop=0)
        assert [line.name for line in lines] == ["random inputs", "full carry chains"]
        for line, distribution in zip(lines, ["uniform", "chain"]):
            assert list(line.y) == at.sel(distribution=distribution).values.tolist()
    layout = figure.plot.to_dict()["layout"]
    assert layout["meta"]["loopinterp"]["columns"] == 4
    titled = [k for k in layout if k.startswith("xaxis") and layout[k].get("title")]
    # The lowest of each column.
    assert titled == ["xaxis8", "xaxis9", "xaxis10", "xaxis11"]
    assert {layout[f"yaxis{k}"]["range"][1] for k in ("", 2, 11)} == {1.04}
    assert {shape["x0"] for shape in layout["shapes"]} == {4} and len(layout["shapes"]) == 11
    assert "Dotted" in figure.caption


def test_along_loops_many_settings_have_a_figure_for_each_kind_of_input() -> None:
    result = made_up({"exact_match": "loop"}, settings=MANY)
    figures = result.figures()
    kinds = ["random inputs", "full carry chains"]
    assert [figure.title.split(", ")[-1] for figure in figures] == kinds
    for figure, distribution in zip(figures, ["uniform", "chain"]):
        lines = panels_of(figure)["<b>s3</b>"]
        assert [line.name for line in lines] == ["n = 4", "n = 8"]
        at = result.data["loop_exact_match"].sel(setting="s3", distribution=distribution)
        for line, n in zip(lines, (4, 8)):
            assert list(line.x) == [1, 2]
            assert list(line.y) == at.sel(length=n).values.tolist()


def test_findings_name_failures_first_and_then_every_setting() -> None:
    failed, missing, lowest, random, chains = made_up({"exact_match": "length"}).findings()
    assert failed.value == "2 failed" and failed.good is False and missing.value == "1 left"
    assert failed.text.startswith("2 of 6") and missing.text.startswith("1 of 6")
    for cell in ("broken, seed 0", "broken, seed 1"):
        assert f"{cell} (it is bad)" in failed.text
    assert "random inputs" in random.text and "full carry chains" in chains.text
    assert all("length 8" in finding.text for finding in (lowest, random, chains))
    # Settings with a seed each have their share; the one without has none.
    assert "± 0.050" in random.text and "no noise" in random.text
    assert "broken" not in random.text + lowest.text


def test_settings_that_are_all_zero_have_no_best() -> None:
    result = made_up({})
    text = result.findings()[2].text
    result.data["exact_match"] *= 0
    alike = result.findings()[2].text
    assert "best" in alike and "best" not in text
    assert result.lowest("base", 8).share == 0 and len(result.lowest("base", 8).distributions) == 2


def test_the_short_table_has_a_row_for_each_setting_and_distribution() -> None:
    short = made_up({"exact_match": "length"}).in_short()
    assert list(short.columns) == [4, 8] and len(short) == 6
    at = made_up({}).data["exact_match"].sel(setting="base", distribution="chain", extra_loop=0)
    assert short.loc[("base", "chain", 2), 8] == f"{float(at.sel(length=8)):.3f} ± 0.050"
