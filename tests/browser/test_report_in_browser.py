"""The report in headless Chromium with the network off."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from loopinterp.core.results import Figure, figures_of, findings_of
from loopinterp.figures import LinePanel, Series, category_maps, line_panels
from loopinterp.figures.plots import space_figure
from loopinterp.pages import write_comparison, write_results
from tests.browser.conftest import PHONE, WIDE, Opener, faults_of_accessibility
from tests.pages import synthetic

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

N_FIGURES = 13
Fresh = Callable[..., "Page"]

# Boxes of all text in figures that sticks out of its figure, or of the page.
_CUT_OFF = """() => [...document.querySelectorAll('figure.card')].flatMap((figure) => {
  const frame = figure.getBoundingClientRect();
  return [...figure.querySelectorAll('.plot text')].filter((text) => {
    const box = text.getBoundingClientRect();
    return box.width > 0 && (box.left < frame.left - 1 || box.right > frame.right + 1
      || box.left < 0 || box.right > innerWidth + 1);
  }).map((text) => figure.id + ': ' + text.textContent);
})"""

# Pairs of tick labels of one axis, and pairs of words over the axes, that overlap.
_OVERLAPS = """() => {
  const found = [];
  const check = (figure, nodes) => {
    const boxes = nodes.map((node) => [node.textContent, node.getBoundingClientRect()])
      .filter(([, box]) => box.width > 0);
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
      const [a, p] = boxes[i], [b, q] = boxes[j];
      const across = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const down = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (across > 2 && down > 3) found.push(`${figure.id}: ${a} | ${b}`);
    }
  };
  for (const figure of document.querySelectorAll('figure.card:not(.with-circuit)')) {
    for (const plane of ['xaxislayer-above', 'yaxislayer-above'])
      check(figure, [...figure.querySelectorAll(`.plot .${plane} text`)]);
    check(figure, [...figure.querySelectorAll('.plot .annotation-text, .plot .infolayer text')]);
  }
  return found;
}"""

_DRAWN = """() => [...document.querySelectorAll('figure.card:not(.with-circuit)')].map((figure) => {
  const svg = figure.querySelector('.plot svg.main-svg');
  const box = svg ? svg.getBoundingClientRect() : { width: 0, height: 0 };
  const marks = figure.querySelectorAll(
    '.plot .scatterlayer path, .plot .barlayer path, .plot .heatmaplayer image');
  const sizes = [...marks].map((mark) => mark.getBoundingClientRect());
  return { id: figure.id, width: box.width, height: box.height,
           marks: sizes.filter((size) => size.width > 0 || size.height > 0).length };
})"""


_SMALLEST = """() => Math.min(...[...document.querySelectorAll('.plot text')]
  .map((text) => parseFloat(getComputedStyle(text).fontSize)))"""

_CONTRASTS = """() => {
  const luminance = (css) => {
    const canvas = document.createElement('canvas').getContext('2d');
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => {
      v /= 255;
      return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (node, property, back) => {
    const pair = [luminance(getComputedStyle(node)[property]),
                  luminance(getComputedStyle(back).backgroundColor)].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
  };
  const card = document.querySelector('figure.card:not(.with-circuit)');
  return [
    contrast(document.querySelector('h1'), 'color', document.body),
    contrast(document.querySelector('.question'), 'color', document.body),
    contrast(card.querySelector('figcaption p'), 'color', card),
    contrast(card.querySelector('.plot .xtick text'), 'fill', card),
    contrast(card.querySelector('.links a'), 'color', card),
  ];
}"""


_SIZES = """() => [...document.querySelectorAll('svg.main-svg')]
  .map((svg) => svg.getBoundingClientRect()).map(({ width, height }) => [width, height])"""

# What has more in it than it shows.
_SCROLLED = """() => [...document.querySelectorAll('main *')].filter((node) =>
  ['auto', 'scroll', 'hidden'].includes(getComputedStyle(node).overflowY) && node.clientHeight > 1
  && (node.scrollHeight > node.clientHeight + 1 || node.scrollWidth > node.clientWidth + 1))
  .map((node) => node.className || node.tagName)"""


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "light"), (WIDE, "dark"), (PHONE, "light")])
def test_every_figure_is_drawn_without_complaint_or_request(
    opener: Opener, width: int, scheme: str
) -> None:
    report = opener.drawn(width, scheme)
    figures = report.page.evaluate(_DRAWN)
    assert len(figures) == N_FIGURES
    for figure in figures:
        assert figure["width"] > 250 and figure["height"] > 120 and figure["marks"] > 0, figure
    assert report.complaints == []
    assert report.requests == [opener.path.as_uri()]


@pytest.mark.parametrize("width", [WIDE, 768, PHONE])
def test_nothing_is_cut_off_or_wider_than_the_page(opener: Opener, width: int) -> None:
    page = opener.drawn(width).page
    overflow = page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    assert overflow <= 0
    assert page.evaluate(_CUT_OFF) == []


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_words_in_figures_can_be_read(opener: Opener, width: int) -> None:
    page = opener.drawn(width).page
    assert page.evaluate(_OVERLAPS) == []
    assert page.evaluate(_SMALLEST) >= 10


@pytest.mark.parametrize(("width", "scheme"), [(WIDE, "dark"), (PHONE, "light")])
def test_the_whole_report_has_no_fault_of_accessibility(
    opener: Opener, width: int, scheme: str
) -> None:
    assert faults_of_accessibility(opener.drawn(width, scheme).page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_page(opener: Opener, scheme: str) -> None:
    assert min(opener.drawn(scheme=scheme).page.evaluate(_CONTRASTS)) > 4.5


@pytest.fixture(scope="module")
def steady(opener: Opener) -> Iterator[Page]:
    """A page for tests that leave it as it was, but for where it is scrolled to."""
    page = opener().page
    yield page
    page.context.close()


@pytest.fixture(scope="module")
def motionless(opener: Opener) -> Iterator[Page]:
    """The same with reduced motion."""
    page = opener(motion="reduce").page
    yield page
    page.context.close()


def test_figures_wait_until_they_come_near(steady: Page) -> None:
    page = steady
    last = page.locator("section > figure.card").last
    assert last.get_attribute("data-drawn") is None
    last.scroll_into_view_if_needed()
    last.locator("svg.main-svg").first.wait_for()


def test_the_slider_goes_from_loop_to_loop_by_keyboard(steady: Page) -> None:
    page = steady
    figure = page.locator("figure.card", has=page.locator(".loop-slider"))
    figure.scroll_into_view_if_needed()
    heat = figure.locator(".heatmaplayer image").first
    heat.wait_for()
    before = heat.get_attribute("href")
    slider = figure.get_by_role("slider", name="Loop")
    slider.focus()
    page.keyboard.press("End")
    last, before_last = (f"loop {loop} of 13" for loop in (13, 12))
    assert figure.locator("output").inner_text() == last
    assert slider.get_attribute("aria-valuetext") == last
    assert before and heat.get_attribute("href") != before
    page.keyboard.press("ArrowLeft")
    assert figure.locator("output").inner_text() == before_last


def test_the_legend_hides_and_shows_lines(steady: Page) -> None:
    page = steady
    figure = page.locator("#generalisation figure.card")
    figure.scroll_into_view_if_needed()
    lines = figure.locator(".scatterlayer .trace")
    lines.first.wait_for()
    n_lines = lines.count()
    button = figure.get_by_role("button", name="full carry chains")
    button.press("Enter")
    assert button.get_attribute("aria-pressed") == "false"
    assert lines.count() < n_lines
    button.press("Enter")
    assert lines.count() == n_lines


def test_the_theme_can_be_switched_and_figures_follow(fresh: Fresh) -> None:
    page = fresh(scheme="light")
    page.locator("#generalisation figure.card").scroll_into_view_if_needed()
    tick = page.locator("#generalisation .xtick text").first
    tick.wait_for()
    light = tick.evaluate("(node) => getComputedStyle(node).fill")
    page.get_by_role("button", name="Dark colours").click()
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.wait_for_function(
        "(light) => getComputedStyle(document.querySelector('#generalisation .xtick text')).fill"
        " !== light",
        arg=light,
    )
    page.reload(wait_until="domcontentloaded")
    assert page.locator("html").get_attribute("data-theme") == "dark"


def test_the_keyboard_reaches_the_summary_first(motionless: Page) -> None:
    page = motionless
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().width") > 50


def test_with_reduced_motion_nothing_plays(motionless: Page) -> None:
    page = motionless
    assert page.locator(".loop-slider").count() == 1
    assert not page.locator(".loop-slider button").is_visible()
    behaviour = page.evaluate("getComputedStyle(document.documentElement).scrollBehavior")
    assert behaviour == "auto"


def test_data_and_images_can_be_downloaded(steady: Page) -> None:
    page = steady
    with page.expect_download() as waiting:
        page.locator("#generalisation .links a").first.click()
    assert waiting.value.suggested_filename == "generalisation-1-exact-match-by-length.csv"
    table = pd.read_csv(io.BytesIO(waiting.value.path().read_bytes()))
    assert table["length"].max() == 96
    with page.expect_download() as waiting:
        page.locator("#program .save-image").first.click()
    assert waiting.value.suggested_filename == "program-1-rival-programs.svg"
    image = waiting.value.path().read_text()
    assert "<svg" in image and "random subspace" in image


def test_the_contents_lead_to_sections_and_mark_the_one_in_view(motionless: Page) -> None:
    page = motionless
    page.locator(".contents").get_by_role("link", name="Program and model").click()
    page.wait_for_selector(".contents a[href='#program'][aria-current]")
    page.wait_for_selector("#program figure.card[data-drawn]")
    assert abs(page.evaluate("document.querySelector('#program').getBoundingClientRect().top")) < 99
    assert page.get_by_role("link", name="Rival programs").is_visible()


def test_a_link_to_a_folded_figure_opens_the_fold(motionless: Page) -> None:
    page = motionless
    folded = page.locator("details.more figure.card", has_text="Update angle")
    assert not folded.is_visible()
    page.locator(".contents").get_by_role("link", name="Convergence").click()
    page.locator(".contents").get_by_role("link", name="Update angle").click()
    folded.locator("svg.main-svg").first.wait_for()
    assert folded.locator("svg.main-svg").first.evaluate("(svg) => svg.clientWidth") > 500


@pytest.fixture(scope="module")
def printed(opener: Opener) -> Iterator[Page]:
    """A dark page that is printed, and is then as it was but for figures that are drawn."""
    page = opener(scheme="dark", motion="reduce").page
    yield page
    page.context.close()


def test_everything_is_drawn_for_print(printed: Page) -> None:
    page = printed
    assert page.locator("figure.card[data-drawn]").count() < N_FIGURES
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(
        f"() => document.querySelectorAll('figure.card[data-drawn]').length === {N_FIGURES}"
    )
    page.wait_for_function(
        "() => [...document.querySelectorAll('.plot')].every((plot) => plot.style.zoom > 0)"
    )
    sizes = page.evaluate(_SIZES)
    assert max(width for width, _ in sizes) <= 641  # what fits on a sheet of paper
    assert max(height for _, height in sizes) <= 700
    assert page.locator("details:not([open])").count() == 0
    tick = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    dark_on_white = page.evaluate(tick)
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.wait_for_function(f"(fill) => {tick} !== fill", arg=dark_on_white)
    assert page.locator("html").get_attribute("data-theme") is None
    assert page.locator("details[open]").count() == 0  # as they were


def test_on_paper_nothing_is_cut_off_folded_or_to_be_pressed(printed: Page) -> None:
    page = printed
    page.set_viewport_size({"width": 680, "height": 1009})  # an A4 sheet within its margins
    page.emulate_media(media="print")
    page.evaluate("document.documentElement.dataset.theme = 'dark'")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(
        "() => [...document.querySelectorAll('.plot')].every((plot) => plot.style.zoom > 0)"
    )
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for name in ("button:not(.legend button)", "input", "select", ".contents", ".links"):
        assert page.locator(f"{name}:visible").count() == 0, name
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) <= 0
    assert page.evaluate(_SCROLLED) == []


def test_a_figure_in_space_brings_its_own_library_beside_the_flat_ones(
    browser: Browser, tmp_path: Path
) -> None:
    class Spatial(synthetic.Synthetic, kind="spatial"):
        pass

    way = Series("way", [0, 1], [0, 1])
    flat = line_panels([LinePanel([way], "y")], x_title="x")
    space = space_figure([way], {"way": np.array([0, 1])}, titles=["1", "2", "3"])
    space.update_layout(height=160)  # in software, a small space is drawn sooner
    plots = {"Flat": flat, "In space": space, "Flat again": flat}
    findings_of.register(Spatial, lambda _: [])
    figures = [Figure(title=title, plot=plot, caption="") for title, plot in plots.items()]
    figures_of.register(Spatial, lambda _: figures)
    found = Spatial.of(synthetic.Took(1.0), section="other")
    page_path = write_results({"a": found}, tmp_path / "page.html", title="x")
    page = Opener(browser, page_path)(PHONE).page
    page.evaluate("report.drawAll()")
    page.wait_for_function(
        "() => document.querySelectorAll('figure.card[data-drawn]').length === 3"
    )
    assert page.locator("figure.card canvas").count() > 0
    assert page.locator("figure.card .scatterlayer path.js-line").count() == 2
    page.get_by_role("button", name="Dark colours").click()  # each is drawn again, by its own
    page.wait_for_timeout(300)
    assert page.locator("figure.card .scatterlayer path.js-line").count() == 2
    page.context.close()


def test_rows_of_panels_have_their_titles_and_whole_numbers_their_ticks(
    browser: Browser, tmp_path: Path
) -> None:
    class Grid(synthetic.Synthetic, kind="grid"):
        pass

    line = [Series("way", [1, 2, 3], [0.1, 0.5, 0.7])]
    rows = [LinePanel(line, title) for title in ("share", "share", "bits", "bits")]
    cells = xr.DataArray([[0.0, 1.0]], {"token": ["a"], "message": [0, 1]}, ["token", "message"])
    plots = {
        "Rows": line_panels(rows, x_title="x", columns=2),
        "Map": category_maps({"": cells}, {"no": "blue", "yes": "red"}),
    }
    findings_of.register(Grid, lambda _: [])
    figures = [Figure(title=title, plot=plot, caption="") for title, plot in plots.items()]
    figures_of.register(Grid, lambda _: figures)
    found = Grid.of(synthetic.Took(1.0), section="other")
    opened = Opener(browser, write_results({"a": found}, tmp_path / "page.html", title="x"))()
    page = opened.page
    widths = []
    for width in (WIDE, PHONE):
        page.set_viewport_size({"width": width, "height": 844})
        page.evaluate("report.drawAll()")
        titles, ticks, drawn = page.evaluate("""() => {
          const [rows, map] = document.querySelectorAll('figure.card');
          const texts = (figure, what) =>
            [...figure.querySelectorAll(what)].map((t) => t.textContent);
          return [texts(rows, "text[class^='y'][class$='title']"), texts(map, '.xtick text'),
                  rows.querySelector('svg.main-svg').clientWidth];
        }""")
        assert list(dict.fromkeys(titles)) == ["share", "bits"]
        assert ticks == ["0", "1"]
        widths.append(drawn)
    assert widths[0] > PHONE > widths[1]
    page.context.close()


def test_how_long_the_report_takes_to_open_is_reported(
    opener: Opener, record_property: Callable[[str, object], None]
) -> None:
    loaded = opener.drawn().page.evaluate(
        "performance.getEntriesByType('navigation')[0].loadEventEnd"
    )
    record_property("report_opens_in_ms", round(loaded))
    print(f"the report opens in {loaded:.0f} ms")
    assert loaded > 0


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    runs = [synthetic.write_run(folder / name) for name in ("seed-0", "seed-1", "compiled")]
    return write_comparison(runs, folder / "compared.html")


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_runs_side_by_side_fit_the_page_and_are_drawn(
    browser: Browser, compared: Path, width: int
) -> None:
    opened = Opener(browser, compared)(width)
    page = opened.page
    page.evaluate("report.drawAll()")
    page.wait_for_selector("figure.card[data-drawn]")
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) <= 0
    assert page.evaluate(_CUT_OFF) == [] and page.evaluate(_OVERLAPS) == []
    assert page.locator("#summary thead th").count() == 3
    assert faults_of_accessibility(page) == []
    assert opened.complaints == [] and len(opened.requests) == 1
    page.context.close()
