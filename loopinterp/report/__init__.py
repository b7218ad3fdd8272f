"""Saved results, of a run or alone, as one HTML file that works offline.

The report knows saved results only: no model is loaded to write it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from loopinterp._lazy import lazy_exports

if TYPE_CHECKING:
    from loopinterp.report.record import RunRecord as RunRecord
    from loopinterp.report.record import read_run as read_run
    from loopinterp.report.write import render_report as render_report
    from loopinterp.report.write import write_report as write_report
    from loopinterp.report.write import write_results as write_results

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "RunRecord": ".record",
        "read_run": ".record",
        "render_report": ".write",
        "write_report": ".write",
        "write_results": ".write",
    },
)
