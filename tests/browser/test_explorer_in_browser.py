"""The explorer in headless Chromium with the network off: what it shows is what the model does."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
import torch

from loopinterp.models import LoopedTransformer
from loopinterp.pages import Exploration, explore, write_results
from loopinterp.zoo import load_pretrained, pretrained_run
from tests.browser.conftest import PHONE, WIDE, Opener, OpenPage, faults_of_accessibility

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

BITS = 48
HOSTILE = ["</script><script>boom()</script>", "<img src=x onerror=boom()>", "\u202eabc\u0000"]

# What is written on the page after each selection.
_READ = """(selections) => selections.map((set) => {
  const root = document.querySelector('.explorer');
  root.explorer.select(set);
  const rows = (name) => [...root.querySelectorAll(`.x-panel[aria-label="${name}"] tbody tr`)]
    .map((row) => [...row.cells].map((cell) => cell.textContent));
  return { answers: rows('Answers'), looks: rows('Attention'), programs: rows('Programs'),
           facts: [...root.querySelectorAll('.x-facts dd')].map((one) => one.textContent),
           state: root.querySelector('.x-note').textContent };
})"""

_FRAMES = """async () => {
  const { explorer } = document.querySelector('.explorer');
  explorer.select({ example: 0, loop: 0, pos: 24 });
  const times = [];
  for (let step = 0; step < 49; step++) {
    times.push(await new Promise(requestAnimationFrame));
    explorer.dispatch({ by: { loop: 1 } });
  }
  return [1000 * (times.length - 1) / (times.at(-1) - times[0]), explorer.state.loop];
}"""


# What is chosen when a page is opened, and how it is so again.
_KEEP = "window.first = { ...document.querySelector('.explorer').explorer.state }"
_AS_OPENED = """() => {
  document.activeElement.blur();
  scrollTo(0, 0);
  document.querySelector('.explorer').explorer.select(first);
}"""

# A finger that goes over the grid, and two frames in which something could be drawn.
_FINGER = """async ([clientX, clientY]) => {
  const at = { pointerType: 'touch', bubbles: true, clientX, clientY };
  document.querySelector('.x-scroll canvas').dispatchEvent(new PointerEvent('pointermove', at));
  for (let frame = 0; frame < 2; frame++) await new Promise(requestAnimationFrame);
}"""


@pytest.fixture(scope="module")
def model() -> LoopedTransformer:
    return load_pretrained("addition")


@pytest.fixture(scope="module")
def explored(model: LoopedTransformer) -> Exploration:
    task = pretrained_run("addition").task
    return explore(model, task, programs=["ripple", "lookahead"], n=BITS, batch_size=32)


@pytest.fixture(scope="module")
def explorer(
    browser: Browser, explored: Exploration, tmp_path_factory: pytest.TempPathFactory
) -> Opener:
    folder = tmp_path_factory.mktemp("explorer")
    page = write_results({"explorer": explored}, folder / "page.html", title="Explored")
    return Opener(browser, page)


def ready(opened: OpenPage) -> Page:
    """The page, once the explorer stands."""
    opened.page.wait_for_function("() => document.querySelector('.explorer').explorer")
    return opened.page


@pytest.fixture(scope="module")
def wide(explorer: Opener) -> OpenPage:
    opened = explorer()
    ready(opened).evaluate(_KEEP)
    return opened


@pytest.fixture(scope="module")
def narrow(explorer: Opener) -> OpenPage:
    """The same on a phone, in the dark."""
    opened = explorer(PHONE, scheme="dark")
    ready(opened).evaluate(_KEEP)
    return opened


@pytest.fixture
def page(wide: OpenPage, explorer: Opener) -> Iterator[Page]:
    """A page that tests share, with what was chosen when it was opened."""
    wide.page.mouse.move(0, 0)
    wide.page.evaluate(_AS_OPENED)
    yield wide.page
    assert wide.complaints == [] and wide.requests == [explorer.path.as_uri()]


@torch.no_grad()
def test_what_is_on_the_page_is_what_the_model_does(
    page: Page, explored: Exploration, model: LoopedTransformer
) -> None:
    """80 places at random, read back from the page, against a run of the model now."""
    words = ["0+0", "1+0", "0+1", "1+1", "BOS"]
    tokens = torch.tensor([[words.index(word) for word in row] for row in explored.tokens])
    names = [f"loops.{loop}.blocks.0.attn.hook_pattern" for loop in range(BITS + 1)]
    _, cache = model.run_with_cache(tokens, n_loops=BITS + 1)
    states = cache.stack("hook_state_post")
    draw = random.Random(0)
    places = [
        {"example": draw.randrange(8), "loop": draw.randint(1, BITS + 1)}
        | {"pos": draw.randrange(BITS + 1), "head": draw.randrange(4)}
        for _ in range(80)
    ]
    places.sort(key=lambda place: place["example"])  # each is drawn once
    for place, shown in zip(places, page.evaluate(_READ, places)):
        example, loop, pos, head = place.values()
        shares = model.readout(states[loop - 1, example][None])[0, pos].double().softmax(-1)
        for symbol, probability in shown["answers"]:
            assert abs(float(probability) - float(shares[int(symbol)])) < 1e-3
        entropy = float(torch.special.entr(shares).sum()) / np.log(2)
        assert abs(float(shown["facts"][1]) - entropy) < 1e-3
        if loop > 1:
            now, before = states[loop - 1, example, pos], states[loop - 2, example, pos]
            moved = float((now - before).norm() / now.norm())
            assert abs(float(shown["facts"][2]) - moved) < 1e-3
        pattern = cache[names[loop - 1]][example, head, pos]
        looks = {int(where.split(" ")[0]): float(weight) for _, where, weight in shown["looks"]}
        assert {name for name, _, _ in shown["looks"]} == {f"head {head}"}
        for key, weight in enumerate(pattern.tolist()):
            assert abs(looks.get(key, 0.0) - weight) < 1e-3
        values = explored.data.isel(example=example, loop=loop, pos=pos)
        of_page = {row[0]: row[1] for row in shown["programs"]}
        assert of_page["ripple.carry"] == str(int(values["variable"].sel(name="ripple.carry")))


def test_frames_are_counted_while_it_steps_through_49_loops(
    page: Page, record_property: Callable[[str, object], None]
) -> None:
    rate, loop = page.evaluate(_FRAMES)
    record_property("explorer_frames_a_second", round(rate))
    print(f"{rate:.0f} frames a second")
    assert loop == BITS + 1 and rate > 0


def test_it_is_used_by_keyboard_alone(page: Page) -> None:
    focused = "document.activeElement.getAttribute('aria-label')"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(focused) == "Loops by positions":
            break
    state = "document.querySelector('.explorer').explorer.state"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("PageDown")
    found = page.evaluate(state)
    assert (found["example"], found["loop"], found["pos"]) == (1, BITS, 0)
    said = page.locator(".x-sr").inner_text()
    place = f"loop {BITS}, position 0, BOS: answers"
    assert said.startswith(place)
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    page.wait_for_function(f"() => {state}.loop > 2")
    assert page.get_by_role("button", name="Pause").is_visible()
    page.keyboard.press(" ")
    assert not page.evaluate(state)["playing"]


def test_every_control_changes_the_one_selection(page: Page) -> None:
    state = "document.querySelector('.explorer').explorer.state"
    page.get_by_role("radio", name="3 · ").press(" ")
    page.get_by_role("slider", name="Loop").press("End")
    page.get_by_label("Arcs of").select_option("2")
    page.get_by_label("Variable").select_option(label="ripple.carry")
    found = page.evaluate(state)
    assert (found["example"], found["loop"], found["head"]) == (2, BITS + 1, 2)
    assert found["shown"] == "variable"
    assert page.get_by_role("radio", name="program against model").is_checked()
    page.get_by_role("radio", name="residual").press(" ")
    assert page.evaluate(state)["shown"] == "moved"


@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_a_cell_that_is_clicked_is_selected(request: pytest.FixtureRequest, width: str) -> None:
    page: Page = request.getfixturevalue(width).page
    page.evaluate(_AS_OPENED)
    canvas = page.locator(".x-scroll canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box
    cell = box["width"] / (BITS + 1)
    page.mouse.click(box["x"] + 5.5 * cell, box["y"] + box["height"] - 3)
    found = page.evaluate("document.querySelector('.explorer').explorer.state")
    assert (found["pos"], found["loop"]) == (5, BITS + 1)


def test_a_pointer_shows_a_cell_without_choosing_it(page: Page) -> None:
    shown = "() => document.querySelector('.x-panel[aria-label=State] .x-plane').ariaLabel"
    state = "document.querySelector('.explorer').explorer.state"
    page.evaluate("document.querySelector('.explorer').explorer.select({ loop: 2, pos: 3 })")
    canvas = page.locator(".x-scroll canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    assert box
    chosen, live = page.evaluate(shown), page.locator(".x-sr").inner_text()
    before = page.evaluate(state)
    there = box["x"] + 7.5 * box["width"] / (BITS + 1), box["y"] + box["height"] - 3
    page.mouse.move(*there)
    page.wait_for_function(f"(old) => ({shown})() !== old", arg=chosen)
    title = f"State of position 7 after loop {BITS + 1} "
    assert page.evaluate(shown).startswith(title)
    assert page.evaluate(state) == before and page.locator(".x-sr").inner_text() == live
    page.mouse.move(box["x"] - 200, 5)
    page.wait_for_function(f"(old) => ({shown})() === old", arg=chosen)
    # A finger that passes over it looks at nothing; a key after a look goes on from what is chosen.
    page.evaluate(_FINGER, [there[0] + 40, there[1]])
    assert page.evaluate(shown) == chosen
    page.mouse.move(*there)
    page.wait_for_function(f"(old) => ({shown})() !== old", arg=chosen)
    page.locator(".x-scroll").press("ArrowDown")
    title = "State of position 3 after loop 3 "
    assert page.evaluate(shown).startswith(title)
    page.locator(".x-scroll").press("ArrowUp")
    # Playing goes on under a pointer that lies on a cell, and the pointer shows nothing then.
    page.mouse.move(there[0], there[1] - 30)
    page.wait_for_function(f"(old) => ({shown})() !== old", arg=chosen)
    page.locator(".x-scroll").press(" ")
    page.wait_for_function(f"() => {state}.loop > 3")
    page.mouse.move(there[0] + 2, there[1] - 1)
    page.wait_for_function(f"() => {state}.loop > 5")
    assert "position 3" in page.evaluate(shown) and page.evaluate(state)["playing"]


def test_on_paper_the_chosen_example_is_a_grid_of_lines_with_its_caption(page: Page) -> None:
    page.emulate_media(color_scheme="dark")
    dark = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(dark) != "rgb(255, 255, 255)"
    page.evaluate("document.querySelector('.explorer').explorer.select({ example: 2, loop: 7 })")
    page.set_viewport_size({"width": 680, "height": 1009})
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    shown = page.locator(".explorer > :visible")
    assert shown.count() == 1
    box = shown.locator("svg").bounding_box()
    assert box and box["width"] <= 680 and box["height"] <= 1009
    assert shown.locator("svg rect").count() > (BITS + 1) * (BITS + 2)
    # Light whatever the screen has: the paper's own white, and words that are dark.
    assert shown.locator("svg > rect").first.get_attribute("fill") == "rgb(255, 255, 255)"
    assert shown.locator("p").inner_text().startswith("Example 3. ")
    framed = "Framed: loop 7, position"
    assert framed in shown.locator("p").inner_text()
    page.emulate_media(media="null", color_scheme="light")
    page.set_viewport_size({"width": WIDE, "height": 900})


def test_what_is_shown_is_saved_as_images_and_as_data(page: Page) -> None:
    page.evaluate("document.querySelector('.explorer').explorer.select({ loop: 9, pos: 3 })")
    texts = {}
    for name in ("Image (SVG)", "State (SVG)", "Data (CSV)", "Attention (CSV)"):
        with page.expect_download() as waiting:
            page.locator(".explorer").get_by_role("button", name=name, exact=True).click()
        texts[waiting.value.suggested_filename] = waiting.value.path().read_text()
    assert [*texts] == [
        "example-1-loops.svg",
        "example-1-position-3-state.svg",
        "example-1.csv",
        "example-1-attention.csv",
    ]
    image, way, table, attention = texts.values()
    assert image.count("<rect") > BITS * BITS and "NaN" not in image + way
    cells = pd.read_csv(io.StringIO(table))
    assert len(cells) == (BITS + 1) * (BITS + 2) and "ripple.carry" in cells
    weights = pd.read_csv(io.StringIO(attention))
    sums = weights.pivot_table("weight", ["loop", "head", "position"], aggfunc="sum")
    np.testing.assert_allclose(sums.to_numpy(), 1, atol=1e-3)


@pytest.mark.parametrize("width", ["wide", "narrow"])
def test_it_fits_and_has_no_fault_of_accessibility(
    request: pytest.FixtureRequest, width: str
) -> None:
    opened: OpenPage = request.getfixturevalue(width)
    page = opened.page
    page.evaluate(_AS_OPENED)
    widths = page.evaluate("[innerWidth, document.documentElement.scrollWidth]")
    assert widths[1] <= widths[0] == {"wide": WIDE, "narrow": PHONE}[width]
    assert faults_of_accessibility(page) == []
    assert opened.complaints == []


def test_hostile_words_stay_text(browser: Browser, explored: Exploration, tmp_path: Path) -> None:
    tokens = [[HOSTILE[k % 3] for k, _ in enumerate(row)] for row in explored.tokens]
    changed = replace(
        explored,
        tokens=tokens,
        reasons=[HOSTILE[1]] * 8,
        details=[HOSTILE[0]] * 8,
        said=[HOSTILE[2]] * 8,
        symbols={"0": HOSTILE[0], "1": HOSTILE[2]},
        asks=HOSTILE[1],
    )
    path = write_results({"explorer": changed}, tmp_path / "page.html", title=HOSTILE[0])
    opened = Opener(browser, path)()
    page = ready(opened)
    page.keyboard.press("Tab")
    page.evaluate("document.querySelector('.explorer').explorer.select({ loop: 5, pos: 2 })")
    injected = page.locator(".explorer img, .explorer script")
    assert injected.count() == 0
    assert page.locator(".x-detail").inner_text() == HOSTILE[0]
    assert page.locator(".x-said").inner_text() == "⟨202e⟩abc␀"
    assert "⟨202e⟩abc␀" in page.locator(".x-sr").inner_text()
    assert opened.complaints == [] and opened.requests == [path.as_uri()]
    page.context.close()
