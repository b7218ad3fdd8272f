"""Calls of the library with numbers, words and tensors that it cannot use."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from loopinterp import (
    comparison,
    compiler,
    dynamics,
    edges,
    interventions,
    lenses,
    models,
    pages,
    probing,
    programs,
    tasks,
    training,
    zoo,
)
from loopinterp.app import stopping_rules
from loopinterp.core.results import Result, load_result, study

INTEGERS = [0, -1, 10**20, 1.5, float("nan"), float("inf"), True, "3", None, 2**63]
NUMBERS = [-1, float("nan"), float("inf"), "x", None, True, [], 10**400]
WORDS = ["", "x", "additon", None, 3, "n" * 3000, "a\0b", "\ud800"]


@cache
def _model() -> models.LoopedTransformer:
    return compiler.compile_program("ripple", max_length=9).model


@cache
def _cache() -> models.LoopedCache:
    return _model().run_with_cache(_batch().inputs, n_loops=3)[1]


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


def _batches(rng: random.Random) -> tuple[str, Callable[[], tasks.Batch]]:
    """A batch of wrong make, in words, and what makes it; some are refused when they are made."""
    good = _batch()
    tensors = [
        good.inputs, good.targets, good.n, good.n_loops, torch.full_like(good.targets, -100),
        good.targets + 5, good.targets - 1, good.targets.float(), good.n * 0, good.n_loops * 0,
        good.n_loops - 20, good.n * 10**6, good.inputs[:, :1], good.targets[:1], good.inputs + 9,
        good.inputs.int(), good.n_loops + torch.arange(len(good)), torch.tensor(3), None, 7,
        good.targets.where(torch.arange(len(good))[:, None] > 0, -100), good.n_loops[:, None],
        good.inputs * torch.nan, good.inputs[..., None].float(), good.targets[:, :0],
    ]  # fmt: skip
    wrong = rng.choice(["inputs", "targets", "n", "n_loops", "rows", "columns", "task"])
    value, other = rng.choice(tensors), rng.choice([None, tasks.get_task("parity"), "addition", 3])
    rows = rng.choice([slice(0, 0), slice(0, 1), slice(0, 2), torch.arange(8) > 99])
    width = rng.choice([0, 1, 2])

    def make() -> tasks.Batch:
        if wrong == "rows":
            return good[rows]
        if wrong == "columns":
            cut = {name: getattr(good, name)[:, :width] for name in ("inputs", "targets")}
            return replace(good, **cut)
        known = rng_task if wrong != "task" else other
        return replace(good, task=known, **({} if wrong == "task" else {wrong: value}))

    rng_task = rng.choice([good.task, None])
    return f"{wrong}={_short(value)}", make


STUDIES: dict[str, Callable[[Any, Any], Any]] = {
    "convergence": lambda m, d: dynamics.convergence_study(m, d, n_loops=12, n_spectral=0),
    "extrapolation": lambda m, d: dynamics.extrapolation_study(m, d, n_loops=20),
    "geometry": lambda m, d: dynamics.geometry_study(m, d, limit_steps=10),
    "reachability": lambda m, d: dynamics.reachability_study(m, d, n_loops=12),
    "basins": lambda m, d: dynamics.basin_map(m, d, n_loops=12, points=3),
    "inputs": lambda m, d: dynamics.input_dependence_study(
        m, d, n_loops=12, n_sensitivity=1, n_probes=1
    ),
    "stabilisation": dynamics.attention_stabilisation_study,
    "attention": lenses.attention_study,
    "explore": pages.explore,
    "lens": lenses.lens_study,
    "exits": lenses.exit_study,
    "probes": lambda m, d: probing.probe_study(m, d, {"carry": tasks.Addition().carries}),
    "heads": lambda m, d: comparison.head_study(m, d, ["ripple"]),
    "planted": comparison.injected_carry_study,
    "programs": lambda m, d: comparison.compare_programs(m, ["ripple", "lookahead"], d),
    "subspaces": lambda m, d: comparison.search_subspaces(m, d, "ripple", steps=1),
    "reduction": lambda m, d: comparison.reduction_study(m, d, ranks=(1,), pairs=16),
    "decodability": lambda m, d: comparison.decodability(m, d, ["ripple"]),
    "interchange": lambda m, d: comparison.interchange_study(m, d, "ripple", pairs_per_loop=4),
    "ablation": lambda m, d: interventions.ablation_study(m, d, kinds=("zero",), when=("all",)),
    "patching": lambda m, d: interventions.patching_sweep(m, d, _batch(), component="z"),
    "patching source": lambda m, d: interventions.patching_sweep(m, _batch(), d, component="z"),
    "edges": lambda m, d: edges.edge_study(m, d, _batch()),
    "run until": lambda m, d: models.run_until(m, d.inputs, models.ResidualBelow(0.1), max_loops=9),
    "greedy": lambda m, d: models.generate(m, d.inputs, n_loops=2, max_new_tokens=2),
    "show": lambda m, d: tasks.Addition().decode(d),
    "targets": lambda m, d: tasks.Addition().targets(d),
}


def odd_study(rng: random.Random) -> tuple[str, Callable[[], Any]]:
    """A study of a batch of wrong make, and what it says of it."""
    made, make = _batches(rng)
    name = rng.choice(list(STUDIES))

    def call() -> Any:
        result = STUDIES[name](_model(), make())
        said = [f.text for f in result.findings()] if isinstance(result, Result) else []
        if any(re.search(r"\bnan\b|nan%", text) for text in said):
            raise AssertionError(f"a finding without a number: {said}")
        return result

    return f"{name} of a batch with {made}", call


def odd_call(rng: random.Random, run: Path, mine: Path) -> tuple[str, Callable[[], Any]]:
    """What is called, in words, and the call."""
    if rng.random() < 0.5:
        return odd_study(rng)
    integer, number, word = rng.choice(INTEGERS), rng.choice(NUMBERS), rng.choice(WORDS)
    tensor = rng.choice(_tensors())
    text, whole = str(word), integer if isinstance(integer, int) else -7
    generator, addition = torch.Generator().manual_seed(0), tasks.get_task("addition")
    model, batch = _model(), _batch()
    odd: Any = rng.choice([word, {word: word}, [integer], {"x": tensor}, None, tensor])
    options: dict[str, Any] = {
        "get_task": lambda: tasks.get_task(word),
        "get_program": lambda: programs.get_program(word),
        "sample n": lambda: addition.sample(integer, batch_size=2, generator=generator),
        "sample size": lambda: addition.sample(3, batch_size=integer, generator=generator),
        "sample kind": lambda: addition.sample(
            3, batch_size=2, generator=generator, distribution=word
        ),
        "targets": lambda: addition.targets(tensor),
        "compile": lambda: compiler.compile_program("parity", max_length=integer),
        "compile name": lambda: compiler.compile_program(word, max_length=4),
        "disguise": lambda: compiler.rotate(
            compiler.compile_program("parity", max_length=3), seed=integer
        ),
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
        "programs": lambda: comparison.head_study(model, batch, [word]),
        "programs seed": lambda: comparison.head_study(model, batch, ["ripple"], seed=integer),
        "evaluate lengths": lambda: training.evaluate(model, addition, [integer], n_samples=2),
        "evaluate samples": lambda: training.evaluate(model, addition, [2], n_samples=integer),
        "evaluate kinds": lambda: training.evaluate(
            model, addition, [2], n_samples=2, distributions=[word]
        ),
        "evaluate seed": lambda: training.evaluate(model, addition, [2], n_samples=2, seed=integer),
        "evaluate extra": lambda: training.evaluate(
            model, addition, [2], n_samples=2, extra_loops=[integer]
        ),
        "stopping": lambda: stopping_rules([text]),
        "tolerance": lambda: models.ResidualBelow(number),
        "load run": lambda: training.Run.load(text),
        "load model": lambda: models.LoopedTransformer.from_pretrained(mine / text),
        "load result": lambda: load_result(text),
        "study seed": lambda: study(integer).__enter__(),
        "encode": lambda: addition.encode(word),
        "encode length": lambda: addition.encode(text, n=integer),
        "cache key": lambda: _cache()[rng.choice([word, (word, integer), (integer,), integer])],
        "cache place": lambda: _cache()[rng.choice(["z", "state_post"]), whole, whole],
        "device": lambda: batch.to(text),
        "device of a model": lambda: zoo.load_pretrained("parity", device=text),
        "zoo": lambda: zoo.load_pretrained(word),
        "heads": lambda: interventions.patching_sweep(
            model, batch, batch[torch.tensor([1, 0, *range(2, 8)])], component="z", heads=[integer]
        ),
        "positions": lambda: interventions.patching_sweep(model, batch, batch, positions=odd),
        "place": lambda: interventions.patching_sweep(
            model, batch, batch, component=f"loops.{integer}.{text}.hook_z"
        ),
        "senders": lambda: edges.path_patching(
            model, batch, batch, senders=word, receivers=f"blocks.{integer}.hook_mlp_in"
        ),
        "targets of probes": lambda: probing.probe_study(model, batch, odd),
        "hook": lambda: model.run_with_hooks(
            batch.inputs, fwd_hooks=[(word, rng.choice([len, lambda x: x, word]))]
        ),
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
