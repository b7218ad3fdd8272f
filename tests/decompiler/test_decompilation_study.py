"""A decompilation as a result: it is what was read off, in the file and in words."""

from __future__ import annotations

import dataclasses
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.core.results import load_result
from loopinterp.decompiler import Decompilation, decompilation_study, decompile
from loopinterp.figures import CircuitGraph
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.tasks import Addition, get_task
from loopinterp.zoo import pretrained_run


@cache
def of_program(name: str) -> Decompilation:
    lengths = None if name == "ripple" else (4,)
    model = compile_program(name, max_length=7).model
    return decompilation_study(model, Addition(), n=4, lengths=lengths)


@cache
def of_nothing() -> Decompilation:
    """Of a model that was not trained."""
    config = LoopedTransformerConfig(d_model=16, n_heads=2, d_vocab=6, d_vocab_out=2)
    model = LoopedTransformer(config)
    return decompilation_study(model, Addition(), n=3, lengths=(3,), n_exchanges=100)


def test_a_known_program_is_given_with_its_evidence() -> None:
    found = of_program("ripple")
    assert found.given and found.sharp and not found.reason
    assert "shift_right" in found.code
    assert found.data["n"].values.tolist() == [3, 4, 6]
    assert float(found.worst().sel(estimate="value")) == 1
    assert found.claim.grade == "exact" and found.claim.checked_to == 6
    assert found.claim.read_at == (4,)
    assert "3, 4, 6" in found.findings()[0].text
    assert (found.data["judged"] > 0).all()


def test_its_table_is_the_one_that_was_decompiled() -> None:
    found = of_program("ripple")
    model = compile_program("ripple", max_length=7).model
    automaton = decompile(model, Addition(), n=4, lengths=(3,), tolerances=(0,)).automaton
    assert automaton is not None
    words = ("a=0 b=0", "a=1 b=0", "a=0 b=1", "a=1 b=1", "BOS", "PAD")
    assert found.data["cell"].values.tolist() == [f"{words[t]}: {v}" for t, v in automaton.cells]
    for (left, own), value in automaton.steps.items():
        if left[0] < 0:
            continue
        message = int(found.data["sends"].values[automaton.cells.index(left)])
        assert found.data["becomes"].values[automaton.cells.index(own), message] == value


def test_a_model_that_runs_no_program_is_not_given_one() -> None:
    found = of_nothing()
    assert not found.given
    assert found.reason
    assert found.claim.grade == "none" and found.refused["code"]
    said = found.findings()[0]
    assert said.good is False and "not decompiled" in said.value
    assert found.reason in said.text


@pytest.mark.parametrize("name", ["ripple", "nothing"])
def test_it_is_read_back_as_it_was_saved(name: str, tmp_path: Path) -> None:
    found = of_nothing() if name == "nothing" else of_program(name)
    found.save(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    again = load_result(path)
    assert isinstance(again, Decompilation)
    for name in ("code", "reason", "claim", "responses"):
        assert getattr(again, name) == getattr(found, name)
    for array in found.data:
        assert np.array_equal(again.data[array], found.data[array], equal_nan=True)


def test_delays_are_said_in_words() -> None:
    (text,) = (f.text for f in of_program("ripple_held_2").findings() if "follows" in f.text)
    assert "1 to 2" in text
    late = set(re.findall(r"(\d) → (\d)\D+a=(\d) b=(\d)", text))
    assert {("1", "0", "0", "0"), ("0", "1", "1", "0")} <= late
    assert ("0", "1", "0", "0") not in late  # that takes 1 loop


def test_figures_have_the_code_and_an_answer_for_every_pair_that_meets() -> None:
    found = of_program("ripple")
    evidence, table, circuit = found.figures()
    assert "carry" in evidence.code or "value" in evidence.code or "answer" in evidence.code
    assert evidence.control
    (drawn,) = (trace for trace in table.plot.data if trace.type == "heatmap")
    there = ~np.isnan(np.array(drawn.z, dtype=float))
    assert there.sum() == int(found.data["becomes"].notnull().sum())
    assert not of_nothing().code or of_nothing().figures()
    assert isinstance(circuit.plot, CircuitGraph) and circuit.control
    assert circuit.plot.code == found.code and circuit.plot.to_dict() == found.graph
    assert {"head", "variable"} <= {node.kind for node in circuit.plot.nodes}


def test_the_transition_at_which_most_runs_leave_the_table_is_named() -> None:
    found = of_program("ripple_held_2")
    rows = [["1+0: 2", "0+1: 1", 12, 40, 0.3], ["1+0: 2", "1+1: 0", 3, 90, 0.1]]
    *_, last = dataclasses.replace(found, unexplained=rows).findings()
    assert "“0+1: 1” with “1+0: 2” on its left (12 runs; 30%" in last.text
    assert not any("leave the table" in finding.text for finding in found.findings())


def test_a_table_too_large_for_a_picture_gives_way_to_response_times() -> None:
    found = of_program("ripple_held_2")
    large = dataclasses.replace(found, data=found.data.reindex(message=range(18)))
    _, delays, circuit = large.figures()
    fastest, slowest = (np.array(trace.z) for trace in delays.plot.data)
    assert (slowest >= fastest).all() and (fastest.min(), slowest.max()) == (1, 2)
    assert circuit.data is not None and len(circuit.data)  # the table itself


def test_long_tables_are_not_spelt_out() -> None:
    from loopinterp.decompiler.figures import _short

    code = "program p\n  next: {" + ", ".join(f"{k}: 1" for k in range(99)) + "}, otherwise 0"
    first, table = _short(code).splitlines()
    assert first == "program p" and table.startswith("  next: ")
    assert "99" in table and "{" not in table
    short_table = "  sends: {0: 1}, otherwise 0"
    assert _short(short_table) == short_table


@pytest.mark.parametrize("given", [{"n": 1}, {"n": (4, 0)}, {"lengths": [1]}, {"n_exchanges": 3}])
def test_numbers_out_of_range_are_refused(given: dict[str, Any]) -> None:
    model = compile_program("ripple", max_length=8).model
    with pytest.raises(InputError):
        decompilation_study(model, Addition(), **{"n": 4, **given})


def test_another_task_is_refused() -> None:
    model = compile_program("ripple", max_length=8).model
    with pytest.raises(InputError) as caught:
        decompilation_study(model, get_task("multiplication"), n=4)
    assert caught.value.what == "model"


def test_a_finite_model_is_said_to_be_what_it_is_at_any_length():
    """A model with a state code whose weights are trained: the zoo's."""
    run = pretrained_run("addition-finite")
    result = decompilation_study(run.model(), run.task, n=4)
    name = "ripple from carry = carry_at_first"
    assert result.identified == name
    assert result.claim.transitions == 73
    (first, *_) = result.findings()
    assert "“ripple”" in first.text and "carry = carry_at_first" in first.text
    assert "any length" in first.text and "73 transitions" in first.text
