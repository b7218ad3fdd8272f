"""Small TRM and HRM: their training, which a kill does not change, and what is measured of them."""

from __future__ import annotations

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from analyses import cell_relations, reasoner_models
from analyses import train_trm_small as training
from analyses import trained_reasoners as study
from analyses.papers import failed_puzzles, locality, one_blank, stable_failures
from analyses.tables_in_pages import put, replaced
from analyses.train_trm_small import KINDS, TASKS, Training, build, draw, fresh
from analyses.trained_reasoners_page import PAGE, as_tables, auc_interval
from loopinterp.adapters import adapt
from loopinterp.tasks import IGNORE
from loopinterp.tasks.maze import WAYS
from loopinterp.tasks.sudoku import units


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "N_TRAIN", 64)
    monkeypatch.setattr(training, "BATCH", 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_ends_with_the_same_weights(kind: str, tmp_path: Path) -> None:
    whole, first, second = (Training(kind, "sudoku", 3, 8) for _ in range(3))
    shown = [whole.step() for _ in range(8)]
    for _ in range(4):
        first.step()
    first.save(tmp_path / "state")
    second.load(tmp_path / "state")
    assert [second.step() for _ in range(4)] == shown[4:]
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_a_segment_of_training_is_one_of_the_adapter() -> None:
    """The states that a step carries on, and the loss of its first segment, by the adapter."""
    for kind in ("trm", "hrm"):
        one = Training(kind, "sudoku", 1, 4)
        model: Any = adapt(build(kind, "sudoku", 1).eval())
        shown = one.step()
        batch = one.pool[one.now["example"]]
        states = model(batch.inputs, n_loops=2, return_type="states")
        for part in ("z_H", "z_L"):
            torch.testing.assert_close(one.now[part], model.part(states[-1], part))
        log_p = model.readout(states[-1]).log_softmax(-1)
        asked = batch.targets != IGNORE
        each = -log_p.gather(-1, batch.targets.clamp(min=0)[..., None])[..., 0]
        answers = ((each * asked).sum(1) / asked.sum(1)).mean()
        right = ((log_p.argmax(-1) == batch.targets) | ~asked).all(1).float()
        stop, go_on = model.halting(states[-1]).unbind(-1)
        entropy = torch.nn.functional.binary_cross_entropy_with_logits
        loss = answers + 0.5 * entropy(stop, right)
        if kind == "hrm":
            later = model.halting(model(batch.inputs, n_loops=4, return_type="states")[-1])
            loss = loss + 0.5 * entropy(go_on, later.amax(-1).sigmoid())
        assert shown["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)


@pytest.mark.parametrize(("bias", "most"), [(9.0, 1), (-9.0, 8)])
def test_an_example_ends_where_the_head_halts_or_after_all_segments(bias: float, most: int) -> None:
    one = Training("trm", "sudoku", 0, 10**6)
    torch.nn.init.constant_(one.model.inner.q_head.bias, bias)
    counts = []
    for _ in range(16):
        before = one.now["example"].clone()
        was_halted = one.now["halted"]
        one.step()
        counts += one.now["segments"][one.now["halted"]].tolist()
        assert torch.equal(one.now["example"][~was_halted], before[~was_halted])
    assert np.median(counts) == most and max(counts) <= 8


def test_all_models_of_a_task_have_the_same_number_of_weights() -> None:
    for task in TASKS:
        sizes = {sum(x.numel() for x in build(kind, task, 0).parameters()) for kind in KINDS}
        assert len(sizes) == 1 and 130_000 < sizes.pop() < 145_000


def test_fresh_puzzles_are_new_and_differ() -> None:
    known = {tuple(x) for x in draw("sudoku", training.N_TRAIN, 0).inputs.tolist()}
    rows = [tuple(x) for x in fresh("sudoku", 50).inputs.tolist()]
    assert len({*rows}) == 50 and not known & {*rows}


def ways(inputs: list[int], start: int, width: int) -> dict[int, int]:
    """Steps to every cell of a maze, by breadth-first search."""
    steps, queue = {start: 0}, deque([start])
    while queue:
        cell = queue.popleft()
        for bit, (down, right) in enumerate(WAYS):
            if inputs[cell] >> bit & 1:
                there = cell + down * width + right
                if there not in steps:
                    steps[there] = steps[cell] + 1
                    queue.append(there)
    return steps


def test_relations_of_a_maze_are_its_ways() -> None:
    inputs = draw("maze", 3, 5).inputs
    masks = cell_relations.relations("maze", inputs)
    assert torch.equal(
        torch.stack([*masks.values()]).int().sum(0).int(), torch.ones(3, 16, 16).int()
    )
    for k, row in enumerate(inputs.tolist()):
        for start in (0, 6):
            steps = ways(row, start, 4)
            for there in range(16):
                (name,) = (name for name, mask in masks.items() if mask[k, start, there])
                away = abs(start // 4 - there // 4) + abs(start % 4 - there % 4)
                far = {0: "itself", 1: "open", 2: "way of 2", 3: "way of 3", 4: "way of 3"}
                expected = "walled" if away == 1 and steps[there] > 1 else far.get(steps[there])
                assert name.startswith(expected or "way of 5")


def test_relations_of_a_sudoku_are_its_units() -> None:
    masks = cell_relations.relations("sudoku", torch.zeros(1, 16, dtype=torch.long))
    for i in range(16):
        peers = {j for unit in units(2) if i in unit for j in unit} - {i}
        named = {j for name, m in masks.items() if name.startswith("peer") for j in range(16)
                 if m[0, i, j]}  # fmt: skip
        assert named == peers
    assert torch.equal(
        torch.stack([*masks.values()]).int().sum(0).int(), torch.ones(1, 16, 16).int()
    )


def test_influence_is_the_size_of_the_blocks_of_a_linear_map() -> None:
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(3, 3, 4, 4, generator=generator)  # [to, from, feature, feature]

    def step(h: Tensor) -> Tensor:
        return torch.einsum("ijab,njb->nia", maps, h)

    # Each of many examples has draws of its own.
    found = cell_relations.influence(step, torch.zeros(400, 3, 4), n_draws=2).mean(0)
    torch.testing.assert_close(found, maps.square().sum((-1, -2)), rtol=0.1, atol=0)


def test_shares_are_one_where_weights_are_even() -> None:
    inputs = draw("maze", 4, 5).inputs
    rows = pd.DataFrame(cell_relations.shares({"task": "maze"}, torch.ones(4, 16, 16), inputs))
    assert rows["times"].tolist() == pytest.approx([1.0] * len(rows))
    masks = cell_relations.relations("maze", inputs)
    only = cell_relations.shares({"task": "maze"}, masks["open"].float(), inputs)
    times = {row["relation"]: row["times"] for row in only}
    # A tree of 16 cells has 30 of 16 * 15 pairs of neighbours.
    assert times.pop("open") == pytest.approx(16 * 15 / 30) and not any(times.values())


PARTS = {
    **study.PARTS,
    "fates": failed_puzzles.fates,
    "restarts": stable_failures.restarts,
    "simple": one_blank.simple,
    "locality": locality.locality,
}
"""Of the script, and of papers' claims."""


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted(PARTS))
def test_every_part_measures_the_models(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one task each: what depends on the task, the relations of cells, has tests above."""
    for script in (failed_puzzles, stable_failures):
        monkeypatch.setattr(script, "LATER", 24)
    one_draw = partial(cell_relations.influence, seed=1)
    monkeypatch.setattr(locality, "influence", lambda step, h, n_draws: one_draw(step, h, 1))
    sizes: Any = (
        (failed_puzzles, "convergence_study", {"limit_steps": 32}),
        (study, "ablation_study", {"loops": [0, 15]}),
        (study, "patching_sweep", {"loops": [0, 15]}),
    )
    for script, name, size in sizes:
        made = getattr(script, name)
        small = lambda *a, made=made, size=size, **options: made(*a, **options | size)  # noqa: E731
        monkeypatch.setattr(script, name, small)
    task = "maze" if part in {"ablation", "attention", "exits", "fates", "probes"} else "sudoku"
    who = {"task": task, "model": "untrained hrm", "seed": 0}
    (model,) = (model for known, model in reasoner_models.models(tmp_path, [0]) if known == who)
    with torch.no_grad():
        rows = pd.DataFrame(list(PARTS[part](who, model, 4)))
    assert len(rows) and {*rows["task"]} == {task}


def test_rows_of_a_model_replace_its_former_ones(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    for model, value in (("trm", 1), ("hrm", 2), ("trm", 3)):
        who = {"task": "maze", "model": model, "seed": 0}
        rows = pd.DataFrame([{**who, "value": value}])
        replaced(file, rows, [*who]).to_csv(file, index=False)
    known = pd.read_csv(file)
    assert dict(zip(known["model"], known["value"])) == {"hrm": 2, "trm": 3}


def test_the_page_says_what_its_files_say() -> None:
    text = PAGE.read_text()
    assert put(text, as_tables()) == text, "run python -m analyses.trained_reasoners page"


def test_an_area_under_the_curve_has_its_interval() -> None:
    wrong = np.arange(40) < 20
    assert auc_interval(wrong, np.where(wrong, 2.0, 1.0)) == "1.00 (1.00–1.00)"
    assert auc_interval(wrong, np.ones(40)) == "0.50 (0.50–0.50)"
    assert auc_interval(wrong | True, np.ones(40)) == "–"
