"""The evidence of a comparison: what is sorted by strata that a strategy of the user's brings."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from loopinterp.comparison import SpreadPairs, compare_programs
from loopinterp.comparison.evidence import gather_evidence
from loopinterp.compiler import compile_program
from loopinterp.interventions.pairs import Stratum
from loopinterp.programs import get_program
from loopinterp.tasks import Addition

PROGRAMS = [get_program("ripple"), get_program("carry_save")]


class Sorted:
    """Spread pairs, sorted by one more stratum for inputs of one length, with one label twice."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, model, programs, batch, generator):
        pairs = SpreadPairs(pairs=120)(model, programs, batch, generator)
        if int(batch.n[0]) == self.n:
            codes = torch.arange(len(pairs)) % 4 - 1
            own = Stratum(("even", "odd", "even"), codes)
            pairs = dataclasses.replace(pairs, strata={**pairs.strata, "own": own})
        return pairs


def drawn(n: int):
    return Addition().sample(n, batch_size=64, generator=torch.Generator().manual_seed(0))


def test_strata_that_only_some_batches_have_leave_the_others_without_a_class():
    model = compile_program("ripple", max_length=8).model
    batches = [drawn(7), drawn(5)]
    evidence = gather_evidence(model, PROGRAMS, batches, Sorted(5), seed=0)
    long = (evidence.strata["length"] == "n = 7").to_numpy()
    own = np.array(evidence.strata["own"].tolist(), dtype=object)
    assert 0 < long.sum() < len(long)
    assert {str(label) for label in own[long]} == {"nan"}
    # Codes -1, 0, 1, 2 in turn, and the labels of 0 and 2 are one class.
    counts = {label: int((own[~long] == label).sum()) for label in ("even", "odd")}
    assert counts == {"even": (~long).sum() // 2, "odd": (~long).sum() // 4}


def test_a_stratum_of_one_model_is_counted_for_that_model_alone():
    models = [compile_program(name, max_length=8).model for name in ("ripple", "carry_save")]
    strategies = iter([Sorted(7), Sorted(5)])

    def in_turn(model, programs, batch, generator):
        return next(strategies)(model, programs, batch, generator)

    found = compare_programs(models, PROGRAMS, drawn(7), names=["first", "second"], pairs=in_turn)
    effective = found.data["effective"].sel(stratum="own: odd", delay="end", program="ripple")
    assert int(effective.sel(model="first")) > 0 == int(effective.sel(model="second"))
    assert [v.identified for v in found.verdicts.values()] == ["ripple", "carry_save"]
