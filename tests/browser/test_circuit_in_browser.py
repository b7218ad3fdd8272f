"""The circuit graph in headless Chromium: every stock program in every view."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loopinterp.compiler import draw_program
from loopinterp.figures import CircuitGraph, GraphEdge, GraphNode
from loopinterp.figures.circuit_graph import fragment
from loopinterp.pages import write_circuit_page, write_report
from loopinterp.pages.assets import asset
from loopinterp.programs import get_program, list_programs
from tests.browser.conftest import PHONE, WIDE, Opener, OpenPage, faults_of_accessibility
from tests.pages import synthetic

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=alert(1)>"

# What sticks out of its card, the words that overlap words or stick out of boxes, and small words.
_FAULTS = """() => [...document.querySelectorAll('.circuit')].flatMap((root) => {
  const card = root.getBoundingClientRect(), found = [];
  const size = (node) => node.getBoundingClientRect();
  const drawn = [...root.querySelectorAll('.circuit-svg')].filter((svg) => size(svg).width > 0);
  if (drawn.length !== 1) return [`${drawn.length} drawings at once`];
  const nodes = [...drawn[0].querySelectorAll('.node .box')];
  const words = [...drawn[0].querySelectorAll('text')];
  const sizes = new Map(words.map((word) => [word, size(word)]));
  const name = (node) => node.closest('[data-node]')?.dataset.node || node.textContent;
  const rest = root.querySelectorAll('.circuit-bar *, .circuit-side > *');
  for (const part of [...nodes, ...words, ...rest]) {
    const box = size(part);
    const out = box.left < card.left - 1 || box.right > card.right + 1;
    if (box.width && out) found.push(`${name(part)} is out`);
  }
  words.forEach((word, k) => {
    const a = sizes.get(word);
    const shrunk = size(drawn[0]).width / drawn[0].viewBox.baseVal.width;
    const letters = parseFloat(getComputedStyle(word).fontSize) * shrunk;
    if (letters < 10) found.push(`${name(word)} is small`);
    const own = word.closest('.node');
    if (own) {
      const b = size(own.querySelector('.box'));
      if (a.left < b.left - 0.5 || a.right > b.right + 0.5) found.push(`${name(word)} is cut off`);
    }
    for (const other of words.slice(k + 1)) {
      const b = sizes.get(other);
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (across > 1 && down > 2) found.push(`${name(word)} overlaps ${name(other)}`);
    }
  });
  return found;
})"""


# Folded, with nothing chosen, and the keyboard at the top of the page.
_AS_OPENED = """() => {
  document.querySelector('.circuit [data-view=folded]').click();
  const chosen = document.querySelector('.circuit [aria-pressed=true]:is(.node, [data-name])');
  chosen?.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }));
  document.activeElement.blur();
  return [...document.querySelectorAll('.circuit .near')].length;
}"""


@pytest.fixture(scope="module")
def programs_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stock programs on one page."""
    style, script = (asset(f"circuit.{kind}") for kind in ("css", "js"))
    cards = "".join(f"<div>{fragment(draw_program(get_program(n)))}</div>" for n in list_programs())
    page = f'<!doctype html><meta charset="utf-8"><style>{style} body {{ margin: 0 auto; '
    page += f"max-width: 910px; padding: 0 20px }}</style>{cards}<script>{script}</script>"
    path = tmp_path_factory.mktemp("circuits") / "programs.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_every_stock_program_can_be_read(browser: Browser, programs_page: Path, width: int) -> None:
    opened = Opener(browser, programs_page)(width)
    page = opened.page
    assert page.locator(".circuit[data-ready]").count() == len(list_programs())
    assert page.evaluate(_FAULTS) == []
    page.evaluate("document.querySelectorAll('[data-view=unfolded]').forEach((b) => b.click())")
    assert page.evaluate(_FAULTS) == []
    assert opened.complaints == [] and opened.requests == [programs_page.as_uri()]
    page.context.close()


@pytest.fixture(scope="module")
def held() -> CircuitGraph:
    return draw_program(get_program("ripple_held_2"))


@pytest.fixture(scope="module")
def held_page(held: CircuitGraph, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_circuit_page(held, tmp_path_factory.mktemp("held") / "c.html")


@pytest.fixture(scope="module")
def opened(browser: Browser, held_page: Path) -> OpenPage:
    return Opener(browser, held_page)()


@pytest.fixture
def page(opened: OpenPage) -> Iterator[Page]:
    """A page that tests share, folded and with nothing chosen, as when it was opened."""
    assert opened.page.evaluate(_AS_OPENED) == 0
    yield opened.page
    assert opened.complaints == []


def test_a_node_is_chosen_by_keyboard_and_tells_what_it_is(page: Page) -> None:
    page.locator(".folded.wide .node").first.focus()
    page.keyboard.press("ArrowDown")
    for _ in range(9):
        if page.evaluate("document.activeElement.classList.contains('head')"):
            break
        page.keyboard.press("ArrowDown")
    label, code = "head shift_1, head 1.0", "select(indices, indices - 1"
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == label
    page.keyboard.press("Enter")
    facts = page.locator(".circuit-facts").inner_text()
    assert code in facts and "new carry" in facts
    assert page.locator(".folded.wide .edge.near").count() == 4
    assert page.locator(".circuit-code .near").first.inner_text() == "shift_right"
    page.keyboard.press("Escape")
    assert page.locator(".edge.near").count() == 0
    assert "Choose a node" in page.locator(".circuit-facts").inner_text()


def test_a_name_in_the_code_chooses_its_node(page: Page) -> None:
    page.locator(".circuit-code [data-name=age]").first.click()
    chosen = page.locator(".folded.wide .node[aria-pressed=true]")
    assert chosen.get_attribute("data-node") == "age"
    assert (
        page.locator(".circuit-code .near").count()
        == page.locator(".circuit-code [data-name=age]").count()
    )


def test_names_in_the_code_are_buttons_of_the_keyboard(page: Page) -> None:
    names = page.locator(".circuit-code [data-name]")
    focused = "document.activeElement"
    page.locator(".circuit-code").focus()
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.dataset.name") == names.first.get_attribute("data-name")
    for _ in range(names.count()):
        if page.evaluate(f"{focused}.dataset.name") == "age":
            break
        page.keyboard.press("ArrowRight")
    assert page.evaluate(f"[{focused}.role, {focused}.ariaLabel]") == ["button", "age, variable"]
    page.keyboard.press(" ")
    chosen = page.locator(".folded.wide .node[aria-pressed=true]")
    assert chosen.get_attribute("data-node") == "age"
    assert page.get_by_role("button", name="age, variable", pressed=True).count() > 0
    page.keyboard.press("Enter")
    assert chosen.count() == 0
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert chosen.count() == 0
    # One stop for the tab key: the next is out of the program.
    page.keyboard.press("Tab")
    assert page.evaluate(f"{focused}.closest('.circuit-code')") is None


def test_its_page_has_no_fault_of_accessibility_and_can_be_printed(
    browser: Browser, held_page: Path
) -> None:
    page = Opener(browser, held_page)(PHONE, scheme="light").page
    page.locator(".folded.narrow .node").first.click()
    assert faults_of_accessibility(page) == []
    page.emulate_media(color_scheme="dark")
    assert faults_of_accessibility(page) == []
    page.set_viewport_size({"width": 680, "height": 1009})
    page.emulate_media(media="print")
    assert page.locator("button:visible").count() == 0
    assert page.evaluate(_FAULTS) == []
    fits = "(node) => node.scrollHeight <= node.clientHeight + 1"
    assert page.locator(".circuit-code").evaluate(fits)
    page.context.close()


def test_unfolded_a_node_of_one_loop_is_chosen_alone(page: Page, held: CircuitGraph) -> None:
    page.get_by_role("button", name="8 loops").click()
    page.locator(".unfolded.wide .node[data-key='3:carry']").click()
    near = page.locator(".unfolded.wide .edge.near")
    ends = near.evaluate_all("(all) => all.map((e) => [e.dataset.source, e.dataset.target])")
    assert ends and all("3:carry" in pair for pair in ends)
    assert len(ends) == sum("3:carry" in edge[:2] for edge in held.unfolded(8))


def test_the_drawing_is_saved_as_a_file(page: Page, held: CircuitGraph) -> None:
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Image (SVG)").click()
    assert waiting.value.suggested_filename == "ripple_held_2-folded.svg"
    image = waiting.value.path().read_text()
    assert image.startswith("<svg") and ".circuit-svg" in image and "shift_1" in image
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Data (JSON)").click()
    assert waiting.value.suggested_filename == "ripple_held_2.json"
    assert json.loads(waiting.value.path().read_text()) == json.loads(held.to_json())


def test_hostile_names_stay_text(browser: Browser, tmp_path: Path) -> None:
    node = GraphNode("a", "head", HOSTILE, "loop", names=(HOSTILE,), facts=((HOSTILE, HOSTILE),))
    graph = CircuitGraph(HOSTILE, (node,), (GraphEdge("a", "a", 1),), f"{HOSTILE} = {HOSTILE}")
    opened = Opener(browser, write_circuit_page(graph, tmp_path / "h.html"))()
    opened.page.locator(".folded.wide .node").click()
    assert HOSTILE in opened.page.locator(".circuit-facts").inner_text()
    assert opened.page.locator("img").count() == 0
    assert opened.complaints == []
    opened.page.context.close()


def test_the_circuit_of_the_report_takes_the_colours_of_the_page(
    browser: Browser, tmp_path: Path
) -> None:
    run = synthetic.write_run(tmp_path / "demo", sections=("program",))
    page = Opener(browser, write_report(run))(scheme="light").page
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    page.locator(".with-circuit .node").first.wait_for(state="attached")
    page.add_style_tag(content="* { transition: none !important; }")
    shades = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate(_FAULTS) == []
        shades.add(
            page.evaluate("getComputedStyle(document.querySelector('.circuit-svg .box')).fill")
        )
    page.locator(".with-circuit .wide .node").first.click()
    assert len(shades) == 2
    page.context.close()
