"""Objectives, curriculum, learning rate."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.models import Iteration, LoopedTransformer, LoopedTransformerConfig, bind
from loopinterp.tasks import IGNORE, Addition, Batch
from loopinterp.training.config import CurriculumConfig, ObjectiveConfig, OptimiserConfig
from loopinterp.training.objectives import (
    Curriculum,
    Supervised,
    answers_at,
    ask,
    learning_rate_factor,
)


def small_model(**changes: object) -> LoopedTransformer:
    values: dict[str, object] = {
        "d_model": 8,
        "n_heads": 2,
        "d_vocab": 6,
        "d_vocab_out": 2,
        "loop_norm": True,
        "injection": "input",
        "initial_state": "zeros",
    }
    config = LoopedTransformerConfig.from_dict({**values, **changes})
    return LoopedTransformer(config, seed=1).double()


def mixed_batch(lengths: tuple[int, ...] = (3, 1, 5, 3, 2)) -> Batch:
    return Addition().sample(torch.tensor(lengths), generator=torch.Generator().manual_seed(7))


def supervise(
    config: ObjectiveConfig, iteration: Iteration, batch: Batch, *, generator: torch.Generator
) -> Supervised:
    questions = ask(config, batch, generator)
    return questions.score(answers_at(iteration, questions.loops))


def apply(config: ObjectiveConfig, model: LoopedTransformer, batch: Batch) -> Supervised:
    generator = torch.Generator().manual_seed(0)
    return supervise(config, bind(model, batch.inputs), batch, generator=generator)


def plain_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over asked positions, without ignore_index."""
    has_target = targets != IGNORE
    picked = logits.float().log_softmax(-1)[has_target].gather(-1, targets[has_target][:, None])
    return -picked.mean()


def gradients(model: LoopedTransformer, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def all_logits(model: LoopedTransformer, batch: Batch, n_loops: int) -> list[Tensor]:
    """Readouts of h_0 .. h_T by the bare protocol."""
    e = model.embed(batch.inputs)
    state, logits = model.initial_state(e), []
    for loop in range(n_loops + 1):
        state = model.step(state, e) if loop else state
        logits.append(model.readout(state))
    return logits


ABACUS = {
    "positions": "abacus",
    "abacus_target": "qk",
    "digit_tokens": [0, 1, 2, 3],
    "n_ctx": 120,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"positions": "relative", "relative_window": 1, "attention_window": 1},
        {"injection": "none", "initial_state": "embedding", "n_prelude": 1, "n_coda": 1},
        {"injection": "sublayer", **ABACUS},
    ],
    ids=["nope", "window", "surround", "token-dependent positions"],
)
def test_step_dependent_equals_each_example_run_alone(changes: dict[str, object]) -> None:
    model, batch = small_model(**changes), mixed_batch()
    supervised = apply(ObjectiveConfig(kind="step_dependent"), model, batch)
    single = torch.cat(
        [model(batch.inputs[k : k + 1], n_loops=int(batch.n_loops[k])) for k in range(len(batch))]
    )
    naive = plain_loss(single, batch.targets)
    torch.testing.assert_close(supervised.logits, single)
    torch.testing.assert_close(supervised.loss, naive)
    ours, theirs = gradients(model, supervised.loss), gradients(model, naive)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-7)


def test_finished_examples_cost_no_further_loops() -> None:
    model, batch = small_model(), mixed_batch((1, 4, 2))
    sizes: list[int] = []
    step = model.step

    def counting(h: Tensor, e: Tensor) -> Tensor:
        sizes.append(h.shape[0])
        return step(h, e)

    class Bare:
        embed, initial_state, readout = model.embed, model.initial_state, model.readout

    bare = Bare()
    bare.step = counting  # type: ignore[attr-defined]
    config = ObjectiveConfig(kind="step_dependent")
    supervise(config, bind(bare, batch.inputs), batch, generator=torch.Generator())
    # T(n) = n + 1: 2, 5 and 3 loops
    assert sizes == [3, 3, 2, 1, 1]


def test_step_dependent_reads_the_initial_state_where_no_loop_is_asked_for() -> None:
    model, batch = small_model(), mixed_batch((2, 2))
    batch = Batch(batch.inputs, batch.targets, batch.n, torch.tensor([0, 2]))
    supervised = apply(ObjectiveConfig(kind="step_dependent"), model, batch)
    logits = all_logits(model, batch, 2)
    torch.testing.assert_close(supervised.logits, torch.stack([logits[0][0], logits[2][1]]))


def test_holding_asks_a_share_of_the_examples_a_second_time() -> None:
    model, batch = small_model(), mixed_batch((2, 3, 1))
    config = ObjectiveConfig(hold_loops=2, hold_share=0.5)
    by_loop = all_logits(model, batch, 6)
    # Every way to draw: not asked again, or asked again 1 or 2 loops later.
    expected: dict[tuple[int, ...], Tensor] = {}
    for drawn in itertools.product(range(3), repeat=3):
        logits, targets = [], []
        for row, later in enumerate(drawn):
            for loop in {int(batch.n_loops[row]), int(batch.n_loops[row]) + later}:
                logits.append(by_loop[loop][row])
                targets.append(batch.targets[row])
        expected[drawn] = plain_loss(torch.stack(logits), torch.stack(targets))
    generator, seen = torch.Generator().manual_seed(0), []
    for _ in range(60):
        supervised = supervise(config, bind(model, batch.inputs), batch, generator=generator)
        matches = [d for d, loss in expected.items() if torch.isclose(supervised.loss, loss)]
        assert len(matches) == 1
        seen += matches[0]
        at_own_loop = torch.stack([by_loop[n][row] for row, n in enumerate([3, 4, 2])])
        torch.testing.assert_close(supervised.logits, at_own_loop)
    counts = torch.bincount(torch.tensor(seen), minlength=3)
    assert (counts - torch.tensor([90, 45, 45])).abs().max() < 25


def test_what_is_due_is_asked_before_the_end() -> None:
    """An answer with k answers after it is due k loops before T(n), and never before that."""
    batch, generator = mixed_batch(tuple(range(1, 7)) * 50), torch.Generator().manual_seed(0)
    questions = ask(ObjectiveConfig(due_share=0.5), batch, generator)
    assert torch.equal(questions.loops[0], batch.n_loops)
    assert torch.equal(questions.targets[0], batch.targets)
    early = (questions.targets[1] != IGNORE).any(-1) | (questions.loops[1] < batch.n_loops)
    assert 0.35 < float(early.double().mean()) < 0.65
    seen = set()
    for row in early.nonzero().flatten().tolist():
        k, total = int(questions.loops[1, row]), int(batch.n_loops[row])
        assert 1 <= k <= total
        places = (batch.targets[row] != IGNORE).nonzero().flatten().tolist()
        due = [p for rank, p in enumerate(reversed(places)) if rank >= total - k]
        got = (questions.targets[1, row] != IGNORE).nonzero().flatten().tolist()
        assert got == sorted(due)
        assert torch.equal(questions.targets[1, row, got], batch.targets[row, got])
        seen.add((total, k))
    # Every number of loops is drawn.
    assert len(seen) > 15


@pytest.mark.parametrize(("n_loops", "ran"), [(None, 6), (3, 3)])
def test_last_loop_asks_all_examples_at_once(n_loops: int | None, ran: int) -> None:
    model, batch = small_model(), mixed_batch()
    supervised = apply(ObjectiveConfig(kind="last", n_loops=n_loops), model, batch)
    logits = all_logits(model, batch, ran)[-1]
    torch.testing.assert_close(supervised.logits, logits)
    torch.testing.assert_close(supervised.loss, plain_loss(logits, batch.targets))


def test_progressive_mixes_the_last_loop_with_a_drawn_one() -> None:
    model, batch = small_model(), mixed_batch()
    losses = [plain_loss(y, batch.targets) for y in all_logits(model, batch, 4)]
    config = ObjectiveConfig(kind="progressive", n_loops=4, alpha=0.3)
    generator, seen = torch.Generator().manual_seed(0), set()
    for _ in range(40):
        loss = supervise(config, bind(model, batch.inputs), batch, generator=generator).loss
        matches = [
            r for r in (1, 2, 3, 4) if torch.isclose(loss, 0.7 * losses[4] + 0.3 * losses[r])
        ]
        assert matches
        seen.update(matches)
    assert seen == {1, 2, 3, 4}


@pytest.mark.parametrize(("scale", "extra"), [(1.0, 1), (1.0, -3), (2.0, 3), (0.5, 0), (1.5, -1)])
@pytest.mark.parametrize("kind", ["step_dependent", "last"])
def test_other_loops_than_those_of_the_task(kind: Any, scale: float, extra: int) -> None:
    """T(n) wrong by k, and T(n) of another slope, against each example run as long by hand."""
    model, batch = small_model(), mixed_batch()
    loops = [max(1, math.ceil(scale * t) + extra) for t in batch.n_loops.tolist()]
    loops = loops if kind == "step_dependent" else [max(loops)] * len(loops)
    by_hand = torch.cat([model(x[None], n_loops=t) for x, t in zip(batch.inputs, loops)])
    config = ObjectiveConfig(kind=kind, loop_scale=scale, extra_loops=extra)
    supervised = apply(config, model, batch)
    torch.testing.assert_close(supervised.logits, by_hand)
    torch.testing.assert_close(supervised.loss, plain_loss(by_hand, batch.targets))


def test_a_drawn_number_of_loops_is_the_same_for_the_batch_and_uniform() -> None:
    model, batch = small_model(), mixed_batch()
    losses = [plain_loss(y, batch.targets) for y in all_logits(model, batch, 5)]
    config = ObjectiveConfig(kind="drawn", n_loops=5, least_loops=2)
    generator, seen = torch.Generator().manual_seed(0), []
    for _ in range(80):
        loss = supervise(config, bind(model, batch.inputs), batch, generator=generator).loss
        seen += [r for r in range(6) if torch.isclose(loss, losses[r])]
    counts = torch.bincount(torch.tensor(seen), minlength=6)
    assert counts[:2].sum() == 0
    assert counts.sum() == 80
    assert (counts[2:] - 20).abs().max() < 14


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_progressive_at_both_ends_of_its_weight(alpha: float) -> None:
    model, batch = small_model(), mixed_batch()
    losses = [plain_loss(y, batch.targets) for y in all_logits(model, batch, 3)]
    generator = torch.Generator().manual_seed(1)
    config = ObjectiveConfig(kind="progressive", n_loops=3, alpha=alpha)
    got = [
        supervise(config, bind(model, batch.inputs), batch, generator=generator).loss
        for _ in range(30)
    ]
    rounds = {r for loss in got for r in (1, 2, 3) if torch.isclose(loss, losses[r])}
    assert rounds == ({3} if alpha == 0 else {1, 2, 3})


def test_every_loop_is_a_weighted_mean_over_loops() -> None:
    model, batch = small_model(), mixed_batch()
    losses = torch.stack([plain_loss(y, batch.targets) for y in all_logits(model, batch, 3)[1:]])
    plain = apply(ObjectiveConfig(kind="every", n_loops=3), model, batch)
    torch.testing.assert_close(plain.loss, losses.mean())
    weighted = apply(
        ObjectiveConfig(kind="every", n_loops=3, weights=(1.0, 0.0, 3.0)), model, batch
    )
    torch.testing.assert_close(weighted.loss, (losses[0] + 3 * losses[2]) / 4)


def test_one_loop_makes_all_objectives_the_same() -> None:
    model, batch = small_model(), mixed_batch((2, 2, 2))
    batch = Batch(batch.inputs, batch.targets, batch.n, torch.ones(3, dtype=torch.int64))
    losses = [
        apply(ObjectiveConfig(kind=kind), model, batch).loss  # type: ignore[arg-type]
        for kind in ("last", "step_dependent", "progressive", "every")
    ]
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0])


def test_ignored_positions_carry_no_loss() -> None:
    model, batch = small_model(), mixed_batch((1, 6))
    logits = all_logits(model, batch, 2)[2]
    short = F.cross_entropy(logits[0, 1:2].float(), batch.targets[0, 1:2])
    long = F.cross_entropy(logits[1, 1:7].float(), batch.targets[1, 1:7], reduction="sum")
    loss = apply(ObjectiveConfig(kind="last", n_loops=2), model, batch).loss
    torch.testing.assert_close(loss, (short + long) / 7)


def test_no_loops_at_all_is_an_input_error() -> None:
    model, batch = small_model(), mixed_batch((1,))
    batch = Batch(batch.inputs, batch.targets, batch.n, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(InputError, match=r"objective\.n_loops"):
        apply(ObjectiveConfig(kind="last"), model, batch)


def feed(curriculum: Curriculum, exact_match: float, n_steps: int) -> list[int]:
    """M before each step."""
    seen = []
    for _ in range(n_steps):
        seen.append(curriculum.longest)
        curriculum.update(exact_match)
    return seen


def test_perfect_steps_grow_it_every_min_steps_once_the_average_has_risen() -> None:
    curriculum = Curriculum(CurriculumConfig(max_n=4, threshold=0.97, min_steps=40))
    seen = feed(curriculum, 1.0, 200)
    # 1 - 0.9^k > 0.97 from k = 34 on, so 40 steps are enough at every length.
    assert seen == [1] * 40 + [2] * 40 + [3] * 40 + [4] * 80
    assert curriculum.done_at == 120


def test_it_waits_for_the_running_accuracy() -> None:
    curriculum = Curriculum(CurriculumConfig(max_n=4, threshold=0.97, min_steps=2))
    seen = feed(curriculum, 1.0, 60)
    # 1 - 0.9^33 = 0.9691, 1 - 0.9^34 = 0.9722
    assert seen.index(2) == 34
    assert seen.index(3) == 36


def test_it_never_grows_below_the_threshold() -> None:
    curriculum = Curriculum(CurriculumConfig(max_n=4, min_steps=1))
    assert set(feed(curriculum, 0.96, 300)) == {1}
    assert curriculum.done_at is None


def test_interval_grows_however_badly_it_goes() -> None:
    curriculum = Curriculum(CurriculumConfig(kind="interval", max_n=3, interval=7))
    assert feed(curriculum, 0.0, 21) == [1] * 7 + [2] * 7 + [3] * 7
    assert curriculum.done_at == 14


def test_no_curriculum_draws_every_length_from_the_start() -> None:
    curriculum = Curriculum(CurriculumConfig(kind="none", min_n=2, max_n=5))
    drawn = curriculum.lengths(500, torch.Generator().manual_seed(0))
    assert sorted(set(drawn.tolist())) == [2, 3, 4, 5]
    assert curriculum.done_at == 0


def test_lengths_are_uniform_up_to_the_present_greatest() -> None:
    curriculum = Curriculum(CurriculumConfig(max_n=9, start_n=3))
    drawn = curriculum.lengths(6000, torch.Generator().manual_seed(0))
    counts = torch.bincount(drawn)
    assert counts[0] == 0
    assert len(counts) == 4
    assert (counts[1:] - 2000).abs().max() < 200


def test_state_goes_through_json_and_back() -> None:
    import json

    config = CurriculumConfig(max_n=6, min_steps=2)
    one, other = Curriculum(config), Curriculum(config)
    feed(one, 0.99, 77)
    other.load(json.loads(json.dumps(one.state())))
    assert feed(one, 0.983, 50) == feed(other, 0.983, 50)
    assert one.state() == other.state()


@given(
    settings=st.one_of(
        st.builds(
            CurriculumConfig,
            max_n=st.just(3),
            threshold=st.sampled_from([0.0, 0.5, 0.97]),
            min_steps=st.integers(1, 9),
        ),
        st.builds(
            CurriculumConfig,
            kind=st.just("interval"),
            max_n=st.just(3),
            interval=st.integers(1, 9),
        ),
    ),
    heard=st.lists(st.floats(0, 1) | st.just(1.0), min_size=1, max_size=60),
)
def test_it_never_grows_where_it_may_not(settings: CurriculumConfig, heard: list[float]) -> None:
    """Steps taken in late, when they may matter, leave what they leave when taken in at once."""
    at_once, late = Curriculum(settings), Curriculum(settings)
    waiting: list[float] = []
    for exact_match in heard:
        at_once.update(exact_match)
        waiting.append(exact_match)
        if late.may_grow(len(waiting)):
            for one in waiting:
                late.update(one)
            waiting.clear()
        assert late.longest == at_once.longest
    for one in waiting:
        late.update(one)
    assert late.state() == at_once.state()


def test_most_steps_need_not_be_heard_of() -> None:
    curriculum = Curriculum(CurriculumConfig(max_n=2, min_steps=30))
    # 1 - 0.9^k passes 0.97 with k = 34.
    assert [curriculum.may_grow(n) for n in (1, 30, 33, 34)] == [False, False, False, True]
    feed(curriculum, 1.0, 34)
    assert curriculum.done_at == 34 and not curriculum.may_grow(10**6)


def run(optimiser: OptimiserConfig, n_steps: int, done_at: int | None = None) -> list[float]:
    return [
        learning_rate_factor(
            optimiser,
            step=step,
            n_steps=n_steps,
            curriculum_done_at=done_at if done_at is not None and step >= done_at else None,
        )
        for step in range(n_steps)
    ]


def test_linear_goes_up_stays_and_comes_down() -> None:
    factors = run(OptimiserConfig(warmup_steps=10, decay=0.2), 100)
    assert factors[0] == pytest.approx(0.1)
    assert factors[9:81] == [1.0] * 72
    assert factors[90] == pytest.approx(0.5)
    assert 0 < factors[-1] < 0.06
    assert sorted(factors[80:], reverse=True) == factors[80:]


def test_no_warm_up_and_no_decay_is_constant() -> None:
    assert set(run(OptimiserConfig(warmup_steps=0, decay=0.0), 20)) == {1.0}
    assert set(run(OptimiserConfig(warmup_steps=0, schedule="constant"), 20)) == {1.0}


def test_cosine_waits_for_the_curriculum() -> None:
    factors = run(OptimiserConfig(warmup_steps=0, schedule="cosine"), 100, done_at=60)
    assert factors[:61] == [1.0] * 61
    assert factors[80] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(0.0, abs=0.01)


def test_cosine_stays_up_if_the_curriculum_never_ends() -> None:
    assert set(run(OptimiserConfig(warmup_steps=0, schedule="cosine"), 50)) == {1.0}


def test_warm_up_longer_than_the_run_is_no_error() -> None:
    factors = run(OptimiserConfig(warmup_steps=100, decay=0.0), 10)
    assert factors == pytest.approx([(k + 1) / 100 for k in range(10)])
