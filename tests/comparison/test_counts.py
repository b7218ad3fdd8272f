"""Counts of a comparison against the same counts made pair by pair."""

from __future__ import annotations

import pytest
import torch

from loopinterp.comparison import SpreadPairs
from loopinterp.comparison.counts import count_evidence
from loopinterp.comparison.evidence import gather_evidence
from loopinterp.compiler import compile_program
from loopinterp.programs import get_program
from loopinterp.tasks import Addition

NAMES = ["ripple", "sticky_ripple", "carry_save"]


@pytest.fixture(scope="module")
def evidence():
    """A model that follows one program in part: it runs another, and two lengths are mixed."""
    generator = torch.Generator().manual_seed(0)
    batches = [Addition().sample(n, batch_size=48, generator=generator) for n in (7, 5)]
    model = compile_program("ripple_held_2", max_length=8).model
    programs = [get_program(name) for name in NAMES]
    return gather_evidence(model, programs, batches, SpreadPairs(pairs=100), seed=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label", [None, "a=1 b=0"])
def test_counts_are_those_made_by_hand(evidence, name, label):
    counts = count_evidence([evidence]).isel(model=0).sel(program=name)
    data = evidence.data.sel(program=name)
    n_delays = data.sizes["delay"]
    named = ("within", "changes", "moves", "agree")
    within, changes, moves, agree = (data[x].transpose("pair", "delay").values for x in named)
    base = data.base.values
    right, effective = [[0] * (n_delays + 1) for _ in range(2)]
    prefix_right, prefix_effective = [[0] * (n_delays + 1) for _ in range(2)]
    run_right = run_effective = 0
    effective_inputs, prefix_inputs = ([set() for _ in right] for _ in range(2))
    run_inputs = set()
    for pair, (_, strata) in enumerate(evidence.strata.iterrows()):
        if strata["kind"] != "other value" or label not in (None, strata["token"]):
            continue
        last = int(within[pair].sum()) - 1
        happened, kept = False, True
        for delay in range(last + 1):
            at = pair, delay
            happens, agrees = bool(changes[at] or moves[at]), bool(agree[at])
            happened, kept = happened or happens, kept and agrees
            for place in [delay] + [n_delays] * (delay == last):
                effective[place] += happens
                right[place] += happens and agrees
                prefix_effective[place] += happened
                prefix_right[place] += happened and kept
                effective_inputs[place] |= {int(base[pair])} if happens else set()
                prefix_inputs[place] |= {int(base[pair])} if happened else set()
        run_effective += happened
        run_inputs |= {int(base[pair])} if happened else set()
        run_right += happened and kept
    stratum = counts.sel(stratum="all" if label is None else f"token: {label}")
    assert stratum.effective.values.tolist() == effective and stratum.right.values.tolist() == right
    assert (int(stratum.run_effective), int(stratum.run_right)) == (run_effective, run_right)
    assert 0 < run_right < run_effective  # the three counts differ
    assert stratum.effective_inputs.values.tolist() == [len(inputs) for inputs in effective_inputs]
    assert int(stratum.run_inputs) == len(run_inputs) < run_effective
    if label is None:
        assert counts.prefix_effective.values.tolist() == prefix_effective
        assert counts.prefix_right.values.tolist() == prefix_right
        assert counts.prefix_inputs.values.tolist() == [len(inputs) for inputs in prefix_inputs]


def test_inputs_of_different_batches_are_different_ones(evidence):
    second = evidence.strata["length"] == "n = 5"
    assert second.any() and ((evidence.data.base.values >= 48) == second).all()
