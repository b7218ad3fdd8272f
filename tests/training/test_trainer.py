"""The trainer and its averaged weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loopinterp.core.errors import CheckpointError
from loopinterp.training import (
    CurriculumConfig,
    ObjectiveConfig,
    OptimiserConfig,
    Trainer,
    TrainingConfig,
)
from loopinterp.training.trainer import _Ema
from tests.refusals import naming

HERE = Path("run/state/checkpoint.safetensors")


def test_first_step_is_adamw_on_the_objective(tiny: TrainingConfig) -> None:
    config = tiny.replace(
        state_noise=0.0,
        objective=ObjectiveConfig(kind="last"),
        optimiser=OptimiserConfig(warmup_steps=0, clip=None),
    )
    trainer, oracle = Trainer(config), Trainer(config)
    metrics = trainer.step()
    drawn = oracle.draw()
    logits = oracle.model(drawn.inputs, n_loops=int(drawn.ends.max()))
    targets = drawn.questions.targets[0].flatten()
    loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=-100)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    norms = [p.grad.norm() for p in oracle.model.parameters() if p.grad is not None]
    assert metrics["grad_norm"] == pytest.approx(torch.stack(norms).norm().item(), rel=1e-4)
    # The first step of AdamW moves every weight by lr against the sign of its gradient.
    for (name, before), after in zip(
        oracle.model.named_parameters(), trainer.model.parameters(), strict=True
    ):
        if before.grad is None:
            continue
        moved = before * (1 - 1e-3 * 0.01) - 1e-3 * before.grad / (before.grad.abs() + 1e-8)
        torch.testing.assert_close(after, moved, msg=name, rtol=1e-3, atol=2e-5)


def test_same_seed_same_numbers_other_seed_other_numbers(tiny: TrainingConfig) -> None:
    losses = [
        [Trainer(tiny.replace(seed=seed)).step()["loss"] for _ in range(1)] for seed in (0, 0, 1)
    ]
    assert losses[0] == losses[1] != losses[2]


def test_global_randomness_has_no_effect(tiny: TrainingConfig) -> None:
    first = Trainer(tiny).step()
    torch.rand(17)
    before = torch.random.get_rng_state()
    assert Trainer(tiny).step() == first
    assert torch.equal(before, torch.random.get_rng_state())


def test_gradients_are_clipped(tiny: TrainingConfig) -> None:
    trainer = Trainer(tiny.replace(optimiser=OptimiserConfig(clip=1e-4)))
    assert trainer.step()["grad_norm"] > 1e-4
    norms = [p.grad.norm() for p in trainer.model.parameters() if p.grad is not None]
    assert torch.stack(norms).norm().item() == pytest.approx(1e-4, rel=1e-2)


def test_state_and_load_go_on_bit_by_bit(tiny: TrainingConfig) -> None:
    full, stopped = Trainer(tiny), Trainer(tiny)
    for _ in range(9):
        full.step()
        stopped.step()
    tensors, metadata = stopped.state()
    saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    thawed = Trainer(tiny)
    thawed.load(saved, metadata, HERE)
    assert [thawed.step() for _ in range(9)] == [full.step() for _ in range(9)]
    for one, other in zip(full.model.parameters(), thawed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    for name in full.ema.shadow:
        assert torch.equal(full.ema.shadow[name], thawed.ema.shadow[name])


@pytest.mark.parametrize("kind", ["missing", "extra", "shape", "dtype"])
def test_states_of_other_models_are_refused(tiny: TrainingConfig, kind: str) -> None:
    trainer = Trainer(tiny)
    trainer.step()
    tensors, metadata = trainer.state()
    name = "exp_avg/unembedding.weight"
    if kind == "missing":
        del tensors[name]
    elif kind == "extra":
        tensors["weights/other"] = torch.ones(1)
    elif kind == "shape":
        tensors[name] = torch.ones(3, 3)
    else:
        tensors[name] = tensors[name].double()
    with naming("checkpoint .*", CheckpointError):
        Trainer(tiny).load(tensors, metadata, HERE)


def test_counters_that_cannot_be_read_are_refused(tiny: TrainingConfig) -> None:
    trainer = Trainer(tiny)
    trainer.step()
    tensors, _ = trainer.state()
    with pytest.raises(CheckpointError, match="counters"):
        Trainer(tiny).load(tensors, {"scalars": "{}"}, HERE)


def test_steps_read_late_are_those_read_at_once(tiny: TrainingConfig) -> None:
    config = tiny.replace(log_every=100, checkpoint_every=100)
    at_once, late = Trainer(config), Trainer(config)
    expected, metrics, readings = [at_once.step() for _ in range(14)], [], 0
    for _ in range(14):
        late.advance()
        if late.due:
            metrics += late.read()
            readings += 1
    assert metrics + late.read() == expected
    assert readings == 2  # after 5 and 10 steps, where the curriculum grows
    for one, other in zip(at_once.state()[0].values(), late.state()[0].values(), strict=True):
        assert torch.equal(one, other)
    assert late.read() == []


def test_readings_are_due_with_lines_and_checkpoints(tiny: TrainingConfig) -> None:
    trainer = Trainer(tiny.replace(curriculum=CurriculumConfig(kind="none", max_n=2), steps=11))
    due = []
    for _ in range(11):
        trainer.advance()
        due += [trainer.steps_done] if trainer.due else []
    assert due == [2, 4, 5, 6, 8, 10, 11]  # a line every 2, a checkpoint every 5, the end


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_step_that_is_not_finite_says_what_to_change(
    tiny: TrainingConfig, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tiny)
    trainer.step()
    if what == "loss":
        with torch.no_grad():
            trainer.model.unembedding.weight.fill_(math.nan)
    else:
        nan = torch.tensor(math.nan)
        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: nan)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with naming(f"{what} at step 2"):
        trainer.step()
    for old, new in zip(before, trainer.model.parameters(), strict=True):
        assert torch.equal(old.nan_to_num(), new.nan_to_num())
    assert trainer.steps_done == 1


def test_averaged_model_carries_the_average(tiny: TrainingConfig) -> None:
    trainer = Trainer(tiny)
    for _ in range(3):
        trainer.step()
    averaged = trainer.averaged_model()
    for name, parameter in averaged.named_parameters():
        assert torch.equal(parameter, trainer.ema.shadow[name])
    assert not torch.equal(averaged.unembedding.weight, trainer.model.unembedding.weight)


def test_abacus_positions_start_anywhere_in_training(tiny: TrainingConfig) -> None:
    values = tiny.to_dict()
    values["model"] |= {
        "positions": "abacus",
        "relative_window": None,
        "digit_tokens": [0, 1, 2, 3],
        "n_ctx": 40,
        "abacus_max_offset": 30,
    }
    trainer = Trainer(TrainingConfig.from_dict(values))
    offsets = {trainer.draw().position_offset for _ in range(500)}
    assert offsets == set(range(31))
    assert math.isfinite(trainer.step()["loss"])


def test_each_example_may_draw_its_own_start(
    tiny: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uniform over the range, differing within a batch, and given to the model with it."""
    values = tiny.to_dict() | {"offset_per_example": True, "batch_size": 64}
    values["model"] |= {
        "positions": "abacus",
        "relative_window": None,
        "digit_tokens": [0, 1, 2, 3],
        "n_ctx": 40,
        "abacus_max_offset": 30,
    }
    trainer = Trainer(TrainingConfig.from_dict(values))
    batches: list[torch.Tensor] = []
    monkeypatch.setattr(
        trainer, "_bind", lambda inputs, position_offset, checked: batches.append(position_offset)
    )
    for _ in range(20):
        trainer.bind(trainer.draw())
    drawn = torch.stack(batches)
    assert drawn.shape == (20, 64)
    assert drawn.unique().tolist() == list(range(31))
    assert (drawn.min(1).values < drawn.max(1).values).all()
    assert abs(drawn.double().mean() - 15) < 1.5


@pytest.mark.parametrize("kind", ["last", "progressive", "every", "drawn"])
def test_every_objective_trains(tiny: TrainingConfig, kind: str) -> None:
    objective = {"kind": kind} | ({"n_loops": 4} if kind == "drawn" else {})
    values = tiny.to_dict() | {"objective": objective, "precision": "bf16"}
    trainer = Trainer(TrainingConfig.from_dict(values))
    assert all(math.isfinite(trainer.step()["loss"]) for _ in range(3))


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", "float32"), ("bf16", "bfloat16")])
def test_precision_is_that_of_the_forward_pass(
    tiny: TrainingConfig, monkeypatch: pytest.MonkeyPatch, precision: Any, dtype: str
) -> None:
    trainer, types = Trainer(tiny.replace(precision=precision)), []
    monkeypatch.setattr(trainer, "finish", lambda _, answered: types.append(answered.logits.dtype))
    trainer.advance()
    assert types == [getattr(torch, dtype)]
    assert trainer.model.dtype == torch.float32


def test_features_can_be_trained_on(tiny: TrainingConfig) -> None:
    values = tiny.to_dict() | {"task_settings": {"format": "features"}}
    values["model"] |= {"d_vocab": None, "d_features": 2}
    assert math.isfinite(Trainer(TrainingConfig.from_dict(values)).step()["loss"])


def scalar_model(value: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def test_average_follows_the_recurrence() -> None:
    model = scalar_model(0.0)
    ema, expected = _Ema(model, decay=0.5), 0.0
    for t, value in enumerate([4.0, -2.0, 8.0, 1.0, 1.0, 3.0, 7.0, 2.0, 5.0, 6.0]):
        nn.init.constant_(model.weight, value)
        ema.update()
        decay = min(0.5, (1 + t) / (10 + t))
        expected = decay * expected + (1 - decay) * value
        assert ema.shadow["weight"].item() == pytest.approx(expected)


def test_average_of_constant_weights_is_those_weights() -> None:
    model = scalar_model(3.0)
    ema = _Ema(model, decay=0.999)
    for _ in range(5):
        ema.update()
    assert ema.shadow["weight"].item() == pytest.approx(3.0)


def test_average_is_no_view_of_the_weights() -> None:
    model = scalar_model(3.0)
    ema = _Ema(model, decay=0.9)
    nn.init.constant_(model.weight, 9.0)
    assert ema.shadow["weight"].item() == 3.0
    assert not ema.shadow["weight"].requires_grad


def test_tied_weights_are_averaged_once() -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    second.weight = first.weight
    ema = _Ema(nn.Sequential(first, second), decay=0.0)
    nn.init.constant_(first.weight, 2.0)
    ema.update()
    assert list(ema.shadow) == ["0.weight"]
    assert (ema.shadow["0.weight"] == 2.0).all()


def test_weights_that_are_not_to_be_averaged_leave_no_trace() -> None:
    model = scalar_model(3.0)
    ema = _Ema(model, decay=0.9)
    nn.init.constant_(model.weight, torch.nan)
    ema.update(unless=torch.tensor(True))
    assert ema.shadow["weight"].item() == 3.0
    nn.init.constant_(model.weight, 5.0)
    plain = _Ema(model, decay=0.9)
    for one in (ema, plain):
        one.shadow["weight"].fill_(3.0)
        one.n_updates = 7
    ema.update(unless=torch.tensor(False))
    plain.update()
    assert torch.equal(ema.shadow["weight"], plain.shadow["weight"])
