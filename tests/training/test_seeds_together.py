"""Seeds that are trained together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loopinterp.core.errors import ConfigError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.models.positions import attention_mask
from loopinterp.tasks.task import IGNORE
from loopinterp.training import Run, Trainer, TrainingConfig, train, train_seeds
from loopinterp.training.objectives import Questions
from loopinterp.training.seeds_together import (
    _goes_by_key,
    _PackedAttention,
    _Packing,
    advance_together,
    read,
)
from tests.refusals import naming

Lengths = list[list[tuple[int, int, int]]]


def examples(most: int = 4) -> st.SearchStrategy[Lengths]:
    """By seed and example: positions that are read, and two numbers of loops."""
    one = st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(0, 4))
    many = st.integers(1, most).flatmap(lambda n: st.lists(one, min_size=n, max_size=n))
    return st.integers(1, most).flatmap(
        lambda n: st.lists(st.lists(one, min_size=n, max_size=n), min_size=2, max_size=3)
    ) | many.map(lambda rows: [rows, rows[::-1]])


def questions_of(drawn: Lengths) -> list[Questions]:
    """The first seed is asked twice, the others once; padding differs between seeds."""
    questions = []
    for seed, rows in enumerate(drawn):
        width = max(length for length, *_ in rows) + seed
        targets = torch.full((2, len(rows), width), IGNORE)
        for row, (length, *_) in enumerate(rows):
            targets[0, row, length - 1] = row
        loops = torch.tensor([[a, b] for _, a, b in rows]).T
        n_asks = 1 if seed else 2
        questions.append(Questions(loops[:n_asks], targets[:n_asks]))
    return questions


NOPE = {"positions": "none", "relative_window": None, "attention_window": None}
ABACUS = {
    "positions": "abacus",
    "relative_window": None,
    "digit_tokens": [0, 1, 2, 3],
    "n_ctx": 40,
    "abacus_max_offset": 30,
    "abacus_target": "qk",
    "injection": "sublayer",
}


@pytest.mark.parametrize(
    ("model", "objective", "steps"),
    [
        ({}, {"hold_loops": 2}, 50),
        ({}, {"kind": "progressive", "n_loops": 3}, 6),
        ({"n_prelude": 1, "n_coda": 1, "tie_unembed": False}, {"kind": "last"}, 6),
        (ABACUS, {"kind": "step_dependent"}, 6),
        (NOPE, {}, 6),
        (NOPE | {"positions": "rotary", "norm": "sandwich", "norm_type": "rmsnorm"}, {}, 3),
        (NOPE | {"positions": "fire", "injection": "concat"}, {"kind": "every"}, 3),
        ({"attention_window": 9, "injection": "gated_output", "n_layers": 2}, {}, 3),
        ({"windowed_heads": 1, "injection": "internal", "norm": "post"}, {}, 3),
        ({"n_prelude": 1, "n_coda": 1, "windowed_surround": False}, {}, 3),
    ],
    ids=[
        *("window", "progressive", "surround", "abacus", "nope"),
        *("rotary, sandwich", "FIRE, concat", "wide window, gate", "some heads, internal"),
        "window of the loop alone",
    ],
)
def test_each_seed_makes_the_steps_it_makes_alone(
    tiny: TrainingConfig, model: dict[str, Any], objective: dict[str, Any], steps: int
) -> None:
    values = tiny.to_dict() | {"objective": objective, "steps": steps}
    values["model"] |= model
    # Lengths that differ between seeds: the widest batch pads the others.
    values["curriculum"] |= {"max_n": 3, "start_n": 1, "interval": 20}
    configs = [TrainingConfig.from_dict(values | {"seed": seed}) for seed in (0, 3)]
    joint, one_by_one = ([Trainer(config) for config in configs] for _ in range(2))
    for _ in range(steps):
        advance_together(joint)
        expected = [trainer.step() for trainer in one_by_one]
        for trainer, other in zip(joint, expected):
            [one] = read(trainer)
            assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
    generator = torch.Generator().manual_seed(0)
    inputs = joint[0].task.sample(4, batch_size=8, generator=generator).inputs
    for one, other in zip(joint, one_by_one):
        # Weights that change nothing, as biases of keys, are moved by rounding alone.
        with torch.no_grad():
            ours, theirs = (t.averaged_model()(inputs, n_loops=4) for t in (one, other))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        for name, generator in one.generators.items():
            assert torch.equal(generator.get_state(), other.generators[name].get_state())


def test_a_seed_that_diverges_is_named(tiny: TrainingConfig) -> None:
    trainers = [Trainer(tiny.replace(seed=seed)) for seed in (0, 7)]
    with torch.no_grad():
        trainers[1].model.unembedding.weight.fill_(torch.nan)
    advance_together(trainers)
    assert len(read(trainers[0])) == 1
    with naming("seed 7: loss at step 1"):
        read(trainers[1])
    assert [trainer.steps_done for trainer in trainers] == [1, 0]


def test_what_cannot_be_padded_or_stacked_is_refused(tiny: TrainingConfig, tmp_path: Path) -> None:
    two_sided = tiny.replace(model=tiny.model.replace(causal=False))
    for config, what in ((two_sided, "model.causal"), (tiny.replace(compile=True), "compile")):
        with naming(what, ConfigError):
            train_seeds(config, [0, 1], tmp_path)


def test_runs_of_seeds_are_ordinary_runs(
    tiny: TrainingConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at different steps, one gone on with alone, and all ended together."""
    config = tiny.replace(steps=8, checkpoint_every=3, log_every=1)
    real, stopped = Trainer.finish, []

    def stopping(self: Trainer, *args: Any) -> None:
        if self.steps_done == 4 and self.config.seed == 5:
            stopped.append(self)
            raise KeyboardInterrupt
        real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "finish", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_seeds(config, [4, 5], tmp_path / "seeds", progress=False)
    assert len(stopped) == 1
    folders = [tmp_path / f"seeds/seed-{seed}" for seed in (4, 5)]
    assert [Run.load(folder).steps_done for folder in folders] == [3, 3]
    train(config.replace(seed=5), folders[1], progress=False)
    runs = train_seeds(config, [4, 5], tmp_path / "seeds", progress=False)
    for seed, run, folder in zip((4, 5), runs, folders):
        assert run.folder == folder
        single = train(config.replace(seed=seed), tmp_path / f"alone-{seed}", progress=False)
        again = Run.load(folder)
        assert again.finished and again.seconds > 0
        assert again.config == single.config
        files = [{str(p.relative_to(f)) for p in f.rglob("*")} for f in (folder, single.folder)]
        assert files[0] == files[1]
        ours, theirs = again.metrics(), single.metrics()
        assert ours.to_numpy() == pytest.approx(theirs.to_numpy(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("seeds", [[], [1, 1]])
def test_seeds_are_some_and_differ(tiny: TrainingConfig, seeds: list[int], tmp_path: Path) -> None:
    with naming("seeds"):
        train_seeds(tiny, seeds, tmp_path)


KINDS: dict[str, dict[str, Any]] = {
    "key by key": {"attention_window": 2},
    "key by key, bias": {"attention_window": 1, "positions": "relative", "relative_window": 1},
    "squares": {},
    "squares, window": {"attention_window": 2, "windowed_heads": 1},
    "squares, bias": {"positions": "relative", "relative_window": 2},
    "squares, FIRE": {"positions": "fire"},
}


def model_of(kind: str, seed: int) -> LoopedTransformer:
    config = LoopedTransformerConfig(d_model=6, n_heads=2, d_vocab=6, d_vocab_out=2, **KINDS[kind])
    return LoopedTransformer(config, seed=seed).double()


def alone(model: LoopedTransformer, q: Any, k: Any, v: Any) -> torch.Tensor:
    """``[head, pos, d_head]`` of one example, by the definition."""
    n_pos = q.shape[1]
    place, scores = torch.arange(n_pos), q @ k.transpose(1, 2) / 3**0.5
    if model.relative_bias is not None:
        scores = scores + model.relative_bias(place[None, :, None], place[None, None])[0]
    allowed = attention_mask(model.config, n_pos, device=q.device)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5)
@given(examples(3), st.booleans(), st.integers(0, 3))
def test_each_example_attends_as_it_does_alone(
    kind: str, drawn: Lengths, square: bool, loop: int
) -> None:
    questions = questions_of(drawn)
    models = [model_of(kind, seed) for seed in range(len(questions))]
    packing = _Packing.pack_questions(
        questions, square=square and not _goes_by_key(models[0].config)
    )
    assume(loop < len(packing.running))
    n_examples, n_places = packing.running[loop]
    bound = [m.bind(torch.zeros(one.targets.shape[1:]).long()) for m, one in zip(models, questions)]
    attend = _PackedAttention(models, bound, packing).of_loop(loop).attend
    assert attend is not None
    shape, generator = (4, len(models), 2, max(n_places), 3), torch.Generator().manual_seed(loop)
    *qkv, g = torch.randn(shape, generator=generator, dtype=torch.float64).unbind(0)
    weights = [x.requires_grad_() for x in qkv]
    weights += [w for m in models if m.relative_bias for w in m.relative_bias.parameters()]
    z, ours, theirs = attend(*qkv), [], []
    for seed, model in enumerate(models):
        for row in range(n_examples[seed]):
            start, length = (int(x[seed, row]) for x in (packing.starts, packing.lengths))
            places = slice(start, start + length)
            expected = alone(model, *(x[seed, :, places] for x in qkv))
            torch.testing.assert_close(z[seed, :, places], expected)
            for z_of_seed, inputs in ((z[seed, :, places], ours), (expected, theirs)):
                inputs.append((z_of_seed * g[seed, :, places]).sum())
    gradients = [
        torch.autograd.grad(
            torch.stack(inputs).sum(), weights, retain_graph=True, materialize_grads=True
        )
        for inputs in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients)


@settings(max_examples=15)
@given(examples())
def test_a_row_has_each_position_once_and_those_that_run_first(drawn: Lengths) -> None:
    questions = questions_of(drawn)
    packing = _Packing.pack_questions(questions)
    names = [  # of each position: its example, and its place there
        torch.cartesian_prod(torch.arange(len(rows)), torch.arange(one.targets.shape[-1]))
        .view(len(rows), -1, 2)
        .double()
        for rows, one in zip(drawn, questions)
    ]
    packed = packing.pack(names)
    for seed, (rows, one) in enumerate(zip(drawn, questions)):
        ends = one.loops.amax(0).tolist()
        expected = [
            [row, pos]
            for row in sorted(range(len(rows)), key=lambda row: -ends[row])
            for pos in range(rows[row][0])
        ]
        assert packed[seed, : len(expected)].tolist() == expected
        for loop, (n_examples, n_places) in enumerate(packing.running, 1):
            running = [row for row in range(len(rows)) if ends[row] >= loop]
            assert n_examples[seed] == len(running)
            assert n_places[seed] == sum(rows[row][0] for row in running)


@settings(max_examples=15)
@given(examples())
def test_answers_are_found_where_they_were_asked_for(drawn: Lengths) -> None:
    """Each state names its seed, loop, example and position; so do the answers."""
    questions = questions_of(drawn)
    packing = _Packing.pack_questions(questions)
    example = packing.order.gather(1, packing.example)
    at = torch.stack([example, packing.pos], -1).double()
    n_places = [at.shape[1], *(max(places) for _, places in packing.running)]
    seed = torch.arange(len(at)).double()[:, None, None].expand(-1, at.shape[1], 1)
    states = [
        torch.cat([seed[:, :n], torch.full_like(seed[:, :n], loop), at[:, :n]], -1)
        for loop, n in enumerate(n_places)
    ]
    answers = packing.answers(states)
    for seed, (rows, one) in enumerate(zip(drawn, questions)):
        for ask, loops in enumerate(one.loops.tolist()):
            for row, (length, *_) in enumerate(rows):
                for pos in range(length):
                    assert answers[seed, ask, row, pos].tolist() == [seed, loops[row], row, pos]


@settings(max_examples=15)
@given(examples())
def test_noise_meets_the_examples_that_run_in_turn(drawn: Lengths) -> None:
    questions = questions_of(drawn)
    packing = _Packing.pack_questions(questions)
    for loop, (n_examples, n_places) in enumerate(packing.running):
        noise = [torch.randn(n, one.targets.shape[-1], 3) for n, one in zip(n_examples, questions)]
        packed = packing.pack_noise(noise, loop)
        for seed, noise_of_seed in enumerate(noise):
            lengths = packing.lengths[seed, : len(noise_of_seed)].tolist()
            rows = [row[:length] for row, length in zip(noise_of_seed, lengths)]
            expected = torch.cat([*rows, torch.zeros(max(n_places) - n_places[seed], 3)])
            assert torch.equal(packed[seed], expected)


def test_a_square_that_is_nearly_full_is_run_whole() -> None:
    nearly = [Questions(torch.ones(1, 8, dtype=torch.long), torch.zeros(1, 8, 9).long())]
    nearly[0].targets[0, 0, -1] = IGNORE
    assert not _Packing.pack_questions(nearly).is_square
    packing = _Packing.pack_questions(nearly, square=True)
    assert packing.is_square and packing.n_pos == 9
