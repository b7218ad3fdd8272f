"""Whatever string of a saved file is hostile: a page shows it as text, or the file is refused."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock, patch

import plotly.graph_objects as go
import pytest

from loopinterp import comparison, decompiler, dynamics, edges, interventions, probing, training
from loopinterp.compiler import compile_program, draw_program
from loopinterp.core.errors import CheckpointError, InputError
from loopinterp.core.results import Result, load_result
from loopinterp.core.storage import read_arrays, write_arrays
from loopinterp.figures.circuit_graph import CircuitGraph
from loopinterp.pages import (
    ExplorerWidget,
    write_circuit_page,
    write_comparison,
    write_report,
    write_results,
)
from loopinterp.pages.run_record import RunRecord
from loopinterp.pages.sections import section_views
from loopinterp.programs import get_program
from loopinterp.tasks import Addition, as_batch
from tests.browser.conftest import FRONT_END, NOTEBOOK, Opener
from tests.pages import synthetic
from tests.test_study_arguments import STUDIES

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

ATTACKS = (
    "</script><script>boom()</script>",
    '"><img src=x onerror=boom()>',
    "' onmouseover='boom()' x='",
    "</style><svg onload=boom()>",
    "<a href='javascript:boom()'>x</a>",
    "<iframe src=https://example.org></iframe>",
    "{{ boom() }}{% for %}${boom()}",
    "\u202egnp\u2066x",
    "]]><!--",
    "\u0000",
)
"""What a string may try: to end its element, to add a handler, to turn what follows it."""

HALF = "\ud800"
"""Half a character, which JSON can spell and nothing can show: refused where a run is read."""


def harmless(names: Mapping[str, str]) -> dict[str, str]:
    """The same new values with letters in place of all but spaces and their number.

    Lines are as long, so that boxes are as large and a drawing has room for the same labels.
    """
    return {old: re.sub(r"[^\s0-9]", "h", new) for old, new in names.items()}


# Elements of a page by tag and attributes; Plotly's own are its business.
_STRUCTURE = """() => [...document.querySelectorAll('*')]
  .filter((one) => !one.closest('.plot') && !one.closest('tspan'))
  .map((one) => [one.tagName, ...[...one.attributes].map((a) => a.name)].join(' '))"""


_NEXT_FRAMES = """() => new Promise((done) =>
  requestAnimationFrame(() => requestAnimationFrame(() => done())))"""

# Each explorer at one loop after the other, to the last.
_THROUGH_ALL_LOOPS = """async () => {
  for (const slider of document.querySelectorAll('.x-steps input')) {
    for (let loop = 0; loop <= Number(slider.max); loop++) {
      slider.value = loop;
      slider.dispatchEvent(new Event('input', { bubbles: true }));
      await new Promise(requestAnimationFrame);
    }
  }
}"""

_DRAWS_ONCE = """(() => {
  let library, drawn = false;
  Object.defineProperty(window, 'Plotly', { get: () => library, set: (one) => {
    const nothing = () => Promise.resolve();
    const first = (...what) => drawn ? nothing() : (drawn = true, one.newPlot(...what));
    library = { ...one, newPlot: first, react: nothing };
  } });
})()"""


def texts_of(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for part in value.values():
            yield from texts_of(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts_of(part)


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A JSON value in which strings have other values wherever they stand."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, dict):
        return {names.get(key, key): renamed(part, names) for key, part in value.items()}
    return [renamed(part, names) for part in value] if isinstance(value, list) else value


def hostile(values: Iterable[str]) -> dict[str, str]:
    """A new value for each string, in their order, with a number so that none is there twice."""
    different = enumerate(dict.fromkeys(values))
    return {old: f"{ATTACKS[k % len(ATTACKS)]}{k}" for k, old in different if old}


def blamed(error: BaseException, names: Mapping[str, str]) -> dict[str, str]:
    """Those of the new names that an error gives, or that it misses by their old values."""
    said: list[str] = []
    raised: BaseException | None = error
    while raised is not None:
        said += [repr(raised), *map(str, raised.args)]
        raised = raised.__cause__ or raised.__context__
    return {
        old: new
        for old, new in names.items()
        if any(repr(old) in text or repr(new)[1:-1] in text or new in text for text in said)
    }


def taken(
    saved: Any,
    read: Callable[[Any], Any],
    names: dict[str, str],
    *,
    others: Mapping[str, str] | None = None,
    refused: bool = False,
) -> dict[str, str]:
    """Those of the new names with which, all together, a JSON value is not refused.

    Args:
        saved: The value.
        read: Raises what it likes where a value is refused.
        names: What is tried, all at once; where that is refused, first those that the error
            speaks of and then the others, or one half after the other.
        others: Names that are changed besides.
        refused: Whether several names are known to be refused together.
    """
    others, first = {**(others or {})}, {}
    if not refused or len(names) == 1:
        try:
            read(renamed(saved, others | names))
        except Exception as error:
            first = blamed(error, names)
        else:
            return names
    if len(names) < 2:
        return {}
    if not 0 < len(first) < len(names):
        first = dict([*names.items()][: len(names) // 2])
    second = {old: new for old, new in names.items() if old not in first}
    good = taken(saved, read, first, others=others)
    # Where all of the first part is taken, it is the second that is refused.
    return good | taken(saved, read, second, others=others | good, refused=good == first)


@cache
def a_circuit() -> tuple[Any, dict[str, str]]:
    """A saved drawing of a circuit, and the hostile strings with which it is read."""
    saved = json.loads(draw_program(get_program("ripple")).to_json())
    return saved, taken(saved, CircuitGraph.from_dict, hostile(texts_of(saved)))


@cache
def every_result() -> dict[str, Result]:
    """A result of every study of a model, by the study's name."""
    model: Any = compile_program("ripple", max_length=17).model
    task, batch = Addition(), as_batch(Addition(), n=4, batch_size=16)
    source = as_batch(Addition(), n=4, batch_size=16, seed=1)
    own = {
        "search_subspaces": lambda: comparison.search_subspaces(
            model, batch, "ripple", steps=1, ranks=(1,), pairs=comparison.SpreadPairs(pairs=32)
        ),
        "decompilation_study": lambda: decompiler.decompilation_study(
            model, task, n=3, lengths=[3], n_exchanges=100
        ),
        "carry_study": lambda: probing.carry_study(model, task, n=6, n_train=32, n_test=32),
        "evaluate": lambda: training.evaluate(model, task, [3], n_samples=20),
        "injected_carry_study": lambda: comparison.injected_carry_study(
            model, as_batch(task, n=16, batch_size=64)
        ),
        "patching_sweep": lambda: interventions.patching_sweep(model, batch, source, component="z"),
        "edge_study": lambda: edges.edge_study(
            model, batch[:2], source[:2], n_loops=1, n_steps=1, curve_points=2
        ),
        "local_stability_study": lambda: dynamics.local_stability_study(
            model, batch[:4], k=1, growth_loops=2, lyapunov_loops=8
        ),
    }
    others = {name: lambda run=run: run(model, batch) for name, run in STUDIES.items()}
    return {name: run() for name, run in {**others, **own}.items()}


def without_plotly() -> Any:
    """While it holds, figures are worked out for a stand-in that draws nothing."""
    figure = MagicMock(spec=go.Figure)
    figure.update_layout.return_value = figure
    return patch("loopinterp.figures.plots.panel_figure", lambda *_, **__: figure)


def hostile_and_harmless(
    result: Result, folder: Path, refused: set[str]
) -> tuple[Result, Result, int]:
    """A saved result with hostile strings and one with harmless ones, and the number of strings.

    Changed are those strings with which it is read, and everything is still said and drawn. Those
    that are not go into ``refused`` and are left as they are in later results: names of dimensions
    and kinds, most of them, which are the same in all.
    """
    path = result.save(folder, "result")
    arrays, metadata = read_arrays(path)
    [(name, text)] = metadata.items()
    header = json.loads(text)

    def saved(new: dict[str, Any]) -> Result:
        write_arrays(path, arrays, metadata={name: json.dumps(new)})
        return load_result(path)

    def read(new: dict[str, Any]) -> Result:
        """The same without the file, which is tried with hundreds of texts."""
        text = {name: json.dumps(new)}
        with patch("loopinterp.core.results.read_arrays", lambda _: (arrays, text)):
            return load_result(path)

    def said(new: dict[str, Any]) -> None:
        read(new).findings()

    def worked_out(new: dict[str, Any]) -> None:
        with without_plotly():
            result = read(new)
            assert result.findings() and isinstance(result.figures(), list)

    def drawn(new: dict[str, Any]) -> None:
        _, problems = section_views(RunRecord(name="", results={"result": read(new)}))
        assert not problems

    # In the order of the file, where those that are refused stand side by side.
    asked = hostile(one for one in texts_of(header) if one not in refused)
    bad = taken(header, said, taken(header, read, asked))
    with without_plotly():
        has_figures = bool(result.figures())
    # A figure that Plotly alone refuses is missed in the page of all.
    bad = taken(header, worked_out if has_figures else drawn, bad)
    refused.update(asked.keys() - bad.keys())
    return saved(renamed(header, bad)), saved(renamed(header, harmless(bad))), len(bad)


def settled(page: Page) -> Counter[str]:
    """The page's elements, once they are the same twice; a slow machine adds rows late."""
    before = None
    for _ in range(100):
        page.wait_for_timeout(100)
        page.evaluate(_NEXT_FRAMES)
        now = Counter(page.evaluate(_STRUCTURE))
        if now == before:
            return now
        before = now
    raise AssertionError("The page's elements go on changing.")


def look(browser: Browser, page_path: Path, *, harmless: bool = False) -> Counter[str]:
    """Open a page with everything drawn; nothing ran and nothing was asked for.

    Of a harmless page Plotly draws the first figure alone: what it adds outside of figures.
    """
    opened = Opener(browser, page_path)
    context = browser.new_context(
        viewport={"width": 1440, "height": 900}, offline=True, reduced_motion="reduce"
    )
    page = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.add_init_script("window.ran = []; window.boom = () => window.ran.push(1);")
    if harmless:
        page.add_init_script(_DRAWS_ONCE)
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(opened.path.as_uri())
    page.evaluate("window.explored")
    # Figures out of sight too.
    page.evaluate("typeof report !== 'undefined' && report.drawAll()")
    page.evaluate(_THROUGH_ALL_LOOPS)
    # The rows of the explorer change in the frame after the pointer has moved.
    page.mouse.move(300, 300)
    structure = settled(page)
    assert page.evaluate("window.ran") == []
    assert complaints == []
    assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [
        page_path.as_uri()
    ]
    assert page.locator(".plot a, iframe, img:not(.plot *)").count() == 0
    context.close()
    return structure


@pytest.mark.slow
def test_strings_of_results(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Thousands of files are written, and none has to outlast a loss of power.
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    pages: dict[str, dict[str, Result]] = {ATTACKS[0]: {}, "harmless": {}}
    # Names of the parts of a circuit, which stand in results too, are soon found in one alone.
    circuit, bad = a_circuit()
    refused = {*texts_of(circuit)} - bad.keys()
    for k, (name, result) in enumerate(every_result().items()):
        bad, good, changed = hostile_and_harmless(result, tmp_path, refused)
        assert changed >= 4, name
        pages[ATTACKS[0]][f"{name} {ATTACKS[k % len(ATTACKS)]}"] = bad
        pages["harmless"][f"{name} harmless"] = good
    out = [tmp_path / "a.html", tmp_path / "b.html"]
    shown = [
        look(browser, write_results(pages[title], path, title=title), harmless=title == "harmless")
        for title, path in zip(pages, out)
    ]
    assert shown[0] == shown[1]
    assert "cannot be shown" not in out[0].read_text()


@pytest.mark.slow
def test_strings_of_a_run(browser: Browser, tmp_path: Path) -> None:
    reports, comparisons = [], []
    for spoil in (lambda names: names, harmless):
        folders = []
        for k in range(2):
            name = spoil({"": ATTACKS[k]})[""].replace("/", "∕")  # no folder in a folder
            folder = synthetic.write_run(tmp_path / str(len(reports)) / name)
            for file in ("config.json", "made.json"):
                saved = json.loads((folder / file).read_text())
                values = [x for part in saved.values() for x in texts_of(part)]
                (folder / file).write_text(json.dumps(renamed(saved, spoil(hostile(values)))))
            folders.append(folder)
        quick = {"harmless": spoil is harmless}
        reports.append(look(browser, write_report(folders[0]), **quick))
        out = tmp_path / f"{len(reports)}.html"
        comparisons.append(look(browser, write_comparison(folders, out), **quick))
    assert reports[0] == reports[1]
    assert comparisons[0] == comparisons[1]


def test_strings_of_the_notebooks_widget(browser: Browser) -> None:
    model, programs = compile_program("ripple", max_length=9).model, ["ripple", "latched_chain"]
    widget = ExplorerWidget(model, Addition(), programs=programs, n=4, examples=2)
    widget.put_in(loop=1, pos=2)
    saved = {name: getattr(widget, name) for name in ("payload", "changed", "said")}
    saved["said"] = "What is said."

    def shown(traits: dict[str, Any]) -> Counter[str]:
        page = browser.new_context(offline=True).new_page()
        complaints: list[str] = []
        page.add_init_script("window.ran = []; window.boom = () => window.ran.push(1);")
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto("about:blank")
        page.set_content(NOTEBOOK)
        page.evaluate(FRONT_END, [widget._esm, widget._css, traits])
        assert page.locator(".explorer").count() == 3
        page.mouse.move(300, 300)
        ran, structure = page.evaluate("window.ran"), Counter(page.evaluate(_STRUCTURE))
        page.context.close()
        assert ran == [] and complaints == []
        return structure

    def spoken(value: Any) -> Iterator[str]:
        """Strings that are shown: no keys, and nothing of how numbers are packed."""
        if isinstance(value, dict):
            value = [part for key, part in value.items() if key not in ("arrays", "bytes")]
        if isinstance(value, str):
            yield value
        for part in value if isinstance(value, list) else ():
            yield from spoken(part)

    bad = hostile(spoken(saved))
    assert {"BOS", "ripple", "ripple.carry", saved["said"]} <= {*bad}
    assert shown(renamed(saved, bad)) == shown(renamed(saved, harmless(bad)))


def test_half_a_character_in_a_configuration_is_refused(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run")
    (folder / "config.json").write_text(json.dumps({"task": "addition", "device": HALF}))
    with pytest.raises(CheckpointError):
        write_report(folder)


def test_strings_of_a_circuit(browser: Browser, tmp_path: Path) -> None:
    saved, bad = a_circuit()
    assert len(bad) > 8
    shown = []
    for names in (bad, harmless(bad)):
        graph = CircuitGraph.from_dict(renamed(saved, names))
        shown.append(look(browser, write_circuit_page(graph, tmp_path / f"{len(shown)}.html")))
    assert shown[0] == shown[1]


def test_the_role_of_an_edge_is_one_of_those_there_are() -> None:
    saved = json.loads(draw_program(get_program("ripple")).to_json())
    assert CircuitGraph.from_dict(saved)
    saved["edges"][0]["role"] = ATTACKS[1]
    with pytest.raises(InputError):
        CircuitGraph.from_dict(saved)


def test_a_page_runs_no_script_but_its_own(browser: Browser, tmp_path: Path) -> None:
    path = write_report(synthetic.write_run(tmp_path / "demo"))
    path.write_text(path.read_text().replace("</main>", "<script>boom()</script></main>"))
    page = browser.new_context(offline=True).new_page()
    page.add_init_script("window.ran = []; window.boom = () => window.ran.push(1);")
    page.goto(path.as_uri())
    page.evaluate("document.body.setAttribute('onclick', 'boom()'); document.body.click()")
    assert page.evaluate("window.ran") == []
    page.context.close()
