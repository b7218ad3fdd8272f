"""Interchange interventions on models whose program is known, and on models that run none."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from loopinterp.circuits import (
    AT_THE_END,
    SWAPS,
    InterchangeResult,
    ProgramModel,
    interchange_study,
)
from loopinterp.circuits.interchange.result import (
    NOTHING,
    OTHER_LOOP,
    OTHER_VARIABLE,
    RANDOM,
    VARIABLE,
)
from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer
from loopinterp.rasp import LoopProgram, get_program
from loopinterp.rasp.compiler import compile_program
from loopinterp.rasp.programs.unique_set import unique_set
from loopinterp.results import load_result
from loopinterp.tasks import Batch, get_task

N = 4
PROGRAMS = {
    "parity": get_program("parity"),
    "copy": get_program("copy"),
    "prefix_xor": get_program("prefix_xor"),
    "ripple": get_program("ripple"),
    "latched_chain": get_program("latched_chain"),
    "lookahead": get_program("lookahead"),
    "token_addition": get_program("token_addition"),
    "unique_set": unique_set(8),
}
WIDE = ["copy", "lookahead", "token_addition", "unique_set"]
"""Programs whose state has so many dimensions that random ones hold little of a variable."""


@cache
def known(name: str) -> tuple[ProgramModel, LoopProgram, Batch]:
    """A model that runs the program, and inputs."""
    program = PROGRAMS[name]
    task = get_task(program.task, **program.task_settings)
    generator = torch.Generator().manual_seed(0)
    # Sets of 4 symbols at most: a swap makes no larger one than the model was built for.
    kind = "few" if name == "unique_set" else None
    batch = task.sample(N, batch_size=64, generator=generator, distribution=kind)
    examples = [
        task.sample(2 * N, batch_size=256, generator=generator, distribution=kind).inputs
        for kind in task.distributions
    ]
    return ProgramModel(program, torch.cat(examples), n_loops=3 * N), program, batch


def subspaces(model: ProgramModel) -> dict[str, torch.Tensor]:
    return {name: model.subspace(name) for name in model.program.variables}


@cache
def _result_of(name: str, whole: bool) -> InterchangeResult:
    model, program, batch = known(name)
    where = None if whole else subspaces(model)
    return interchange_study(model, program, batch, subspaces=where, pairs_per_cell=16)


def result_of(name: str, *, whole: bool = False) -> InterchangeResult:
    return _result_of(name, whole)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_right_subspace_at_the_right_loop_is_always_right(name, whole):
    result = result_of(name, whole=whole)
    there = result.n_pairs[0] > 0
    assert there.sum() >= N
    assert (result.iia[there] == 1).all()
    assert np.isnan(result.iia[~there]).all()
    assert (result.behaviour[there] == 1).all()
    assert (result.chance[there] == 0).all()
    assert result.whole == [whole] * len(result.variables)


@pytest.mark.parametrize("name", PROGRAMS)
def test_controls_that_the_program_tells_apart_are_never_right(name):
    result = result_of(name)
    for swap in (OTHER_LOOP, OTHER_VARIABLE, NOTHING):
        score, *_, n = result.pooled(swap)
        assert score == 0 if n else np.isnan(score)
    assert result.pooled(NOTHING)[3] == result.pooled(VARIABLE)[3]
    assert result.pooled(OTHER_LOOP)[3] > 0
    assert (result.pooled(OTHER_VARIABLE)[3] > 0) == (len(result.variables) > 1)


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_directions_do_less_than_the_right_ones(name):
    result = result_of(name)
    assert result.pooled(RANDOM)[2] < result.pooled(VARIABLE)[1]
    if name in WIDE:
        assert result.pooled(RANDOM)[0] < 0.05
    ranks = np.broadcast_to(np.array(result.ranks)[:, None, None], result.random_ranks.shape)
    there = result.n_pairs[0] > 0
    assert (result.random_ranks[there] == ranks[there]).all()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["parity", "copy", "lookahead"])
def test_a_compiled_transformer_holds_its_variables_where_its_circuit_says(name, whole):
    _, program, batch = known(name)
    compiled = compile_program(program, max_length=batch.inputs.shape[1])
    where = {v: compiled.circuit.subspace(v) for v in program.variables}
    result = interchange_study(
        compiled.model, program, batch, subspaces=None if whole else where, pairs_per_cell=16
    )
    np.testing.assert_array_equal(result.n_pairs[0], result_of(name, whole=whole).n_pairs[0])
    assert result.pooled(VARIABLE)[0] == 1
    assert result.pooled(OTHER_LOOP)[0] == 0
    assert result.pooled(RANDOM)[0] < 0.1


def test_the_random_control_of_the_whole_state_has_as_many_dimensions_as_the_swap_needs():
    result = result_of("copy", whole=True)
    there = result.n_pairs[0] > 0
    assert result.ranks == [known("copy")[0].d_model] * 2
    # Two values of one variable, at the same token: the difference is one of a few directions.
    assert 0 < result.random_ranks[there].max() <= 3


def test_variables_in_each_others_subspaces_are_wrong():
    model, program, batch = known("parity")
    swapped = {"bit": model.subspace("parity"), "parity": model.subspace("bit")}
    result = interchange_study(model, program, batch, subspaces=swapped, pairs_per_cell=16)
    assert result.pooled(VARIABLE)[0] == 0
    assert result.pooled(OTHER_VARIABLE)[0] == 1
    assert result.summary()[0].good is False


@pytest.mark.parametrize(("own", "rival"), [("ripple", "latched_chain"), ("lookahead", "ripple")])
def test_a_rival_program_is_right_less_often(own, rival):
    model, _, batch = known(own)
    result = interchange_study(model, PROGRAMS[rival], batch, pairs_per_cell=16)
    right = interchange_study(model, PROGRAMS[own], batch, pairs_per_cell=16)
    assert right.pooled(VARIABLE)[0] == 1
    assert result.pooled(VARIABLE)[2] < 0.8


def test_a_variable_of_a_rival_lies_elsewhere():
    model, program, batch = known("latched_chain")
    where = {"carry": model.subspace("carry")}
    ripple = interchange_study(model, "ripple", batch, subspaces=where, pairs_per_cell=16)
    own = interchange_study(model, program, batch, subspaces=where, pairs_per_cell=16)
    assert own.pooled(VARIABLE)[0] == 1
    assert ripple.pooled(VARIABLE)[2] < own.pooled(VARIABLE)[1]


def test_an_untrained_model_does_nothing_that_the_program_says(untrained):
    _, program, batch = known("ripple")
    result = interchange_study(untrained, program, batch, pairs_per_cell=16)
    assert result.pooled(VARIABLE)[0] < 0.1
    assert np.nanmean(result.behaviour) < 0.5
    assert result.summary()[0].good is False


@pytest.mark.parametrize("rank", [None, 3])
def test_scores_are_those_of_one_patched_run_at_a_time(rank, untrained, monkeypatch):
    from loopinterp.circuits.interchange import study as interchange

    _, program, batch = known("ripple")
    seen: list[Any] = []
    found = interchange.CellFinder.cells

    def cells(self: Any, variable: str, loop: int) -> Any:
        seen.extend(made := found(self, variable, loop))
        return made

    monkeypatch.setattr(interchange.CellFinder, "cells", cells)
    rows = torch.linalg.qr(torch.randn(16, 3, generator=torch.Generator().manual_seed(0))).Q.mT
    where = None if rank is None else {"carry": rows}
    result = interchange_study(untrained, program, batch, subspaces=where, pairs_per_cell=4)
    for cell in (c for c in seen if c.loop in (2, 4)):
        held = None if rank is None else rows
        said = [_by_hand(untrained, batch, cell, k, held) for k in range(len(cell))]
        right = cell.agrees(torch.stack(said)).double().mean()
        at = (cell.variable, result.loops.index(cell.loop), cell.delay)
        assert result.iia[at] == pytest.approx(float(right))


def _by_hand(
    model: LoopedTransformer, batch: Batch, cell: Any, k: int, rows: torch.Tensor | None
) -> torch.Tensor:
    """The model's answer in one pair, by a hook on its state."""
    donor = model(batch.inputs[cell.source[k]][None], n_loops=cell.loop, return_type="state")

    def put_in(state: torch.Tensor, hook: object) -> torch.Tensor:
        change = (donor - state)[:, cell.position[k]]
        state[:, cell.position[k]] += change if rows is None else change @ rows.mT @ rows
        return state

    name = f"loops.{cell.loop - 1}.hook_state_post"
    base = batch.inputs[cell.base[k]][None]
    logits = model.run_with_hooks(base, n_loops=cell.loop + cell.steps, fwd_hooks=[(name, put_in)])
    return logits[0].argmax(-1)


def test_a_model_is_run_a_few_pairs_at_a_time(untrained, monkeypatch):
    from loopinterp.circuits.interchange import study as interchange

    _, program, batch = known("ripple")
    whole = interchange_study(untrained, program, batch, pairs_per_cell=8)
    monkeypatch.setattr(interchange, "_AT_A_TIME", 3)
    parts = interchange_study(untrained, program, batch, pairs_per_cell=8)
    np.testing.assert_array_equal(parts.agreement, whole.agreement)


def test_subspaces_may_be_given_for_some_variables():
    model, program, batch = known("parity")
    result = interchange_study(
        model, program, batch, subspaces={"bit": model.subspace("bit")}, pairs_per_cell=8
    )
    assert result.whole == [False, True]
    assert result.ranks == [2, model.d_model]
    assert (result.iia[result.n_pairs[0] > 0] == 1).all()
    assert result.pooled(OTHER_VARIABLE)[3] == 0


def test_loops_and_delays_can_be_chosen():
    model, program, batch = known("parity")
    result = interchange_study(
        model, program, batch, subspaces=subspaces(model), loops=[1, 3], delays=(AT_THE_END, 2, 0)
    )
    assert result.loops == [1, 3]
    assert result.delays == ["at the end", "2 loops later", "at once"]
    assert result.agreement.shape == (len(SWAPS), 2, 2, 3)
    # At once, the bits that are on their way are not answered yet.
    assert result.n_pairs[0, :, 0].tolist() == [[64, 64, 0], [64, 64, 64]]
    assert (result.iia[result.n_pairs[0] > 0] == 1).all()


def test_plain_tokens_do_as_well_as_a_batch():
    model, program, batch = known("prefix_xor")
    where = subspaces(model)
    tokens = interchange_study(model, program, batch.inputs, subspaces=where, n_loops=N)
    assert tokens.iia.shape == (1, N + 1, 2)
    assert (tokens.iia[tokens.n_pairs[0] > 0] == 1).all()


def test_inputs_that_are_all_alike_have_nothing_to_swap():
    model, program, batch = known("parity")
    same = batch[torch.zeros(4, dtype=torch.long)]
    result = interchange_study(model, program, same, subspaces=subspaces(model))
    assert np.isnan(result.agreement).all()
    assert result.n_pairs.sum() == 0
    assert result.figures() == []
    (finding,) = result.summary()
    assert "nothing was swapped" in finding.text


def test_intervals_hold_the_scores():
    result = result_of("ripple")
    there = result.n_pairs > 0
    assert (result.low[there] <= result.agreement[there]).all()
    assert (result.high[there] >= result.agreement[there]).all()
    sixteen = there & (result.n_pairs == 16) & (result.agreement == 1)
    assert result.low[sixteen] == pytest.approx(0.806, abs=1e-3)  # Wilson, 16 of 16


def test_same_seed_same_result():
    model, program, batch = known("ripple")
    runs = [
        interchange_study(
            model, program, batch, subspaces=subspaces(model), pairs_per_cell=8, seed=seed
        )
        for seed in (3, 3, 4)
    ]
    np.testing.assert_array_equal(runs[0].agreement, runs[1].agreement)
    np.testing.assert_array_equal(runs[0].n_pairs, runs[1].n_pairs)
    assert not np.array_equal(runs[0].of(RANDOM), runs[2].of(RANDOM), equal_nan=True)


def test_results_go_to_disk_and_back(tmp_path):
    result = result_of("parity")
    read = load_result(result.save(tmp_path))
    assert isinstance(read, InterchangeResult)
    np.testing.assert_array_equal(read.agreement, result.agreement)
    table = read.to_frame()
    assert len(table) == len(SWAPS) * 2 * (N + 1) * 2
    row = table.query(
        "swap == 'the variable' and variable == 'bit' and loop == 1 and delay == 'at the end'"
    )
    assert row["agreement"].item() == 1.0
    assert row["n_pairs"].item() == 16


def test_figures_are_drawn_from_a_saved_result_and_explained(tmp_path):
    figures = load_result(result_of("parity").save(tmp_path)).figures()
    assert len({figure.title for figure in figures}) == len(figures) == 2
    for figure in figures:
        assert figure.section == "program"
        assert len(list(figure.plot.data)) == len(SWAPS) + 1
        assert len(figure.caption) > 80
        assert len(figure.control) > 40
        assert "chance (0%" in figure.control
        assert figure.data is not None and len(figure.data)
        assert figure.plot.to_json()


def test_controls_that_were_not_made_have_no_panel():
    one = result_of("ripple").figures()[0]
    assert OTHER_VARIABLE not in [note.text for note in one.plot.layout.annotations]


def test_findings_are_sentences(untrained):
    _, program, batch = known("ripple")
    bad = interchange_study(untrained, program, batch, pairs_per_cell=8)
    (good,) = result_of("parity").summary()
    assert good.value == "100%"
    assert good.good is True
    assert "another variable 0%" in good.text
    first, second = bad.summary()
    assert first.good is False
    assert "“carry” is swapped after" in second.text
    for finding in (good, first, second):
        assert finding.kind == "program"
        assert finding.text.endswith(".")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": lambda b: b.inputs + 3}, "inputs for program parity"),
        ({"batch": lambda b: b.inputs.float()}, "inputs for program parity"),
        ({"batch": lambda b: b[torch.arange(1)]}, "at least 2 inputs"),
        ({"batch": lambda b: b.inputs}, "n_loops"),
        ({"n_loops": -1}, "n_loops"),
        ({"loops": [0, 5]}, "numbers from 0 to n_loops = 4"),
        ({"loops": [2, 1]}, "loops"),
        ({"delays": ()}, "delays"),
        ({"delays": (1, 1)}, "delays"),
        ({"delays": (-2,)}, "delays"),
        ({"pairs_per_cell": 0}, "pairs_per_cell"),
        ({"subspaces": {"bits": torch.eye(9)[:1]}}, "Did you mean 'bit'"),
        ({"subspaces": {"bit": torch.eye(8)[:1]}}, "model's width 9"),
        ({"subspaces": {"bit": torch.ones(9)}}, "model's width 9"),
        ({"subspaces": {"bit": torch.zeros(0, 9)}}, "rank 1..9"),
        ({"subspaces": {"bit": [1.0, 0.0]}}, "got list"),
        ({"subspaces": {"bit": 2 * torch.eye(9)[:2]}}, "orthonormal"),
        ({"program": "paritty"}, "Did you mean 'parity'"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_arguments_that_cannot_be_used_are_refused(change, message):
    model, program, batch = known("parity")
    given = {"program": program, "batch": lambda b: b, **change}
    chosen, inputs = given.pop("program"), given.pop("batch")(batch)
    with pytest.raises(InputError, match=message):
        interchange_study(model, chosen, inputs, **given)
