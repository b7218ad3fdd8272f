"""A step that takes the index of its loop is given it by everything that steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from loopinterp.circuits import InterchangeRun, compare_programs, patching_sweep
from loopinterp.circuits.interchange_engine import answer
from loopinterp.circuits.interchange_pairs import InterchangePairs
from loopinterp.circuits.learned_subspace import _Crop
from loopinterp.circuits.pair_strategies import SpreadPairs
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
from loopinterp.dynamics.solvers.fixed_point_solver import Status
from loopinterp.errors import InputError
from loopinterp.explorer import explore
from loopinterp.lenses import exit_study, fit_jacobian_lens, lens_study
from loopinterp.models import (
    Fixed,
    WithVocabulary,
    bind,
    greedy_decode,
    iterate,
    run_until,
    states_at,
)
from loopinterp.tasks import Addition, as_batch
from tests.circuits.random_pairs import random_pairs
from tests.models.timed_toys import MOST, N_TOKENS, Clock, Timed, TimedNear, by_hand

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
    for delay, (logits, counted) in enumerate(crop._logits(rows, run.donor)):
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
    effect, wanted = (
        patching_sweep(model, base, source, **options).data["effect"].values.squeeze()
        for model in (net, Clock(net))
    )
    assert abs(effect - wanted).max() < 1e-4
    assert abs(wanted).max() > 0.1


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
    said = greedy_decode(spoken, x[:1], max_new_tokens=1, n_loops=5)
    last = spoken.readout(by_hand(spoken, x[:1], range(5)))[0, -1].argmax()
    assert int(said[0, -1]) == int(last)


def answer_of(net: Timed, x: torch.Tensor, n_loops: int) -> torch.Tensor:
    *_, (_, h) = iterate(net, x, n_loops)
    return net.readout(h).argmax(-1)


def test_the_jacobian_lens_differentiates_the_loops_that_come() -> None:
    net, x = Timed(), tokens(2)
    lens = fit_jacobian_lens(net, x, n_loops=3)
    h = by_hand(net, x, range(2)).requires_grad_()
    end = by_hand(net, x, range(2, 3), h)
    rows = [torch.autograd.grad(end[..., i].sum(), h, retain_graph=True)[0] for i in range(12)]
    wanted = torch.stack([row.mean((0, 1)) for row in rows])
    torch.testing.assert_close(lens.matrix[2], wanted)


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
    found = convergence_study(net, batch, n_loops=12)
    assert not found.one_map
    assert set(found.data["limit_status"].values.tolist()) == {Status.OUT_OF_BUDGET}
    assert found.data["spectral_radius"].isnull().all()
    residual = found.data["residual"].values[1:]
    states = [by_hand(net, batch.inputs, [k % MOST for k in range(t)]) for t in range(13)]  # type: ignore[arg-type]
    moved = [(b - a).norm(dim=-1) / b.norm(dim=-1) for a, b in pairwise(states)]
    torch.testing.assert_close(torch.from_numpy(residual), torch.stack(moved).detach())
    assert any("index" in finding.text for finding in found.findings())
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
