"""Draw docs/pictures/explorer.png: the explorer on one addition, as Chromium shows it.

    python tools/picture_of_explorer.py

It needs the package with its extra `browser`, and Chromium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from loopinterp.explorer import explore, typed_example
from loopinterp.report import write_results
from loopinterp.zoo import load_pretrained

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "explorer.png"
CHOSEN = {"loop": 9, "pos": 10}


def main() -> None:
    """Write the page of one prompt, choose a place on it, and take its picture."""
    run = load_pretrained("addition")
    shown = typed_example(run.task(), f"{2**21 - 1} + 1")
    found = explore(run.model().eval(), shown, programs=["ripple"])
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = write_results({"explorer": found}, Path(folder) / "page.html", title="Explorer")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1240, "height": 1100}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_function("() => document.querySelector('.explorer').explorer")
        choose = "(place) => document.querySelector('.explorer').explorer.select(place)"
        tab.evaluate(choose, CHOSEN)
        PICTURE.parent.mkdir(exist_ok=True)
        tab.locator(".explorer").screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
