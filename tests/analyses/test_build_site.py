"""The site: its links have their places, its pages their sources, and dead links are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from analyses import build_site


def test_the_guide_has_one_place_for_the_links_on_each_page() -> None:
    for name in build_site.LINKED_FROM:
        source = [(build_site.DOCS / f"{name}.md").read_text()]
        assert source[0].count(build_site.PLACE) == 1
        build_site.link_live_pages(None, name, source)
        assert all(f'"live/{page.name}.html"' in source[0] for page in build_site.LIVE_PAGES)


@pytest.mark.parametrize("name", ["explorer", "lens", "circuit"])
def test_a_live_page_is_made_of_what_comes_with_the_package(name: str, tmp_path: Path) -> None:
    (page,) = (page for page in build_site.LIVE_PAGES if page.name == name)
    page.write(tmp_path / "no-demo", tmp_path / "page.html")
    assert not list(build_site.faults_of_links(tmp_path))


def test_without_a_demo_the_builder_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "site"
    monkeypatch.setattr("sys.argv", ["site", "--demo", str(tmp_path), "--out", str(out)])
    with pytest.raises(SystemExit):
        build_site.main()
    assert "make demo" in capsys.readouterr().err and not out.exists()


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "live").mkdir()
    (tmp_path / "a b.png").touch()
    good = '<a href="live/page.html#here">1</a><a href="https://example.org">2</a>'
    good += '<img src="a%20b.png">'
    (tmp_path / "index.html").write_text(good)
    (tmp_path / "live" / "page.html").write_text(
        '<p id="here"><a href="#loop=3&amp;pos=1">1</a><a href="../index.html">2</a>'
        "<script>const text = '<a href=\"gone.html\">';</script>"
    )
    assert not list(build_site.faults_of_links(tmp_path))

    bad = {
        '<a href="gone.html">': "gone.html",
        '<a href="live/page.html#there">': "live/page.html#there",
        '<img src="../outside.png">': "../outside.png",
        '<script src="https://example.org/x.js">': "https://example.org/x.js",
        '<link rel="stylesheet" href="//example.org/x.css">': "//example.org/x.css",
    }
    (tmp_path.parent / "outside.png").touch()
    for tag, target in bad.items():
        (tmp_path / "index.html").write_text(good + tag)
        (fault,) = build_site.faults_of_links(tmp_path)
        assert fault.startswith("index.html") and target in fault
