"""Whether a model answers without seeing the answer, where that stands in its input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loopinterp.errors import InputError
from loopinterp.models.looped_model import bind
from loopinterp.models.model_description import device_of
from loopinterp.study_examples import fit_to_model
from loopinterp.tasks.task import IGNORE
from loopinterp.tasks.token_by_token import TokenByToken

if TYPE_CHECKING:
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.tasks.task import Task

EXAMPLES = 8
"""Examples on which a model is tried."""

ROUNDING = 1e-3
"""Change of the logits, as a share of the largest, that counts for nothing."""


@torch.no_grad()
def need_unseen_answers(task: Task, model: LoopedModel | Any, n: int) -> None:
    """Raise if a model of a task that is answered token by token looks ahead in its input.

    It is given a few inputs, and each of them with another answer behind the place where the first
    token of the answer is asked for: there it has to say the same.

    Raises:
        InputError: If it does not.
    """
    if not isinstance(task, TokenByToken):
        return
    generator = torch.Generator().manual_seed(0)
    batch = task.sample(n, batch_size=EXAMPLES, generator=generator).to(device_of(model))
    batch = fit_to_model(model, batch)
    asked = batch.targets != IGNORE
    first, last = asked.int().argmax(1), int(batch.n_loops.max())
    # What stands behind a place where a token is asked for is that token: put another one there.
    written = torch.nn.functional.pad(asked[:, :-1], (1, 0))
    known = batch.inputs[written].unique()
    other = batch.inputs.clone()
    other[written] = known[(torch.searchsorted(known, other[written]) + 1) % len(known)]

    def said(inputs: Tensor) -> Tensor:
        bound = bind(model, inputs)
        *_, (loop, state) = bound.run(last, may_diverge=True)
        return bound.read(state, loop)[torch.arange(len(inputs), device=inputs.device), first]

    once, of_other = said(batch.inputs), said(other)
    if (of_other - once).abs().max() > ROUNDING * once.abs().max():
        raise InputError(
            "model",
            expected="one whose answer at a position depends on no later one, as the right answer "
            f"stands in the input of task {task.name!r}",
            given="logits that change with the tokens after their position",
            fix="Let no position see a later one, as with a causal mask.",
        )
