"""Stepping a model gives the states of an ordinary run: all of them, or those at chosen places."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

from loopinterp.comparison import compare_programs
from loopinterp.comparison.pair_strategies import SpreadPairs
from loopinterp.core.errors import InputError
from loopinterp.dynamics import (
    basin_map,
    convergence_study,
    extrapolation_study,
    find_fixed_point,
    geometry_study,
    input_dependence_study,
    local_stability_study,
    reachability_study,
    spectral_radius,
)
from loopinterp.dynamics.solvers import Status
from loopinterp.interventions import InterchangeRun, patching_sweep
from loopinterp.interventions.engine import answer
from loopinterp.interventions.learned_subspace import _Crop
from loopinterp.interventions.pairs import InterchangePairs
from loopinterp.lenses import exit_study, fit_jacobian_lens, lens_study
from loopinterp.models import (
    Fixed,
    LoopedTransformer,
    LoopedTransformerConfig,
    WithVocabulary,
    bind,
    describe_model,
    generate,
    iterate,
    run_until,
    states_at,
)
from loopinterp.models.iteration import need_repeatable
from loopinterp.pages import explore
from loopinterp.tasks import Addition, as_batch
from tests.interventions.random_pairs import random_pairs
from tests.models.looped_toys import Halving
from tests.models.timed_toys import MOST, N_TOKENS, Clock, Counted, Timed, TimedNear, by_hand
from tests.models.variants import VARIANTS, build, some_inputs
from tests.test_study_arguments import OF_A_TASK, STUDIES

PLACE = torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_states_of_an_ordinary_run(name: str) -> None:
    model = build(name)
    inputs = some_inputs(model)
    loops, states = zip(*iterate(model, inputs, 4))
    assert loops == (0, 1, 2, 3, 4)
    torch.testing.assert_close(torch.stack(states), model(inputs, n_loops=4, return_type="states"))


def test_a_run_goes_on_from_a_state() -> None:
    model = build("abacus on q and k")
    inputs = some_inputs(model)
    states = [h for _, h in iterate(model, inputs, 5)]
    rest = list(iterate(model, inputs, 3, state=states[2]))
    assert [loop for loop, _ in rest] == [0, 1, 2, 3]
    for (_, ours), theirs in zip(rest, states[2:]):
        torch.testing.assert_close(ours, theirs)


def test_a_loop_runs_when_it_is_asked_for_and_gradients_are_the_callers() -> None:
    toy, e = Halving(), torch.zeros(1, 2, 1, requires_grad=True)
    run = iterate(toy, e, 100)
    assert not next(run)[1].requires_grad and not toy.rows
    assert next(run)[1].requires_grad and len(toy.rows) == 1
    with torch.no_grad():
        assert not next(iterate(toy, e, 1))[1].requires_grad


@pytest.mark.parametrize("n_loops", [-1, True])
def test_numbers_of_loops_are_checked_before_the_first_state(n_loops: int) -> None:
    with pytest.raises(InputError, match="n_loops"):
        iterate(Halving(), torch.zeros(1, 1, 1), n_loops)
    with pytest.raises(InputError, match="looped model"):
        iterate(object(), torch.zeros(1, 1, 1), 1)


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_states_at_chosen_places(batch_size: int, generator: torch.Generator) -> None:
    model = build("demo")
    inputs = some_inputs(model, batch=7, n_pos=6)
    row = torch.randint(7, (2, 9), generator=generator)
    pos = torch.randint(6, (2, 9), generator=generator)
    states, e = states_at(model, inputs, row, pos, loops=[0, 2, 5], batch_size=batch_size)
    with torch.no_grad():
        expected = model(inputs, n_loops=5, return_type="states")
        torch.testing.assert_close(e, model.embed(inputs)[row, pos])
    torch.testing.assert_close(states, expected[[0, 2, 5]][:, row, pos], atol=1e-5, rtol=1e-5)
    assert not states.requires_grad


def test_states_that_overflow_say_nothing_where_they_may() -> None:
    model: Any = SimpleNamespace(
        embed=lambda x: x,
        initial_state=torch.clone,
        readout=torch.clone,
        step=lambda h, e: h * e,
    )
    x = torch.tensor([2.0, 1e15]).expand(1, 1, 2).repeat(2, 1, 1)
    x[1] = 3
    each = torch.arange(2)
    given: Any = (x, each, PLACE.expand(2))
    states, _ = states_at(model, *given, loops=[1, 3], may_diverge=True)
    assert states.tolist() == [[[4, pytest.approx(1e30)], [9, 9]], [[0, 0], [81, 81]]]
    with pytest.raises(InputError):
        states_at(model, *given, loops=[1, 3])


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("loops", "message"),
    [
        ([], "increasing"),
        ([2, 2], "increasing"),
        ([-1, 2], "integer >= 0, got -1"),
        (["a"], "^loops:"),
    ],
)
def test_loops_of_chosen_places_increase(loops: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        states_at(Halving(), torch.zeros(1, 3, 1), PLACE, PLACE, loops=loops)


@pytest.mark.parametrize("row", [-1, 4])
def test_rows_that_are_not_there_are_refused(row: int) -> None:
    rows = torch.tensor([0, row])
    with pytest.raises(InputError, match=rf"row: expected an integer in 0\.\.3, got {row}"):
        states_at(Halving(), torch.zeros(4, 3, 1), rows, PLACE.expand(2), loops=[1])


def test_places_need_inputs() -> None:
    with pytest.raises(InputError, match=r"^inputs:"):
        states_at(Halving(), torch.zeros(0, 3, 1), PLACE[:0], PLACE[:0], loops=[1])


NETS = [Timed, TimedNear]


KINDS = [Timed, TimedNear, lambda: WithVocabulary(TimedNear())]


def tokens(n: int = 6, n_pos: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randint(N_TOKENS, (n, n_pos), generator=torch.Generator().manual_seed(seed))


def net_of(model: object) -> Timed:
    return model.model if isinstance(model, WithVocabulary) else model  # type: ignore[return-value]


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_counts_its_loops(kind: type[Timed]) -> None:
    model, x = kind(), tokens()
    states = [h for _, h in iterate(model, x, MOST)]
    for loop, h in enumerate(states):
        torch.testing.assert_close(h, by_hand(net_of(model), x, range(loop)))
    *_, (_, later) = iterate(model, x, 4, state=states[3], start_at_loop=3)
    torch.testing.assert_close(later, states[7])
    each = torch.arange(6)
    torch.testing.assert_close(
        states_at(model, x, each, each, loops=[5])[0][0], states[5][each, each]
    )
    stopped = run_until(model, x, Fixed(4))
    torch.testing.assert_close(stopped.state, states[4])


def test_a_state_alone_does_not_say_which_loop_comes_next() -> None:
    model, x = Timed(), tokens()
    with pytest.raises(InputError) as error:
        next(iterate(model, x, 2, state=torch.zeros(6, 6, 12)))
    assert error.value.what == "start_at_loop"
    iteration = bind(model, x)
    with pytest.raises(InputError) as error:
        iteration.step(iteration.h0)
    assert error.value.what == "loop"


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_an_interchange_goes_on_at_the_loop_where_it_was_made(kind: type[Timed]) -> None:
    model, x = kind(), tokens()
    net, n_loops = net_of(model), 7
    pairs = random_pairs(x, n_loops=n_loops, count=40, seed=1)
    read = InterchangeRun(model, pairs).interchange()
    for k in range(len(pairs)):
        loop, other = int(pairs.loop[k]), int(pairs.source_loop[k])
        base, source = x[pairs.base[k]][None], x[pairs.source[k]][None]
        h = by_hand(net, base, range(loop))
        where = pairs.positions[k]
        h[:, where] = by_hand(net, source, range(other))[:, where]
        for delay in range(n_loops - loop + 1):
            after = by_hand(net, base, range(loop, loop + delay), h)
            assert torch.equal(read[k, delay], answer(net.readout(after))[0])


@torch.no_grad()
@pytest.mark.parametrize("kind", NETS)
def test_learning_goes_on_at_the_loop_of_each_pair(kind: type[Timed]) -> None:
    model, x = kind(), tokens()
    pairs = random_pairs(x, n_loops=7, count=30, seed=2)
    run, rows = InterchangeRun(model, pairs), torch.arange(30)
    crop = _Crop(run, 3)
    for delay, (logits, counted) in enumerate(crop._logits(rows, run.source_state)):
        place = crop._places(rows)
        for k in range(30):
            loop, base = int(pairs.loop[k]), x[pairs.base[k]][None]
            h = by_hand(model, base, range(loop))
            where = pairs.positions[k]
            h[:, where] = by_hand(
                model, x[pairs.source[k]][None], range(int(pairs.source_loop[k]))
            )[:, where]
            if loop + delay > 7:
                continue
            want = model.readout(by_hand(model, base, range(loop, loop + delay), h))[0, place[k]]
            torch.testing.assert_close(logits[k][counted[k]], want[counted[k]])


@pytest.mark.parametrize("kind", NETS)
def test_patching_finds_what_it_finds_where_the_state_counts(kind: type[Timed]) -> None:
    net, (base, source, other) = kind(), (tokens(seed=k) for k in (1, 2, 3))
    options = {"component": "state", "positions": "each", "n_loops": 7, "other": other}
    effect, expected = (
        patching_sweep(model, base, source, **options).data["effect"].values.squeeze()
        for model in (net, Clock(net))
    )
    assert abs(effect - expected).max() < 1e-4
    assert abs(expected).max() > 0.1


def test_lenses_exits_explorer_and_decoding_count_loops() -> None:
    net, x = Timed(), tokens()
    want = torch.stack([net.readout(by_hand(net, x, range(t))) for t in range(8)]).argmax(-1)
    clock = Clock(net)
    for study in (
        lambda m: lens_study(m, x, lens="logit", n_loops=7).top.values,
        lambda m: exit_study(m, x, n_loops=7).data["agreement"].values,
    ):
        assert abs(study(net) - study(clock)).max() < 1e-5
    assert (explore(net, x, n_loops=7).data["answer"].values.shape[0]) > 0
    assert torch.equal(answer_of(net, x, 7), want[7])
    spoken = Timed(d_vocab_out=N_TOKENS)
    token = generate(spoken, x[:1], max_new_tokens=1, n_loops=5)
    last = spoken.readout(by_hand(spoken, x[:1], range(5)))[0, -1].argmax()
    assert int(token[0, -1]) == int(last)


def answer_of(net: Timed, x: torch.Tensor, n_loops: int) -> torch.Tensor:
    *_, (_, h) = iterate(net, x, n_loops)
    return net.readout(h).argmax(-1)


def test_the_jacobian_lens_differentiates_the_loops_that_come() -> None:
    net, x = Timed(), tokens(2)
    lens = fit_jacobian_lens(net, x, n_loops=3)
    h = by_hand(net, x, range(2)).requires_grad_()
    end = by_hand(net, x, range(2, 3), h)
    rows = [torch.autograd.grad(end[..., i].sum(), h, retain_graph=True)[0] for i in range(12)]
    expected = torch.stack([row.mean((0, 1)) for row in rows])
    torch.testing.assert_close(lens.matrix[2], expected)


def test_the_map_of_one_loop_is_asked_for() -> None:
    net, x = Timed(), tokens(1)
    net.mix.weight.data /= 12
    iteration = bind(net, x)
    frozen = iteration.at(4)
    point = find_fixed_point(frozen.step, frozen.h0, max_iter=500)
    h = by_hand(net, x, range(0))
    for _ in range(500):
        h = by_hand(net, x, range(4, 5), h)
    torch.testing.assert_close(point.state, h, atol=1e-4, rtol=1e-4)
    dense = torch.func.jacrev(lambda z: by_hand(net, x, range(4, 5), z))(h).reshape(72, 72)
    radius = torch.linalg.eigvals(dense).abs().max()
    torch.testing.assert_close(spectral_radius(frozen.step, h).radius[0], radius, atol=1e-3, rtol=0)
    with pytest.raises(InputError) as error:
        find_fixed_point(iteration.step, iteration.h0)
    assert error.value.what == "loop"


@pytest.mark.parametrize(
    "study", [basin_map, reachability_study, input_dependence_study, local_stability_study]
)
def test_studies_of_one_map_refuse_a_map_for_each_loop(study: object) -> None:
    batch = as_batch(Addition(), n=3, batch_size=4)
    with pytest.raises(InputError) as error:
        study(Timed(d_vocab_out=2), batch)  # type: ignore[operator]
    assert error.value.what == "model" and "loop=t" in error.value.fix


def test_studies_of_trajectories_seek_no_limit_of_it() -> None:
    class Long(Timed):
        def step(self, h: torch.Tensor, e: torch.Tensor, loop: int = 0) -> torch.Tensor:
            return super().step(h, e, loop % MOST)

    batch, net = as_batch(Addition(), n=3, batch_size=4), Long(d_vocab_out=2)
    result = convergence_study(net, batch, n_loops=12)
    assert not result.one_map
    assert set(result.data["limit_status"].values.tolist()) == {Status.OUT_OF_BUDGET}
    assert result.data["spectral_radius"].isnull().all()
    residual = result.data["residual"].values[1:]
    states = [by_hand(net, batch.inputs, [k % MOST for k in range(t)]) for t in range(13)]  # type: ignore[arg-type]
    moved = [(b - a).norm(dim=-1) / b.norm(dim=-1) for a, b in pairwise(states)]
    torch.testing.assert_close(torch.from_numpy(residual), torch.stack(moved).detach())
    assert any("index" in finding.text for finding in result.findings())
    assert geometry_study(net, batch, n_loops=12).data["limit_status"].size == 4
    assert extrapolation_study(net, batch, n_loops=12).findings()


def test_programs_are_compared_with_it() -> None:
    net, batch = Timed(d_vocab_out=2), as_batch(Addition(), n=4, batch_size=8)
    # A state of another loop takes the clock with it, so every source is of the same loop.
    pairs = SpreadPairs(other_loops=0)
    of_net, of_clock = (
        compare_programs(model, ["ripple", "lookahead"], batch, pairs=pairs)
        for model in (net, Clock(net))
    )
    # A random change has the size of the state, and the clock adds a feature to that.
    for name in set(of_net.data) - {"random_change"}:
        assert of_net.data[name].equals(of_clock.data[name]), name


def test_pairs_have_loops_that_differ() -> None:
    pairs = random_pairs(tokens(), n_loops=7, count=30, seed=2)
    assert isinstance(pairs, InterchangePairs) and len(pairs.loop.unique()) > 3


HOOKED = {
    "attention_stabilisation_study",
    "attention_study",
    "probe_study",
    "head_study",
    "ablation_study",
    "edge_study",
    "feature_study",
    "steering_sweep",
}
"""They take models of ours alone, and refuse any other for that."""


class DropsFunctionally(Timed):
    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(dropout(h + 1, 0.3, self.training), e, 0)


class StartsAnywhere(Timed):
    def initial_state(self, e: Tensor) -> Tensor:
        return torch.randn_like(e)

    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(h, e, 0)


class EmbedsAnew(Timed):
    def embed(self, inputs: Tensor) -> Tensor:
        return dropout(super().embed(inputs), 0.3)


class ReadsAnew(Timed):
    def readout(self, h: Tensor) -> Tensor:
        return super().readout(dropout(h, 0.3))


class Remembers(Timed):
    """A state of its own, that no one sees: a mean of what it was called with."""

    kept: Tensor | float = 0.0

    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        self.kept = 0.9 * self.kept + 0.1 * h.mean()
        return super().step(h, e, 0) + self.kept


class CountsLate(Counted):
    """A counter that changes something at the fourth loop only."""

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        self.made += 1
        return Timed.step(self, h, e, int(self.made > 4))


class KeepsItsInput(Timed):
    """Injects what it embedded last, and not what it is given."""

    def embed(self, inputs: Tensor) -> Tensor:
        self.kept = super().embed(inputs)
        return self.kept

    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(h, self.kept[: len(h)], 0)


class SlowEveryThird(Counted):
    """Two fast loops and a slow one, by a counter that each embedding sets back."""

    def embed(self, inputs: Tensor) -> Tensor:
        self.made = 0
        return super().embed(inputs)

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        self.made += 1
        return Timed.step(self, h, e, int(self.made % 3 == 0))


class ReadsTheOthers(Timed):
    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(h, e, 0) - e.mean(0, keepdim=True)


class StartsByRow(Timed):
    """Seeded, but for the batch as a whole: an example starts otherwise in another row."""

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.randn(e.shape, generator=torch.Generator().manual_seed(0)).to(e)

    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(h, e, 0)


CASES: list[tuple[Callable[..., Timed], str]] = [
    (Counted, "step"),
    (CountsLate, "step"),
    (DropsFunctionally, "step"),
    (Remembers, "step"),
    (StartsAnywhere, "initial_state"),
    (EmbedsAnew, "embed"),
    (ReadsAnew, "readout"),
    (KeepsItsInput, "step"),
    (SlowEveryThird, "step"),
    (ReadsTheOthers, "step"),
    (StartsByRow, "initial_state"),
]


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_the_method_that_does_not_repeat_is_named(kind: Callable[..., Timed], method: str) -> None:
    model = kind()
    for each in (model, WithVocabulary(model)):
        with pytest.raises(InputError) as error:
            need_repeatable(each, torch.tensor([[0, 1, 2, 3], [3, 3, 0, 1]]))
        assert error.value.what == f"{method} of {type(model).__name__}"


def test_what_repeats_is_taken() -> None:
    x = torch.tensor([[0, 1, 2, 3]])
    for model in (Timed(), Timed().double(), Timed().bfloat16(), DropsFunctionally().eval()):
        need_repeatable(model, x)
        need_repeatable(WithVocabulary(model), x)


def test_our_own_models_are_not_run_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    model = LoopedTransformer(config)
    monkeypatch.setattr(LoopedTransformer, "bind", lambda *_, **__: pytest.fail("was bound"))
    need_repeatable(model, torch.tensor([[0, 1]]))


@pytest.mark.parametrize("name", sorted(STUDIES.keys() - HOOKED))
def test_every_study_refuses_a_step_that_counts(name: str) -> None:
    data = Addition() if name in OF_A_TASK else as_batch(Addition(), n=4, batch_size=8)
    with pytest.raises(InputError) as error:
        STUDIES[name](Counted(d_vocab_out=2), data)
    assert error.value.what == "step of Counted"
    assert "loop" in error.value.fix and ".eval()" in error.value.fix


@pytest.mark.parametrize("name", ["attention_dropout", "hidden_dropout_prob"])
def test_modules_that_drop_functionally_are_named_in_training_mode(name: str) -> None:
    module: Any = torch.nn.Linear(2, 2)
    setattr(module, name, 0.1)
    with pytest.raises(InputError) as error:
        describe_model(torch.nn.Sequential(module))
    assert error.value.what == "module 0"
    describe_model(torch.nn.Sequential(module).eval())


def test_the_toy_declares_its_index() -> None:
    assert "loop" in inspect.signature(Timed().step).parameters
