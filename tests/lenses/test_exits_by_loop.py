from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.compiler import compile_program
from loopinterp.core.errors import InputError
from loopinterp.dynamics import stream_measures
from loopinterp.lenses import ExitResult, exit_study
from loopinterp.models import (
    ConfidenceAbove,
    EntropyBelow,
    GateAbove,
    MaxConfidence,
    ReadoutKL,
    bind,
    run_until,
)
from loopinterp.tasks import Addition, Batch
from loopinterp.tasks.task import IGNORE
from tests.lenses.lens_toys import Scripted, tokens, transformer

LOOPS = 7


def scripted(seed: int = 0, n_examples: int = 12) -> tuple[Scripted, Batch]:
    """A model whose readouts are drawn, and right answers of which each is drawn as well."""
    g = torch.Generator().manual_seed(seed)
    model = Scripted(2 * torch.randn(LOOPS + 1, n_examples, 2, 2, generator=g))
    targets = torch.randint(0, 2, (n_examples, 2), generator=g)
    targets[0, 1] = IGNORE
    counts = torch.full((n_examples,), LOOPS)
    return model, Batch(inputs=model.inputs, targets=targets, n=counts, n_loops=counts)


def exact_of(model: Scripted, batch: Batch) -> list[list[bool]]:
    answers = model.logits.argmax(-1).tolist()
    targets = batch.targets.tolist()
    return [
        [all(w in (a, IGNORE) for a, w in zip(row, want)) for row, want in zip(loop, targets)]
        for loop in answers
    ]


def test_accuracy_agreement_and_the_oracle_are_those_of_plain_python() -> None:
    model, batch = scripted()
    result = exit_study(model, batch)
    exact = exact_of(model, batch)
    np.testing.assert_array_equal(result.data["exact"], exact)
    answers = model.logits.argmax(-1)
    same = (answers == answers[-1]).double()
    same[:, 0, 1] = same[:, 0, 0]  # of the first example one position is asked
    np.testing.assert_allclose(result.data["agreement"], same.mean(-1), rtol=1e-6)
    shares = [sum(row) / 12 for row in exact[1:]]
    assert result.best_loop() == (max(shares), 1 + shares.index(max(shares)))
    first = [next((t for t in range(1, 8) if exact[t][b]), LOOPS) for b in range(12)]
    ever_right = [any(exact[t][b] for t in range(1, 8)) for b in range(12)]
    assert result.oracle() == (sum(ever_right) / 12, sum(first) / 12)


def test_the_answer_of_another_is_looked_for_at_every_loop() -> None:
    model, batch = scripted()
    another = exit_study(model, batch).data["another"].values
    answers, targets = model.logits.argmax(-1).tolist(), batch.targets.tolist()
    for b in range(12):
        other = targets[b - 1]
        if other == targets[b]:
            assert np.isnan(another[b])
            continue
        hits = [
            all(w in (a, IGNORE) for a, w in zip(answers[t][b], other)) for t in range(1, LOOPS + 1)
        ]
        assert another[b] == any(hits)
    assert 0 < np.nanmean(another) < 1 and np.isnan(another).any()


def test_a_rule_stops_where_run_until_does() -> None:
    model, batch = scripted()
    rules = {"kl": ReadoutKL(0.5), "entropy": EntropyBelow(0.4), "sure": ConfidenceAbove(0.9)}
    result = exit_study(model, batch, rules=rules)
    exact, mask = exact_of(model, batch), batch.targets != IGNORE
    for name, rule in rules.items():
        stopped = run_until(model, batch.inputs, rule, max_loops=LOOPS, mask=mask)
        seen = stopped.scores.isfinite()
        np.testing.assert_allclose(
            result.data["score"].sel(rule=name).values[seen], stopped.scores[seen], rtol=1e-5
        )
        # Loop 0, at which no loop was made, is no exit here.
        score = result.data["score"].sel(rule=name).values
        ready = [[t for t in range(1, 8) if score[t, b] <= rule.tolerance] for b in range(12)]
        at = [min(loops, default=LOOPS) for loops in ready]
        assert float(result.data["own_loops"].sel(rule=name)) == pytest.approx(sum(at) / 12)
        right = sum(exact[t][b] for b, t in enumerate(at)) / 12
        assert float(result.data["own_exact"].sel(rule=name)) == pytest.approx(right)


def test_tolerances_go_from_none_to_all_and_the_control_is_the_mean_of_all_deals() -> None:
    model, batch = scripted()
    result = exit_study(model, batch)
    exact = np.array(exact_of(model, batch), dtype=float)
    for rule in result.data["rule"].values:
        at = result.data.sel(rule=rule)
        assert at["swept_loops"][0] == LOOPS
        assert at["swept_loops"].values[-1] == at["swept_loops"].values.min()
        assert (np.diff(at["tolerance"]) >= 0).all()
        for step in range(at.sizes["step"]):
            score, limit = at["score"].values, float(at["tolerance"][step])
            stops = [next((t for t in range(1, 8) if score[t, b] <= limit), 7) for b in range(12)]
            assert float(at["swept_loops"][step]) == pytest.approx(np.mean(stops))
            right = np.mean([exact[t, b] for b, t in enumerate(stops)])
            assert float(at["swept_exact"][step]) == pytest.approx(right)
            dealt = np.mean([[exact[t, b] for b in range(12)] for t in stops])
            assert float(at["swept_dealt"][step]) == pytest.approx(dealt)
        exact_at, dealt_at, _ = result.gain(str(rule))
        gaps = at["swept_exact"].values - at["swept_dealt"].values
        assert exact_at - dealt_at == pytest.approx(gaps.max())
        cost = result.cheapest(str(rule))
        good = at["swept_exact"].values >= result.best_loop()[0]
        assert cost == (at["swept_loops"].values[good].min() if good.any() else None)


class Signalled(Scripted):
    """A model with a gate that is open from an example's first right loop on."""

    def __init__(self, logits: Tensor, first: list[int]) -> None:
        super().__init__(logits)
        self.first = torch.tensor(first)

    def gate(self, h: Tensor) -> Tensor:
        return (h[:, :, 0] >= self.first[h[:, 0, 1].long()][:, None]).float()


@pytest.mark.parametrize("per_example", [False, True])
def test_a_gate_that_knows_is_the_oracle(per_example: bool) -> None:
    model, batch = scripted(5)
    exact = exact_of(model, batch)
    first = [next((t for t in range(1, 8) if exact[t][b]), LOOPS) for b in range(12)]
    signalled = Signalled(model.logits, first)

    def gate(h: Tensor) -> Tensor:
        return signalled.gate(h)[:, 0] if per_example else signalled.gate(h)

    result = exit_study(signalled, batch, gate=gate)
    assert result.data["rule"].values.tolist()[5:] == ["gate", "gate, cumulated"]
    for rule in ("gate", "gate, cumulated"):  # which are the same where a gate says 0 or 1
        own = (float(result.data[name].sel(rule=rule)) for name in ("own_exact", "own_loops"))
        assert tuple(own) == pytest.approx(result.oracle())
    # Each of the others knows nothing: what was drawn of its loops is not what was right.
    gains = [np.subtract(*result.gain(str(rule))[:2]) for rule in result.data["rule"].values]
    assert int(np.argmax(gains)) in (5, 6)


def test_states_are_measured_as_dynamics_measures_them() -> None:
    model, x = transformer("loop norm"), tokens(5, 4)
    result = exit_study(model, x, n_loops=5)
    assert not result.targets
    for loop, h, moved in stream_measures(bind(model, x), 5):
        at = result.data.sel(loop=loop)
        np.testing.assert_allclose(at["norm"], moved.norm.mean(1), rtol=1e-5)
        np.testing.assert_allclose(at["residual"], moved.residual.mean(1), rtol=1e-4)
        np.testing.assert_allclose(at["cosine"], moved.cosine.nanmedian(1).values, rtol=1e-4)
        p = model.readout(h).softmax(-1)
        np.testing.assert_allclose(at["confidence"], p.amax(-1).mean(1).detach(), rtol=1e-5)
        entropy = -(p * p.log()).sum(-1).mean(1)
        np.testing.assert_allclose(at["entropy"], entropy.detach(), rtol=1e-4)


def test_with_inputs_alone_right_is_what_the_last_loop_says() -> None:
    result = exit_study(transformer("loop norm"), tokens(16), n_loops=5)
    assert result.data["exact"].values[-1].all() and result.best_loop()[0] == 1
    assert (result.data["answer_loops"] == 5).all()
    assert "last loop" in result.findings()[0].text


def test_it_does_not_depend_on_how_many_examples_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = scripted()
    full = exit_study(model, batch)
    monkeypatch.setattr("loopinterp.dynamics.measures.CHUNK_BYTES", 1)
    parts = exit_study(model, batch)
    for name, values in full.data.items():
        np.testing.assert_allclose(parts.data[name], values, rtol=1e-5)


def test_a_model_that_holds_its_answer_can_be_left_early() -> None:
    model = compile_program("ripple", max_length=6).model
    result = exit_study(model, Addition(), n=5, batch_size=64)
    best, at = result.best_loop()
    share, mean = result.oracle()
    assert best == share == 1 and mean < at <= 6
    assert float(result.data["another"].mean()) < 0.2
    saving = result.findings()[1]
    assert saving.value and float(saving.value.split()[0]) < at


def test_what_is_never_right_costs_nothing_to_leave() -> None:
    model, batch = scripted()
    wrong = 1 - model.logits.argmax(-1)
    assert wrong.any()
    targets = torch.full_like(batch.targets, 7)
    never = exit_study(
        model, Batch(inputs=batch.inputs, targets=targets, n=batch.n, n_loops=batch.n_loops)
    )
    assert never.best_loop()[0] == 0 and never.oracle() == (0, LOOPS)
    assert never.cheapest("entropy") is None
    (finding,) = never.findings()
    assert finding.text.startswith("No example") and len(never.figures()) == 2
    assert not finding.value and "%" not in finding.text


@pytest.mark.parametrize("rules", [{"surest": MaxConfidence()}, {}])
def test_rules_that_see_all_loops_first_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        exit_study(transformer(), tokens(), n_loops=2, rules=rules)
    assert caught.value.what == "rules"


def test_what_asks_nothing_is_refused() -> None:
    model, batch = scripted()
    batch.targets[3] = IGNORE
    with pytest.raises(InputError) as caught:
        exit_study(model, batch)
    assert caught.value.what == "batch"
    with pytest.raises(InputError) as caught:
        exit_study(transformer(), tokens(), n_loops=2, gate=lambda h: h)
    assert caught.value.what == "gate"


def test_a_result_is_read_back_and_says_what_it_shows(tmp_path: Path) -> None:
    model, batch = scripted()
    result = exit_study(model, batch, gate=lambda h: h[..., 0] / 9)
    again = ExitResult.load(result.save(tmp_path))
    assert again.data.equals(result.data) and again.rules == result.rules
    assert [f.text for f in again.findings()] == [f.text for f in result.findings()]
    figures = result.figures()
    assert all(figure.caption and figure.control for figure in figures)
    names = {trace.name for trace in figures[0].plot.data if trace.name}
    rules = {"oracle", "gate", "entropy", "fixed budget"}
    assert rules <= names
    assert any("random stops" in name for name in names)


def test_a_gate_is_a_rule_like_any_other() -> None:
    rule = GateAbove(lambda h: h[..., 0] / 9, threshold=0.5)
    model, batch = scripted()
    stopped = run_until(model, batch.inputs, rule, max_loops=LOOPS)
    assert stopped.loop.tolist() == [5] * 12  # 5 of 9 is the first at a half or more
