"""The list of studies: on which inputs they are made, and what they say nothing of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loopinterp import circuits, dynamics, probing, studies
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, LoopRule
from loopinterp.rasp import compile_program
from loopinterp.saved_results import Owner
from loopinterp.studied_model import StudiedModel
from loopinterp.studies import STUDIES
from loopinterp.tasks import Addition

BY_NAME = {study.name: study for study in STUDIES}


def studied(model: Any, cutoff: int) -> StudiedModel:
    """A model that adds up to the cutoff; nothing is saved."""
    owner = Owner(config="")
    return StudiedModel(
        model=model, task=Addition(), folder=Path("none"), owner=owner, cutoff=cutoff
    )


def test_a_traceback_says_which_study_failed():
    names = [study.run.__name__ for study in STUDIES]
    assert names == ["_" + study.name.replace("-", "_") for study in STUDIES]


@pytest.mark.parametrize(
    ("cutoff", "room", "lengths"),
    [(10, 99, [20, 40]), (2, 99, [12, 24]), (2, 12, [6, 12]), (2, 3, [2, 3])],
)
def test_programs_are_told_apart_at_two_lengths_beyond_training_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch, cutoff: int, room: int, lengths: list[int]
) -> None:
    given = []
    monkeypatch.setattr(circuits, "compare_programs", lambda *args, **_: given.extend(args[2]))
    BY_NAME["programs"].run(studied(SimpleNamespace(n_ctx=room + 1), cutoff))  # BOS, and the bits
    assert [batch.n.unique().tolist() for batch in given] == [[n] for n in lengths]


def test_convergence_and_carries_are_followed_to_four_times_the_training_cutoff(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = []
    monkeypatch.setattr(
        dynamics, "convergence_study", lambda _, batch, **__: given.append(int(batch.n.max()))
    )
    monkeypatch.setattr(probing, "carry_study", lambda *_, n, **__: given.append(n))
    for name, cutoff in (("convergence", 10), ("wavefront", 10), ("wavefront", 2)):
        BY_NAME[name].run(studied(SimpleNamespace(), cutoff))
    assert given == [40, 40, 24]  # carries need room whatever the training was


def test_subspaces_are_looked_for_only_where_an_exchange_changes_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(studies, "_nearest", lambda _: "ripple")
    model = studied(compile_program("ripple", max_length=12).model, 6)
    assert BY_NAME["subspaces"].unsaid(model) == ""
    with torch.no_grad():
        for weight in model.model.unembed.parameters():
            weight.zero_()
    assert "no exchange of a state changes" in BY_NAME["subspaces"].unsaid(model)


@pytest.mark.parametrize("depth", [1, 4])
def test_of_a_model_of_one_loop_nothing_is_asked_from_loop_to_loop(depth: int) -> None:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    model = LoopedTransformer(config)
    model.loop_rule = LoopRule(depth)
    silent = {s.name for s in STUDIES if "makes one loop" in s.unsaid(studied(model, 4))}
    assert silent == (
        {s.name for s in STUDIES} - {"explorer", "attention", "ablation"} if depth == 1 else set()
    )


def test_a_run_goes_on_from_the_depth_that_a_model_was_trained_at() -> None:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    model = LoopedTransformer(config)
    model.loop_rule = LoopRule(4)
    found = BY_NAME["extrapolation"].run(studied(model, 12))
    assert isinstance(found, dynamics.ExtrapolationResult)
    assert (found.n_loops, found.trained_loops) == (40, 4)
    assert "right at its own 4 loops" in found.findings()[0].text
