"""No study says anything of a model whose weights, states or logits are not finite."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from loopinterp import comparison, dynamics, interventions, lenses, probing, training
from loopinterp.compiler import compile_program
from loopinterp.core.errors import HookError, InputError
from loopinterp.models import LoopedTransformer, iterate
from loopinterp.tasks import Addition, Batch

Study = Callable[[Any, Batch], object]

ON_PROTOCOL: dict[str, Study] = {
    "convergence": lambda model, batch: dynamics.convergence_study(model, batch),
    "extrapolation": lambda model, batch: dynamics.extrapolation_study(model, batch),
    "evaluate": lambda model, _: training.evaluate(model, Addition(), [4], n_samples=8),
    "compare": lambda model, batch: comparison.compare_programs(model, ["ripple"], batch),
    "decodability": lambda model, batch: comparison.decodability(model, batch, ["ripple"]),
    "reduction": lambda model, batch: comparison.reduction_study(
        model, batch, ranks=(1,), pairs=16
    ),
    "lens": lambda model, batch: lenses.lens_study(model, batch),
    "exits": lambda model, batch: lenses.exit_study(model, batch),
    "interchange": lambda model, batch: comparison.interchange_study(model, batch, "ripple"),
}
WITH_HOOKS: dict[str, Study] = {
    "carry": lambda model, _: probing.carry_study(model, Addition(), n=16),
    "stabilisation": lambda model, batch: dynamics.attention_stabilisation_study(model, batch),
    "attention": lambda model, batch: lenses.attention_study(model, batch.inputs, n_loops=4),
    "patching": lambda model, batch: interventions.patching_sweep(
        model, batch.inputs, batch.inputs.roll(1, 0), n_loops=4
    ),
    "probes": lambda model, batch: probing.probe_study(
        model, batch.inputs, {"token": batch.inputs}, n_loops=4
    ),
    "subspaces": lambda model, batch: comparison.search_subspaces(
        model, batch, "ripple", ranks=(1,), steps=2
    ),
    "heads": lambda model, batch: comparison.head_study(model, batch, ["ripple"]),
}


@cache
def batch() -> Batch:
    return Addition().sample(8, batch_size=16, generator=torch.Generator().manual_seed(0))


def broken_transformer(value: float) -> LoopedTransformer:
    model = compile_program("ripple", max_length=17).model
    with torch.no_grad():
        model.unembedding.bias[0] = value
    return model


class Foreign:
    """The four methods, with weights that nobody sees; what goes wrong, and after which loop."""

    def __init__(self, broken: str = "", loop: int = 1, example: int = 0) -> None:
        self.broken, self.loop, self.example = broken, loop, example

    def embed(self, inputs: torch.Tensor) -> torch.Tensor:
        e = torch.stack([inputs.float(), torch.ones(inputs.shape)], dim=-1)
        return e * torch.nan if self.broken == "input" else e

    def initial_state(self, e: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(e)

    def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        h = h + e
        if self.broken == "state":
            bad = h[..., 1].eq(self.loop).all(1)
            bad &= torch.arange(len(h)) >= self.example
            h = torch.where(bad[:, None, None], torch.nan, h)
        return h

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.inf if self.broken == "logits" else h


def loop_of(error: InputError) -> tuple[str, int]:
    """What is not finite, and after which loop."""
    name, loop = error.what.split(" after loop ")
    return name, int(loop)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", [*ON_PROTOCOL, *WITH_HOOKS])
def test_a_weight_that_is_not_finite_is_named_by_every_study(name: str, value: float) -> None:
    study = (ON_PROTOCOL | WITH_HOOKS)[name]
    with pytest.raises(InputError) as caught:
        study(broken_transformer(value), batch())
    assert caught.value.what == "weight unembedding.bias"
    assert caught.value.expected == "finite numbers"


@pytest.mark.parametrize("name", [*ON_PROTOCOL, *WITH_HOOKS])
def test_hooks_that_are_on_are_named_by_every_study(name: str) -> None:
    model = compile_program("ripple", max_length=17).model
    model.add_hook("loops.0.blocks.0.attn.hook_z", lambda z, hook: torch.zeros_like(z))
    with pytest.raises(HookError) as caught:
        (ON_PROTOCOL | WITH_HOOKS)[name](model, batch())
    assert caught.value.what == "model"
    assert re.search(r"'blocks\.\d+\.attn\.hook_z'$", caught.value.given)


@pytest.mark.parametrize("broken", ["state", "logits"])
@pytest.mark.parametrize("name", ON_PROTOCOL)
def test_a_foreign_model_is_refused_by_loop_and_example(name: str, broken: str) -> None:
    if (name, broken) == ("decodability", "logits"):
        return  # it reads states alone
    with pytest.raises(InputError) as caught:
        ON_PROTOCOL[name](Foreign(broken), batch())
    assert loop_of(caught.value)[0] == broken
    assert re.search(r"example \d+$", caught.value.given)


@pytest.mark.parametrize("name", ON_PROTOCOL)
def test_a_foreign_model_of_embeddings_that_are_not_finite_is_refused(name: str) -> None:
    with pytest.raises(InputError) as caught:
        ON_PROTOCOL[name](Foreign("input"), batch())
    assert loop_of(caught.value) == ("state", 1) and caught.value.expected == "finite numbers"


def test_the_loop_and_the_example_are_the_first_that_go_wrong() -> None:
    run = iterate(Foreign("state", loop=3, example=5), batch().inputs, 6)
    with pytest.raises(InputError) as caught:
        list(run)
    assert loop_of(caught.value) == ("state", 3)
    assert re.findall(r"\d+", caught.value.given) == ["11", "16", "5"]


def test_a_run_that_grows_without_bound_is_still_a_finding_of_the_dynamics() -> None:
    class Growing(Foreign):
        def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
            return 1e9 * h + e

    result = dynamics.convergence_study(Growing(), batch(), n_spectral=0)
    assert (result.data["limit_status"] == dynamics.Status.DIVERGED).all()
    assert int(dynamics.extrapolation_study(Growing(), batch()).data["exact"].sum()) == 0
    with pytest.raises(InputError) as caught:
        comparison.compare_programs(Growing(), ["ripple"], batch())
    assert loop_of(caught.value) == ("state", 6)


def test_a_whole_foreign_model_is_studied_as_before() -> None:
    for name in ("convergence", "extrapolation", "evaluate"):
        ON_PROTOCOL[name](Foreign(), batch())
