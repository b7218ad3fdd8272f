"""A program is claimed to be exact only where all of the evidence is complete."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from scipy.stats import binomtest

from loopinterp.circuits.decompiler.claim import EXACT, NEARLY, NONE, Claim
from loopinterp.circuits.decompiler.held_out import PLANTED, TRAJECTORY, UNDISTURBED, held_out
from loopinterp.rasp import compile_program, get_program
from loopinterp.rasp.mutations.program_equivalence import inputs_of
from loopinterp.tasks import get_task


def evidence(**agree: int) -> pd.DataFrame:
    rows = [
        (n, what, agree.get(f"{name}_{n}", of), of)
        for n in (5, 6)
        for name, what, of in (
            ("alone", UNDISTURBED, 200),
            ("later", "1 loop later", 250),
            ("usual", TRAJECTORY, 300),
            ("planted", PLANTED, 400),
        )
    ]
    return pd.DataFrame(rows, columns=["n", "what", "agree", "of"])


def test_all_that_was_tried_must_go_as_the_program_says() -> None:
    claim = Claim.of(evidence(), given=True)
    assert (claim.grade, claim.tried, claim.otherwise) == (EXACT, 1400, 0)
    assert claim.lengths == (5, 6) and str(claim).startswith("exact: all of 1400")


@pytest.mark.parametrize("where", ["alone_5", "usual_6", "planted_5", "planted_6"])
def test_one_run_that_goes_otherwise_is_enough(where: str) -> None:
    claim = Claim.of(evidence(**{where: 199}), given=True)
    assert claim.grade == NEARLY
    assert "exact" not in str(claim)


@pytest.mark.parametrize("missing", [UNDISTURBED, TRAJECTORY, PLANTED])
def test_what_was_not_tried_is_not_claimed(missing: str) -> None:
    seen: Any = evidence()
    less = seen[seen["what"] != missing]
    assert Claim.of(less, given=True).grade == NEARLY
    at_one_length = seen[(seen["what"] != missing) | (seen["n"] == 6)]
    assert Claim.of(at_one_length, given=True).grade == NEARLY
    none_felt = seen.assign(of=seen["of"].where(seen["what"] != missing, 0))
    none_felt["agree"] = none_felt[["agree", "of"]].min(axis=1)
    claim = Claim.of(none_felt, given=True)
    assert claim.grade == NEARLY and claim.at_most < 0.02


def test_no_program_is_no_claim() -> None:
    assert Claim.of(evidence(), given=False).grade == NONE
    assert Claim.of(pd.DataFrame(), given=True).grade == NONE


def test_how_many_may_go_otherwise_is_the_upper_end_of_the_worst_interval() -> None:
    claim = Claim.of(evidence(planted_5=390, usual_6=299), given=True)
    ends = binomtest(10, 400).proportion_ci(method="wilson")
    assert claim.at_most == pytest.approx(ends.high, abs=1e-6)
    assert (claim.tried, claim.otherwise) == (1400, 11)


def test_a_state_of_another_loop_tells_apart_what_exchanges_at_one_loop_do_not() -> None:
    # Undisturbed, all carries of loop 0 are 0: only a later loop's can be planted there.
    program, task = get_program("ripple_held_2"), get_task("addition")
    model = compile_program("ripple", max_length=6).model
    batch = inputs_of(task, (4,), 24, seed=0)
    n_loops, generator = task.n_loops(4), torch.Generator().manual_seed(0)
    wrong = held_out(model, program, batch, n_loops, 300, generator).set_index("what")
    assert wrong.loc[PLANTED, "value"] < wrong.loc[UNDISTURBED, "value"] == 1
    right = held_out(model, get_program("ripple"), batch, n_loops, 300, generator)
    assert (right["agree"] == right["of"]).all() and (right["of"] > 0).all()


def test_where_no_exchange_was_tried_no_share_is_said() -> None:
    seen: Any = evidence()
    alone = seen[seen["what"] == UNDISTURBED]
    assert str(Claim.of(alone, given=True)).endswith("(none was tried; n = 5, 6)")
