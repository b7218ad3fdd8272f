"""Training of models with a state code: hardening, drawn initial bits, and dropped bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from loopinterp.core.errors import ConfigError, InputError
from loopinterp.models import LoopedTransformer, iterate
from loopinterp.training import (
    CodeConfig,
    CurriculumConfig,
    FiniteStage,
    ObjectiveConfig,
    Trainer,
    TrainingConfig,
    finite_state,
    smallest_stage,
    train,
    train_finite,
    train_seeds,
)
from loopinterp.training.finite_state import with_initial_bits
from loopinterp.training.recipes import RECIPES
from loopinterp.training.run import RunError, RunFault
from loopinterp.training.trainer import starting_model
from tests.refusals import naming

SMALL = RECIPES["addition"].replace(
    model=RECIPES["addition"].model.replace(
        d_model=16, n_heads=2, state_code=3, initial_state="code"
    ),
    curriculum=CurriculumConfig(kind="none", max_n=3),
    objective=ObjectiveConfig(),
    state_noise=0.0,
    steps=4,
    batch_size=16,
    checkpoint_every=2,
    log_every=1,
)


def test_hardness_grows_from_none_to_all():
    code = CodeConfig(harden_from=0.2, harden_to=0.6)
    assert [code.hardness(p) for p in (0, 0.2, 0.4, 0.6, 1)] == [0, 0, 0.5, 1, 1]
    step = CodeConfig(harden_from=0.5, harden_to=0.5)
    assert [step.hardness(p) for p in (0.4, 0.5)] == [0, 1]


@pytest.mark.parametrize(
    "changes", [{"harden_to": 0.1}, {"random_everywhere": 0.7, "random_somewhere": 0.5}]
)
def test_hardening_that_makes_no_sense_is_refused(changes):
    with pytest.raises(ConfigError):
        CodeConfig(**changes)


def test_what_a_state_code_cannot_be_trained_with_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="compile"):
        SMALL.replace(compile=True)
    with pytest.raises(ConfigError, match="state_code"):
        RECIPES["addition"].replace(code=CodeConfig(hard=0.5))
    with naming("model.state_code", ConfigError):
        train_seeds(SMALL, [0, 1], tmp_path)


def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not(tmp_path):
    config = SMALL.replace(code=CodeConfig(random_everywhere=0.4, random_somewhere=0.4))
    full, stopped = Trainer(config), Trainer(config)
    for trainer, steps in ((full, 4), (stopped, 2)):
        for _ in range(steps):
            trainer.step()
    again = Trainer(config)
    tensors, metadata = stopped.state()
    again.load({name: x.clone() for name, x in tensors.items()}, metadata, tmp_path)
    for _ in range(2):
        again.step()
    for one, other in zip(full.model.parameters(), again.model.parameters()):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("everywhere", "somewhere"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0)])
def test_initial_bits_are_drawn_where_they_are_asked_for(everywhere, somewhere):
    config = SMALL.replace(
        batch_size=400,
        code=CodeConfig(random_everywhere=everywhere, random_somewhere=somewhere),
    )
    trainer = Trainer(config)
    iteration = trainer._started(trainer.bind(trainer.draw()))
    start = trainer.model.initial_state(iteration.e)
    moved = (iteration.h0 != start).any(-1).double().mean()
    share = everywhere + 0.1 * somewhere
    assert abs(float(moved) - share * 7 / 8) < 0.03  # one code in eight is the start's own


def test_a_dropped_bit_is_minus_one_from_then_on(tmp_path):
    run = train(SMALL, tmp_path / "three", progress=False)
    three = run.model()
    config = SMALL.replace(start_from=str(run.folder), model=SMALL.model.replace(state_code=2))
    two = starting_model(config)
    inputs = torch.randint(4, (8, 5), generator=torch.Generator().manual_seed(0))
    states = [h for _, h in iterate(two, inputs, 3)]
    logits = two(inputs, n_loops=3)

    def without(bit: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        def drop(bits, hook):
            bits[..., bit] = -1
            return bits

        hooks = [(lambda name: name.endswith("hook_code"), drop)]
        out = three.run_with_hooks(inputs, n_loops=3, fwd_hooks=hooks)
        with three.hooks(fwd_hooks=hooks):
            seen = three(inputs, n_loops=3, return_type="states")
        return out, list(seen)

    same = [torch.allclose(without(bit)[0], logits, atol=1e-5) for bit in range(3)]
    assert any(same)
    _, seen = without(same.index(True))
    for one, other in zip(states, seen):
        torch.testing.assert_close(one, other)


def test_only_the_model_that_training_began_with_will_do(tmp_path):
    run = train(SMALL, tmp_path / "first", progress=False)
    config = SMALL.replace(start_from=str(run.folder), seed=1)
    second = train(config, tmp_path / "second", progress=False).config
    assert isinstance(second, TrainingConfig) and second.start_sha256 is not None
    train(SMALL.replace(seed=2), tmp_path / "other", progress=False)
    (tmp_path / "first").rename(tmp_path / "away")
    (tmp_path / "other").rename(tmp_path / "first")
    with pytest.raises(RunError) as caught:
        starting_model(second)
    assert caught.value.fault is RunFault.OTHER_START
    with pytest.raises(ConfigError, match="start_from"):
        starting_model(
            SMALL.replace(start_from=str(run.folder), model=SMALL.model.replace(state_code=4))
        )
    with pytest.raises(ConfigError, match="another architecture"):
        starting_model(RECIPES["addition"].replace(start_from=str(run.folder), state_noise=0.0))


def test_stages_go_on_while_they_learn_and_end_where_none_does(tmp_path, monkeypatch):
    """Which stages are made: what they learn is said by a table in place of an evaluation."""
    monkeypatch.setattr(finite_state, "_TUNING_STEPS", 2)
    monkeypatch.setattr(finite_state, "_STEPS_FROM_ANYWHERE", 2)
    names = ["bits-3", "bits-2", "bits-1", "bits-2-from-anywhere", "bits-1-from-anywhere"]
    learnt = {"bits-3", "bits-2", "bits-2-from-anywhere"}

    class Measured:
        def __init__(self, name: str) -> None:
            self.share = float(name in learnt)

        def lowest(self, n: int) -> Measured:
            return self

    tried = iter(names)
    monkeypatch.setattr(finite_state, "evaluate", lambda *args, **kwargs: Measured(next(tried)))
    monkeypatch.setattr(finite_state, "_MOST_STARTS", 1)  # no initial bits are chosen
    stages = train_finite(SMALL, tmp_path, progress=False)
    assert [stage.run.folder.name for stage in stages] == names
    smallest = smallest_stage(stages)
    assert smallest is not None and smallest.run.folder.name == "bits-2-from-anywhere"
    assert smallest.run.model().config.state_code == 2
    began = [stage.run.config.to_dict()["start_from"] for stage in stages]
    folders = [str(tmp_path / name) for name in ("bits-3", "bits-2", "bits-2", names[3])]
    assert began == [None, *folders]
    model = stages[-1].run.model()
    assert isinstance(model, LoopedTransformer) and model.code is not None
    assert model.code.n_bits == 1


def test_no_fewer_bits_are_tried_than_answers_need(tmp_path, monkeypatch):
    """The readout sees the state alone: three answers need two bits."""
    monkeypatch.setattr(finite_state, "_TUNING_STEPS", 2)
    monkeypatch.setattr(finite_state, "_STEPS_FROM_ANYWHERE", 2)
    right = SimpleNamespace(lowest=lambda n: SimpleNamespace(share=1.0))
    monkeypatch.setattr(finite_state, "evaluate", lambda *args, **kwargs: right)
    monkeypatch.setattr(finite_state, "_MOST_STARTS", 1)
    sizes = SMALL.model.replace(d_vocab=5, d_vocab_out=3)
    config = SMALL.replace(task="parity", model=sizes, distribution="uniform")
    names = [stage.run.folder.name for stage in train_finite(config, tmp_path, progress=False)]
    assert names == ["bits-3", "bits-2", "bits-2-from-anywhere"]


@pytest.mark.parametrize("bits", [(-1, -1, -1), (1, -1, 1), (-1, 1, 1)])
def test_turned_bits_change_where_a_model_starts_and_nothing_else(bits):
    model = starting_model(SMALL)
    assert model.code is not None
    inputs = torch.randint(4, (8, 5), generator=torch.Generator().manual_seed(0))
    turned = with_initial_bits(model, torch.tensor(bits)).bind(inputs)
    bound = model.bind(inputs)
    h = model.code.state(torch.tensor(bits).float()).expand_as(bound.h0)
    torch.testing.assert_close(turned.h0, h)
    for _ in range(3):
        one, h = turned.step(h), bound.step(h)
        torch.testing.assert_close(one, h)
        torch.testing.assert_close(turned.readout(one), bound.readout(h))


def test_initial_bits_of_the_fewest_cells_are_chosen_among_the_right_ones(tmp_path, monkeypatch):
    run = train(SMALL, tmp_path / "bits-3", progress=False)
    model, refused = run.model(), []
    initial, best, second = (-1, -1, -1), (1, 1, -1), (-1, 1, 1)
    cells = {best: 5, second: 6, initial: 7}

    def started(bits):
        return with_initial_bits(model, torch.tensor(bits)).state_dict()["code.read.weight"]

    def same(one, bits):
        return torch.equal(one.state_dict()["code.read.weight"], started(bits))

    def count_cells(one, inputs):
        return next((n for bits, n in cells.items() if same(one, bits)), 9)

    def evaluate(one, *args, **kwargs):
        refused.append(same(one, best))
        return SimpleNamespace(lowest=lambda n: SimpleNamespace(share=float(same(one, second))))

    monkeypatch.setattr(finite_state, "_count_cells", count_cells)
    monkeypatch.setattr(finite_state, "evaluate", evaluate)
    stage = FiniteStage(3, run, True, {})
    chosen = finite_state._with_chosen_start(stage, tmp_path, resume=True)
    assert chosen is not None and chosen.chosen_start and refused == [True, False]
    assert same(chosen.run.model(), second) and chosen.run.cutoff == run.cutoff
    again = finite_state._with_chosen_start(stage, tmp_path, resume=True)
    assert again is not None and again.run.folder == chosen.run.folder
    cells[initial] = 4  # nothing has fewer
    assert finite_state._with_chosen_start(stage, tmp_path / "other", resume=True) is None


def test_cells_are_pairs_of_a_token_and_a_state():
    model = starting_model(SMALL.replace(model=SMALL.model.replace(state_code=1)))
    inputs = torch.randint(4, (64, 6), generator=torch.Generator().manual_seed(0))
    states = model(inputs, return_type="states")
    pairs = {
        (int(token), tuple(state.tolist()))
        for h in states
        for token, state in zip(inputs.flatten(), h.flatten(0, 1))
    }
    assert finite_state._count_cells(model, inputs) == len(pairs) <= 8


def test_what_never_learns_is_one_stage(tmp_path):
    stages = train_finite(SMALL, tmp_path, progress=False)
    assert [stage.learnt for stage in stages] == [False] and smallest_stage(stages) is None


def test_a_model_without_a_code_has_no_bits_to_drop(tmp_path):
    with pytest.raises(ConfigError, match="state_code"):
        train_finite(RECIPES["addition"], tmp_path)
    with pytest.raises(InputError, match="fewest_bits"):
        train_finite(SMALL, tmp_path, fewest_bits=4)


def test_the_configuration_comes_back(tmp_path):
    config = SMALL.replace(code=CodeConfig(hard=0.2))
    assert TrainingConfig.from_dict(config.to_dict()) == config
