"""One input that a model works on, with the answer read after every loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from loopinterp.errors import InputError
from loopinterp.models.looped_model import bind
from loopinterp.models.model_description import describe_model
from loopinterp.rasp.trace import kept_from
from loopinterp.results import Result, study
from loopinterp.study_examples import examples_for

if TYPE_CHECKING:
    from loopinterp.models import LoopedModel
    from loopinterp.tasks import Batch, Task


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class WorkedExample(Result, kind="worked-example"):
    """What :func:`worked_example` returns.

    Arrays:
        answer: The class that is read out, from loop 0 on.
        right_share: Probability that the readout gives to the right class; NaN where none is.
        target: The right class; -1 where nothing is asked.

    Attributes:
        asks: What the task asks, in a sentence.
        by_hand: How the answer comes about on this input, in sentences ("" if nobody says).
        rows: What stands at each position, by what it is ("input", "carry in").
        symbols: A word for each class.
        n_examples: Examples among which this one is answered last.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        "answer": "loop pos",
        "right_share": "loop pos",
        "target": "pos",
    }

    asks: str
    by_hand: str
    rows: dict[str, list[str]]
    symbols: list[str]
    n_examples: int

    def right_from(self) -> int | None:
        """The loop from which the whole answer is right to the end; None if it ends wrong."""
        asked = self.data["target"] >= 0
        right = ((self.data["answer"] == self.data["target"]) | ~asked).all("pos").values
        return int(kept_from(torch.from_numpy(right))) if right[-1] else None


Explain = Callable[["Batch"], tuple[str, Mapping[str, Sequence[str]]]]
"""From a batch of one example to how it is done by hand, and what stands at each position."""


@torch.no_grad()
def worked_example(
    model: LoopedModel,
    data: Batch | Task,
    *,
    asks: str = "",
    explain: Explain | None = None,
    symbols: Sequence[str] | None = None,
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> WorkedExample:
    """The example of a batch whose whole answer is right last, loop by loop up to T(n).

    Args:
        model: Any looped model.
        data: Examples of one length, or a task to draw them from.
        asks: What the task asks, in a sentence.
        explain: How to say in words what an example is; inputs as they are by default.
        symbols: A word for each class; its number by default.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples, where a task is given.
        seed: Seed of what is drawn.

    Raises:
        InputError: If the examples are of several lengths.

    Example:
        >>> from loopinterp.rasp import compile_program
        >>> from loopinterp.tasks import Addition
        >>> batch = Addition().encode([(2, 1), (3, 1)], n=3)
        >>> found = worked_example(compile_program("ripple", max_length=4).model, batch)
        >>> found.rows["input"], found.right_from()     # 3 + 1, as its carry takes longer
        (['4', '3', '1', '0'], 2)
    """
    batch = examples_for(model, data, n=n, batch_size=batch_size, seed=seed)
    if len(lengths := batch.n_loops.unique().tolist()) != 1:
        raise InputError(
            "data",
            expected="examples of one length",
            given=f"examples that are asked for after {lengths} loops",
            fix="Sample them with one n.",
        )
    with study(seed, model=describe_model(model), n_examples=len(batch)) as watch:
        bound = bind(model, batch.inputs)
        logits = torch.stack([bound.readout(h) for _, h in bound.run(lengths[0])])
        asked, answers = batch.targets >= 0, logits.argmax(-1)
        right = ((answers == batch.targets) | ~asked).all(-1)
        # Of those that end right if there are any: what never gets there has no last loop.
        late = kept_from(right).where(right[-1], -1) if right[-1].any() else kept_from(right)
        one = int(late.argmax())
        example = batch[one : one + 1].to("cpu")
        by_hand, rows = explain(example) if explain else ("", {"input": example.inputs[0].tolist()})
        target = batch.targets[one].where(asked[one], -1)
        classes = target.clamp(min=0).expand(len(logits), -1)[..., None]
        shares = logits[:, one].softmax(-1).gather(-1, classes)[..., 0].double()
        return WorkedExample.of(
            watch,
            answer=answers[:, one],
            right_share=shares.masked_fill(~asked[one], float("nan")),
            target=target,
            asks=asks,
            by_hand=by_hand,
            rows={name: list(map(str, words)) for name, words in rows.items()},
            symbols=list(symbols or map(str, range(logits.shape[-1]))),
            n_examples=len(batch),
        )
