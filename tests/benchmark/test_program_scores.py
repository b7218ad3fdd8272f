"""Programs on the benchmark: an equal one, none, or a false name."""

from __future__ import annotations

from functools import cache

import pandas as pd
import pytest

from loopinterp.benchmark import (
    KnownCircuit,
    benchmark_models,
    by_comparing,
    by_decompiling,
    score_program,
)
from loopinterp.circuits import Decompiled
from loopinterp.circuits.decompiler.claim import INTERCHANGED
from loopinterp.errors import InputError
from loopinterp.rasp import get_program
from loopinterp.rasp.mutations import near_misses_by_kind

SCORES = "loopinterp.benchmark.program_scores"


@cache
def known_circuit(name: str) -> KnownCircuit:
    (about,) = benchmark_models([name])
    return KnownCircuit(about, about.compiled, *about.pairs(), {})


def test_the_same_program_in_other_words_is_equivalent() -> None:
    (negated,) = near_misses_by_kind("ripple")["negated"]
    (row,) = score_program(lambda _: negated, known_circuit("ripple.bare")).to_dict("records")
    assert row == {"outcome": "equivalent", "told_apart": 0}


def test_a_near_miss_is_a_false_name() -> None:
    (row,) = score_program(
        lambda _: get_program("ripple_held_2"), known_circuit("ripple.bare")
    ).to_dict("records")
    assert row["outcome"] == "false name"
    assert 0 < row["told_apart"] < 1


def test_none_is_no_name() -> None:
    (row,) = score_program(lambda _: None, known_circuit("ripple.bare")).to_dict("records")
    assert row["outcome"] == "no program"


def test_the_name_of_a_program_is_not_a_program() -> None:
    with pytest.raises(InputError, match=r"a LoopProgram.*got str"):
        score_program(lambda _: "ripple", known_circuit("ripple.bare"))  # type: ignore[arg-type, return-value]


def test_the_comparison_names_the_program_if_it_is_listed_and_no_other_if_not() -> None:
    known = known_circuit("ripple.distracted-rotated")
    found = by_comparing(known.exercise)
    assert found is not None and found.name == "ripple"
    assert by_comparing(known.exercise, left_out="ripple") is None


def test_a_task_with_one_program_has_no_rival() -> None:
    known = known_circuit("parity.bare")
    assert by_comparing(known.exercise, left_out="parity") is None


def test_the_decompiler_is_told_nothing_and_reads_it_off() -> None:
    known = known_circuit("prefix_xor.rotated-permuted")
    assert score_program(by_decompiling, known)["outcome"].tolist() == ["equivalent"]


def test_a_program_that_is_only_nearly_right_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    known = known_circuit("ripple.bare")
    held = get_program("ripple_held_2")
    rows = [(5, what, 399, 400, 90) for what in ("undisturbed", *INTERCHANGED)]
    evidence = pd.DataFrame(rows, columns=["n", "what", "agree", "of", "inputs"])
    for agree, outcome in ((399, "no program"), (400, "false name")):
        found = Decompiled(held, closest=held, evidence=evidence.assign(agree=agree))
        monkeypatch.setattr(f"{SCORES}.decompile", lambda *_, found=found, **__: found)
        assert score_program(by_decompiling, known)["outcome"].tolist() == [outcome]
