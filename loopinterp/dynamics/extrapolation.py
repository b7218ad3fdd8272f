"""Loop extrapolation: answers when the model runs past T(n)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import PositiveInt

from loopinterp.core.boundary import Loops, checked
from loopinterp.core.errors import check_integer
from loopinterp.core.results import Result, study
from loopinterp.core.settings import Seed
from loopinterp.core.text import track
from loopinterp.dynamics.measures import (
    AfterLoops,
    beside_float32,
    correctness,
    counted_examples,
    exact_match,
    gather,
    likeliest,
    state_chunks,
    stream_measures,
)
from loopinterp.models.iteration import bind, no_autocast
from loopinterp.models.study_examples import answered_after

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from loopinterp.models.protocol import LoopedModel
    from loopinterp.tasks.task import Batch, Task


class AnswerFate(Enum):
    """Whether an answer is right at T(n), after the last loop, and in between."""

    STABLE = "right and stays right"
    LOST_BETWEEN = "right at both, lost in between"
    LOST = "right, then lost"
    GAINED = "wrong, then found"
    WRONG = "wrong at both"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExtrapolationResult(AfterLoops, Result, kind="extrapolation"):
    """Exact match by loop, far past T(n); loop 0 is the initial state.

    Arrays:
        exact, accuracy: Whether every asked position is right, and the share that is.
        residual, norm: Means over asked positions (:class:`LoopMeasures`).
        contraction, cosine: Medians over asked positions.
        residual_max: Residual of the whole sequence in the maximum norm.
        length, answer_loops: Problem length and T(n).
        float32_exact: In half precision: ``exact`` of the same weights in float32.

    Attributes:
        trained_loops: Most loops in training, marked in the figure.
        answered_after: The loops after which the answer is read, in words.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("exact", "accuracy", "residual"), "loop batch"),
        **dict.fromkeys(("residual_max", "norm", "contraction", "cosine"), "loop batch"),
        **dict.fromkeys(("length", "answer_loops"), "batch"),
        "float32_exact": "loop batch",
    }
    OPTIONAL: ClassVar[frozenset[str]] = frozenset(("float32_exact",))

    trained_loops: int | None = None
    answered_after: str = "T(n)"

    def at_answer(self) -> xr.DataArray:
        """Exact match of each example after T(n) loops."""
        return self.data["exact"].sel(loop=self.data["answer_loops"])

    def decided_by_rounding(self) -> int | None:
        """Examples right in one precision only, at T(n) or at the end; None for a float32 run."""
        if "float32_exact" not in self.data:
            return None
        differs = self.data["exact"] != self.data["float32_exact"]
        at_answer = differs.sel(loop=self.data["answer_loops"])
        return int((at_answer | differs.isel(loop=-1)).sum())

    def fates(self) -> dict[AnswerFate, int]:
        """Number of examples of each fate."""
        exact, loop = self.data["exact"], self.data["loop"]
        first, last = self.at_answer(), exact.isel(loop=-1)
        always_right = exact.where(loop >= self.data["answer_loops"], other=True).all("loop")
        fates = {
            AnswerFate.STABLE: always_right,
            AnswerFate.LOST_BETWEEN: first & last & ~always_right,
            AnswerFate.LOST: first & ~last,
            AnswerFate.GAINED: ~first & last,
            AnswerFate.WRONG: ~first & ~last,
        }
        return {fate: int(examples.sum()) for fate, examples in fates.items()}


@checked
def extrapolation_study(
    model: LoopedModel,
    data: Batch | Task,
    *,
    n_loops: Loops | None = None,
    trained_loops: PositiveInt | None = None,
    n: PositiveInt | None = None,
    batch_size: PositiveInt | None = None,
    seed: Seed = 0,
) -> ExtrapolationResult:
    """Run far past T(n) and score the readout after every loop.

    Args:
        n_loops: At least the longest T(n) of the batch; ten times that by default.
        trained_loops: Most loops in training.
    """
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch, counted = counted_examples(model, data, needs_loops=n_loops is None, **drawn)
    longest = int(batch.n_loops.max())  # T(n) of the longest
    n_loops = 10 * longest if n_loops is None else n_loops
    check_integer("n_loops", n_loops, least=max(1, longest))
    settings = {"n_loops": n_loops, "n_examples": len(batch)}
    about, precise = beside_float32(model, batch.inputs)
    with study(seed, **about, **settings) as watch:
        parts = []
        for rows in state_chunks(model, batch, 4):
            part = _follow(model, batch[rows], counted[rows], n_loops)
            if precise is not None:
                with no_autocast(batch.inputs.device):
                    exact = _follow(precise, batch[rows], counted[rows], n_loops)["exact"]
                part["float32_exact"] = exact
            parts.append(part)
        return ExtrapolationResult.of(
            watch,
            coords={"loop": range(n_loops + 1)},
            **gather(ExtrapolationResult, parts),
            length=batch.n,
            answer_loops=batch.n_loops,
            trained_loops=trained_loops,
            answered_after=answered_after(model),
        )


@torch.no_grad()
def _follow(model: LoopedModel, batch: Batch, counted: Tensor, n_loops: int) -> dict[str, Tensor]:
    share = counted / counted.sum(dim=1, keepdim=True)  # weight of each position in a mean
    arrays: dict[str, list[Tensor]] = defaultdict(list)
    run = stream_measures(iteration := bind(model, batch.inputs), n_loops)
    for loop, h, measures in track(run, "loops", total=n_loops + 1):
        right = correctness(likeliest(iteration.read(h, loop)), batch.targets)  # [batch, pos]
        arrays["exact"].append(exact_match(right).bool())
        arrays["accuracy"].append(((right == 1) * share).sum(dim=1).float())
        arrays["residual_max"].append(measures.residual_max.float())
        for name in ("residual", "norm"):
            # Weighted by position, [batch, pos]
            values = torch.where(counted, getattr(measures, name) * share, 0)
            arrays[name].append(values.sum(dim=1).float())
        for name in ("contraction", "cosine"):
            values = getattr(measures, name).masked_fill(~counted, float("nan"))
            arrays[name].append(values.nanmedian(dim=1).values.float())
    return {name: torch.stack(values) for name, values in arrays.items()}
