"""Ablation on known circuits: what the program says is needed, and what the tool says."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch

from loopinterp.benchmark import TRAINED, benchmark_models, known_models
from loopinterp.benchmark.mechanism_scores import (
    interchange_variables,
    judged_by_ablation,
    score_ablation,
    score_patching,
    used_parts,
)
from loopinterp.compiler import compile_program, distract, rotate
from loopinterp.tasks import get_task
from loopinterp.tasks.task import IGNORE

KINDS = ("zero", "mean", "resample")


@pytest.mark.parametrize(
    ("name", "zero", "informed"),
    [
        # What is shifted, the shift, and what becomes of it; head 0.0 computes nothing.
        ("sticky_ripple", {"head 1.0", "MLP 0", "MLP 1"}, {"head 1.0", "MLP 0", "MLP 1"}),
        ("carry_save", {"head 0.0", "MLP 0"}, {"head 0.0", "MLP 0"}),
        # MLP 0 says how far to look back, which depends on the loop alone.
        ("lookahead", {"head 1.0", "MLP 0", "MLP 1"}, {"head 1.0", "MLP 1"}),
    ],
)
def test_the_circuit_says_which_parts_lead_to_the_answer(name, zero, informed) -> None:
    compiled = compile_program(name, max_length=7)
    assert used_parts(compiled, informed=False) == zero
    assert used_parts(compiled, informed=True) == informed
    hidden = rotate(distract(compiled, seed=0), seed=0)
    assert used_parts(hidden, informed=False) == zero  # no distractor leads to an answer


@pytest.mark.parametrize("disguises", [[], [partial(distract, seed=0), partial(rotate, seed=0)]])
def test_each_head_and_mlp_is_judged_as_the_circuit_says(disguises) -> None:
    names = ["sticky_ripple", "lookahead", "parity", "copy"]
    for known in known_models(names, n=4, examples=32, disguises=disguises):
        scores = score_ablation(known)
        assert {key: score.value for key, score in scores.items()} == {
            f"ablated: {kind}": 1.0 for kind in KINDS
        }, known.name
        if disguises:
            assert all(score.control < 0.7 for score in scores.values())


def test_a_circuit_that_names_the_wrong_head_is_contradicted() -> None:
    compiled = distract(compile_program("sticky_ripple", max_length=7), seed=0)
    (head,) = compiled.circuit.heads
    wrong = dataclasses.replace(head, head=(head.head + 1) % compiled.model.config.n_heads)
    circuit = dataclasses.replace(compiled.circuit, heads=(wrong,))
    task = get_task("addition")
    batch = task.sample(5, batch_size=64, generator=torch.Generator().manual_seed(0))
    judged = judged_by_ablation(dataclasses.replace(compiled, circuit=circuit), batch)
    assert set(judged.loc[~judged["right"], "part"]) == {
        f"head {h.layer}.{h.head}" for h in (head, wrong)
    }


def test_of_a_trained_model_attention_is_needed_where_the_program_looks_to_the_left() -> None:
    (about,) = (m for m in benchmark_models(["ripple"]) if m.disguise == TRAINED)
    batch = about.task.sample(about.n, batch_size=64, generator=torch.Generator().manual_seed(0))
    judged = judged_by_ablation(about.compiled, batch)
    assert judged["part"].unique().tolist() == ["attention 0"]
    assert judged["ablation"].tolist() == list(KINDS)
    assert judged["used"].all() and judged["right"].all()


@pytest.mark.parametrize(("n_loops", "after"), [(0, [0, 1]), (1, [0, 1]), (2, [0, 1, 2])])
def test_states_are_interchanged_after_every_loop_of_a_run_that_has_one_at_least(n_loops, after):
    (known,) = known_models(["one_shot"], n=4, examples=32)
    subspaces = {"carry": known.compiled.circuit.subspace("carry")}
    runs = interchange_variables(dataclasses.replace(known, n_loops=n_loops), subspaces, seed=0)
    assert runs.data["loop"].values.tolist() == after


def test_answers_of_0_are_asked_like_any_other():
    (known,) = known_models(["prefix_xor"], n=4, examples=64)
    bases, targets = known.batch.inputs.clone(), known.batch.targets.clone()
    bases[:32, 1:] = 0
    targets[:32, 1:] = 0
    assert (targets[:, 0] == IGNORE).all()
    zeros = dataclasses.replace(known.batch, inputs=bases, targets=targets)
    scores = score_patching(dataclasses.replace(known, batch=zeros))
    assert scores["patched states"].value == 1
    assert scores["patched heads"].value < 1e-3 < scores["patched heads"].control
