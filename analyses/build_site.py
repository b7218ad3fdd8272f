"""The guide as a site: its pages and live pages in one folder, which can be hosted as it is.

    make site        # or: python -m analyses.build_site --demo runs/demo --out build/site

The demo comes first (``make demo``). All links are relative, and no page loads anything from the
network; a dead link fails the build.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import loopinterp
from loopinterp.app import analyze_run, compile_run, evaluate_run, write_lens_page
from loopinterp.compiler import draw_program
from loopinterp.pages import (
    explore,
    write_circuit_page,
    write_comparison,
    write_report,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
PLACE = "<!-- live pages, linked by analyses/build_site.py -->"
"""Where the links stand, in the pages of ``LINKED_FROM``; the plain Markdown has none."""
LINKED_FROM = ("index", "gallery")
LIVE = "live"


@dataclass(frozen=True)
class LivePage:
    """A page that is made from the demo's folder, or from what comes with the package."""

    name: str
    title: str
    write: Callable[[Path, Path], object]


def side_by_side(demo: Path, page: Path) -> None:
    """The demo's two models beside a compiled one, whose weights are rotated."""
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_run(
            "ripple", Path(folder) / "compiled-ripple", max_length=24, disguises=["rotate"]
        ).folder
        evaluate_run(compiled, samples=100, progress=False)
        studies = ["explorer", "convergence", "programs"]
        analyze_run(compiled, studies=studies, progress=False)
        write_comparison([demo / "finite-state", demo, compiled], page)


def several_sums(demo: Path, page: Path) -> None:
    """Sums that the zoo's model finds interesting, in the explorer."""
    model = loopinterp.load_pretrained("addition")
    shown = explore(model, model.task, programs=["ripple"], n=16, batch_size=64)
    shown.save(page, title="Explorer: addition")


LIVE_PAGES = (
    LivePage("report", "the demo's report", write_report),
    LivePage(
        "finite-state",
        "the report of a finite-state model",
        lambda demo, page: write_report(demo / "finite-state", page),
    ),
    LivePage("comparison", "three models side by side", side_by_side),
    LivePage("explorer", "the explorer", several_sums),
    LivePage(
        "lens",
        "one sum through the logit lens",
        lambda demo, page: write_lens_page("addition", "2047 + 1", lens="logit", out=page),
    ),
    LivePage(
        "circuit",
        "a circuit",
        lambda demo, page: write_circuit_page(
            draw_program(loopinterp.get_program("ripple_held_2")), page
        ),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the site.")
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="Made by `make demo`.")
    parser.add_argument("--out", type=Path, default=Path("build/site"))
    args = parser.parse_args()
    if not (args.demo / "finite-state" / "results").is_dir():
        parser.error(f"there is no demo in {args.demo}; make it with: make demo")
    shutil.rmtree(args.out, ignore_errors=True)
    build_guide(args.out)
    (args.out / ".nojekyll").touch()  # or else GitHub Pages leaves out _static
    (args.out / LIVE).mkdir()
    for page in LIVE_PAGES:
        page.write(args.demo, args.out / LIVE / f"{page.name}.html")
    if faults := list(faults_of_links(args.out)):
        sys.exit("\n".join(faults))
    size = sum(file.stat().st_size for file in args.out.rglob("*") if file.is_file())
    print(f"{args.out / 'index.html'}: {size / 1e6:.0f} MB in all")


def build_guide(out: Path) -> None:
    """Sphinx's pages, with links to the live ones; a warning is an error."""
    from sphinx.application import Sphinx

    with tempfile.TemporaryDirectory() as doctrees:
        app = Sphinx(DOCS, DOCS, out, doctrees, "html", status=None, warningiserror=True)
        app.connect("source-read", link_live_pages)
        app.build()
    if app.statuscode:
        sys.exit("The guide has warnings.")
    (out / ".buildinfo").unlink(missing_ok=True)


def link_live_pages(app: Any, name: str, source: list[str]) -> None:
    """Put the links into a page of the guide as it is read."""
    if name in LINKED_FROM:
        links = [f'<a href="{LIVE}/{page.name}.html">{page.title}</a>' for page in LIVE_PAGES]
        source[0] = source[0].replace(PLACE, f"<p>Live pages: {', '.join(links)}.</p>")


class _Page(HTMLParser):
    """What a page links to, loads, and can be linked at."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.links |= {given[name] for name in ("href", "src") if name in given}
        if tag != "a":
            self.loads |= {given[name] for name in ("href", "src") if name in given}


def faults_of_links(folder: Path) -> Iterator[str]:
    """Relative links of a built site that lead nowhere, and what it loads from the network."""
    pages = {file.resolve(): _Page(file) for file in sorted(folder.rglob("*.html"))}
    for file, page in pages.items():
        name = file.relative_to(folder.resolve())
        for target in sorted(page.links):
            url = urlsplit(target)
            if url.scheme or url.netloc:
                if url.scheme not in ("data", "blob") and target in page.loads:
                    yield f"{name} loads {target}"
                continue
            there = (file.parent / unquote(url.path)).resolve() if url.path else file
            if not there.is_file() or not there.is_relative_to(folder.resolve()):
                yield f"{name} links to {target}, which is not there"
            anchor = unquote(url.fragment)
            # "=" is in the explorer's addresses of a cell, which are no anchors.
            is_anchor = anchor and "=" not in anchor and there in pages
            if is_anchor and anchor not in pages[there].anchors:
                yield f"{name} links to {target}, which has no such anchor"


if __name__ == "__main__":
    main()
