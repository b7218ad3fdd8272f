"""Programs and expressions as graphs: every part is there, and fits a page."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest

from loopinterp.errors import InputError
from loopinterp.rasp import (
    compile_program,
    draw,
    get_program,
    list_programs,
    num_prev,
    rotate,
    shift_right,
    tokens,
    var,
)
from loopinterp.rasp.diagram_boxes import expression_boxes

pytestmark = pytest.mark.usefixtures("quick")


def titles(figure: Any) -> list[str]:
    first = [a.text.split("<br>")[0] for a in figure.layout.annotations]
    return [text.removeprefix("<b>").removesuffix("</b>") for text in first]


@pytest.mark.parametrize("name", list_programs())
def test_a_program_is_drawn_with_its_parts_variables_and_selectors(name):
    program = get_program(name)
    figure: Any = draw(program)
    assert figure.layout.title.text == f"{name}: T(n) = {program.n_loops}"
    drawn = titles(figure)
    assert {"prepare", "loop", "finish", "output"} <= set(drawn)
    assert {f"{variable} after a loop" for variable in program.step} <= set(drawn)
    assert set(program.variables) <= set(drawn)
    assert {select.name for select in program.selectors.values() if select.name} <= set(drawn)
    for note in figure.layout.annotations:
        x_axis, y_axis = (figure.layout[f"{a[0]}axis{a[1:]}"] for a in (note.xref, note.yref))
        assert x_axis.range[0] <= note.x <= x_axis.range[1]
        assert y_axis.range[0] <= note.y <= y_axis.range[1]


@pytest.mark.parametrize("name", list_programs())
def test_each_part_fits_a_phone_and_all_of_them_a_page(name):
    figure: Any = draw(get_program(name))
    parts = figure.layout.meta["loopinterp"]["parts"]
    assert max(width for width, _ in parts) <= 346
    assert sum(width for width, _ in parts) + 28 * (len(parts) - 1) <= 908


def test_boxes_say_what_heads_select_and_maps_compute():
    by_title = {box.title: box for box in expression_boxes(dict(get_program("unique_set").step))}
    assert by_title["next_symbol"].lines == ["mean of offered where indices", "== at, else 50"]
    roles = {(child.title, role) for child, role in by_title["next_symbol"].inputs}
    assert roles == {("indices", "key"), ("at", "query"), ("offered", "value")}
    ripple = {box.title: box for box in expression_boxes(dict(get_program("ripple").step))}
    assert ripple["shift_1"].lines == ["map 1, 1 to the left"]
    assert ripple["map 1"].lines == ["generate | (propagate & carry)"]
    assert ripple["propagate"].lines == ["tokens: {1: 1, 2: 1}, else 0"]


def test_heads_have_lines_for_key_query_and_value():
    figure: Any = draw(num_prev(tokens, var("x")) + shift_right(var("x")))
    names = {trace.name for trace in figure.data}
    assert names == {"reads", "value", "key", "query"}
    assert titles(draw(tokens)) == ["tokens", "output"]


def test_signs_of_comparison_are_not_read_as_markup():
    figure: Any = draw((tokens < 3) & (tokens > 1))
    texts = [a.text for a in figure.layout.annotations]
    assert any("tokens &lt; 3" in text and "tokens &gt; 1" in text for text in texts)


def test_a_circuit_shows_its_heads_and_neurons_section_by_section():
    figure: Any = draw(compile_program("latched_ripple", max_length=6).circuit)
    texts = [a.text for a in figure.layout.annotations]
    assert texts[0] == "<b>loop</b>"
    assert "<b>readout</b>" in texts and "<b>prelude</b>" not in texts
    assert "<b>shift_1</b><br>layer 1, head 0" in texts
    assert titles(figure).count("carry") == 3  # what is read in both sections, and who writes it
    assert "carry after a loop" in titles(figure) and "output" in titles(figure)


def test_a_circuit_in_disguise_says_so():
    figure: Any = draw(rotate(compile_program("copy", max_length=6), seed=0).circuit)
    assert figure.layout.title.text == "copy, rotated (seed 0)"


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(InputError, match="a LoopProgram, a sequence expression or a Circuit"):
        draw("ripple")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at most 400 boxes"):
        draw(reduce(lambda x, _: shift_right(x), range(4000), tokens))
