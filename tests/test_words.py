"""Nobody reads a word that the glossary replaced."""

from __future__ import annotations

from pathlib import Path

from tests.words import ROOT, hits, texts

# Names that saved files, arguments and axes keep; a model's name on a page follows its program's.
KEPT = {
    "a run reaches": "comparison/counts.py",
    "no run reaches": "comparison/counts.py",
    "planted": "injected_carry.py evidence.py zoo.md",
    "settled": "disguises.py mutations.py lens_by_loop.py results/programs.md",
    "kick": "reachability.py",
    "kicks": "reachability.py",
    "exchanges": "decompilation.py decompilation_study.py",
    "swapping": "models/taps.py",  # memory
}


def test_no_replaced_word_is_read() -> None:
    read = [ROOT / "loopinterp", ROOT / "docs", ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    kept = {word: places.split() for word, places in KEPT.items()}
    left = []
    for hit in hits(read):
        place, _, word = hit.rpartition(": ")
        if not any(end in place for end in kept.get(word.lower(), [])):
            left.append(hit)
    assert left == []


def test_a_replaced_word_is_found_in_prose_and_not_in_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Left alone, it settles.\n\n```python\nkicks = 3\n```\nThe `donor` of it.\n")
    assert [hit.rpartition(": ")[2] for hit in hits([page])] == ["Left alone", "settles"]
    script = tmp_path / "a.py"
    script.write_text('"""It comes to rest."""\nexchange = "no ``exchange`` here"\n')
    assert [hit.rpartition(": ")[2] for hit in hits([script])] == ["comes to rest"]
    assert next(iter(texts(script))) == (1, "It comes to rest.")
