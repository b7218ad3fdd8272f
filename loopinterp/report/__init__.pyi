from .record import RunRecord as RunRecord
from .record import read_run as read_run
from .write import render_report as render_report
from .write import write_report as write_report
from .write import write_results as write_results
