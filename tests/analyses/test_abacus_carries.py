"""Where a carry is, measured on models whose rule for it is known."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from analyses import abacus_carries
from analyses.abacus_carries import FILE, Sums, barred, changed_tokens, draw, interchanges, tables
from analyses.tables_in_pages import PAGES, put
from loopinterp.tasks import IGNORE
from loopinterp.tasks.abacus import ALPHABET
from loopinterp.zoo import load_pretrained


def test_the_page_is_what_is_stored() -> None:
    page = (PAGES / "results" / "abacus-addition.md").read_text()
    assert put(page, tables(json.loads(FILE.read_text()))) == page


@pytest.fixture(scope="module")
def sums() -> Sums:
    return draw(5, 60, seed=3, chains=0.4)


def test_sums_and_carries_are_those_of_integers(sums: Sums) -> None:
    for row in range(len(sums.a)):
        a, b = (int("".join(map(str, reversed(x[row].tolist())))) for x in (sums.a, sums.b))
        for k in range(sums.n + 1):
            assert sums.carry[row, k] == (a % 10**k + b % 10**k) // 10**k
    due = sums.by_query((sums.a + sums.b + sums.carry[:, :-1])[:, 1:] % 10)
    asked = due != IGNORE
    assert asked.sum() == len(sums.a) * (sums.n - 1)
    assert torch.equal(due[asked], sums.batch.targets[asked])


class Adder:
    """Adds, with the carry of the digits written so far or with that of the operands alone."""

    def __init__(self, rule: str) -> None:
        self.rule = rule

    def __call__(self, inputs: torch.Tensor, *, n_loops: int) -> torch.Tensor:
        n = inputs[0].tolist().index(ALPHABET.index("+"))
        a, b, written = inputs[:, :n], inputs[:, n + 1 : 2 * n + 1], inputs[:, 2 * n + 2 :]
        logits, carry = torch.zeros(*inputs.shape, 15), torch.zeros(len(a), dtype=torch.long)
        for k in range(n - 1):
            carry_out = (a[:, k] + b[:, k] + carry) > 9
            if self.rule == "written":  # a digit below an operand's has wrapped
                total = a[:, k] + b[:, k]
                carry_out = (total > 9) | ((total == 9) & (written[:, k] == 0))
            carry = carry_out.long()
            due = (a[:, k + 1] + b[:, k + 1] + carry) % 10
            logits[torch.arange(len(a)), 2 * n + 2 + k, due] = 1
        return logits


@pytest.mark.parametrize("rule", ["written", "operands"])
def test_changed_tokens_tell_an_adder_of_written_digits_from_one_of_operands(rule: str) -> None:
    adder: Any = Adder(rule)
    rows = {row["changed"]: row for row in changed_tokens(adder, 8)}
    other = {"written": "operands", "operands": "written"}[rule]
    assert rows["nothing"]["written"] == rows["nothing"]["operands"] == 1
    for changed in ("written digit", "operands"):
        assert rows[changed]["examples"] > 100
        assert (rows[changed][rule], rows[changed][other]) == (1, 0)


def test_shares_of_barred_and_interchanged_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that adds six digits: it needs the due column, and a state is its answer."""
    monkeypatch.setattr(abacus_carries, "SAMPLES", 64)
    model = load_pretrained("abacus")
    rows = {(x["barred"], x["loop"], x["head"]): x for x in barred(model, 6)}
    assert rows["nothing", "all", "all"]["right"] > 0.95
    assert rows["due", "all", "all"]["right"] < 0.2
    shares = [x for x in interchanges(model, 6) if x["loop"] == 4]
    for row in shares:
        total = sum(row[outcome] for outcome in ("base", "carry", "source", "other"))
        assert total == pytest.approx(1, abs=1e-3)
    whole, along, random, same = shares
    assert whole["source"] > 0.95  # the last state is the answer
    assert same["base"] > 0.95
    assert along["carry"] >= random["carry"]
