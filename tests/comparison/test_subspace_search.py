"""Subspaces that carry an interchange, on models of which it is known where the variable is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import xarray as xr

from loopinterp.comparison import SpreadPairs, search_subspaces
from loopinterp.comparison.rule import THRESHOLD
from loopinterp.comparison.subspace_search import (
    PER_TOKEN,
    READ,
    WHOLE_STATE,
    SubspaceSearch,
    _spread_loops,
    labelled_states,
    mean_directions,
    probe_directions,
)
from loopinterp.compiler import compile_program, rotate
from loopinterp.core.errors import InputError
from loopinterp.core.intervals import ENDS, wilson_estimate
from loopinterp.core.results import load_result
from loopinterp.interventions import InterchangeRun, engine, learn_subspace
from loopinterp.programs import get_program
from loopinterp.tasks import Addition, Parity
from loopinterp.zoo import load_pretrained

N = 6


@pytest.fixture(scope="module")
def ripple():
    return rotate(compile_program("ripple", max_length=N + 1), seed=1)


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(0)
    return Addition().sample(N, batch_size=128, generator=generator)


@pytest.fixture(scope="module")
def result(ripple, batch):
    given = {"circuit": ripple.circuit.subspace("carry")}
    return search_subspaces(
        ripple.model,
        batch,
        "ripple",
        ranks=(1, 2),
        given=given,
        steps=20,
        pairs=SpreadPairs(pairs=200, same_value=0),
    )


def carried(result, name):
    return result.data["carried"].sel(subspace=name, estimate="value").dropna("delay")


def test_the_circuits_own_subspace_carries_everything_and_leaves_nothing(result, ripple):
    rank = len(ripple.circuit.subspace("carry"))
    name = f"circuit, {rank}"
    assert float(carried(result, name).min()) == 1
    rest = result.data["complement"].sel(subspace=name, estimate="value").dropna("delay")
    assert float(rest.max()) == 0
    assert result.smallest["circuit"] == rank
    right = result.data["iia"].sel(subspace=name, estimate="value").dropna("delay")
    assert float(right.min()) == 1


def test_one_learned_direction_carries_a_carry(result):
    """A bit kept as two opposite directions moves along one: their difference."""
    assert result.smallest["learned"] == 1
    assert result.smallest["principal directions"] == 1


def test_the_learned_direction_is_the_circuits(ripple, batch):
    generator = torch.Generator().manual_seed(0)
    pairs = SpreadPairs(pairs=200, same_value=0)(
        ripple.model, [get_program("ripple")], batch, generator
    )
    rows = learn_subspace(InterchangeRun(ripple.model, pairs), 1, steps=20)
    known = ripple.circuit.subspace("carry").to(rows)
    assert float((rows @ known.mT).norm()) > 0.99


def test_one_of_two_variables_is_found_by_following_the_program(batch):
    """The age of a held carry moves nothing at once; learning for the carry must leave it."""
    compiled = rotate(compile_program("carry_save", max_length=N + 1), seed=2)
    names = compiled.program.variables
    result = search_subspaces(
        compiled.model,
        batch,
        "carry_save",
        variables=names[:1],
        methods=("learned",),
        ranks=(1,),
        given={"circuit": compiled.circuit.subspace(names[0])},
        steps=40,
        pairs=SpreadPairs(pairs=200, same_value=0),
    )
    iia = result.data["iia"].sel(estimate="value", delay="0")
    circuit = next(str(s) for s in iia.subspace.values if str(s).startswith("circuit"))
    assert float(iia.sel(subspace=circuit)) == 1
    assert float(iia.sel(subspace="learned, 1")) > 0.9


def test_each_way_of_reading_is_scored_under_its_own_name(monkeypatch, batch):
    """A direction that carries all stands in for one way, one that carries nothing for another."""
    ripple = compile_program("ripple", max_length=N + 1)
    circuit = ripple.circuit.subspace("carry")
    known = torch.linalg.qr((circuit[0] - circuit[1])[:, None]).Q.mT
    other = torch.linalg.svd(circuit).Vh[-1:]
    right = {"difference of means": True, "probe": False}
    for method, is_right in right.items():
        rows = known if is_right else other
        monkeypatch.setitem(READ, method, lambda states, values, rows=rows: rows.to(states))
    methods: Any = [f"{method}{tokens}" for method in READ for tokens in ("", PER_TOKEN)]
    found = search_subspaces(
        ripple.model, batch, "ripple", methods=methods, pairs=SpreadPairs(pairs=200)
    )
    for method in methods:
        is_right = right[method.removesuffix(PER_TOKEN)]
        value, low, high = found.worst(f"{method}, 1")
        rest = found.data["complement"].sel(subspace=f"{method}, 1", estimate="value").max()
        assert (value, float(rest)) == ((1, 0) if is_right else (0, 1))
        assert low <= value <= high
        assert found.smallest[method] == int(is_right)
    text = found.findings()[-1].text
    assert all(f"“{method}, 1” {100 * right[method]}%" in text for method in right)


def test_one_direction_per_token_carries_what_no_single_one_does(monkeypatch, batch):
    """Each token has a direction that carries all or nothing: pairs of its own tell which."""
    ripple = compile_program("ripple", max_length=N + 1)
    circuit = ripple.circuit.subspace("carry")
    known = torch.linalg.qr((circuit[0] - circuit[1])[:, None]).Q.mT
    calls = []

    def by_turns(states, values):
        calls.append(len(states))
        return (known if len(calls) % 2 else torch.linalg.svd(circuit).Vh[-1:]).to(states)

    monkeypatch.setitem(READ, "probe", by_turns)
    found = search_subspaces(
        ripple.model, batch, "ripple", methods=("probe, per token",), pairs=SpreadPairs(pairs=200)
    )
    shares = found.data["carried_by_token"].sel(subspace="probe, per token, 1", estimate="value")
    assert shares.dropna("token").values.tolist() == [1, 0, 1, 0]
    assert sum(calls) <= 128 * N * 12 and len(calls) == 4


def carrying(changed: list[int], share: list[float]) -> Any:
    """A search for one direction that carries such shares of pairs at each delay."""
    carried = np.array(share)[None, :, None] * np.ones(3)
    delays = [str(delay) for delay in range(len(changed))]
    data = xr.Dataset(
        {"changed": ("delay", changed), "carried": (("subspace", "delay", "estimate"), carried)},
        coords={"subspace": ["learned, 1"], "delay": delays, "estimate": list(ENDS)},
    )
    search: Any = SimpleNamespace(data=data, methods=["learned", WHOLE_STATE], ranks=[1, 8])
    search.scored_inputs = 10_000
    search.worst = lambda name: SubspaceSearch.worst(search, name)
    return search


def test_the_worst_delay_is_that_of_the_least_share():
    # 50, 10 and 3 pairs say too little by themselves: with the 100 before them, 144 of 163.
    search = carrying([100, 100, 50, 10, 3], [1.0, 0.9, 0.98, 0.5, 0.0])
    value, low, high = search.worst("learned, 1")
    assert value == pytest.approx(144 / 163) and low < value < high


def test_many_pairs_of_few_inputs_say_as_much_as_the_inputs():
    search = carrying([1000], [1.0])
    search.scored_inputs = 30
    assert search.worst("learned, 1") == (1.0, wilson_estimate(30, 30)[1], 1.0)


def test_few_pairs_of_a_larger_share_may_say_less():
    search = carrying([1000, 60], [0.93, 0.95])
    for at, (changed, share) in enumerate([(1000, 0.93), (60, 0.95)]):
        _, low, _ = wilson_estimate(share * changed, changed)
        assert (low < THRESHOLD) == bool(at)
    assert search.worst("learned, 1")[0] == pytest.approx(0.95)
    assert cast("Any", SubspaceSearch.smallest).fget(search) == {"learned": 0}


def test_it_is_scored_on_inputs_it_was_not_fitted_on(result):
    assert result.fitted_on > 0 < result.scored_on
    assert int(result.data["changed"].sel(delay="0")) > 50


class Recording(SpreadPairs):
    """Pairs as ever, and the inputs that they were drawn from."""

    def __call__(self, model, programs, batch, generator):
        drawn.append(batch.inputs)
        return super().__call__(model, programs, batch, generator)


drawn: list[torch.Tensor] = []


def searched(task: Parity | Addition, *sizes: int, n: int) -> list[torch.Tensor]:
    """Inputs of the first batch, those that were fitted on, and those of each batch scored."""
    drawn.clear()
    generator = torch.Generator().manual_seed(0)
    batches = [task.sample(n, batch_size=size, generator=generator) for size in sizes]
    program = "ripple" if isinstance(task, Addition) else "parity"
    model = compile_program(program, max_length=n + 3).model
    options = {"methods": ["principal directions"], "ranks": [1], "pairs": Recording(pairs=8)}
    search_subspaces(model, batches, program, **options)
    return [batches[0].inputs, *drawn]


@pytest.mark.parametrize("sizes", [[256], [64, 256]])
def test_no_input_is_both_fitted_on_and_scored(sizes):
    given, fitted, *scored = (set(map(tuple, x.tolist())) for x in searched(Parity(), *sizes, n=6))
    assert fitted | scored[0] == given
    assert len(scored) == len(sizes) and all(fitted and x and not fitted & x for x in scored)


def test_inputs_that_are_all_different_take_turns():
    given, fitted, scored = searched(Addition(), 32, n=8)
    assert torch.equal(fitted, given[::2]) and torch.equal(scored, given[1::2])


def test_inputs_that_were_all_fitted_on_are_not_scored(ripple, batch):
    first = batch[torch.tensor([0, 0, 0, 0])]
    with pytest.raises(InputError) as refused:
        search_subspaces(ripple.model, [batch, first], "ripple", methods=("difference of means",))
    assert refused.value.what == "data"


def test_it_is_said_and_drawn_from_the_saved_result(result, tmp_path):
    again = load_result(result.save(tmp_path))
    assert again.findings()[0].value.startswith("1 of ")
    (figure,) = again.figures()
    assert figure.plot.data and len(figure.control) > 40


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"methods": ("guess",)}, "methods"),
        ({"variables": ["sum"]}, "variable of program ripple"),
        ({"ranks": (0,)}, "ranks"),
        ({"ranks": (10_000,)}, "ranks"),
        ({"given": {"circuit": torch.eye(1, 18)}}, "given subspace 'circuit'"),
        ({"given": {"circuit": [1.0]}}, "given subspace 'circuit'"),
        ({"methods": ()}, "methods"),
        ({"variables": ()}, "variables"),
        ({"steps": -1}, "steps"),
    ],
)
@pytest.mark.usefixtures("no_type_checks")
def test_wrong_arguments_are_named(ripple, batch, change, what):
    with pytest.raises(InputError) as refused:
        search_subspaces(ripple.model, batch, "ripple", **change)
    assert refused.value.what == what


def test_a_given_subspace_has_a_name_of_its_own(ripple, batch):
    given = {"learned": torch.eye(1, ripple.model.config.d_model)}
    with pytest.raises(InputError) as refused:
        search_subspaces(ripple.model, batch, "ripple", given=given)
    assert refused.value.what == "given"


def test_inputs_whose_runs_are_not_all_kept_teach_the_same(ripple, batch, monkeypatch):
    def learned() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        pairs = SpreadPairs(pairs=40, same_value=0)(
            ripple.model, [get_program("ripple")], batch[:32], generator
        )
        return learn_subspace(InterchangeRun(ripple.model, pairs), 1, steps=3)

    kept = learned()
    monkeypatch.setattr(engine, "_HELD_NUMBERS", 1)  # one run at a time
    assert torch.allclose(learned(), kept, atol=1e-6)


def test_what_a_change_does_not_reach_teaches_nothing():
    """Within a window only the positions that a change reaches are run."""
    model, batch = load_pretrained("addition"), Addition().sample(8, batch_size=64, seed=0)

    def learned(reach: int | None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        pairs = SpreadPairs(pairs=40, same_value=0)(
            model, [get_program("ripple")], batch, generator
        )
        run = InterchangeRun(model, pairs)
        assert run.reach == 1
        run.reach = reach
        return learn_subspace(run, 2, steps=10)

    # The loss is a mean over other positions; a wrong left neighbour differs by 0.005.
    assert torch.allclose(learned(1), learned(None), atol=2e-3)


@pytest.mark.parametrize(
    ("directions", "least"),
    # Means differ along tokens and places as well, where these go along with the variable.
    [(probe_directions, 0.99), (mean_directions, 0.95)],
)
def test_the_directions_of_a_variable_are_found_by_themselves(directions, least):
    batch = Addition().sample(5, batch_size=128, generator=torch.Generator().manual_seed(0))
    compiled = compile_program("ripple", max_length=6)
    model, program = compiled.model, compiled.program
    found = labelled_states(model, program, ["carry"], batch).subspace(directions)
    known = compiled.circuit.subspace("carry")
    # The difference of the two values; the sum of both is constant, and nothing to find.
    difference = (known[0] - known[1]) / (known[0] - known[1]).norm()
    assert found.shape == (1, model.config.d_model)
    assert abs(float(found[0] @ difference)) > least


def test_a_probe_reads_what_tells_values_apart_and_means_what_goes_along_with_them():
    """A large noisy trace of a bit beside a small clean one."""
    generator = torch.Generator().manual_seed(0)
    bit = torch.randint(2, (4_000,), generator=generator)
    noise = torch.randn(4_000, 2, generator=generator)
    states = bit[:, None] * torch.tensor([10.0, 1.0]) + noise * torch.tensor([10.0, 0.01])
    probed, means = (f(states, bit)[-1].abs() for f in (probe_directions, mean_directions))
    assert probed[1] > 10 * probed[0]
    assert means[0] > 5 * means[1]


def test_directions_may_turn_with_the_token():
    batch = Addition().sample(5, batch_size=128, generator=torch.Generator().manual_seed(0))
    compiled = compile_program("ripple", max_length=6)
    model, program = compiled.model, compiled.program
    labelled = labelled_states(model, program, ["carry"], batch)
    table = labelled.subspace_by_token()
    assert table.shape[::2] == (len(program.inputs), model.config.d_model)
    everywhere = labelled.subspace()
    for token in range(4):
        assert float((table[token] @ everywhere.mT).norm()) > 0.9
    assert not table[program.inputs.index("BOS")].any()  # it has no target


@pytest.mark.parametrize("most", [1, 2, 5, 40])
@pytest.mark.parametrize("n_loops", [1, 2, 9, 24])
def test_loops_are_spread_over_the_run(n_loops, most):
    loops = _spread_loops(n_loops, most)
    last = max(n_loops - 1, 1)
    assert loops == sorted(set(loops)) and len(loops) == min(most, last)
    assert loops[0] == 1 and loops[-1] in (last, 1)
    gaps = [b - a for a, b in itertools.pairwise(loops)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_model_whose_states_are_all_equal_is_refused(batch):
    model = compile_program("ripple", max_length=9).model
    for weights in model.parameters():
        weights.data.zero_()
    with pytest.raises(InputError, match="changes an answer"):
        search_subspaces(model, batch, "ripple", ranks=(1,), steps=1)
