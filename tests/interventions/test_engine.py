"""The engine against one run at a time, written out: every model, every way to go on."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import InputError
from loopinterp.interventions import engine, light_cone
from loopinterp.interventions.engine import (
    InterchangeRun,
    answer,
    answers_by_loop,
    principal_subspace,
    project,
    random_change,
)
from loopinterp.interventions.pairs import InterchangePairs
from loopinterp.models import (
    LoopedTransformer,
    LoopedTransformerConfig,
    WithVocabulary,
    bind,
    iterate,
    reach,
)
from tests.interventions.random_pairs import random_pairs

D_MODEL, N_TOKENS, N_LOOPS, N_POS = 8, 6, 5, 9


def random_model(seed: int = 0, **changes: object) -> LoopedTransformer:
    """Untrained, with weights so large that a change is seen in the answers."""
    config = {
        "d_model": D_MODEL,
        "n_heads": 2,
        "d_vocab": N_TOKENS,
        "d_vocab_out": 5,
        "norm": "pre",
        "loop_norm": True,
        "injection": "input",
        "init_std": 0.6,
        **changes,
    }
    return LoopedTransformer(LoopedTransformerConfig(**config), seed=seed)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(N_TOKENS, (6, N_POS), generator=torch.Generator().manual_seed(seed))


@lru_cache(maxsize=32)
def states(model: LoopedTransformer, row: tuple[int, ...], n_loops: int) -> list[torch.Tensor]:
    iteration = bind(model, torch.tensor([row]))
    reached = [iteration.h0]
    for _ in range(n_loops):
        reached.append(iteration.step(reached[-1]))
    return reached


@torch.no_grad()
def by_hand(
    model: LoopedTransformer, pairs: InterchangePairs, k: int, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Answers [delay, pos] of one pair, its whole sequence run loop by loop."""

    def reached(example: torch.Tensor, loop: torch.Tensor) -> torch.Tensor:
        return states(model, tuple(pairs.inputs[example].tolist()), pairs.n_loops)[int(loop)]

    loop, iteration = int(pairs.loop[k]), bind(model, pairs.inputs[pairs.base[k]][None])
    h = reached(pairs.base[k], pairs.loop[k]).clone()
    donor = reached(pairs.source[k], pairs.source_loop[k])
    second, later = pairs.second, -1
    if second is not None and second.made[k]:
        later, place = int(second.loop[k]), int(second.position[k])
        of_second = reached(second.source[k], second.source_loop[k])
    added = {}
    for position in pairs.positions[k].tolist():
        change = donor[0, position] - h[0, position]
        if rows is not None:
            change = torch.stack([float(row @ change) * row for row in rows]).sum(0)
        added[position] = change
    for position, change in added.items():
        h[0, position] += change
    read = []
    for after in range(loop, pairs.n_loops + 1):
        h = iteration.step(h) if after > loop else h
        if after == later:
            h[0, place] = of_second[0, place]
        read.append(h.clone())
    return answer(iteration.readout(torch.cat(read)))


@torch.no_grad()
def check(model: LoopedTransformer, pairs: InterchangePairs, rows: torch.Tensor | None = None):
    """Every pair is what it is by hand, and past its end what it is at its end, undisturbed."""
    run = InterchangeRun(model, pairs)
    answers = run.interchange(rows)
    assert answers.shape == (len(pairs), pairs.longest + 1, pairs.inputs.shape[1])
    natural = answers_by_loop(model, pairs.inputs, pairs.n_loops)
    after = None if rows is not None else run.states_after(run.source_state)
    for k in range(len(pairs)):
        horizon = int(pairs.horizon[k])
        assert torch.equal(answers[k, : horizon + 1], by_hand(model, pairs, k, rows))
        assert run.within[k].sum() == horizon + 1
        if after is not None:
            h, readout = after[k, : horizon + 1], bind(model, pairs.inputs[pairs.base[k]][None])
            assert torch.equal(answer(readout.readout(h)), answers[k, : horizon + 1])
            if horizon and (
                pairs.second is None or not pairs.second.made[k]
            ):  # each is a step from the one before, at every position
                stepped = readout.step(h[-2][None])[0]
                torch.testing.assert_close(h[-1], stepped, atol=1e-5, rtol=1e-4)
        undisturbed = natural[int(pairs.loop[k]) :, pairs.base[k]]
        assert torch.equal(run.base[k, : horizon + 1], undisturbed)
    assert bool((answers != run.base).any())


WINDOWED = {
    "window of 1": {"attention_window": 1},
    "window of 0": {"attention_window": 0},
    "window of 2, relative bias": {
        "attention_window": 2,
        "positions": "relative",
        "relative_window": 2,
    },
    "window of 3, two layers": {"attention_window": 3, "n_layers": 2, "positions": "rotary"},
    "window of 1, three layers": {"attention_window": 1, "n_layers": 3, "initial_state": "zeros"},
    "learned positions, prelude": {
        "attention_window": 1,
        "positions": "absolute",
        "n_ctx": 12,
        "n_prelude": 1,
        "initial_state": "noise",
    },
    "a prelude without the window": {
        "attention_window": 1,
        "n_prelude": 1,
        "windowed_surround": False,
        "initial_state": "zeros",
    },
    "as wide as the sequence": {"attention_window": 8},
}
OTHER_MODELS = {
    "no window": {},
    "both ways": {"causal": False},
    "both ways, window": {"causal": False, "attention_window": 1},
    "coda": {"attention_window": 1, "n_coda": 1},
    "fire in a window": {"attention_window": 2, "positions": "fire", "fire_threshold": 2.0},
    "some heads in a window": {"attention_window": 1, "windowed_heads": 1},
    "no injection": {"injection": "none", "n_layers": 2},
    "abacus positions in queries and keys": {
        "attention_window": 1,
        "positions": "abacus",
        "abacus_target": "qk",
        "n_ctx": 20,
        "digit_tokens": (1, 2, 3),
    },
}


# Only the cones of a window depend on how many sites there are.
@pytest.mark.parametrize(
    ("name", "sites", "twice"),
    [
        *((n, *w) for n in WINDOWED for w in ((1, False), (3, False), (1, True), (2, True))),
        *((n, *w) for n in OTHER_MODELS for w in ((1, False), (2, True))),
    ],
)
def test_an_exchange_is_one_run_by_hand(name, sites, twice):
    model = random_model(**(WINDOWED | OTHER_MODELS)[name])
    if name in WINDOWED:
        assert reach(model) is not None
    check(model, random_pairs(tokens(), n_loops=N_LOOPS, count=12, sites=sites, twice=twice))


@pytest.mark.parametrize("name", [*WINDOWED, *OTHER_MODELS])
def test_a_model_behind_a_vocabulary_goes_on_as_it_does(name):
    changes = (WINDOWED | OTHER_MODELS)[name]
    model = random_model(**changes)
    if name == "fire in a window":
        with torch.no_grad():  # so that places count
            model.get_parameter("relative_bias.mlp.2.weight").mul_(20)
    words = tuple(reversed(range(N_TOKENS)))
    mapped = WithVocabulary(model, tokens=words)
    pairs = random_pairs(tokens(), n_loops=N_LOOPS, count=16)
    run = InterchangeRun(mapped, pairs)
    assert torch.equal(run.after(run.base_state), run.base)
    behind = InterchangeRun(model, replace(pairs, inputs=torch.tensor(words)[pairs.inputs]))
    assert torch.equal(run.interchange(), behind.interchange())


@given(
    seed=st.integers(0, 10_000),
    window=st.sampled_from([None, 0, 1, 2, 5]),
    n_layers=st.integers(1, 3),
    causal=st.booleans(),
    sites=st.integers(1, 4),
    rank=st.integers(0, 3),
)
@settings(max_examples=12, deadline=None, derandomize=True)
def test_an_exchange_in_any_small_model_is_one_run_by_hand(
    seed, window, n_layers, causal, sites, rank
):
    model = random_model(seed, attention_window=window, n_layers=n_layers, causal=causal)
    pairs = random_pairs(tokens(seed), n_loops=4, count=12, sites=sites, seed=seed)
    gauss = torch.randn(D_MODEL, D_MODEL, generator=torch.Generator().manual_seed(seed))
    check(model, pairs, torch.linalg.qr(gauss).Q[:rank] if rank else None)


@pytest.mark.parametrize("window", [None, 1])
def test_a_subspace_for_each_pair_is_the_same_as_one_at_a_time(window):
    model = random_model(attention_window=window)
    pairs = random_pairs(tokens(), n_loops=N_LOOPS, count=12, sites=2)
    gauss = torch.randn(12, D_MODEL, 3, generator=torch.Generator().manual_seed(0))
    rows = torch.linalg.qr(gauss).Q.mT
    answers = InterchangeRun(model, pairs).interchange(rows)
    for k in range(12):
        horizon = int(pairs.horizon[k])
        assert torch.equal(answers[k, : horizon + 1], by_hand(model, pairs, k, rows[k]))


def test_the_complement_is_what_the_subspace_leaves():
    model, rows = random_model(attention_window=1), torch.eye(D_MODEL)
    pairs = random_pairs(tokens(), n_loops=N_LOOPS, count=30)
    run = InterchangeRun(model, pairs)
    assert torch.equal(run.interchange(rows[:3], complement=True), run.interchange(rows[3:]))
    assert torch.equal(run.interchange(rows), run.interchange())
    assert torch.equal(run.interchange(rows, complement=True), run.base)


@pytest.mark.parametrize("changes", [{}, {"attention_window": 1}, {"attention_window": 2}])
def test_an_input_exchanged_with_itself_changes_nothing(changes):
    pairs = random_pairs(tokens(), n_loops=N_LOOPS, count=16, sites=2)
    pairs = replace(pairs, source=pairs.base, source_loop=pairs.loop)
    model = random_model(**changes)
    run = InterchangeRun(model, pairs)
    assert torch.equal(run.interchange(), run.base)
    assert not run.difference.any()
    clean = torch.stack([h for _, h in iterate(model, pairs.inputs, N_LOOPS)])
    loops = (pairs.loop[:, None] + torch.arange(pairs.longest + 1)).clamp(max=N_LOOPS)
    expected = clean[loops, pairs.base[:, None]][run.within]
    assert torch.allclose(run.states_after(run.base_state)[run.within], expected, atol=1e-5)


def test_pairs_that_put_in_the_bases_own_state_are_not_run(monkeypatch):
    pairs = random_pairs(tokens(), n_loops=N_LOOPS, count=16, sites=1)
    run = InterchangeRun(random_model(), pairs)
    changed = run.difference.flatten(1).any(1)
    rows_run = []
    fronts = InterchangeRun._fronts

    def counted(self, runs, rows, *rest):
        rows_run.append(rows)
        return fronts(self, runs, rows, *rest)

    monkeypatch.setattr(InterchangeRun, "_fronts", counted)
    run.interchange()
    assert 0 < changed.sum() < 40
    assert torch.equal(torch.cat(rows_run).sort().values, changed.nonzero()[:, 0])


@pytest.mark.parametrize("name", ["window of 2, relative bias", "window of 3, two layers"])
def test_the_cone_gives_what_the_whole_sequence_gives(name, monkeypatch):
    model = random_model(**WINDOWED[name])
    pairs = random_pairs(tokens(), n_loops=N_LOOPS, count=300, sites=2)
    cone = InterchangeRun(model, pairs).interchange()
    monkeypatch.setattr(light_cone, "reach", lambda model: None)
    assert torch.equal(InterchangeRun(model, pairs).interchange(), cone)


@pytest.mark.parametrize("window", [None, 1])
def test_inputs_and_pairs_may_go_on_a_few_at_a_time(window, monkeypatch):
    model = random_model(attention_window=window)
    pairs = random_pairs(tokens(), n_loops=N_LOOPS, count=50)
    at_once = InterchangeRun(model, pairs).interchange()
    monkeypatch.setattr(engine, "_HELD_NUMBERS", 2 * (N_LOOPS + 1) * N_POS * D_MODEL)
    monkeypatch.setattr(engine, "_AT_A_TIME", 7)
    monkeypatch.setattr(engine, "_NUMBERS_AT_A_TIME", 0)
    assert torch.equal(InterchangeRun(model, pairs).interchange(), at_once)


def test_kinds_of_states_at_once_are_those_one_by_one(generator):
    run = InterchangeRun(random_model(), random_pairs(tokens(), n_loops=N_LOOPS, count=16, sites=2))
    changes = torch.stack([run.difference, random_change(run.difference, generator)])
    exchanged, random = run.after(run.base_state + changes)
    assert torch.equal(exchanged, run.interchange())
    assert torch.equal(random, run.after(run.base_state + changes[1]))
    assert not torch.equal(exchanged, random)


def test_no_pairs_have_no_answers():
    pairs = random_pairs(tokens(), n_loops=N_LOOPS, count=4)[torch.zeros(4, dtype=torch.bool)]
    assert InterchangeRun(random_model(), pairs).interchange().shape == (0, 1, N_POS)


def test_rows_that_are_not_orthonormal_are_refused():
    run = InterchangeRun(random_model(), random_pairs(tokens(), n_loops=2, count=4))
    for what, changes in {
        "subspace": {"subspace": 2 * torch.eye(D_MODEL)[:2]},
        "complement": {"complement": True},
    }.items():
        with pytest.raises(InputError) as caught:
            run.interchange(**changes)
        assert caught.value.what == what


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("base", 99),
        ("source", -1),
        ("positions", -1),
        ("loop", 3),
        ("loop", -1),
        ("source_loop", 3),
    ],
)
def test_pairs_out_of_range_are_refused(name, value):
    pairs = random_pairs(tokens(), n_loops=2, count=4)
    wrong = getattr(pairs, name).clone()
    wrong[1] = value
    with pytest.raises(InputError) as caught:
        InterchangeRun(random_model(), replace(pairs, **{name: wrong}))
    assert caught.value.what == f"pairs.{name}"


def test_answers_by_loop_are_classes_that_index() -> None:
    model = LoopedTransformer(
        LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=5, d_vocab_out=3)
    )
    answers = answers_by_loop(model, torch.tensor([[0, 4, 2]]), 2)
    marked = torch.nn.functional.one_hot(answers, 3)
    assert marked.shape == (3, 1, 3, 3)
    assert bool((marked.gather(-1, answers[..., None]) == 1).all())


def test_of_logits_that_are_equal_to_rounding_the_first_class_is_the_answer():
    logits = torch.tensor([[1.0, 1.0 + 5e-5, 0.0], [0.0, 1.0, 2.0], [0.0, 1.0, 1.0 - 5e-5]])
    assert answer(logits).tolist() == [0, 2, 1]


def orthonormal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Orthonormal rows [..., rank, d_model]."""
    gauss = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(gauss.mT).Q.mT


def test_principal_directions_span_what_changes(generator):
    basis = orthonormal(2, 8)
    difference = torch.randn(50, 2, generator=generator) @ basis
    rows = principal_subspace(difference, 2)
    assert torch.allclose(difference @ rows.mT @ rows, difference, atol=1e-5)


def test_a_projection_keeps_the_part_that_lies_in_the_subspace(generator):
    rows = orthonormal(20, 3, 8)
    change = torch.randn(20, 4, 8, generator=generator)
    part = project(change, rows)
    assert torch.allclose(project(part, rows), part, atol=1e-5)
    for k in range(20):
        assert torch.allclose(part[k] @ rows[k].mT, change[k] @ rows[k].mT, atol=1e-5)
        assert torch.allclose(project(change[k], rows[k]), part[k], atol=1e-5)
        for site in range(4):
            parts = [row * float(row @ change[k, site]) for row in rows[k]]
            assert torch.allclose(part[k, site], torch.stack(parts).sum(0), atol=1e-5)


def test_a_random_change_keeps_the_norm_and_favours_no_direction(generator):
    change = torch.zeros(4000, 1, 6)
    change[:, 0, 0] = torch.arange(4000) / 100
    changed = random_change(change, generator)
    assert torch.allclose(changed.norm(dim=-1), change.norm(dim=-1), atol=1e-4)
    directions = changed[1:, 0] / changed[1:, 0].norm(dim=-1, keepdim=True)
    assert torch.allclose(directions.square().mean(0), torch.full((6,), 1 / 6), atol=0.02)
    assert torch.allclose(directions.mean(0), torch.zeros(6), atol=0.03)


@pytest.mark.parametrize("rank", [0, 9])
def test_impossible_ranks_are_refused(rank, generator):
    with pytest.raises(InputError, match="rank"):
        principal_subspace(torch.randn(20, 8, generator=generator), rank)
