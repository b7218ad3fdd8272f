from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.lenses import WorkedExample, worked_example
from loopinterp.models import LoopedTransformer
from loopinterp.rasp import compile_program
from loopinterp.tasks import Addition

# The carry of the second has the longest way, through four bits.
SUMS = [(0b00101, 0b01010), (0b01111, 0b00001), (0b00011, 0b00001)]


@pytest.fixture(scope="module")
def ripple() -> LoopedTransformer:
    return compile_program("ripple", max_length=6).model


def test_the_example_that_is_answered_last_is_worked(ripple: LoopedTransformer) -> None:
    result = worked_example(ripple, Addition().encode(SUMS, n=5))
    assert result.rows["input"] == ["4", "3", "1", "1", "1", "0"]
    assert result.right_from() == 4
    # The carry comes one bit further in every loop, until the sum is 16.
    answers = [row[1:] for row in result.data["answer"].values.tolist()]
    assert answers[1:5] == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
    assert result.data["target"].values.tolist() == [-1, 0, 0, 0, 0, 1]
    assert "2 of the 5 symbols right after 1 loop, and all of them from loop 4" in (
        result.findings()[-1].text
    )


def test_an_example_that_ends_wrong_is_said_to(ripple: LoopedTransformer) -> None:
    untrained = LoopedTransformer(ripple.config, seed=3)
    result = worked_example(untrained, Addition().encode(SUMS[:1], n=5))
    assert result.right_from() is None and "it gets this one wrong" in result.findings()[-1].text


def test_shares_are_those_of_the_right_class(ripple: LoopedTransformer) -> None:
    batch = Addition().encode(SUMS[1:2], n=5)
    shares = worked_example(ripple, batch).data["right_share"]
    logits = ripple(batch.inputs, n_loops=6)[0].double().softmax(-1)
    expected = logits.gather(-1, batch.targets[0].clamp(min=0)[:, None])[:, 0]
    assert bool(shares[:, 0].isnull().all())
    np.testing.assert_allclose(shares[-1, 1:], expected.detach()[1:], atol=1e-6)


def test_the_figure_is_a_table_of_words(ripple: LoopedTransformer, tmp_path: Path) -> None:
    def explain(example: Any) -> tuple[str, dict[str, list[str]]]:
        return "15 + 1 = 16.", {"input": list("sabcde"), "carry in": list(" 01111")}

    saved = worked_example(
        ripple, Addition().encode(SUMS, n=5), asks="Add.", explain=explain, symbols=["no", "yes"]
    ).save(tmp_path)
    result = WorkedExample.load(saved)
    assert result.findings()[0].text == "Add. 15 + 1 = 16."
    (figure,) = result.figures()
    (table,) = cast("Any", figure.plot).data
    assert list(table.y[:4]) == ["input", "carry in", "answer", "loop 1"]
    assert list(table.text[2]) == ["", "no", "no", "no", "no", "yes"]
    assert list(table.text[3]) == ["", "no", "no", "yes", "yes", "no"]
    assert np.isnan(np.asarray(table.z, float)[:3]).all()


def test_examples_of_several_lengths_are_refused(ripple: LoopedTransformer) -> None:
    batch = Addition().sample(torch.tensor([3, 4]), generator=torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match="one length"):
        worked_example(ripple, batch)
