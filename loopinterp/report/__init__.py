"""Saved results, of a run or alone, as one HTML file that works offline.

The report knows saved results only: no model is loaded to write it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.report.html_report import render_report as render_report
    from loopinterp.report.html_report import write_report as write_report
    from loopinterp.report.html_report import write_results as write_results
    from loopinterp.report.run_record import RunRecord as RunRecord
    from loopinterp.report.run_record import read_run as read_run

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "RunRecord": ".run_record",
        "read_run": ".run_record",
        "render_report": ".html_report",
        "write_report": ".html_report",
        "write_results": ".html_report",
    },
)
