from __future__ import annotations

import re

import pytest
import torch

from loopinterp.comparison import decodability, head_study, interchange_study
from loopinterp.compiler import compile_program, draw_program
from loopinterp.interventions import ablation_study
from loopinterp.pages.run_record import Problem, Trouble
from loopinterp.pages.sections import Evidence, evidence_by_name
from loopinterp.programs import get_program
from loopinterp.tasks import get_task

IN_MODEL, INTERCHANGED = "In the model studied", "Interchanged in the model studied"
"""Headings of facts about a node of the circuit."""


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    """Of a compiled ripple: what is true of it is known."""
    task, compiled = get_task("addition"), compile_program("ripple", max_length=9)
    batch, model = (
        task.sample(5, batch_size=12, generator=torch.Generator().manual_seed(0)),
        compiled.model,
    )
    subspaces = {"carry": compiled.circuit.subspace("carry")}
    results = {
        "heads": head_study(model, batch, ["ripple"]),
        "ablation": ablation_study(model, batch, when=("all",)),
        "decodability": decodability(
            model,
            task.sample(5, batch_size=48, generator=torch.Generator().manual_seed(0)),
            ["ripple"],
        ),
        "interchange": interchange_study(
            model,
            task.sample(5, batch_size=24, generator=torch.Generator().manual_seed(0)),
            "ripple",
            subspaces=subspaces,
            pairs_per_loop=4,
        ),
    }
    problems: list[Problem] = []
    found = evidence_by_name(results, problems)
    assert problems == []
    return found


def test_a_selector_has_its_head_and_what_is_lost_without_it(evidence: Evidence) -> None:
    facts = dict(evidence["shift_1"])
    in_model = facts[IN_MODEL]
    assert in_model.startswith("head 1.0 ")
    assert "overlaps by 100%" in in_model
    assert re.search(r"even attention: \d", in_model)
    assert re.search(r"equal norm: \d", facts["Ablation"])
    assert "Clean runs: 100%" in facts["Ablation"]


def test_a_variable_is_read_and_exchanged_beside_its_controls(evidence: Evidence) -> None:
    facts = dict(evidence["ripple.carry"])
    assert "at least 1.00" in facts[IN_MODEL]
    assert re.search(r"shuffled labels\D+0\.\d", facts[IN_MODEL])
    assert re.search(r"variable 100%\D+\d", facts[INTERCHANGED])
    assert "random" in facts[INTERCHANGED]


def test_the_graph_of_the_program_tells_them(evidence: Evidence) -> None:
    graph = draw_program(get_program("ripple")).with_facts(evidence)
    headings = {node.label: {heading for heading, _ in node.facts} for node in graph.nodes}
    assert {IN_MODEL, "Ablation"} <= headings["shift_1"]
    assert INTERCHANGED in headings["carry"]
    other = draw_program(get_program("sticky_ripple")).with_facts(evidence)
    (carry,) = (node for node in other.nodes if node.kind == "variable")
    assert IN_MODEL not in dict(carry.facts)  # another program's variable


def test_a_damaged_result_becomes_a_problem() -> None:
    batch = get_task("addition").sample(4, batch_size=4, generator=torch.Generator().manual_seed(0))
    result = ablation_study(compile_program("ripple", max_length=9).model, batch, when=("all",))
    object.__setattr__(result, "data", result.data.drop_vars("control_exact_match"))
    problems: list[Problem] = []
    assert evidence_by_name({"ablation": result}, problems) == {}
    (problem,) = problems
    assert (problem.trouble, problem.name) == (Trouble.CIRCUIT_VALUES, "ablation")
