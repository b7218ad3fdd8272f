from .circuit_page import write_circuit_page as write_circuit_page
from .html_report import need_page as need_page
from .html_report import render_report as render_report
from .html_report import write_report as write_report
from .html_report import write_results as write_results
from .run_record import RunRecord as RunRecord
from .run_record import read_run as read_run
