from __future__ import annotations

from typing import Any

import pytest
import torch

from loopinterp.errors import InputError
from loopinterp.tasks import Addition, as_batch, as_prompts


def test_the_right_output_of_a_token_is_the_next_one() -> None:
    tokens = torch.tensor([[5, 3, 8, 3], [1, 2, 3, 4]])
    batch = as_prompts(tokens, n_loops=6)
    assert batch.targets.tolist() == [[3, 8, 3, -100], [2, 3, 4, -100]]
    assert torch.equal(batch.inputs, tokens)
    assert batch.n_loops.tolist() == [6, 6] and batch.n.tolist() == [4, 4]


@pytest.mark.parametrize(
    "tokens", [torch.ones(2, 3), torch.tensor([1, 2]), torch.tensor([[1]]), [[1, 2]]]
)
def test_what_is_no_prompts_is_refused(tokens: Any, no_type_checks: None) -> None:
    with pytest.raises(InputError, match=r"tokens: expected integers \[batch, pos\]"):
        as_prompts(tokens, n_loops=2)


def test_more_than_can_be_drawn_is_refused_before_it_is_drawn() -> None:
    with pytest.raises(InputError, match="n, batch_size: expected examples of at most"):
        as_batch(Addition(), n=10**8, batch_size=512)
