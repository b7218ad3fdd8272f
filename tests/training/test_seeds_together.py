"""Seeds that are trained together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopinterp.core.errors import ConfigError
from loopinterp.training import Run, Trainer, TrainingConfig, train, train_seeds
from loopinterp.training.seeds import (
    advance_together,
    read,
)
from tests.refusals import naming

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
        ({}, {"hold_loops": 2}, 18),
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
    values["curriculum"] |= {"max_n": 3, "start_n": 1, "interval": 7}
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
    abacus = {**ABACUS, "abacus_target": "input", "abacus_window": 3}
    windowed = TrainingConfig.from_dict(
        tiny.to_dict() | {"model": tiny.model.to_dict() | {"attention_window": None} | abacus}
    )
    for config, what in (
        (two_sided, "model.causal"),
        (tiny.replace(compile=True), "compile"),
        (windowed, "model.abacus_window"),
    ):
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
