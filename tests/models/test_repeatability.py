"""What does not repeat is refused on entry, by every study, with what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, WithVocabulary
from loopinterp.models.repeatability import need_repeatable
from loopinterp.tasks import Addition, as_batch
from tests.models.timed_toys import Counted, Timed
from tests.test_study_arguments import OF_A_TASK, STUDIES

HOOKED = {
    "attention_stabilisation_study",
    "attention_study",
    "probe_study",
    "head_study",
    "ablation_study",
    "edge_study",
}
"""They take models of ours alone, and refuse any other for that."""


class DropsFunctionally(Timed):
    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(dropout(h + 1, 0.3, self.training), e, 0)


class StartsAnywhere(Timed):
    def initial_state(self, e: Tensor) -> Tensor:
        return torch.randn_like(e)

    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(h, e, 0)


class EmbedsAnew(Timed):
    def embed(self, inputs: Tensor) -> Tensor:
        return dropout(super().embed(inputs), 0.3)


class ReadsAnew(Timed):
    def readout(self, h: Tensor) -> Tensor:
        return super().readout(dropout(h, 0.3))


class Remembers(Timed):
    """A state of its own, that no one sees: a mean of what it was called with."""

    kept: Tensor | float = 0.0

    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        self.kept = 0.9 * self.kept + 0.1 * h.mean()
        return super().step(h, e, 0) + self.kept


class CountsLate(Counted):
    """A counter that changes something at the fourth loop only."""

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        self.made += 1
        return Timed.step(self, h, e, int(self.made > 4))


class KeepsItsInput(Timed):
    """Injects what it embedded last, and not what it is given."""

    def embed(self, inputs: Tensor) -> Tensor:
        self.kept = super().embed(inputs)
        return self.kept

    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(h, self.kept[: len(h)], 0)


class SlowEveryThird(Counted):
    """Two fast loops and a slow one, by a counter that each embedding sets back."""

    def embed(self, inputs: Tensor) -> Tensor:
        self.made = 0
        return super().embed(inputs)

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        self.made += 1
        return Timed.step(self, h, e, int(self.made % 3 == 0))


class ReadsTheOthers(Timed):
    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(h, e, 0) - e.mean(0, keepdim=True)


class StartsByRow(Timed):
    """Seeded, but for the batch as a whole: an example starts otherwise in another row."""

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.randn(e.shape, generator=torch.Generator().manual_seed(0)).to(e)

    def step(self, h: Tensor, e: Tensor) -> Tensor:  # type: ignore[override]
        return super().step(h, e, 0)


CASES: list[tuple[Callable[..., Timed], str]] = [
    (Counted, "step"),
    (CountsLate, "step"),
    (DropsFunctionally, "step"),
    (Remembers, "step"),
    (StartsAnywhere, "initial_state"),
    (EmbedsAnew, "embed"),
    (ReadsAnew, "readout"),
    (KeepsItsInput, "step"),
    (SlowEveryThird, "step"),
    (ReadsTheOthers, "step"),
    (StartsByRow, "initial_state"),
]


@pytest.mark.parametrize(("kind", "method"), CASES)
def test_the_method_that_does_not_repeat_is_named(kind: Callable[..., Timed], method: str) -> None:
    model = kind()
    for asked in (model, WithVocabulary(model)):
        with pytest.raises(InputError) as error:
            need_repeatable(asked, torch.tensor([[0, 1, 2, 3], [3, 3, 0, 1]]))
        assert error.value.what == f"{method} of {type(model).__name__}"


def test_what_repeats_is_taken() -> None:
    x = torch.tensor([[0, 1, 2, 3]])
    for model in (Timed(), Timed().double(), Timed().bfloat16(), DropsFunctionally().eval()):
        need_repeatable(model, x)
        need_repeatable(WithVocabulary(model), x)


def test_our_own_models_are_not_run_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    model = LoopedTransformer(config)
    monkeypatch.setattr(LoopedTransformer, "bind", lambda *_, **__: pytest.fail("was bound"))
    need_repeatable(model, torch.tensor([[0, 1]]))


@pytest.mark.parametrize("name", sorted(STUDIES.keys() - HOOKED))
def test_every_study_refuses_a_step_that_counts(name: str) -> None:
    data = Addition() if name in OF_A_TASK else as_batch(Addition(), n=4, batch_size=8)
    with pytest.raises(InputError) as error:
        STUDIES[name](Counted(d_vocab_out=2), data)
    assert error.value.what == "step of Counted"
    assert "loop" in error.value.fix and ".eval()" in error.value.fix


@pytest.mark.parametrize("name", ["attention_dropout", "hidden_dropout_prob"])
def test_modules_that_drop_functionally_are_named_in_training_mode(name: str) -> None:
    from loopinterp.models.model_description import check_modules

    module: Any = torch.nn.Linear(2, 2)
    setattr(module, name, 0.1)
    with pytest.raises(InputError) as error:
        check_modules(torch.nn.Sequential(module))
    assert error.value.what == "module 0"
    check_modules(torch.nn.Sequential(module).eval())


def test_the_toy_declares_its_index() -> None:
    assert "loop" in inspect.signature(Timed().step).parameters
