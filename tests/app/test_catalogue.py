from __future__ import annotations

import dataclasses
import importlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from loopinterp import comparison, decompiler, dynamics, probing
from loopinterp.app import catalogue, workflow
from loopinterp.app import study as registry
from loopinterp.app.catalogue import STUDIES
from loopinterp.app.session import Session
from loopinterp.app.study import Skip, SkipReason, Study, register_study, spell_skip
from loopinterp.compiler import compile_program
from loopinterp.core import results
from loopinterp.core.errors import InputError
from loopinterp.core.results import (
    Finding,
    Result,
    findings_of,
    load_result,
    registered_kinds,
    study,
)
from loopinterp.core.run_files import Owner
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig, LoopRule, bind
from loopinterp.pages import write_report
from loopinterp.pages.sections import SECTIONS
from loopinterp.programs import get_program
from loopinterp.tasks import Addition, get_task

BY_NAME = {study.name: study for study in STUDIES}


def studied(model: Any, cutoff: int) -> Session:
    """A model that adds up to the cutoff; nothing is saved."""
    owner = Owner(config="")
    return Session(model=model, task=Addition(), folder=Path("none"), owner=owner, cutoff=cutoff)


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

    def compare(model: Any, programs: Any, batches: Any, **_: Any) -> Any:
        given.extend(batches)
        return SimpleNamespace(verdict=SimpleNamespace(identified=None))

    monkeypatch.setattr(comparison, "compare_programs", compare)
    BY_NAME["programs"].run(studied(SimpleNamespace(n_ctx=room + 1), cutoff))  # BOS, and the bits
    assert [batch.n.unique().tolist() for batch in given] == [[n] for n in lengths]


@pytest.mark.parametrize("identified", ["ripple", None])
def test_a_models_own_program_is_a_candidate_where_it_is_none_of_the_stock(
    monkeypatch: pytest.MonkeyPatch, identified: str | None
) -> None:
    candidates: list[list[Any]] = []
    own = dataclasses.replace(get_program("ripple"), name="its own")
    result = SimpleNamespace(verdict=SimpleNamespace(identified=identified))

    def compare(model: Any, programs: list[Any], *_: Any, **__: Any) -> Any:
        candidates.append([*programs])
        return result

    monkeypatch.setattr(comparison, "compare_programs", compare)
    monkeypatch.setattr(decompiler, "finite_program", lambda *_: own)
    assert BY_NAME["programs"].run(studied(SimpleNamespace(n_ctx=99), 2)) is result
    expected = [False] if identified else [False, True]
    assert [own in programs for programs in candidates] == expected


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
    monkeypatch.setattr(catalogue, "_closest_program", lambda _: "ripple")
    model = studied(compile_program("ripple", max_length=12).model, 6)
    assert BY_NAME["subspaces"].skipped(model) is None
    with torch.no_grad():
        for weight in model.model.unembed.parameters():
            weight.zero_()
    assert BY_NAME["subspaces"].skipped(model) == Skip(SkipReason.NO_EFFECT)


@pytest.mark.parametrize("depth", [1, 4])
def test_of_a_model_of_one_loop_nothing_is_asked_from_loop_to_loop(depth: int) -> None:
    config = LoopedTransformerConfig(d_model=8, n_heads=2, d_vocab=6, d_vocab_out=2)
    model = LoopedTransformer(config)
    model.loop_rule = LoopRule(depth)
    silent = {s.name for s in STUDIES if s.skipped(studied(model, 4)) == Skip(SkipReason.ONE_LOOP)}
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


EXAMPLES = [
    (Skip(SkipReason.OTHER_TASK, {"asked": "addition", "task": "parity"}), "about addition and"),
    (Skip(SkipReason.NO_HOOKS, {"model": "Mine"}), "Mine has no hooks there"),
    (Skip(SkipReason.NO_PROGRAM, {"task": "maze"}), "solves maze"),
    (Skip(SkipReason.NO_ROOM, {"needed": 16, "room": 8}), "16 bits to be followed"),
]


@pytest.mark.parametrize("reason", SkipReason)
def test_every_reason_is_spelled(reason: SkipReason) -> None:
    example, part = next(
        ((skip, part) for skip, part in EXAMPLES if skip.reason is reason), (Skip(reason), "")
    )
    clause = spell_skip(example)
    assert part in clause and clause and not clause.endswith(".") and "{" not in clause


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class StateSize(Result, kind="state-size"):
    """How large the state is after each loop."""

    VARIABLES: ClassVar = {"size": "loop"}


@findings_of.register
def _(result: StateSize) -> list[Finding]:
    return [Finding(f"The state grows to {float(result.data['size'][-1]):.1f}.", value="large")]


@pytest.fixture
def of_ones_own(monkeypatch: pytest.MonkeyPatch) -> str:
    """A study that is registered here, with a kind and a section of the report."""
    registered_kinds()  # whatever the package has is there first
    monkeypatch.setattr(results, "_KINDS", dict(results._KINDS))
    monkeypatch.setattr(registry, "STUDIES", STUDIES[:])
    monkeypatch.setattr(workflow, "STUDIES", registry.STUDIES)

    @register_study("state-size", __name__, "convergence", tasks=("addition",))
    def _state_size(session: Session) -> Result:
        """How large?"""
        batch = session.sample(session.length(4), 8)
        with study(session.seed) as watch:
            states = bind(session.model, batch.inputs).run(session.n_loops(4))
            return StateSize.of(
                watch, size=[h.detach().norm(dim=-1).mean().item() for _, h in states]
            )

    return "state-size"


def test_a_study_that_is_registered_is_made_read_and_reported(
    barely_trained: Path, tmp_path: Path, of_ones_own: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(barely_trained, run)
    analysis = workflow.analyze_run(run, studies=[of_ones_own], progress=False)
    assert analysis.results.keys() == {of_ones_own}
    check_entry(registry.STUDIES[-1])
    assert registry.STUDIES[-1].about == "how large?"
    assert isinstance(load_result(analysis.files[of_ones_own]), StateSize)
    page = write_report(run, tmp_path / "report.html").read_text()
    section = page[page.index('<section id="convergence"') :].partition("</section>")[0]
    assert "The state grows" in section


def test_a_study_that_is_registered_is_skipped_for_other_tasks_and_has_one_name(
    of_ones_own: str,
) -> None:
    model = compile_program("parity", max_length=4).model
    session = dataclasses.replace(studied(model, 4), task=get_task("parity"))
    entry = registry.STUDIES[-1]
    skip = entry.skipped(session)
    assert skip and (skip.reason, skip.values["task"]) == (SkipReason.OTHER_TASK, "parity")
    with pytest.raises(InputError, match=r"^study:"):
        register_study(of_ones_own, __name__, "", kind="another")


def check_entry(entry: Study) -> None:
    """What every entry of the catalogue must hold, whoever registered it."""
    kind = registered_kinds()[entry.kind]
    assert kind.study == entry.name and kind.tasks == entry.tasks
    assert kind.section in {section.key for section in SECTIONS}
    importlib.import_module(kind.module)
    assert Result._kinds[entry.kind].__module__ == kind.module


@pytest.mark.parametrize("entry", STUDIES, ids=lambda entry: entry.name)
def test_an_entry_says_where_its_kind_is_and_which_section_shows_it(entry: Study) -> None:
    check_entry(entry)


def test_each_section_is_about_a_study_there_is() -> None:
    names = {entry.name for entry in STUDIES} | {"generalisation"}  # which `evaluate` makes
    assert {section.of_study for section in SECTIONS} <= names
