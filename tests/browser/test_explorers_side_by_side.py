"""The explorers of several runs on one page, in headless Chromium with the network off."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loopinterp.compiler import compile_program
from loopinterp.pages import explore, write_comparison
from loopinterp.tasks import Addition
from tests.browser.conftest import PHONE, WIDE, Opener, faults_of_accessibility
from tests.pages import synthetic

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

SHARED = (7, 9)
_CHOSEN = """(nodes) => nodes.map(({ explorer: { state, data } }) =>
  ({ ...state, tokens: data.examples[state.example].tokens.join(' ') }))"""
_CORNERS = """(nodes) => nodes.map((node) => node.getBoundingClientRect())
  .map(({ x, y }) => [Math.round(x), Math.round(y)])"""
_TO_LOOP_3 = """({ explorer }) => {
  const loops = explorer.data.examples.map((one) => one.loops);
  explorer.select({ example: loops.indexOf(Math.max(...loops)), loop: 3 });
}"""
_OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs with one example in common, the second's others longer, and one with none."""
    folder = tmp_path_factory.mktemp("side-by-side")
    task = Addition()
    longer = task.encode([(1, 31), (2, 3)], n=5)
    batches = {
        "ripple": [task.encode([(5, 3), SHARED], n=4)],
        "late": [task.encode([SHARED], n=4), longer],
        "plain": [],
    }
    runs = []
    for name, of in batches.items():
        runs.append(synthetic.write_run(folder / name))
        if of:
            program = "ripple" if name == "ripple" else "late_ripple"
            model = compile_program(program, max_length=6).model
            found = explore(model, of, programs=["late_ripple", "ripple"], examples=4 - len(of))
            found.save(runs[-1] / "results", "explorer")
    return write_comparison(runs, folder / "page.html")


@pytest.fixture(scope="module", params=[WIDE, PHONE])
def page(browser: Browser, page_path: Path, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page that tests share; what is done in it is tried at one width alone."""
    opened = Opener(browser, page_path)(request.param)
    opened.page.wait_for_function(
        "() => [...document.querySelectorAll('.explorer')].every((one) => one.explorer)"
    )
    opened.page.evaluate("window.explored")
    yield opened.page
    assert opened.complaints == [] and opened.requests == [page_path.as_uri()]
    opened.page.context.close()


def chosen(page: Page) -> list[dict[str, Any]]:
    return page.locator(".explorer").evaluate_all(_CHOSEN)


def test_they_stand_side_by_side_or_one_below_the_other(page: Page) -> None:
    corners = page.locator(".explorers > section").evaluate_all(_CORNERS)
    (left, top), (second_left, second_top) = corners
    below = page.viewport_size == {"width": PHONE, "height": 844}
    assert (second_left == left) == below and (second_top != top) == below
    assert page.evaluate(_OVERFLOW) <= 0
    headings = page.locator("#explorers > div > section > h3")
    assert headings.all_inner_texts() == ["ripple", "late"]
    assert "plain" in page.locator("#explorers .missing").inner_text()
    assert faults_of_accessibility(page) == []


@pytest.mark.parametrize("page", [WIDE], indirect=True)
def test_what_is_chosen_in_one_is_chosen_in_all(page: Page) -> None:
    shared = "BOS " + " ".join(f"{7 >> k & 1}+{9 >> k & 1}" for k in range(4))
    first, second = page.locator(".explorer").all()
    numbers = [
        one.evaluate(
            "({ explorer }, words) =>"
            " explorer.data.examples.findIndex((one) => one.tokens.join(' ') === words)",
            shared,
        )
        for one in (first, second)
    ]
    own = f"{2 - numbers[0]} · "  # the other one of two
    first.get_by_role("radio", name=own).press(" ")
    first.get_by_role("radio", name=f"{numbers[0] + 1} · ").press(" ")
    assert [one["tokens"] for one in chosen(page)] == [shared, shared]
    second.locator(".x-scroll").press("End")
    second.locator(".x-scroll").press("ArrowRight")
    a, b = chosen(page)
    assert a["loop"] == b["loop"] > 1 and a["pos"] == b["pos"] == 2
    first.get_by_label("Variable").select_option(label="ripple.carry")
    a, b = chosen(page)
    assert (a["shown"], b["shown"]) == ("variable", "variable")
    names = [
        one.get_by_label("Variable").evaluate("(node) => node.selectedOptions[0].text")
        for one in (first, second)
    ]
    assert names == ["ripple.carry", "ripple.carry"]
    # An input that the first has not: it keeps its own, and goes as far as it can.
    longest = next(k for k in range(3) if k != numbers[1])
    second.get_by_role("radio", name=f"{longest + 1} · ").press(" ")
    second.get_by_role("slider", name="Loop").press("End")
    a, b = chosen(page)
    assert a["tokens"] == shared != b["tokens"] and (a["loop"], b["loop"]) == (5, 6)


@pytest.mark.parametrize("page", [WIDE], indirect=True)
def test_play_in_one_plays_all_to_their_ends(page: Page) -> None:
    first, second = page.locator(".explorer").all()
    # From the third loop of the longer example, which has one more than the other run's.
    second.evaluate(_TO_LOOP_3)
    assert [one["loop"] for one in chosen(page)] == [3, 3]
    first.get_by_role("button", name="Play").press("Enter")
    assert second.get_by_role("button", name="Pause").is_visible()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.explorer')]"
        ".every(({ explorer: { state, data } }) => "
        "!state.playing && state.loop === data.examples[state.example].loops)"
    )
    assert [one["loop"] for one in chosen(page)] == [5, 6]
