"""Tensors made on the wrong device, and steps that wait for the device, are found without one.

What is computed on the device of :mod:`tests.pretend_gpu` equals what the CPU computes, and fails
where a GPU would. Where a study turns tensors into numpy's arrays, it has brought them back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import loopinterp
from loopinterp import (
    comparison,
    dynamics,
    edges,
    features,
    interventions,
    lenses,
    models,
    probing,
    training,
)
from loopinterp.adapters import adapt
from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.decompiler.evidence import judged_lengths
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, generate
from loopinterp.tasks import Addition, Batch
from loopinterp.training import Trainer, TrainingConfig
from loopinterp.training.seeds import advance_together, read
from loopinterp.zoo import pretrained_run
from tests.adapters.kinds import KINDS
from tests.pretend_gpu import DEVICE, OnDevice, WouldWait, no_waiting, pretend_gpu
from tests.refusals import naming
from tests.small_studies import decompile_little
from tests.test_study_arguments import OF_A_TASK
from tests.test_study_arguments import STUDIES as ASKED
from tests.training.tiny_run import TINY

SMALL: dict[str, Any] = {"d_model": 16, "n_heads": 2, "d_vocab": 6, "d_vocab_out": 6}
ABACUS = {"positions": "abacus", "digit_tokens": (0, 1), "n_ctx": 60, "abacus_max_offset": 20}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two answers": {"d_vocab_out": 2},
    "window": {"positions": "relative", "relative_window": 1, "attention_window": 1},
    "mixed windows": {"attention_window": 1, "windowed_heads": 1},
    "learned": {"positions": "absolute", "n_ctx": 60},
    "rotary, surround": {"positions": "rotary", "n_prelude": 1, "n_coda": 1},
    "fire": {"positions": "fire"},
    "abacus": {**ABACUS, "abacus_target": "input"},
    "abacus on q and k": {**ABACUS, "abacus_target": "qk"},
    "gate, noise": {"injection": "gated_output", "initial_state": "noise", "norm": "sandwich"},
    "recall": {"injection": "concat", "initial_state": "zeros", "loop_norm": True},
    "sublayer, rms": {"injection": "sublayer", "norm_type": "rmsnorm"},
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The device, which ``--device cuda`` asks for as well, and autocast takes for one of its."""
    monkeypatch.setattr(training.trainer, "resolve_device", lambda _: torch.device(DEVICE.type))
    monkeypatch.setattr(Trainer, "autocast", lambda _: nullcontext())
    with pretend_gpu() as pretend:
        yield pretend


def model_of(kind: str) -> LoopedTransformer:
    return LoopedTransformer(LoopedTransformerConfig(**SMALL | MODELS[kind]), seed=0)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def tokens(n: int = 8) -> Tensor:
    """Prompts of additions: digits, ``+`` and ``=``."""
    return torch.randint(6, (4, n), generator=seeded())


def same(there: Any, here: Any) -> None:
    """The values that the CPU has, on the device."""
    assert isinstance(there, OnDevice)
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)


# Runs of a model


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "two answers"])
def test_runs_hooks_caches_and_decoding(device: torch.device, kind: str) -> None:
    here, there = model_of(kind), model_of(kind).to(device)
    inputs, ends = tokens(), torch.tensor([3, 1, 2, 4])
    moved = inputs.to(device)
    same(there(moved, n_loops=ends.to(device)), here(inputs, n_loops=ends))
    every = here.run_with_cache(inputs, n_loops=2, incl_bwd=True, loss_fn=lambda y: y.sum())[1]
    cached = there.run_with_cache(moved, n_loops=2, incl_bwd=True, loss_fn=lambda y: y.sum())[1]
    assert list(cached) == list(every)
    for name in every:
        same(cached[name], every[name])
    hook = [("loops.1.blocks.0.attn.hook_pattern", lambda x, hook: torch.zeros_like(x))]
    same(
        there.run_with_hooks(moved, n_loops=2, fwd_hooks=hook),
        here.run_with_hooks(inputs, n_loops=2, fwd_hooks=hook),
    )
    for loops, by_cache in ((ends.clamp(max=2), True), (2, False)):
        theirs = loops.to(device) if isinstance(loops, Tensor) else loops
        options: dict[str, Any] = {"max_new_tokens": 3, "stop_token": 1, "use_cache": by_cache}
        answer = generate(there, moved, n_loops=theirs, **options)
        assert torch.equal(answer.cpu(), generate(here, inputs, n_loops=loops, **options))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_published_models_run_where_their_weights_are(device: torch.device, kind: str) -> None:
    here, there = adapt(KINDS[kind].build()), adapt(KINDS[kind].build().to(device))
    inputs = torch.randint(64, (2, 6), generator=seeded())
    moved = inputs.to(device)
    ends = torch.tensor([2, 1])
    same(there(moved, n_loops=ends.to(device)), here(inputs, n_loops=ends))
    every = here.run_with_cache(inputs, n_loops=2)[1]
    cached = there.run_with_cache(moved, n_loops=2)[1]
    for name in every:
        same(cached[name], every[name])
    if here.config.causal:
        answer = generate(there, moved, n_loops=1, max_new_tokens=2)
        assert torch.equal(answer.cpu(), generate(here, inputs, n_loops=1, max_new_tokens=2))
    if KINDS[kind].halts:
        loops = [
            models.run_until(
                model, x, models.GateAbove(model.exit_probability, cumulated=True), max_loops=3
            ).loop.cpu()
            for model, x in ((here, inputs), (there, moved))
        ]
        assert torch.equal(*loops)


def test_autoencoders_are_trained_and_spliced_where_the_states_are(device: torch.device) -> None:
    here, there = model_of("plain"), model_of("plain").to(device)
    inputs, answers = tokens(), []
    for model in (here, there):
        x = inputs.to(model.device)
        with torch.no_grad():
            states = model(x, n_loops=2, return_type="states")
        options: dict[str, Any] = {"n_features": 64, "k": 2, "steps": 8, "dead_after": 2}
        trained = features.train_autoencoder(states[1:].flatten(0, 2), **options)
        hooks = features.splice_hooks(model, trained, n_loops=2, ablate=[1], steer={2: 1.0})
        answers.append(model.run_with_hooks(x, n_loops=2, fwd_hooks=hooks))
    same(answers[1], answers[0])


RULES: dict[str, Any] = {
    "oracle": models.Oracle(),
    "confidence": models.MaxConfidence(),
    "of the batch": models.MaxConfidence(per="batch"),
    "residual": models.ResidualBelow(0.5),
    "kl": models.ReadoutKL(0.05),
    "acceleration": models.AccelerationBelow(0.5),
    "held": models.AnswerHeld(2),
    "entropy": models.EntropyBelow(0.4),
    "sure": models.ConfidenceAbove(0.9),
    "gate": models.GateAbove(lambda h: h[..., 0].sigmoid(), 0.8, cumulated=True),
}


@pytest.mark.parametrize("rule", RULES)
def test_stopping_rules(device: torch.device, rule: str) -> None:
    batch = Addition().sample(torch.tensor([2, 3, 4, 4]), generator=seeded())
    here, there = (
        models.run_until(
            m, b.inputs, RULES[rule], max_loops=8, mask=b.targets >= 0, n_loops=b.n_loops
        )
        for m, b in ((model_of("plain"), batch), (model_of("plain").to(device), batch.to(device)))
    )
    for name in ("loop", "logits", "state"):
        same(getattr(there, name), getattr(here, name))


# Studies


def _patching(model: Any, batch: Batch) -> Any:
    return interventions.patching_sweep(model, batch.inputs, batch.inputs.roll(1, 0), n_loops=2)


def _edges(model: Any, batch: Batch) -> Any:
    x = batch.inputs
    return edges.edge_study(model, x, x.roll(1, 0), n_loops=3, n_steps=2, curve_points=2)


STUDIES: dict[str, Callable[[Any, Any], Any]] = ASKED | {
    "edge_study": _edges,
    "convergence_study": lambda m, d: dynamics.convergence_study(
        m, d, n_loops=12, limit_steps=20, n_spectral=1
    ),
    "search_subspaces": lambda m, d: comparison.search_subspaces(
        m, d, "ripple", ranks=(1,), steps=2, pairs=comparison.SpreadPairs(pairs=64, same_value=0)
    ),
    "carry_study": lambda m, d: probing.carry_study(
        m, d, n=8, loops=[0, 4], n_short=4, n_train=48, n_test=48
    ),
    "patching_sweep": _patching,
    "local_stability_study": lambda m, d: dynamics.local_stability_study(
        m, d, n_loops=12, k=1, max_vectors=8, max_products=16, growth_loops=1, lyapunov_loops=8
    ),
    "reachability_study": lambda m, d: dynamics.reachability_study(
        m, d, n_loops=8, kicks=(0.01, 1.0), n_noise=1, n_others=1, n_draws=1
    ),
    "input_dependence_study": lambda m, d: dynamics.input_dependence_study(
        m, d, n_loops=8, n_sensitivity=1, n_probes=1
    ),
}
OF_KNOWN = {"edge_study", "search_subspaces", "patching_sweep"}
"""Studies that a model without training gives nothing to compare."""

PLANNED_ON_THE_CPU = {"compare_programs", "interchange_study", "head_study"}
"""Studies that bring their data to the model themselves."""

OF_EACH_EXAMPLE = {"convergence_study", "local_stability_study", "reachability_study"}
"""Studies that take as many steps as there are examples, or more."""

ON_THE_CPU_ALONE = {"edge_study"}

TIES = {"carry_study": 0.02}
"""Accuracies, in which a tie may fall to either side."""


@cache
def data_for(name: str) -> Any:
    if name in OF_A_TASK:
        return Addition()
    sizes = {"injected_carry_study": (16, 48), "compare_programs": (4, 8)}
    n, size = sizes.get(name, (5, 2 if name in OF_EACH_EXAMPLE else 12))
    return Addition().sample(n, batch_size=size, generator=seeded(), distribution="propagate")


def model_for(name: str) -> LoopedTransformer:
    if name in OF_KNOWN:
        return compile_program("ripple", max_length=7).model
    return model_of("two answers")


def _no_forward_derivative(*_: Any) -> Any:
    raise RuntimeError("no forward derivative")


@cache
def on_the_cpu(name: str) -> Any:
    return STUDIES[name](model_for(name), data_for(name))


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        *((name, True) for name in STUDIES if name not in ON_THE_CPU_ALONE),
        *((name, False) for name in sorted(PLANNED_ON_THE_CPU)),
    ],
)
def test_studies(name: str, moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decompile_little(monkeypatch)
    monkeypatch.setattr("loopinterp.dynamics.local_stability.LIMIT_LOOPS", 16)
    here, data = on_the_cpu(name), data_for(name)
    # PyTorch crashes where it differentiates forwards under a dispatch mode; the other way does.
    monkeypatch.setattr(torch.func, "jvp", _no_forward_derivative)
    with pretend_gpu() as device:
        data = data.to(device) if moved and isinstance(data, Batch) else data
        there = STUDIES[name](model_for(name).to(device), data)
    assert there.data.variables.keys() == here.data.variables.keys()
    for key, expected in here.data.variables.items():
        on_device, atol = there.data[key].values, TIES.get(name, 1e-4)
        if expected.values.dtype.kind == "f":
            np.testing.assert_allclose(
                on_device, expected.values, rtol=1e-3, atol=atol, err_msg=key
            )
        else:
            np.testing.assert_array_equal(on_device, expected.values, err_msg=key)


@pytest.mark.parametrize("kind", ["tuned", "jacobian"])
def test_fitted_lenses(kind: str) -> None:
    """Fitted where the model is, kept on the CPU, and read with anywhere."""
    fit: Any = {
        "tuned": lambda m, x: lenses.fit_tuned_lens(m, x, n_loops=3, steps=3, inside=True),
        "jacobian": lambda m, x: lenses.fit_jacobian_lens(
            m, x, n_loops=3, inside=True, targets="own", positions=[1, 2], draws=1
        ),
    }[kind]
    model, x = model_for("lens_study"), data_for("lens_study").inputs
    here = fit(model, x)
    with pretend_gpu() as device:
        there = fit(model.to(device), x.to(device))
        read = lenses.lens_study(model.to(device), x.to(device), lens=there, inside=True)
    assert there.matrix.device.type == there.offset.device.type == "cpu"
    torch.testing.assert_close(there.matrix, here.matrix, rtol=1e-3, atol=1e-4)
    on_cpu = lenses.lens_study(model.cpu(), x, lens=here, inside=True)
    np.testing.assert_allclose(read.data["kl"], on_cpu.data["kl"], rtol=1e-3, atol=1e-4)


def test_lengths_of_evidence(device: torch.device) -> None:
    here, there = model_of("learned"), model_of("learned").to(device)
    assert judged_lengths(there, Addition(), [3]) == judged_lengths(here, Addition(), [3])


def test_edges_are_refused_elsewhere() -> None:
    model, data = model_for("edge_study"), data_for("edge_study")
    with pretend_gpu() as device, pytest.raises(InputError, match=r"Pass model\.cpu\(\)"):
        _edges(model.to(device), data.to(device))


# Training

TRAINED: dict[str, dict[str, Any]] = {
    "tiny": {},
    "held": {"objective": {"hold_loops": 2}},
    "last": {"objective": {"kind": "last"}},
    "progressive": {"objective": {"kind": "progressive"}},
    "every": {"objective": {"kind": "every", "n_loops": 2, "weights": [1.0, 3.0]}},
    "drawn": {"objective": {"kind": "drawn", "n_loops": 4}},
    "shifted": {"objective": {"loop_scale": 1.5, "extra_loops": 1}},
    "muon": {"optimiser": {"kind": "muon", "warmup_steps": 4}},
    "by accuracy": {"curriculum": {"max_n": 3, "min_steps": 3}},
    "features": {
        "task_settings": {"format": "features"},
        "model": {"d_vocab": None, "d_features": 2},
    },
    "abacus": {"offset_per_example": True, "model": {**ABACUS, "relative_window": None}},
    "abacus on q and k": {
        "model": {**ABACUS, "abacus_target": "qk", "relative_window": None, "loop_norm": False}
    },
}


def trained(kind: str, **more: Any) -> TrainingConfig:
    values = TINY.to_dict() | more
    for key, value in TRAINED[kind].items():
        values[key] = {**values["model"], **value} if key == "model" else value
    return TrainingConfig.from_dict(values)


@pytest.mark.parametrize("kind", TRAINED)
def test_a_training_run_is_that_of_the_cpu_and_waits_for_nothing(
    device: torch.device, kind: str
) -> None:
    config = trained(kind, log_every=100, checkpoint_every=100)
    there = Trainer(config)
    assert there.device.type == device.type
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.trainer, "resolve_device", lambda _: torch.device("cpu"))
        here = Trainer(config)
    with no_waiting():
        there.advance()
        there.advance()
    metrics = [*there.read(), there.step()]
    assert [one["step"] for one in metrics] == [1, 2, 3]
    for one in metrics:
        assert one == pytest.approx(here.step(), rel=1e-4, abs=1e-6)
    here.step()
    with no_waiting():
        there.advance()
        with pytest.raises(WouldWait):  # to read is to wait, and is seen
            there.read()
    inputs = here.draw().inputs
    # Weights that change nothing, as biases of keys, are moved by rounding alone.
    with torch.no_grad():
        ours, theirs = (t.averaged_model()(inputs, n_loops=3) for t in (there, here))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", ["tiny", "held", "abacus on q and k"])
def test_seeds_trained_together_wait_for_nothing(device: torch.device, kind: str) -> None:
    configs = [trained(kind, seed=seed, log_every=100) for seed in (0, 1)]
    several, single = ([Trainer(config) for config in configs] for _ in range(2))
    with no_waiting():
        for _ in range(2):
            advance_together(several)
    for trainer, other in zip(several, single):
        for metrics in read(trainer):
            assert metrics == pytest.approx(other.step(), rel=1e-4, abs=1e-5)


def test_a_step_that_is_not_finite_changes_nothing_nor_do_those_after_it(
    device: torch.device,
) -> None:
    trainer = Trainer(trained("tiny", log_every=100, checkpoint_every=100))
    trainer.advance()
    trainer.read()
    shadow, moment = trainer.ema.shadow["unembedding.weight"], "exp_avg/unembedding.weight"
    weight = trainer.model.unembedding.weight
    with torch.no_grad():
        weight[0, 0] = torch.inf
    before = [x.detach().clone() for x in (weight, shadow, trainer.state()[0][moment])]
    with no_waiting():
        for _ in range(3):
            trainer.advance()
    with pytest.raises(InputError) as caught:
        trainer.state()
    assert caught.value.what == "training state" and caught.value.given.startswith("3 ")
    with pytest.raises(InputError) as caught:
        trainer.read()
    assert re.findall(r"loss|\d+", caught.value.what) == ["loss", "2"]
    assert (trainer.steps_done, trainer.ema.n_updates) == (1, 1)
    for old, new in zip(before, (weight, shadow, trainer.state()[0][moment])):
        assert torch.equal(old, new)
    with torch.no_grad():
        weight[0, 0] = 0.0
    assert trainer.step()["step"] == 2 and not torch.equal(before[1], shadow)


@pytest.mark.parametrize("door", ["load", "pretrained", "run", "folder", "model", "batch", "cache"])
def test_a_gpu_that_is_not_there_is_refused_at_every_door(
    door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = pretrained_run("parity", tmp_path / "run")
    model = run.model()
    batch = model.task.sample(3, batch_size=2)
    _, cached = model.run_with_cache(batch.inputs)
    doors: dict[str, Any] = {
        "load": lambda x: loopinterp.load(run.folder, device=x),
        "pretrained": lambda x: loopinterp.load_pretrained("parity", device=x),
        "run": lambda x: run.model(device=x),
        "folder": lambda x: type(model).from_pretrained(run.folder / "model", device=x),
        "model": lambda x: model.to(x),
        "batch": lambda x: batch.to(x),
        "cache": lambda x: model.run_with_cache(batch.inputs, device=x),
    }
    assert cached.to("cpu") is cached
    for device in ("cuda", torch.device("cuda")):
        with naming("device 'cuda'"):
            doors[door](device)
        with naming("device 'cuda'"):
            cached.to(device)
