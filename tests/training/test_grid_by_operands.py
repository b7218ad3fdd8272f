"""The grid by operand lengths, against generation written out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.models import LoopedTransformer, LoopedTransformerConfig
from loopinterp.saved_results import load_result
from loopinterp.tasks import IGNORE, AbacusAddition, Addition
from loopinterp.tasks.task import Batch
from loopinterp.training import operand_grid
from loopinterp.training.answer_scores import scores_at


class Operands(AbacusAddition):
    """Operands of given lengths; what the abacus task is to offer itself."""

    drawn = 0

    def sample_operands(
        self, n_a: int, n_b: int, *, batch_size: int, generator: torch.Generator
    ) -> Batch:
        type(self).drawn += 1

        def operand(n: int) -> int:
            return int(torch.randint(10 ** (n - 1), 10**n, (), generator=generator))

        pairs = [(operand(n_a), operand(n_b)) for _ in range(batch_size)]
        return self.encode(pairs)


def small(**changes) -> LoopedTransformer:
    task = AbacusAddition()
    settings = {"d_model": 16, "n_heads": 2, "positions": "relative", "relative_window": 4}
    settings |= {"d_vocab": task.d_vocab, "d_vocab_out": task.d_vocab_out, "loop_norm": True}
    return LoopedTransformer(LoopedTransformerConfig(**settings | changes), seed=1)


def trained() -> LoopedTransformer:
    """A model that is right on some sums of one digit, and wrong on others."""
    model, task = small(), AbacusAddition()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        batch = task.sample(1, batch_size=64, generator=generator)
        logits = model(batch.inputs, n_loops=2)
        loss = torch.nn.functional.cross_entropy(logits.mT, batch.targets, ignore_index=IGNORE)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


@torch.no_grad()
def generated(model: LoopedTransformer, batch: Batch, loops: int) -> list[bool]:
    """Whether each answer is right that is written symbol by symbol, each read back."""
    right = []
    for row, target in zip(batch.inputs, batch.targets):
        places = (target != IGNORE).nonzero()[:, 0].tolist()
        tokens = row[: places[0] + 1]
        for _ in places:
            said = model(tokens[None], n_loops=loops)[0, -1].argmax()
            tokens = torch.cat([tokens, said[None]])
        right.append(tokens[places[0] + 1 :].tolist() == target[places].tolist())
    return right


def test_one_pass_scores_what_greedy_generation_writes() -> None:
    model, task = trained(), Operands()
    generator = torch.Generator().manual_seed(5)
    batch = task.sample_operands(1, 1, batch_size=40, generator=generator)
    found = scores_at(model, batch, [2])[2].exact.tolist()
    assert found == generated(model, batch, 2)
    assert 0 < sum(found) < 40, "both kinds of answers"


def test_a_grid_that_was_stopped_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    model, task, file = small(), Operands(), tmp_path / "cells.safetensors"
    options = {"loops": [1, 3], "n_samples": 6}
    whole = operand_grid(model, task, 2, **options)

    class Killed(Operands):
        def sample_operands(self, n_a, n_b, **rest) -> Batch:
            if (n_a, n_b) == (2, 1):
                raise KeyboardInterrupt
            return super().sample_operands(n_a, n_b, **rest)

    with pytest.raises(KeyboardInterrupt):
        operand_grid(model, Killed(), 2, unfinished=file, **options)
    Operands.drawn = 0
    again = operand_grid(model, task, 2, unfinished=file, **options)
    assert again.data.identical(whole.data) and Operands.drawn == 2
    # Cells of other weights are not taken for this model's.
    operand_grid(small(loop_norm=False), task, 2, unfinished=file, **options)
    assert Operands.drawn == 6


def test_a_grid_is_saved_and_shown(tmp_path: Path) -> None:
    grid = operand_grid(small(), Operands(), 2, loops=[1, 2], n_samples=4, trained_up_to=1)
    assert grid.data["exact_match"].dims == ("loop", "n_a", "n_b", "estimate")
    loaded = load_result(grid.save(tmp_path))
    (figure,) = loaded.figures()
    assert figure.section == "generalisation" and "Trained up to 1" in figure.caption
    assert [t["type"] for t in figure.plot.to_dict()["data"]].count("heatmap") == 2
    assert figure.data is not None and len(figure.data) == 2 * 2 * 2
    exact = grid.data["exact_match"].sel(estimate="value")
    assert np.isfinite(exact).all() and "up to 2 x 2" in loaded.findings()[0].text


def test_a_grid_of_zeros_has_no_best_number_of_loops() -> None:
    grid = operand_grid(small(), Operands(), 2, loops=[1, 2], n_samples=4)
    grid.data["exact_match"][:] = 0
    (said,) = grid.findings()
    assert said.good is False and said.value == "0.00 grid mean" and "loops:" not in said.text
    grid.data["exact_match"][:] = 0.5
    assert "As high: 2 loops" in grid.findings()[0].text


@pytest.mark.parametrize(
    ("model", "task", "changes", "message"),
    [
        (small(), Addition(), {}, "sample_operands"),
        (small(causal=False), Operands(), {}, "a causal one"),
        (small(), Operands(), {"loops": [2, 1]}, "numbers of loops, increasing"),
        (small(), Operands(), {"n_samples": 0}, "n_samples"),
    ],
    ids=["no operands", "not causal", "falling loops", "no examples"],
)
def test_what_makes_no_grid_is_refused(model, task, changes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        operand_grid(model, task, 2, **changes)
