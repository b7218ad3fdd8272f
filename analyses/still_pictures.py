"""Figures as still pictures, for pages that run no script: drawn by Chromium with Plotly's file.

Needs Playwright (the extra ``browser``) and a Chromium on the path.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plotly.offline import get_plotlyjs

if TYPE_CHECKING:
    import plotly.graph_objects as go
    from typing_extensions import Self

_DRAW = """async ([spec, width, height, scale]) => {
  const picture = await Plotly.toImage(spec, { format: 'png', width, height, scale });
  return picture.split(',')[1];
}"""


class StillPictures:
    """A browser that draws figures and photographs pages; use it in a ``with`` block."""

    def __enter__(self) -> Self:
        from playwright.sync_api import sync_playwright

        found = shutil.which("chromium") or shutil.which("chromium-browser")
        if found is None:
            raise SystemExit("Pictures need Chromium (Debian: apt-get install chromium).")
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(
            executable_path=found, args=["--no-sandbox", "--disable-gpu"]
        )
        self._page = self._browser.new_page()
        self._page.add_script_tag(content=get_plotlyjs())
        return self

    def __exit__(self, *_: object) -> None:
        self._browser.close()
        self._playwright.stop()

    def draw(
        self,
        figure: go.Figure | dict[str, Any],
        *,
        width: int = 760,
        height: int | None = None,
        scale: float = 1.25,
    ) -> bytes:
        """A figure as PNG, on white; its height is its own unless one is given."""
        import plotly.graph_objects as go

        white = go.Figure(figure).update_layout(paper_bgcolor="white", plot_bgcolor="white")
        spec = json.loads(str(white.to_json()))
        told = [spec, width, height or spec["layout"].get("height") or 440, scale]
        return base64.b64decode(self._page.evaluate(_DRAW, told))

    def photograph(
        self,
        page: Path,
        *,
        width: int = 1200,
        height: int = 800,
        script: str = "",
        element: str = "",
    ) -> bytes:
        """What a file, or one element of it, looks like in the browser after a script has run."""
        opened = self._browser.new_page(viewport={"width": width, "height": height})
        opened.goto(page.resolve().as_uri())
        if script:
            opened.evaluate(script)
        opened.wait_for_timeout(500)
        shot = opened.locator(element).screenshot() if element else opened.screenshot()
        opened.close()
        return shot
