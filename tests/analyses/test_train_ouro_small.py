"""A small Ouro on p-hop induction: its losses, the training of its gate, and what is measured."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from analyses import ouro_small_results as results
from analyses import train_ouro_small as script
from analyses.ouro_small_results import FILES, PAGE, as_tables, measure
from analyses.small_language_models import TASK, fresh
from analyses.tables_in_pages import PAGES, RESULTS, put
from loopinterp.adapters import adapt
from loopinterp.adapters.plain.language_models import OuroForCausalLM
from tests.adapters.published.ouro import native


@pytest.fixture(scope="module")
def model() -> OuroForCausalLM:
    model = script.build(3, seed=1)
    torch.nn.init.normal_(model.model.early_exit_gate.weight, std=0.5)
    return model


def test_exits_are_those_of_the_published_model(model: OuroForCausalLM) -> None:
    batch = TASK.sample(10, batch_size=4)
    loss, gate, right = script.run(model, batch)
    exits = script.log_exits(gate).exp()  # [loop, batch, pos]
    output = model(batch.inputs)
    torch.testing.assert_close(exits, output.exits.permute(2, 0, 1)[:, :, 1:])
    torch.testing.assert_close(exits.sum(0), torch.ones(4, 10))
    for loop in range(3):
        log_p = native(model, batch.inputs, loop + 1).log_softmax(-1)
        by_hand = -log_p.gather(-1, batch.targets.clamp(min=0)[..., None])[:, 1:, 0]
        torch.testing.assert_close(loss[loop], by_hand)
        assert torch.equal(right[loop], log_p.argmax(-1)[:, 1:] == batch.targets[:, 1:])


@pytest.mark.parametrize("ahead", [False, True])
def test_stage_two_trains_the_gate_alone_to_stop_where_no_loop_helps(
    ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "LENGTH", 12)
    model = script.build(3, seed=0)
    for name, value in model.named_parameters():
        if "layernorm_2" in name:  # the layers write nothing, so no loop after the first helps
            torch.nn.init.zeros_(value)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    script.train_gate(model, 60, seed=0, ahead=ahead)
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    _, gate, _ = script.run(model, TASK.sample(10, batch_size=8))
    wanted = torch.sigmoid(torch.tensor(script.SLOPE * script.LEAST_GAIN))  # at a gain of 0
    torch.testing.assert_close(gate.sigmoid()[1:], wanted.expand(2, 8, 10), atol=0.01, rtol=0)


@pytest.mark.parametrize(
    ("ahead", "stops"), [(False, [None, 0.0, 0.56]), (True, [0.0, 0.56, None])]
)
def test_labels_are_of_the_last_loop_or_of_the_next(
    ahead: bool, stops: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is better after its second loop, and no better after its third."""
    gate = torch.nn.Linear(3, 1)
    states = torch.eye(3)[:, None, None]  # another state after each loop, [loop, 1, 1, 3]
    losses = torch.tensor([2.0, 1.0, 1.0]).view(3, 1, 1)
    monkeypatch.setattr(script, "TASK", SimpleNamespace(sample=lambda *_, **__: None))  # not read
    monkeypatch.setattr(script, "run", lambda *_: (losses, gate(states)[..., 0], None))
    model: Any = SimpleNamespace(model=SimpleNamespace(early_exit_gate=gate))
    script.train_gate(model, 900, seed=0, ahead=ahead)
    for value, stop in zip(gate(states).sigmoid().flatten().tolist(), stops):
        assert stop is None or value == pytest.approx(stop, abs=0.05)


@torch.no_grad()
def test_measured_are_answers_and_exits_at_the_last_position(model: OuroForCausalLM) -> None:
    by_loop, rules = measure("looped", 0, model, 16)
    published = script.build(3, seed=1)
    published.load_state_dict(model.state_dict())
    stops, rights = [], []
    for p in range(1, 9):
        batch = fresh(p, 16)
        exits = published(batch.inputs).exits[:, -1]  # [batch, loop]
        stops.append((exits.cumsum(1) < 0.5).sum(1).clamp(max=2))
        of_p = by_loop.query("hops == @p").sort_values("loop")
        np.testing.assert_allclose(of_p["exit"], exits.mean(0), atol=1e-5)
        mean = float((exits * torch.arange(1, 4)).sum(1).mean())
        assert of_p["exit_loop"].iloc[0] == pytest.approx(mean, abs=1e-5)
        answers = [native(published, batch.inputs, t)[:, -1].argmax(-1) for t in (1, 2, 3)]
        right = torch.stack(answers) == batch.targets[:, -1]
        np.testing.assert_allclose(of_p["right"], right.float().mean(1))
        rights.append(right)
    own = rules.query("rule == 'gate at 0.5'").iloc[0]
    stop, right = torch.cat(stops), torch.cat(rights, 1).float()  # [example], [loop, example]
    assert own["loops"] == pytest.approx(float(stop.float().mean()) + 1)
    assert own["right"] == pytest.approx(float(right.gather(0, stop[None]).mean()))
    assert own["dealt"] == pytest.approx(float(right.mean(1)[stop].mean()), abs=1e-6)
    within = [r.float().mean(1)[s].mean() for r, s in zip(rights, stops)]
    assert own["dealt_within"] == pytest.approx(float(torch.stack(within).mean()), abs=1e-6)


@pytest.mark.slow
def test_a_second_run_measures_the_saved_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.md").write_text((PAGES / PAGE).read_text())
    small = ["--seed", "3", "--steps", "2", "--samples", "2", "--out", str(tmp_path / "run")]
    where = ["--results", str(tmp_path), "--page", str(tmp_path / "page.md")]
    monkeypatch.setattr(sys, "argv", ["train_ouro_small", *small, *where])
    script.main()
    first = [(tmp_path / file).read_text() for file in FILES]
    assert "loss" in capsys.readouterr().out
    script.main()
    assert "loss" not in capsys.readouterr().out
    assert first == [(tmp_path / file).read_text() for file in FILES]
    assert len(list((tmp_path / "run").glob("*.safetensors"))) == 4


def test_the_page_says_what_the_files_say() -> None:
    stored, text = [pd.read_csv(RESULTS / file) for file in FILES], (PAGES / PAGE).read_text()
    assert put(text, as_tables(*stored)) == text, "run python -m analyses.train_ouro_small"


def test_a_trained_model_is_reached_through_its_adapter(model: OuroForCausalLM) -> None:
    inputs = fresh(2, 4).inputs
    logits = adapt(model)(inputs, n_loops=2)
    torch.testing.assert_close(logits, native(model, inputs, 2))
    assert list(results.STAGES) == sorted(results.STAGES)  # tables rely on this order
