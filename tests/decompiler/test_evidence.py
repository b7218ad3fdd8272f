"""A program is claimed to be exact only where all of the evidence is complete."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from scipy.stats import binomtest, norm

from loopinterp.compiler import compile_program
from loopinterp.decompiler.evidence import (
    CLEAN,
    ENOUGH,
    EXACT,
    INJECTED,
    NEARLY,
    NONE,
    REPEATED,
    TRAJECTORY,
    Claim,
    below_line,
    estimates,
    held_out,
)
from loopinterp.decompiler.interchange_runs import Runs
from loopinterp.programs import get_program
from loopinterp.programs.equivalence import inputs_of
from loopinterp.programs.mutations import forgotten_the_second_time
from loopinterp.tasks import get_task


def evidence(**agree: int) -> pd.DataFrame:
    rows = [
        (n, what, agree.get(f"{name}_{n}", of), of, of // 4)
        for n in (5, 6)
        for name, what, of in (
            ("alone", CLEAN, 200),
            ("later", "1 loop later", 250),
            ("usual", TRAJECTORY, 300),
            ("planted", INJECTED, 400),
            ("repeated", REPEATED, 350),
        )
    ]
    return pd.DataFrame(rows, columns=["n", "what", "agree", "of", "inputs"])


def test_all_that_was_tried_must_go_as_the_program_says() -> None:
    claim = Claim.of(evidence(), given=True)
    assert (claim.grade, claim.tried, claim.otherwise) == (EXACT, 2100, 0)
    assert claim.lengths == (5, 6) and claim.checked_to == 6
    assert str(claim).startswith(EXACT)


@pytest.mark.parametrize("where", ["alone_5", "usual_6", "planted_5", "planted_6", "repeated_5"])
def test_one_run_that_goes_otherwise_is_enough(where: str) -> None:
    claim = Claim.of(evidence(**{where: 199}), given=True)
    assert claim.grade == NEARLY
    assert "exact" not in str(claim)


@pytest.mark.parametrize("missing", [CLEAN, TRAJECTORY, INJECTED, REPEATED])
def test_what_was_not_tried_is_not_claimed(missing: str) -> None:
    seen: Any = evidence()
    less = seen[seen["what"] != missing]
    assert Claim.of(less, given=True).grade == NEARLY
    at_one_length = seen[(seen["what"] != missing) | (seen["n"] == 6)]
    assert Claim.of(at_one_length, given=True).grade == NEARLY
    none_felt = seen.assign(of=seen["of"].where(seen["what"] != missing, 0))
    none_felt["agree"] = none_felt[["agree", "of"]].min(axis=1)
    claim = Claim.of(none_felt, given=True)
    assert claim.grade == NEARLY and claim.at_most < 0.06


def test_no_program_is_no_claim() -> None:
    assert Claim.of(evidence(), given=False).grade == NONE
    assert Claim.of(pd.DataFrame(), given=True).grade == NONE


def test_how_many_may_go_otherwise_is_the_upper_end_of_the_worst_interval() -> None:
    claim = Claim.of(evidence(planted_5=390, usual_6=299), given=True)
    # 400 interchanges on 100 inputs: 2.5 of 100 in the place of 10 of 400.
    p, z, n = 10 / 400, norm.ppf(0.975), 100
    high = (p + z**2 / (2 * n) + z * (p * (1 - p) / n + z**2 / (4 * n**2)) ** 0.5) / (1 + z**2 / n)
    assert claim.at_most == pytest.approx(high, abs=1e-6)
    assert claim.at_most > binomtest(10, 400).proportion_ci(method="wilson").high + 0.01
    assert (claim.tried, claim.otherwise) == (2100, 11)


def test_a_state_of_another_loop_tells_apart_what_exchanges_at_one_loop_do_not() -> None:
    # Undisturbed, all carries of loop 0 are 0: only a later loop's can be planted there.
    program, task = get_program("ripple_held_2"), get_task("addition")
    model = compile_program("ripple", max_length=6).model
    batch = inputs_of(task, (4,), 24, seed=0)
    runs, generator = Runs(model, batch, task.n_loops(4)), torch.Generator().manual_seed(0)
    wrong = held_out(runs, program, 300, generator).set_index("what")
    assert wrong.loc[INJECTED, "value"] < wrong.loc[CLEAN, "value"] == 1
    right = held_out(runs, get_program("ripple"), 300, generator)
    assert (right["agree"] == right["of"]).all() and (right["of"] > 0).all()


@pytest.mark.parametrize("name", ["ripple", "prefix_xor"])
def test_a_second_interchange_tells_apart_what_single_ones_do_not(name: str) -> None:
    program, task = get_program(name), get_task(get_program(name).task)
    miss = forgotten_the_second_time(program, next(iter(program.variables)))
    model = compile_program(miss, max_length=6).model
    batch, generator = inputs_of(task, (4,), 48, seed=0), torch.Generator().manual_seed(0)
    runs = Runs(model, batch, task.n_loops(4))
    seen: Any = held_out(runs, program, 1000, generator).assign(n=4)
    by_kind = seen.set_index("what")["value"]
    assert by_kind[CLEAN] == by_kind[TRAJECTORY] == by_kind[INJECTED] == 1
    assert by_kind[REPEATED] < 1
    assert Claim.of(seen, given=True).grade == NEARLY


def test_where_no_exchange_was_tried_no_share_is_said() -> None:
    seen: Any = evidence()
    alone = seen[seen["what"] == CLEAN]
    claim = Claim.of(alone, given=True)
    assert claim.tried == 0 and claim.at_most == 1 and "%" not in str(claim)


def test_intervals_count_inputs_and_not_the_interchanges_made_on_them() -> None:
    program, task = get_program("ripple"), get_task("addition")
    model = compile_program("ripple", max_length=6).model
    batch = inputs_of(task, (4,), 8, seed=0)
    generator = torch.Generator().manual_seed(0)
    runs = Runs(model, batch, task.n_loops(4))
    seen = held_out(runs, program, 600, generator).set_index("what")
    whole = seen.loc[TRAJECTORY]
    assert whole["of"] > 2 * whole["inputs"] and whole["inputs"] <= len(batch)
    n, z = whole["inputs"], norm.ppf(0.975)
    assert whole["low"] == pytest.approx(n / (n + z**2), abs=1e-6)
    assert seen.loc[CLEAN, "inputs"] == len(batch)


@pytest.mark.parametrize(("inputs", "given"), [(3000, True), (240, False)])
def test_the_acceptance_line_is_held_against_the_low_end_over_inputs(inputs: int, given: bool):
    counts = pd.DataFrame([{"what": TRAJECTORY, "agree": 9278, "of": 10000, "inputs": inputs}])
    rows: Any = counts.assign(n=8, low=estimates(counts)[:, 1])
    refusal = below_line(rows)
    assert (refusal is None) == given
    if refusal is not None:
        assert (refusal.code, refusal.n, refusal.kind) == ("below-line", 8, TRAJECTORY)
        assert refusal.value == pytest.approx(0.888, abs=2e-3) and refusal.line == ENOUGH


def test_clean_answers_are_held_against_the_line_too() -> None:
    rows: Any = pd.DataFrame({"what": [TRAJECTORY, CLEAN], "low": [0.95, 0.7], "n": [5, 9]})
    refusal = below_line(rows)
    assert refusal is not None and (refusal.kind, refusal.n) == (CLEAN, 9)
    alone: Any = rows[rows["what"] == CLEAN]
    missing = below_line(alone)
    assert missing is not None and missing.code == "nothing-to-check"
