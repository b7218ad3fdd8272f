"""Calls of the library with numbers, words and tensors that it cannot use."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from loopinterp import circuits, dynamics, lenses, models, rasp, tasks, training, workflow
from loopinterp.results import Result, study
from loopinterp.saved_results import load_result

INTEGERS = [0, -1, 10**20, 1.5, float("nan"), float("inf"), True, "3", None, 2**63]
NUMBERS = [-1, float("nan"), float("inf"), "x", None, True, [], 10**400]
WORDS = ["", "x", "additon", None, 3, "n" * 3000, "a\0b", "\ud800"]


@cache
def _model() -> models.LoopedTransformer:
    return rasp.compile_program("ripple", max_length=9).model


@cache
def _batch() -> tasks.Batch:
    generator = torch.Generator().manual_seed(0)
    return tasks.get_task("addition").sample(5, batch_size=8, generator=generator)


def _tensors() -> list[Any]:
    good = _batch().inputs
    return [
        good[0], good[None], good[:, :0], good + 10, good - 10, good.double(), good.float(),
        good.bool(), torch.tensor([]), torch.zeros(2, 3, 4, 5), torch.full((2, 3), torch.nan),
        good.repeat(1, 400), good.tolist(), None, "tokens",
    ]  # fmt: skip


def _config(**changes: Any) -> models.LoopedTransformerConfig:
    sizes: dict[str, Any] = {"d_model": 8, "n_heads": 2, "d_vocab": 6, "d_vocab_out": 2}
    return models.LoopedTransformerConfig(**(sizes | changes))


def odd_call(rng: random.Random, run: Path, mine: Path) -> tuple[str, Callable[[], Any]]:
    """What is called, in words, and the call."""
    integer, number, word = rng.choice(INTEGERS), rng.choice(NUMBERS), rng.choice(WORDS)
    tensor = rng.choice(_tensors())
    text, whole = str(word), integer if isinstance(integer, int) else -7
    generator, addition = torch.Generator().manual_seed(0), tasks.get_task("addition")
    model, batch = _model(), _batch()
    options: dict[str, Any] = {
        "get_task": lambda: tasks.get_task(word),
        "get_program": lambda: rasp.get_program(word),
        "sample n": lambda: addition.sample(integer, batch_size=2, generator=generator),
        "sample size": lambda: addition.sample(3, batch_size=integer, generator=generator),
        "sample kind": lambda: addition.sample(
            3, batch_size=2, generator=generator, distribution=word
        ),
        "targets": lambda: addition.targets(tensor),
        "compile": lambda: rasp.compile_program("parity", max_length=integer),
        "compile name": lambda: rasp.compile_program(word, max_length=4),
        "disguise": lambda: rasp.rotate(rasp.compile_program("parity", max_length=3), seed=integer),
        "config d_model": lambda: _config(d_model=integer),
        "config n_layers": lambda: _config(n_layers=integer),
        "config norm": lambda: _config(norm=word),
        "config eps": lambda: _config(norm_eps=number),
        "config std": lambda: models.LoopedTransformer(_config(init_std=number)),
        "config from_dict": lambda: models.LoopedTransformerConfig.from_dict({word: integer}),
        "training from_dict": lambda: training.TrainingConfig.from_dict({word: integer}),
        "apply": lambda: training.apply_settings(training.RECIPES["addition"], [f"seed={word}"]),
        "seed": lambda: models.LoopedTransformer(_config(), seed=integer),
        "run": lambda: model(tensor, n_loops=2),
        "run loops": lambda: model(batch.inputs, n_loops=integer),
        "run type": lambda: model(batch.inputs, n_loops=2, return_type=word),
        "run state": lambda: model(batch.inputs, n_loops=2, state=torch.as_tensor(_batch().inputs)),
        "run start": lambda: model(batch.inputs, n_loops=2, start_at_loop=integer),
        "cache": lambda: model.run_with_cache(batch.inputs, n_loops=2, names_filter=word),
        "cache loops": lambda: model.run_with_cache(batch.inputs, n_loops=2, loops=whole),
        "iterate": lambda: list(models.iterate(model, batch.inputs, integer)),
        "site": lambda: model.site(word, loop=integer),
        "convergence": lambda: dynamics.convergence_study(model, batch, n_loops=integer),
        "threshold": lambda: dynamics.convergence_study(
            model, batch, threshold=number, n_spectral=0
        ),
        "solver": lambda: dynamics.convergence_study(model, batch, solver=word, n_spectral=0),
        "extrapolation": lambda: dynamics.extrapolation_study(model, batch, n_loops=integer),
        "attention": lambda: lenses.attention_study(
            model, batch.inputs, n_loops=2, example=integer
        ),
        "attention distance": lambda: lenses.attention_study(
            model, batch.inputs, n_loops=2, max_distance=integer
        ),
        "programs": lambda: circuits.head_study(model, batch, [word]),
        "programs seed": lambda: circuits.head_study(model, batch, ["ripple"], seed=integer),
        "evaluate lengths": lambda: training.evaluate(model, addition, [integer], n_samples=2),
        "evaluate samples": lambda: training.evaluate(model, addition, [2], n_samples=integer),
        "evaluate kinds": lambda: training.evaluate(
            model, addition, [2], n_samples=2, distributions=[word]
        ),
        "evaluate seed": lambda: training.evaluate(model, addition, [2], n_samples=2, seed=integer),
        "evaluate extra": lambda: training.evaluate(
            model, addition, [2], n_samples=2, extra_loops=[integer]
        ),
        "stopping": lambda: workflow.stopping_rules([text]),
        "tolerance": lambda: models.ResidualBelow(number),
        "load run": lambda: training.Run.load(text),
        "load model": lambda: models.LoopedTransformer.from_pretrained(mine / text),
        "load result": lambda: load_result(text),
        "study seed": lambda: study(integer).__enter__(),
        "save": lambda: _Nothing.made().save(mine / "saved", text),
    }
    name = rng.choice(list(options))
    return f"{name}: {integer!r:.20}, {number!r:.20}, {word!r:.20}, {_short(tensor)}", options[name]


class _Nothing(Result, kind="nothing"):
    """A result without arrays."""

    @classmethod
    def made(cls) -> _Nothing:
        with study(0) as watch:
            return cls.of(watch)


def _short(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else f"{x!r:.20}"
