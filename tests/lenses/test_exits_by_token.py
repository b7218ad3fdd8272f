"""Exits of each token by itself, and weighted exits, against plain Python."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from loopinterp.core.errors import InputError
from loopinterp.lenses import ExitResult, exit_study
from loopinterp.lenses.exits_by_loop import N_DEALS, Per
from loopinterp.models import ConfidenceAbove, EntropyBelow, ReadoutKL, run_frozen
from loopinterp.tasks import Batch
from loopinterp.tasks.task import IGNORE
from tests.lenses.lens_toys import Scripted

LOOPS, EXAMPLES, POS = 6, 9, 3
RULES = {"kl": ReadoutKL(0.5), "entropy": EntropyBelow(0.4), "sure": ConfidenceAbove(0.9)}


def scripted(seed: int = 0) -> tuple[Scripted, Batch]:
    """Drawn readouts and right answers; of some examples not all positions are asked."""
    g = torch.Generator().manual_seed(seed)
    model = Scripted(2 * torch.randn(LOOPS + 1, EXAMPLES, POS, 3, generator=g))
    targets = torch.randint(0, 3, (EXAMPLES, POS), generator=g)
    targets[0, 1:] = targets[4, 0] = IGNORE
    counts = torch.full((EXAMPLES,), LOOPS)
    return model, Batch(inputs=model.inputs, targets=targets, n=counts, n_loops=counts)


def asked(batch: Batch) -> list[tuple[int, int]]:
    return [(b, p) for b, p in (batch.targets != IGNORE).nonzero().tolist()]


def entropy(logits: list[float]) -> float:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    p = [w / sum(weights) for w in weights]
    return -sum(x * math.log(x) for x in p if x > 0)


def test_each_token_stops_where_its_own_entropy_is_low() -> None:
    model, batch = scripted()
    result = exit_study(model, batch, rules=RULES, per="token")
    tokens, logits = asked(batch), model.logits.tolist()
    right = [
        [max(range(3), key=logits[t][b][p].__getitem__) == batch.targets[b, p] for b, p in tokens]
        for t in range(LOOPS + 1)
    ]
    np.testing.assert_array_equal(result.data["exact"], right)
    assert result.data["example"].values.tolist() == [b for b, _ in tokens]
    at = result.data.sel(rule="entropy")
    scores = [[entropy(logits[t][b][p]) for b, p in tokens] for t in range(LOOPS + 1)]
    np.testing.assert_allclose(at["score"], scores, rtol=1e-5, atol=1e-6)
    for step, limit in enumerate(at["tolerance"].values):
        stops = [
            next((t for t in range(1, LOOPS + 1) if at["score"].values[t, k] <= limit), LOOPS)
            for k in range(len(tokens))
        ]
        hit = [right[t][k] for k, t in enumerate(stops)]
        drawn = [np.mean([right[t][k] for t in stops]) for k in range(len(tokens))]
        of = [[k for k, (b, _) in enumerate(tokens) if b == example] for example in range(EXAMPLES)]
        assert float(at["swept_loops"][step]) == pytest.approx(np.mean(stops))
        assert float(at["swept_exact"][step]) == pytest.approx(np.mean(hit))
        assert float(at["swept_dealt"][step]) == pytest.approx(np.mean(drawn))
        every = np.mean([all(hit[k] for k in ks) for ks in of])
        assert float(at["swept_examples"][step]) == pytest.approx(every)
        by_chance = np.mean([math.prod(float(drawn[k]) for k in ks) for ks in of])
        assert float(at["swept_examples_dealt"][step]) == pytest.approx(by_chance)
    first = [
        next((t for t in range(1, LOOPS + 1) if right[t][k]), LOOPS) for k in range(len(tokens))
    ]
    assert result.oracle()[1] == pytest.approx(np.mean(first))


def test_with_one_token_asked_of_each_example_both_are_the_same() -> None:
    model, batch = scripted(1)
    batch.targets[:, :2] = IGNORE
    batch.targets[:, 2] = torch.arange(EXAMPLES) % 3
    gate = torch.rand(LOOPS + 1, generator=torch.Generator().manual_seed(0))
    whole, parts = (
        exit_study(model, batch, rules=RULES, gate=lambda h: gate[h[..., 0].long()], per=per)
        for per in ("example", "token")
    )
    for name in whole.data:
        np.testing.assert_allclose(parts.data[name], whole.data[name], rtol=1e-5, err_msg=name)


def test_it_does_not_depend_on_how_many_examples_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = scripted()
    options = {"rules": RULES, "gate": lambda h: h[..., 0] / 9, "per": "token", "frozen": True}
    full = exit_study(model, batch, **options)
    monkeypatch.setattr("loopinterp.dynamics.measures.CHUNK_BYTES", 1)
    parts = exit_study(model, batch, **options)
    for name, values in full.data.items():
        np.testing.assert_allclose(parts.data[name], values, rtol=1e-5)


class Gated(Scripted):
    """A scripted model whose gate is given at each loop, example and position."""

    def __init__(self, logits: Tensor, opens: Tensor) -> None:
        super().__init__(logits)
        self.opens = opens  # [loop, example, pos], from loop 1 on

    def gate(self, h: Tensor) -> Tensor:
        return self.opens[int(h[0, 0, 0]) - 1, h[:, 0, 1].long()]


@pytest.mark.parametrize("per", ["example", "token"])
def test_a_weighted_exit_is_the_mixture_of_all_loops(per: Per) -> None:
    model, batch = scripted(2)
    opens = torch.rand(LOOPS, EXAMPLES, POS, generator=torch.Generator().manual_seed(3))
    gated = Gated(model.logits, opens)
    result = exit_study(gated, batch, rules=RULES, gate=gated.gate, per=per)
    probabilities = model.logits.softmax(-1).tolist()
    right, loops = {}, {}
    for b, p in asked(batch):
        left, mixture, mean = 1.0, [0.0] * 3, 0.0
        for t in range(1, LOOPS + 1):
            weight = left if t == LOOPS else left * float(opens[t - 1, b, p])
            left -= weight
            mean += t * weight
            mixture = [m + weight * x for m, x in zip(mixture, probabilities[t][b][p])]
        right[b, p] = max(range(3), key=mixture.__getitem__) == batch.targets[b, p]
        loops[b, p] = mean
    units = [[place] for place in right]
    if per == "example":
        units = [[place for place in right if place[0] == b] for b in range(EXAMPLES)]
    exact = [all(right[place] for place in unit) for unit in units]
    np.testing.assert_array_equal(result.data["weighted_exact"], exact)
    means = [np.mean([loops[place] for place in unit]) for unit in units]
    np.testing.assert_allclose(result.data["weighted_loops"], means, rtol=1e-5)
    assert result.data["weighted_dealt"].shape == (N_DEALS,)


def test_dealt_weights_bite_where_the_gate_knows_and_only_there() -> None:
    model, batch = scripted(4)
    hit = model.logits.argmax(-1)[1:] == batch.targets  # [loop, example, pos]
    gated = Gated(model.logits, hit.float())  # it opens where the answer is right
    knows = exit_study(gated, batch, gate=gated.gate, per="token")
    assert float(knows.data["weighted_exact"].mean()) == knows.oracle()[0]
    assert float(knows.data["weighted_dealt"].max()) < knows.oracle()[0]
    even = exit_study(model, batch, gate=lambda h: torch.full(h.shape[:2], 0.3), per="token")
    assert (even.data["weighted_dealt"] == even.data["weighted_exact"].mean()).all()
    one = Gated(model.logits, torch.zeros(LOOPS, EXAMPLES, POS))
    one.opens[2] = 1.0  # all of the third loop
    third = exit_study(one, batch, gate=one.gate, per="token")
    np.testing.assert_array_equal(third.data["weighted_exact"], third.data["exact"].sel(loop=3))
    assert (third.data["weighted_loops"] == 3).all()


class Leaning:
    """``h <- h / 2 + left neighbour / 4 + e``: every position is its logits."""

    def embed(self, inputs: Tensor) -> Tensor:
        table = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
        return table[inputs]

    def initial_state(self, e: Tensor) -> Tensor:
        return torch.zeros_like(e)

    def step(self, h: Tensor, e: Tensor) -> Tensor:
        left = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
        return h / 2 + left / 4 + e

    def readout(self, h: Tensor) -> Tensor:
        return 2 * h


def frozen_by_hand(model: Leaning, tokens: Tensor, mask: Tensor, limit: float) -> list[list[int]]:
    """Loops where tokens stop by entropy, in plain Python."""
    stops = []
    for row, counts in zip(model.embed(tokens).tolist(), mask.tolist()):
        h, loops = [[0.0] * 3 for _ in row], [LOOPS] * len(row)
        running = [True] * len(row)
        for t in range(1, LOOPS + 1):
            before = [[0.0] * 3, *h[:-1]]
            moved = [[x / 2 + y / 4 + z for x, y, z in zip(*each)] for each in zip(h, before, row)]
            h = [new if runs else old for new, old, runs in zip(moved, h, running)]
            for p, state in enumerate(h):
                if running[p] and counts[p] and entropy([2 * x for x in state]) <= limit:
                    loops[p], running[p] = t, False
        stops.append(loops)
    return stops


def test_a_frozen_token_stays_as_it_is_for_the_others() -> None:
    model, rule = Leaning(), EntropyBelow(0.4)
    tokens = torch.randint(0, 12, (8, 5), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 1] = False
    loops, logits = run_frozen(model, tokens, rule, max_loops=LOOPS, mask=mask)
    assert loops.tolist() == frozen_by_hand(model, tokens, mask, rule.tolerance)
    assert len(loops[mask].unique()) > 1
    # The last states of stopped tokens are still sure, and the study counts both.
    sure = [entropy(x) <= rule.tolerance + 1e-6 for x in logits[mask & (loops < LOOPS)].tolist()]
    assert all(sure)
    targets = torch.where(mask, tokens % 3, IGNORE)
    counts = torch.full((8,), LOOPS)
    batch = Batch(inputs=tokens, targets=targets, n=counts, n_loops=counts)
    result = exit_study(model, batch, rules={"sure": rule}, per="token", frozen=True)
    own = result.data.sel(rule="sure")
    assert float(own["frozen_loops"]) == pytest.approx(float(loops[mask].float().mean()))
    right = (logits.argmax(-1) == targets)[mask]
    assert float(own["frozen_exact"]) == pytest.approx(float(right.float().mean()))
    assert float(own["frozen_loops"]) != float(own["own_loops"])


def test_frozen_or_not_is_the_same_where_tokens_do_not_meet() -> None:
    model, batch = scripted()
    by_place = {"sure": ConfidenceAbove(0.9)}
    batch.targets[:, 1:], batch.targets[4, 0] = IGNORE, 1  # the toy reads the first position's loop
    own = exit_study(model, batch, rules=by_place, per="token", frozen=True).data.sel(rule="sure")
    for name in ("exact", "examples", "loops"):
        assert float(own[f"frozen_{name}"]) == pytest.approx(float(own[f"own_{name}"]))


def test_frozen_examples_are_refused() -> None:
    model, batch = scripted()
    with pytest.raises(InputError) as caught:
        exit_study(model, batch, frozen=True)
    assert caught.value.what == "per"


def test_a_result_of_tokens_is_read_back_and_names_them(tmp_path: Path) -> None:
    model, batch = scripted()
    result = exit_study(model, batch, gate=lambda h: h[..., 0] / 9, per="token", frozen=True)
    again = ExitResult.load(result.save(tmp_path))
    assert again.data.equals(result.data) and again.per == "token"
    assert [f.text for f in again.findings()] == [f.text for f in result.findings()]
    assert "tokens" in result.findings()[0].text
    assert all(figure.caption and figure.control for figure in result.figures())
