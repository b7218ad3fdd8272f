from __future__ import annotations

from pathlib import Path

import pytest

from loopinterp.errors import InputError
from loopinterp.rasp import compile_program, draw_program, get_program
from loopinterp.report import write_circuit_page


def test_a_compiled_model_its_circuit_a_program_and_a_graph_become_pages(tmp_path: Path) -> None:
    compiled = compile_program("ripple", max_length=5)
    for k, circuit in enumerate((compiled, compiled.circuit, get_program("ripple"))):
        page = write_circuit_page(circuit, tmp_path / f"{k}.html").read_text()
        assert page.startswith("<!doctype html>") and "shift_1" in page and "shift_right" in page
        assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    graph = draw_program(get_program("copy"))
    assert "copy" in write_circuit_page(graph, tmp_path / "0.html").read_text()  # replaces a page


@pytest.mark.usefixtures("no_type_checks")
def test_what_is_no_circuit_and_a_file_of_another_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="what to draw"):
        write_circuit_page("ripple", tmp_path / "a.html")
    (tmp_path / "a.html").write_text("mine")
    with pytest.raises(InputError, match="a file that is none"):
        write_circuit_page(get_program("ripple"), tmp_path / "a.html")
