"""Somebody's own looped model, from a wrapper to the report, as the guide's page has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from loopinterp import analyze_model, load
from loopinterp.app.catalogue import STUDIES, SkipReason
from loopinterp.app.session import keep_in_memory
from loopinterp.app.study import spell_skip
from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.models import (
    LoopedTransformer,
    LoopedTransformerConfig,
    LoopRule,
    WithVocabulary,
)
from loopinterp.pages import write_report
from loopinterp.tasks import Addition, Copy, Parity
from loopinterp.training import Run
from loopinterp.training.run import LoopsByLength, RunError, RunFault

LETTERS = [7, 3, 5, 1, 0, 2]
"""The adder's own letters for 0+0, 1+0, 0+1, 1+1, the start and the padding."""


class SomebodysAdder(nn.Module):
    """Carries move one column a step: a recurrent net on columns of letters, with no attention."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.zeros(8, 3)  # of each letter: does it propagate, does it generate, no carry
        table[3, 0] = table[5, 0] = table[1, 1] = 1
        self.columns = nn.Embedding.from_pretrained(table, freeze=False)
        self.sharpness = nn.Parameter(torch.tensor(5.0))

    def read(self, letters: torch.Tensor) -> torch.Tensor:
        return self.columns(letters)

    def move(self, board: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        propagate, generate, _ = columns.unbind(-1)
        out = generate + propagate * board[..., 2]
        into = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], dim=1)
        return torch.stack([propagate, generate, into], dim=-1)

    def say(self, board: torch.Tensor) -> torch.Tensor:
        one = (board[..., 0] - board[..., 2]).abs()  # their exclusive or
        # It answers in letters too: 6 says nought, 4 says one.
        out = board.new_full((*one.shape, 8), -9.0)
        out[..., 4], out[..., 6] = self.sharpness * (one - 0.5), self.sharpness * (0.5 - one)
        return out


class Wrapped(nn.Module):
    reach = 1

    def __init__(self, net: SomebodysAdder, n_ctx: int | None) -> None:
        super().__init__()
        self.net, self.n_ctx = net, n_ctx

    def embed(self, letters: torch.Tensor) -> torch.Tensor:
        return self.net.read(letters)

    def initial_state(self, e: torch.Tensor) -> torch.Tensor:
        return e

    def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return self.net.move(h, e)

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        return self.net.say(h)


def _model(n_ctx: int | None = None) -> WithVocabulary:
    return WithVocabulary(Wrapped(SomebodysAdder(), n_ctx), tokens=LETTERS, answers=[6, 4]).eval()


@pytest.mark.usefixtures("small_studies")
def test_a_wrapped_model_is_evaluated_studied_and_reported(tmp_path: Path) -> None:
    out, origin = tmp_path / "adder", "written by somebody else"
    analysis = analyze_model(
        _model(n_ctx=9),
        Addition(),
        out,
        max_n=4,
        origin=origin,
        studies=["extrapolation", "programs"],
        samples=20,
        progress=False,
    )
    assert analysis.results["programs"].verdict.identified == "ripple"  # type: ignore[attr-defined]
    page = write_report(out).read_text()
    assert origin in page
    assert "cannot be shown" not in page
    assert sorted(p.name for p in (out / "results").iterdir()) == [
        "extrapolation.safetensors",
        "generalisation.safetensors",
        "programs.safetensors",
    ]
    assert not list(out.rglob("model*"))
    with pytest.raises(RunError) as caught:
        Run.load(out)
    assert caught.value.fault is RunFault.MODEL_IN_MEMORY
    assert "WithVocabulary" in caught.value.given


def test_what_looks_inside_a_loop_is_left_out_with_the_reason(tmp_path: Path) -> None:
    studied = keep_in_memory(_model(), Addition(), tmp_path, max_n=6, origin="made up")
    skips = {study.name: study.skipped(studied) for study in STUDIES}
    inside = {name for name, skip in skips.items() if skip and skip.reason is SkipReason.NO_HOOKS}
    assert inside == {"ablation", "attention", "heads", "stabilisation"}
    assert {name for name, skip in skips.items() if not skip} == {s.name for s in STUDIES} - inside
    with pytest.raises(InputError) as caught:
        analyze_model(
            _model(),
            Addition(),
            tmp_path / "other",
            max_n=3,
            studies=["attention"],
            samples=1,
            progress=False,
        )
    assert (skip := skips["attention"]) and spell_skip(skip) in caught.value.given


def test_a_folder_keeps_to_one_model(tmp_path: Path) -> None:
    class WithPair(Addition):
        def config(self) -> dict[str, Any]:
            return {"pair": (1, 2)}  # which JSON reads back as a list

    for _ in range(2):  # the same model may be gone on with
        keep_in_memory(_model(), Addition(), tmp_path, max_n=6, origin="made up")
        keep_in_memory(_model(), WithPair(), tmp_path / "pair", max_n=6, origin="made up")
    document = json.loads((tmp_path / "config.json").read_text())
    assert (document["in_memory"], document["max_n"]) == ("WithVocabulary", 6)
    with pytest.raises(InputError) as caught:
        keep_in_memory(_model(), Addition(), tmp_path, max_n=7, origin="made up")
    assert caught.value.what == f"output folder {tmp_path}"
    assert caught.value.given.endswith(": max_n")
    other: Any = _model()
    other.model.net.sharpness.data += 1
    with pytest.raises(InputError) as caught:
        keep_in_memory(other, Addition(), tmp_path, max_n=6, origin="made up")
    assert caught.value.given.endswith(": weights")
    other = _model()
    other.model.loop_rule = LoopRule(1)
    with pytest.raises(InputError) as caught:
        keep_in_memory(other, Addition(), tmp_path, max_n=6, origin="made up")
    assert caught.value.given.endswith(": model")
    with pytest.raises(InputError) as caught:
        keep_in_memory(_model(), "addition", tmp_path, max_n=7, origin="")  # type: ignore[arg-type]
    assert caught.value.what == "task"


@pytest.mark.parametrize("wrap", [lambda m: m, WithVocabulary])
def test_a_model_without_weights_is_not_taken_for_another_one(tmp_path: Path, wrap: Any) -> None:
    class Plain:
        """Somebody's model, which is no module."""

        def __init__(self, answer: int) -> None:
            self.answer = answer

        def embed(self, letters: torch.Tensor) -> torch.Tensor:
            return letters[..., None].float()

        def initial_state(self, e: torch.Tensor) -> torch.Tensor:
            return e

        def step(self, h: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
            return h

        def readout(self, h: torch.Tensor) -> torch.Tensor:
            return torch.cat([h - self.answer, self.answer - h], -1)

    keep_in_memory(wrap(Plain(0)), Addition(), tmp_path, max_n=6, origin="made up")
    with pytest.raises(InputError) as caught:
        keep_in_memory(wrap(Plain(1)), Addition(), tmp_path, max_n=6, origin="made up")
    assert caught.value.what == f"output folder {tmp_path}"
    assert "without weights" in caught.value.given and "torch.nn.Module" in caught.value.fix


@pytest.mark.usefixtures("no_type_checks")
def test_only_what_a_run_can_hold_is_made_one(tmp_path: Path) -> None:
    class Subclass(LoopedTransformer):
        def run_loop(self, *args: Any, **options: Any) -> torch.Tensor:
            return -super().run_loop(*args, **options)

    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    model, shared = LoopedTransformer(config), {"max_n": 4, "origin": "made up"}

    def refused(what: str, part: str, model: Any, task: Any = Addition()) -> None:  # noqa: B008
        with pytest.raises(InputError) as caught:
            Run.from_model(model, task, tmp_path / "run", **shared)  # type: ignore[arg-type]
        assert caught.value.what == what
        assert part in f"{caught.value.expected} {caught.value.given}"
        assert not (tmp_path / "run").exists()

    refused("model", "a Subclass", Subclass(config))
    refused("task", "'addition'", model, "addition")
    refused("model", "the tokens of task 'parity'", model, Parity())
    refused("model", "one of 'parity'", compile_program("parity", max_length=6).model, Copy())
    model.loop_rule = LoopRule(9, of_length=lambda n_pos: 2 * n_pos)
    refused("loop_rule of the model", "T(n) of task 'addition'", model)
    model.loop_rule = LoopRule(5, of_length=LoopsByLength(Addition()))
    Run.from_model(model, Addition(), tmp_path / "run", **shared)  # type: ignore[arg-type]
    again = load(tmp_path / "run")
    Run.from_model(again, Addition(), tmp_path / "again", **shared)  # type: ignore[arg-type]


def test_load_gives_the_model_of_a_run_with_its_task_at_hand(tmp_path: Path) -> None:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    untrained, task = LoopedTransformer(config, seed=3), Addition()
    Run.from_model(untrained, task, tmp_path / "run", max_n=4, origin="made up")
    model = load(tmp_path / "run")
    assert isinstance(model, LoopedTransformer) and not model.training
    assert model.task == task and untrained.task is None
    batch = model.task.encode([(3, 5)], n=4)
    assert torch.equal(model(batch.inputs, n_loops=5), untrained(batch.inputs, n_loops=5))


@pytest.mark.slow
@pytest.mark.usefixtures("small_studies")
def test_every_study_that_needs_no_hooks_is_made(tmp_path: Path) -> None:
    model = _model(n_ctx=17)  # room for the least carries that are followed
    analysis = analyze_model(model, Addition(), tmp_path, max_n=4, samples=20, progress=False)
    assert analysis.skipped.keys() == {"ablation", "attention", "heads", "stabilisation"}
    assert analysis.results.keys() == {study.name for study in STUDIES} - analysis.skipped.keys()
    page = write_report(tmp_path).read_text()
    assert "cannot be shown" not in page
    assert all(spell_skip(skip) in page for skip in analysis.skipped.values())
