"""The notebook's widget in headless Chromium, its messages answered by the widget in Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from loopinterp.pages import ExplorerWidget
from loopinterp.tasks import Addition
from loopinterp.zoo import pretrained_run
from tests.browser.conftest import FRONT_END, NOTEBOOK, WIDE, faults_of_accessibility

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def widget() -> ExplorerWidget:
    run = pretrained_run("addition")
    model = run.model().eval()
    batch = Addition().encode([(1, 126), (1, 127), (5, 9), (64, 64)], n=8)
    return ExplorerWidget(model, batch, programs=["ripple", "latched_chain"], examples=4)


@pytest.fixture
def page(browser: Browser, widget: ExplorerWidget) -> Iterator[Page]:
    page = browser.new_context(viewport={"width": WIDE, "height": 900}, offline=True).new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.set_content(NOTEBOOK)

    def traits() -> dict[str, Any]:
        return {name: getattr(widget, name) for name in ("payload", "changed", "said")}

    def asked(message: dict[str, Any]) -> dict[str, Any]:
        widget._heard(None, message, None)
        return traits()

    page.expose_function("toPython", asked)
    page.evaluate(FRONT_END, [widget._esm, widget._css, traits()])
    yield page
    assert complaints == []
    page.context.close()


def answered(page: Page, n: int) -> None:
    page.wait_for_function(f"() => window.answered === {n}")


def test_a_state_is_put_in_and_three_runs_are_stepped_together(
    page: Page, widget: ExplorerWidget
) -> None:
    first = page.locator(".explorer").first
    of = widget.result.data["row"].values.tolist()
    base, source = of.index(0), of.index(1)
    place = {"example": base, "loop": 5, "pos": 5}
    first.evaluate("(node, place) => node.explorer.select(place)", place)
    page.get_by_label("At the chosen place").select_option(f"interchange {source}")
    page.get_by_role("button", name="Put in here").click()
    answered(page, 1)
    second = page.locator(".explorer").nth(1)
    title = second.locator(".x-detail").inner_text()
    put_in = f"After loop 5, position 5 is given the state of example {source + 1}."
    assert title == put_in
    state = "(node) => [node.explorer.state.loop, node.explorer.state.pos]"
    assert second.evaluate(state) == [5, 5]
    # Bit 4 of 1 + 126 is 1; with the carry of 1 + 127 it is 0, and that is in the run beside.
    answer = "(node) => node.querySelector('.x-panel[aria-label=Answers] td').textContent"
    assert [first.evaluate(answer), second.evaluate(answer)] == ["1", "0"]
    first.locator(".x-scroll").press("ArrowDown")
    assert second.evaluate(state) == [6, 5]
    second.locator(".x-scroll").press("ArrowLeft")
    assert first.evaluate(state) == [6, 4]
    # The third is what the program, given the same, would answer: here as the model does.
    third = page.locator(".explorer").nth(2)
    assert third.evaluate(state) == [6, 4]
    third.evaluate("(node) => node.explorer.select({ loop: 5, pos: 5 })")
    assert first.evaluate(state) == second.evaluate(state) == [5, 5]
    assert third.evaluate(answer) == "0"
    detail = "The run of ripple"
    assert detail in third.locator(".x-detail").inner_text()
    # What it has not is not shown, nor made up.
    assert third.locator(".x-plane").count() == 0 and "entropy" not in third.inner_text()
    third.get_by_label("Variable").select_option(label="ripple's claim")
    claims = third.locator(".x-panel[aria-label=Programs] tr", has_text="claim").inner_text()
    assert claims.split() == ["ripple's", "claim", "0", "0"]
    page.get_by_role("combobox", name="Program").select_option("latched_chain")
    third.get_by_text("The run of latched_chain").wait_for()
    assert third.evaluate(state) == [5, 5]
    assert faults_of_accessibility(page) == []
    page.get_by_role("button", name="Take out").click()
    answered(page, 2)
    assert page.locator(".explorer:visible").count() == 1
    assert not page.get_by_role("combobox", name="Program").is_visible()


def test_of_zeros_a_program_makes_no_claim_and_that_is_said(page: Page) -> None:
    page.get_by_label("At the chosen place").select_option("zero")
    page.get_by_role("button", name="Put in here").click()
    answered(page, 1)
    assert page.locator(".explorer:visible").count() == 2
    claim = page.get_by_text("ripple makes no claim")
    assert claim.is_visible()


def test_an_example_is_typed_and_what_is_none_is_refused_without_fault_of_accessibility(
    page: Page,
) -> None:
    page.get_by_label("Example", exact=True).fill("5 + 6")
    page.get_by_role("button", name="Show").press("Enter")
    answered(page, 1)
    by_hand = "0101 + 0110 = 1011 mod 2^4"
    assert page.locator(".x-said").nth(1).inner_text() == by_hand
    page.get_by_label("Example", exact=True).fill("<img src=x>")
    page.get_by_label("Example", exact=True).press("Enter")
    answered(page, 2)
    alert, refused = page.get_by_role("alert").inner_text(), "'<img src=x>' at place 0"
    assert refused in alert and page.locator("img").count() == 0
    assert faults_of_accessibility(page) == []
