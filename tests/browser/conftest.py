from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loopinterp.pages import write_report
from tests.pages import synthetic

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDE, PHONE = 1440, 390
_AXE = Path(__file__).parent / "vendor" / "axe-core" / "axe.min.js"
# The address bar of each window is two pages of its own, of half a second each. This switch takes
# the place of Playwright's, so what of it concerns pages is said again.
_OFF = [
    "WebUIOmniboxPopup",
    "WebUIOmniboxAimPopup",
    "HttpsUpgrades",
    "MediaRouter",
    "OptimizationHints",
    "PaintHolding",
    "ThirdPartyStoragePartitioning",
]
_QUIET = [
    f"--disable-features={','.join(_OFF)}",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]

NOTEBOOK = """<!doctype html><html lang="en"><title>A notebook</title>
<body><main><h1>A notebook</h1><h2>A cell</h2></main></body></html>"""

# What anywidget gives a front end: traits that are read and heard, and messages that are sent.
FRONT_END = """async ([code, style, traits]) => {
  document.head.append(Object.assign(document.createElement('style'), { textContent: style }));
  const heard = {};
  const model = {
    get: (name) => traits[name],
    on: (event, call) => { heard[event] = call; },
    send: async (message) => {
      const fresh = await window.toPython(message);
      const changed = Object.keys(fresh).filter((name) =>
        JSON.stringify(fresh[name]) !== JSON.stringify(traits[name]));
      Object.assign(traits, fresh);
      for (const name of changed) await heard[`change:${name}`]?.();
      window.answered = (window.answered || 0) + 1;
    },
  };
  const url = URL.createObjectURL(new Blob([code], { type: 'text/javascript' }));
  const { default: widget } = await import(url);
  await widget.render({ model, el: document.querySelector('main') });
}"""


@dataclass
class OpenPage:
    """A report in the browser, and everything the browser complained about or asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)


def faults_of_accessibility(page: Page) -> list[tuple[str, list[str]]]:
    """What axe finds, light or grave, on a whole page with its folds open: rule, and where."""
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.evaluate(_AXE.read_text())
    found: list[dict[str, Any]] = page.evaluate("axe.run().then((all) => all.violations)")
    return [(one["id"], [str(node["target"]) for node in one["nodes"]]) for one in found]


@pytest.fixture(scope="module")
def report_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(synthetic.write_run(tmp_path_factory.mktemp("browser") / "demo"))


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    """One for each file: pages that all its tests share go on playing until it ends."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=chromium, args=_QUIET)
        yield instance
        instance.close()


class Opener:
    """Opens the report with the network off.

    ``opener(width, scheme=...)`` gives a fresh page; ``opener.drawn(width, scheme)`` one that all
    tests share, with every figure drawn, for tests that only look.
    """

    def __init__(self, browser: Browser, path: Path) -> None:
        self.path = path
        self._browser = browser
        self._drawn: dict[tuple[int, str], OpenPage] = {}

    def __call__(
        self, width: int = WIDE, *, scheme: Any = "light", motion: Any = "no-preference"
    ) -> OpenPage:
        page = self._browser.new_context(
            viewport={"width": width, "height": 844 if width == PHONE else 900},
            color_scheme=scheme,
            reduced_motion=motion,
            offline=True,
            accept_downloads=True,
        ).new_page()
        opened = OpenPage(page)
        page.on("console", lambda message: opened.hear(message.type, message.text))
        page.on("pageerror", lambda error: opened.hear("error", str(error)))
        page.on("request", lambda request: opened.requests.append(request.url))
        page.goto(self.path.as_uri())
        return opened

    def drawn(self, width: int = WIDE, scheme: str = "light") -> OpenPage:
        if (width, scheme) not in self._drawn:
            opened = self(width, scheme=scheme)
            opened.page.evaluate("report.drawAll()")
            self._drawn[width, scheme] = opened
        return self._drawn[width, scheme]


@pytest.fixture(scope="module")
def opener(browser: Browser, report_path: Path) -> Opener:
    return Opener(browser, report_path)


@pytest.fixture
def fresh(opener: Opener) -> Iterator[Callable[..., Page]]:
    """Opens pages that a test may change; they are closed after it."""
    pages: list[Page] = []

    def opened(width: int = WIDE, **options: Any) -> Page:
        pages.append(opener(width, **options).page)
        return pages[-1]

    yield opened
    for page in pages:
        page.context.close()
