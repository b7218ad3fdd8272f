"""What `make demo` made, checked at its real size: `make demo | tee LOG`, then this with LOG."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from loopinterp.app.catalogue import STUDIES
from loopinterp.core.results import load_result, result_files
from tests.pages.test_report import Reader

FOLDER = Path("runs/demo")


def main(log: Path) -> None:
    # The screen: where the two models' facts begin, to the end.
    text = log.read_text()
    assert "\r" not in text and "Traceback" not in text
    lines = text.splitlines()
    last = lines[max(k for k, line in enumerate(lines) if line.startswith("Done in")) :]
    assert len(last) <= 12 and max(map(len, last)) <= 100, last
    assert any("✓ Program: “ripple” (exact" in line for line in last), last

    # Every study of both models has a result that loads, and is on the report.
    made = json.loads((FOLDER / "made.json").read_text())
    named = {"generalisation", *(study.name for study in STUDIES)} - set(made["unsaid"])
    results = {path.stem: load_result(path) for path in result_files(FOLDER / "results")}
    assert set(results) == named == set(made["stages"]) - {"train"}
    assert results["generalisation"].data["exact_match"].sel(estimate="value").min() > 0.99

    report = (FOLDER / "report.html").read_text()
    assert "cannot be shown" not in report
    assert len(Reader(report).unfolded) <= 1000
    finite = json.loads((FOLDER / "finite-state" / "made.json").read_text())
    assert set(finite["stages"]) >= {"decompilation", "programs", "convergence"}
    comparison = (FOLDER / "comparison.html").read_text()
    assert "ripple" in comparison and "cannot be shown" not in comparison
    print("The demo made what it says.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
