from __future__ import annotations

import dataclasses
import errno
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from loopinterp.compiler import compile_program, draw_program
from loopinterp.core.errors import InputError
from loopinterp.core.results import Finding, figures_of, findings_of
from loopinterp.lenses import attention_study
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, LoopRule
from loopinterp.pages import (
    RunRecord,
    explore,
    need_page,
    read_run,
    render_report,
    write_circuit_page,
    write_report,
    write_results,
)
from loopinterp.pages.assets import setting_groups
from loopinterp.pages.facts import Code, Fact, Topic, introduction
from loopinterp.pages.report import _made_figures, seconds
from loopinterp.pages.run_record import Problem, Trouble, spell_problem
from loopinterp.pages.sections import SECTIONS, section_views
from loopinterp.programs import get_program
from loopinterp.tasks import Addition
from loopinterp.training import evaluate
from tests.pages import synthetic


class Reader(HTMLParser):
    """Tags, anchors and links of a page, and its words outside scripts, folds and drawings."""

    void = frozenset({"meta", "link", "input", "br", "path", "circle"})

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.anchors: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.unfolded: list[str] = []
        self.feed(page)
        assert self.open == [], "tags left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.void:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.append(value)
            if name in ("href", "src") and value:
                self.links.append(value)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)
            if not {"nav", "noscript", "title", "svg"} & set(self.open) and (
                "details" not in self.open or "summary" in self.open
            ):
                self.unfolded += data.split()

    @property
    def text(self) -> str:
        """All words, with plain single spaces between them."""
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def record(synthetic_run: Path) -> RunRecord:
    return read_run(synthetic_run)


@pytest.fixture(scope="module")
def page(record: RunRecord) -> str:
    return render_report(record)


def test_the_page_is_well_formed_and_its_links_lead_somewhere(page: str) -> None:
    reader = Reader(page)
    assert len(reader.anchors) == len(set(reader.anchors))
    inner = {link[1:] for link in reader.links if link.startswith("#")}
    assert inner <= set(reader.anchors)


def test_the_page_needs_nothing_from_outside(page: str) -> None:
    reader = Reader(page)
    assert {link.partition(":")[0] for link in reader.links if not link.startswith("#")} == {"data"}
    assert "default-src 'none'" in page
    assert len(page) < 15_000_000


def test_the_story_and_the_facts_come_before_everything_else(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"longest": 144, "share": "99%", "factor": 12}
    fact = Fact(Topic.GENERALISATION, Code.RIGHT_BEYOND, True, values)
    monkeypatch.setattr("loopinterp.pages.report.facts_of", lambda results: [fact])
    page = render_report(record)
    text = Reader(page).text
    order = [introduction(record), fact.sentence, fact.title, fact.detail, "96.5%"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert page.index('id="summary"') < page.index("<section")
    assert page.count('class="tile"') == 1 and 'href="#generalisation"' in page


def test_every_section_is_there_in_order(page: str) -> None:
    shown = [*synthetic.DEMO, "attention", "not-measured", "made"]
    places = [page.index(f'<section id="{key}"') for key in shown]
    assert places == sorted(places) and page.count("<section") == len(shown)


def test_every_figure_has_caption_and_data_and_its_control(record: RunRecord, page: str) -> None:
    text = Reader(page).text
    figures = [figure for result in record.results.values() for figure in result.figures()]
    assert len(figures) == 12
    for figure in figures:
        assert figure.caption in text
        if figure.control:
            assert f"Control {figure.control}" in text
    assert page.count('<a download="') == len(figures) + 2  # and two of its own making


def test_how_it_was_made_can_be_read_off(page: str) -> None:
    text = Reader(page).text
    command = "loopinterp demo --out runs/demo --seed 0"
    assert command in text
    assert "torch 2.13.0" in text and "weight_decay 0.01" in text and "3f9a01c2b4d5" in text
    assert f"{seconds(149)} on 2 CPU" in text


def test_the_own_study_of_a_section_comes_first_and_further_figures_are_folded(
    record: RunRecord,
) -> None:
    wavefront = record.results["wavefront"]
    results = {"a_wavefront": wavefront, "more_wavefront": wavefront, "wavefront": wavefront}
    (view,) = [
        view
        for view in section_views(dataclasses.replace(record, results=results))[0]
        if view.section.key == "wavefront"
    ]
    first, second = (figure.title for figure in wavefront.figures())
    # Its own study's claim with one figure; the rest of it, and each other study, when asked for.
    assert [v.figure.title for v in view.figures] == [first]
    assert [[v.figure.title for v in fold.figures] for fold in view.folds] == [
        [second],
        [first, second],
        [first, second],
    ]
    assert [len(fold.findings) for fold in view.folds] == [0, 1, 1]
    assert view.folds[1].value == view.findings[0].value
    assert view.folds[1].title == f"{first}; {second}"


def test_what_is_seen_at_once_is_a_claim_and_a_figure_for_each_section(
    record: RunRecord, page: str
) -> None:
    views, _ = section_views(record)
    assert all(len(view.findings) <= 2 for view in views)
    seen = {view.section.key: [bool(figure.html) for figure in view.figures] for view in views}
    assert seen.pop("program") == [False, True]  # the circuit beside the figure of the claim
    assert all(len(of) <= 1 for of in seen.values())
    assert all(view.figures for view in views)
    anywhere = {view.section.key for view in views}
    anywhere |= {fold.anchor for view in views for fold in view.folds}
    assert anywhere <= set(Reader(page).anchors)
    assert len(Reader(page).unfolded) < 800


def test_the_explorer_stands_before_the_evidence_with_the_task_in_a_fold(
    record: RunRecord,
) -> None:
    batch = Addition().encode([(3, 1)], n=3)
    explored = explore(compile_program("ripple", max_length=4).model, batch, asks="Add up.")
    results = {"wavefront": record.results["wavefront"], "explorer": explored}
    page = render_report(dataclasses.replace(record, results=results))
    reader = Reader(page)
    finding = explored.findings()[-1].text
    assert reader.text.index("Add up.") < reader.text.index(finding)
    assert page.index('id="summary"') < page.index('id="explorer"') < page.index('"wavefront"')
    assert "Add up." not in " ".join(reader.unfolded)


def test_of_a_finding_two_sentences_are_seen_and_the_rest_is_folded(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    lead, numbers = "It is none. It is near one.", "Not identified, by 0.5% of 3. And more."
    verdict = Finding(f"{lead} {numbers}", section="verdict", value="none of these")
    monkeypatch.setitem(synthetic._FINDINGS, "program", [verdict])
    results = {"program": record.results["program"]}
    reader = Reader(render_report(dataclasses.replace(record, results=results)))
    seen = " ".join(reader.unfolded)
    assert lead in seen and "Not identified" not in seen
    assert reader.text.count(numbers) == 1


def test_studies_come_in_the_order_in_which_they_were_made(record: RunRecord) -> None:
    one = record.results["convergence"]
    other = synthetic.made_up("second")
    order = {"stages": {"train": 1.0, "b": 1.0, "a": 1.0}}
    for made, first in ((order, "second"), ({}, "convergence")):
        changed = dataclasses.replace(record, results={"a": one, "b": other}, made=made)
        findings = next(v for v in section_views(changed)[0] if v.findings).findings
        assert findings[0].text.startswith("Second") == (first == "second")


def test_what_applies_but_was_not_measured_is_said_in_a_line(record: RunRecord) -> None:
    left = {name: r for name, r in record.results.items() if name in ("attention", "wavefront")}
    page = render_report(dataclasses.replace(record, results=left))
    text = Reader(page).text
    for section in SECTIONS:
        assert (section.missing in text) == (section.key not in left)
        assert (f'<section id="{section.key}"' in page) == (section.key in left)


def test_what_cannot_be_said_is_said_with_the_reason(record: RunRecord) -> None:
    skipped = {"wavefront": "carries need room", "programs": "no stock program fits"}
    left = dataclasses.replace(record, results={}, made={"unsaid": skipped})
    text = Reader(render_report(left)).text
    assert re.search(rf"Wavefront: [^.]*{skipped['wavefront']}\.", text)
    assert text.count(skipped["programs"]) == 1
    for section in SECTIONS:
        assert (section.missing in text) == ((section.study or section.key) not in skipped)


ONE_LOOP = "the model makes one loop, whatever the length"


@pytest.mark.parametrize("config", [{"objective": {"n_loops": 1}}, {"depth": 1, "origin": "made"}])
def test_of_a_model_of_one_loop_nothing_is_said_of_others(
    record: RunRecord, config: dict[str, Any]
) -> None:
    model = LoopedTransformer(
        LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2, n_layers=2)
    )
    model.loop_rule = LoopRule(1)
    task = Addition()
    results = {
        "explorer": explore(model, task, n=4, batch_size=4),
        "attention": attention_study(model, task, n=4, batch_size=4),
        "generalisation": evaluate(model, task, [2, 4], n_samples=8),
    }
    made = {
        "unsaid": dict.fromkeys(("convergence", "programs", "ground-truth", "wavefront"), ONE_LOOP)
    }
    config = {"task": "addition", "model": {"n_layers": 2}, **config}
    one = dataclasses.replace(record, config=config, metrics=[], results=results, made=made)
    text = Reader(render_report(one)).text
    assert "2 layers" in text and "run once" in text
    assert results["explorer"].findings()[-1].text in text
    said = text.replace(ONE_LOOP, "").replace("correct after 1 loop", "").replace("loopinterp", "")
    said = said.replace("answered after 1 loop;", "")
    assert not re.findall(r".{30}\bloop.{30}", said, flags=re.IGNORECASE)
    assert text.count(ONE_LOOP) == 1  # once for all studies


def test_of_a_fixed_depth_it_is_not_said_that_longer_inputs_get_more_loops(
    record: RunRecord,
) -> None:
    plain = dataclasses.replace(
        record, results={"generalisation": record.results["generalisation"]}
    )
    deep = dataclasses.replace(plain, config={**record.config, "objective": {"n_loops": 16}})
    more = "A longer input gets more loops"
    assert more in Reader(render_report(plain)).text
    assert more not in Reader(render_report(deep)).text


@pytest.mark.usefixtures("no_type_checks")
def test_what_is_no_result_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^result 'a':.*int"):
        write_results({"a": 3}, tmp_path / "page.html", title="x")  # type: ignore[dict-item]
    assert not list(tmp_path.iterdir())


def test_a_model_that_was_not_trained_is_said_to_be_none(record: RunRecord) -> None:
    origin = "compiled from the program ripple"
    config = {"task": "addition", "max_n": 20, "origin": origin}
    bare = dataclasses.replace(record, config=config, metrics=[], results={}, made={})
    text = Reader(render_report(bare)).text
    # In the title, and in place of the training curve.
    assert f"transformer, {origin}." in text
    assert f"was {origin}" in text and "no training curve" in text
    assert re.search(r"lengths up to\s+20\b", text) and "training metrics" not in text


def test_what_does_not_apply_to_the_task_is_not_mentioned(record: RunRecord) -> None:
    text = Reader(
        render_report(dataclasses.replace(record, config={"task": "parity"}, results={}))
    ).text
    missing = {section.key: section.missing for section in SECTIONS}
    assert missing["convergence"] in text and missing["program"] in text
    assert "carry" not in text.lower()
    own = Reader(
        render_report(dataclasses.replace(record, config={"task": "my own"}, results={}))
    ).text
    assert missing["convergence"] in own
    assert "program" not in own.lower() and "verdict" not in own.lower()


def test_a_run_that_was_only_trained_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"task": "parity", "seed": 4}')
    page = write_report(tmp_path).read_text()
    text = Reader(page).text
    assert "transformer, trained to" in text
    assert "no training metrics" in text and "Seed 4" in text


def test_problems_are_shown_and_their_text_is_escaped() -> None:
    problem = Problem(Trouble.RESULT_VALUES, "<i>", "E")
    page = render_report(RunRecord(name="<b>run</b>", problems=[problem]))
    assert spell_problem(problem) in Reader(page).text
    assert "<b>run</b>" not in page and "&lt;i&gt;" in page


def test_a_result_that_fails_is_a_problem_and_the_others_are_shown(record: RunRecord) -> None:
    broken = dataclasses.replace(record.results["wavefront"], section=3)  # type: ignore[arg-type]
    page = render_report(dataclasses.replace(record, results={**record.results, "bad": broken}))
    text = Reader(page).text
    assert spell_problem(Problem(Trouble.RESULT_VALUES, "bad", "KeyError")) in text
    assert "96.5%" in text


def test_a_figure_that_cannot_be_written_is_a_problem_and_the_others_are_shown(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *rest = record.results["wavefront"].figures()
    half = pd.DataFrame({"name": [chr(0xD800)]}, dtype=object)
    spoiled = [dataclasses.replace(first, data=half), *rest]
    monkeypatch.setitem(synthetic._FIGURES, "wavefront", lambda: spoiled)
    text = Reader(render_report(record)).text
    said = f"The figure {first.title!r} has values that cannot be shown (UnicodeEncodeError)."
    assert said in text and all(figure.title in text for figure in rest)


@pytest.mark.parametrize("config", ['{"model": 3}', '{"curriculum": [1], "task": {"name": 3}}'])
def test_a_configuration_of_other_types_has_a_report(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    assert "A looped transformer" in Reader(write_report(tmp_path).read_text()).text


def test_a_study_of_ones_own_section_is_shown_too(record: RunRecord) -> None:
    class Own(synthetic.Synthetic, kind="own"):
        pass

    finding = Finding(section="own", text="Something else was found.", value="42")
    figures = figures_of(synthetic.made_up("wavefront"))
    findings_of.register(Own, lambda result: [finding])
    figures_of.register(
        Own, lambda result: [dataclasses.replace(figure, section="own") for figure in figures]
    )
    own = Own.of(synthetic.Took(1.0), section="wavefront")
    page = render_report(dataclasses.replace(record, results={"own": own}))
    assert '<section id="other"' in page and finding.text in Reader(page).text


def test_figures_of_one_name_have_anchors_of_their_own(record: RunRecord) -> None:
    twice = {"a": record.results["wavefront"], "b": record.results["wavefront"]}
    anchors = Reader(render_report(dataclasses.replace(record, results=twice))).anchors
    assert len(anchors) == len(set(anchors))


@pytest.fixture(scope="module")
def bare_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without results, for what is not about what a report shows; not to be changed."""
    run = tmp_path_factory.mktemp("bare") / "run"
    run.mkdir()
    (run / "config.json").write_text('{"task": "parity", "seed": 4}')
    return run


def test_the_file_is_written_where_asked(bare_run: Path, tmp_path: Path) -> None:
    path = write_report(bare_run, tmp_path / "deep" / "page.html")
    assert path == tmp_path / "deep" / "page.html"
    assert re.match("<!doctype html>", path.read_text())


@pytest.mark.parametrize("kind", ["file", "empty", "folder", "link", "dangling", "pipe", "config"])
def test_only_an_earlier_report_is_replaced(bare_run: Path, tmp_path: Path, kind: str) -> None:
    out, other = tmp_path / "out", tmp_path / "other.html"
    write_report(bare_run, other)
    if kind in ("file", "empty"):
        out.write_text("<!doctype html> mine" if kind == "file" else "")
    elif kind == "folder":
        out.mkdir()
    elif kind in ("link", "dangling"):
        out.symlink_to(other if kind == "link" else tmp_path / "nowhere")
    elif kind == "pipe":
        os.mkfifo(out)
    else:
        out = bare_run / "config.json"
    before = (out.lstat().st_mode, out.lstat().st_ino, other.read_bytes())
    with pytest.raises(InputError, match=rf"{out.name}: expected a new file, or an earlier report"):
        write_report(bare_run, out)
    with pytest.raises(InputError, match=r"^output file"):
        write_results({"a": synthetic.made_up("wavefront")}, out, title="x")
    assert (out.lstat().st_mode, out.lstat().st_ino, other.read_bytes()) == before


def test_a_name_that_no_file_can_have_is_explained(bare_run: Path) -> None:
    with pytest.raises(InputError, match=r"^output"):
        write_report(bare_run, "a\0b.html")


def test_a_device_is_not_replaced(bare_run: Path) -> None:
    before = os.lstat(os.devnull).st_mode
    with pytest.raises(InputError, match="device"):
        need_page(os.devnull)
    assert os.lstat(os.devnull).st_mode == before


def test_an_earlier_report_is_replaced(bare_run: Path, tmp_path: Path) -> None:
    first = write_report(bare_run, tmp_path / "page.html").read_bytes()
    assert write_report(bare_run, tmp_path / "page.html").read_bytes() == first
    results = {"a": synthetic.made_up("wavefront")}
    assert write_results(results, tmp_path / "page.html", title="x").read_bytes() != first


def test_a_full_disk_names_the_file_and_leaves_the_earlier_report(
    bare_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_report(bare_run, tmp_path / "page.html")
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"page\.html:"):
        write_report(bare_run, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_explained(bare_run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"^output"):
        write_report(bare_run, tmp_path / "file" / "page.html")


def test_a_compiled_model_its_circuit_a_program_and_a_graph_become_pages(tmp_path: Path) -> None:
    compiled = compile_program("ripple", max_length=5)
    for k, circuit in enumerate((compiled, compiled.circuit, get_program("ripple"))):
        page = write_circuit_page(circuit, tmp_path / f"{k}.html").read_text()
        assert page.startswith("<!doctype html>") and "shift_1" in page and "shift_right" in page
        assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    graph = draw_program(get_program("copy"))
    assert "copy" in write_circuit_page(graph, tmp_path / "0.html").read_text()  # replaces a page


@pytest.mark.usefixtures("no_type_checks")
def test_what_is_no_circuit_and_a_file_of_another_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="draw:"):
        write_circuit_page("ripple", tmp_path / "a.html")
    (tmp_path / "a.html").write_text("mine")
    with pytest.raises(InputError, match=r"^output"):
        write_circuit_page(get_program("ripple"), tmp_path / "a.html")


def rows(n: int) -> list[dict[str, float]]:
    return [
        {"step": k, "loss": 1 / (k + 1), "exact_match": 0.5, "longest_n": k // 10, "lr": 1e-3}
        for k in range(n)
    ]


def test_the_training_curve_has_a_panel_for_each_curve() -> None:
    ((figure,), _) = _made_figures(RunRecord(name="run", metrics=rows(40)))
    assert [trace["name"] for trace in figure.plot.to_dict()["data"]] == [
        "loss",
        "exact match",
        "longest length",
    ]
    assert figure.plot.to_dict()["layout"]["yaxis"]["type"] == "log"


def test_a_long_training_is_thinned_in_the_figure_but_whole_in_its_table() -> None:
    ((figure,), _) = _made_figures(RunRecord(name="run", metrics=rows(5000)))
    x = figure.plot.to_dict()["data"][0]["x"]
    assert 300 < len(x) < 1200
    assert figure.data is not None and len(figure.data) == 5000


def test_metrics_of_another_kind_give_no_curve() -> None:
    assert _made_figures(RunRecord(name="run", metrics=[{"epoch": 1}])) == ([], [])


def test_what_cannot_be_drawn_is_said_and_the_rest_is_drawn() -> None:
    record = RunRecord(name="r", metrics=[{"step": 1, "loss": "x"}], made={"stages": {"train": 1}})
    figures, problems = _made_figures(record)
    assert [figure.title for figure in figures] == ["Time by stage"]
    assert problems == [Problem(Trouble.NOT_DRAWN, "metrics of training", "TypeError")]


def test_stages_are_those_of_the_run_else_those_of_the_studies() -> None:
    results = {"attention": synthetic.attention()}
    assert RunRecord(name="run", results=results).stage_seconds == {"attention": 0.8}
    made = {"stages": {"train": 80}}
    record = RunRecord(name="run", results=results, made=made)
    assert record.stage_seconds == {"train": 80.0}
    ((figure,), _) = _made_figures(record)
    assert seconds(80) in figure.caption
    assert figure.data is not None and figure.data["seconds"].tolist() == [80.0]


def test_settings_are_flattened_within_their_group() -> None:
    groups = setting_groups({"a": {"b": {"c": [1, 2.5]}, "on": True}, "empty": {}, "seed": 3})
    assert groups == {"run": {"seed": "3"}, "a": {"b.c": "1, 2.5", "on": "yes"}}


def test_whole_minutes_and_hours_are_said_as_such() -> None:
    durations = {
        10.4: "10 s",
        59: "59 s",
        60: "1 min 0 s",
        3599: "59 min 59 s",
        3600: "1 h 0 min",
        7199: "1 h 59 min",
    }
    assert {value: seconds(value) for value in durations} == durations
