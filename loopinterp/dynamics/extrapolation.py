"""Loop extrapolation: what becomes of the answer when the loop runs on past T(n)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from loopinterp.dynamics.readouts import correctness, exact_match, likeliest
from loopinterp.dynamics.rounding import coarse_dtype
from loopinterp.dynamics.state_checks import asked_positions
from loopinterp.dynamics.state_trajectories import chunks, gather, state_bytes
from loopinterp.dynamics.streamed_measures import stream_measures
from loopinterp.errors import check_integer
from loopinterp.models.looped_model import bind
from loopinterp.models.model_description import describe_model
from loopinterp.progress import track
from loopinterp.results import Result, study
from loopinterp.study_examples import answered_after, examples_for

if TYPE_CHECKING:
    import xarray as xr
    from torch import Tensor

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.tasks.task import Batch, Task


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ExtrapolationResult(Result, kind="extrapolation"):
    """Exact match against loops, far past the loop at which the answer is asked for.

    The loop axis counts loops made: loop 0 is the initial state.

    Arrays:
        exact: Whether every asked position of an example is right.
        accuracy: Share of its asked positions that are right.
        residual: Mean relative residual of its asked positions; NaN before the first loop. This
            and the next four are those of :class:`LoopMeasures`, which says where they are NaN.
        residual_max: Residual of the whole sequence in the maximum norm.
        norm: Mean norm of the state at its asked positions.
        contraction: Median, over its asked positions, of the update's norm over that before.
        cosine: Median, over its asked positions, of the cosine between successive updates.
        length: Problem length of each example.
        answer_loops: T(n) of each example.

    Attributes:
        trained_loops: Most loops of a training run, marked in the figure (None if unknown).
        answered_after: The loops after which the answer is asked for, in words.
    """

    VARIABLES: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("exact", "accuracy", "residual"), "loop batch"),
        **dict.fromkeys(("residual_max", "norm", "contraction", "cosine"), "loop batch"),
        **dict.fromkeys(("length", "answer_loops"), "batch"),
    }

    trained_loops: int | None = None
    answered_after: str = "T(n)"

    @property
    def n_loops(self) -> int:
        """Loops of the run."""
        return self.data.sizes["loop"] - 1

    def at_answer(self) -> xr.DataArray:
        """Exact match of each example after its own T(n) loops."""
        return self.data["exact"].sel(loop=self.data["answer_loops"])

    def fates(self) -> dict[str, int]:
        """Examples by whether they are right at T(n), after the last loop, and in between."""
        exact, loop = self.data["exact"], self.data["loop"]
        first, last = self.at_answer(), exact.isel(loop=-1)
        kept = exact.where(loop >= self.data["answer_loops"], other=True).all("loop")
        fates = {
            "right and stays right": kept,
            "right at both, lost in between": first & last & ~kept,
            "right, then lost": first & ~last,
            "wrong, then found": ~first & last,
            "wrong at both": ~first & ~last,
        }
        return {fate: int(examples.sum()) for fate, examples in fates.items()}


def extrapolation_study(
    model: LoopedModel,
    data: Batch | Task,
    *,
    n_loops: int | None = None,
    trained_loops: int | None = None,
    n: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> ExtrapolationResult:
    """Run far past T(n) and score the readout after every loop.

    Only the present state is held, so the number of loops costs time but no memory.

    Args:
        model: Any looped model.
        data: Examples with targets, of one length or several; or a task to draw them from.
        n_loops: Loops to run, at least the longest T(n) of the batch; ten times that by default.
        trained_loops: Most loops of a training run, to be marked in the figure.
        n: Problem length, where a task is given; see :func:`~loopinterp.tasks.as_batch`.
        batch_size: Examples, where a task is given.
        seed: Seed of what is drawn.

    Raises:
        InputError: If the loops do not reach T(n), an example asks nothing, or the initial state
            is not finite.
    """
    drawn = {"n": n, "batch_size": batch_size, "seed": seed}
    batch = examples_for(model, data, needs_loops=n_loops is None, **drawn)
    asked = asked_positions(batch, "asked")
    longest = int(batch.n_loops.max())
    n_loops = 10 * longest if n_loops is None else n_loops
    check_integer("n_loops", n_loops, least=max(1, longest))
    if trained_loops is not None:
        check_integer("trained_loops", trained_loops, least=1)
    about = {"n_loops": n_loops, "n_examples": len(batch), **coarse_dtype(model, batch)}
    with study(seed, model=describe_model(model), **about) as watch:
        parts = (
            _follow(model, batch[rows], asked[rows], n_loops)
            for rows in chunks(len(batch), 4 * state_bytes(model, batch))
        )
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
def _follow(model: LoopedModel, batch: Batch, asked: Tensor, n_loops: int) -> dict[str, Tensor]:
    """Exact match, accuracy and residual of some examples after 0..n_loops loops."""
    share = asked / asked.sum(dim=1, keepdim=True)
    found: dict[str, list[Tensor]] = defaultdict(list)
    run = stream_measures(iteration := bind(model, batch.inputs), n_loops)
    for loop, h, measures in track(run, "loops", total=n_loops + 1):
        right = correctness(likeliest(iteration.read(h, loop)), batch.targets)
        found["exact"].append(exact_match(right).bool())
        found["accuracy"].append(((right == 1) * share).sum(dim=1).float())
        found["residual_max"].append(measures.residual_max.float())
        for name in ("residual", "norm"):
            values = torch.where(asked, getattr(measures, name) * share, 0)
            found[name].append(values.sum(dim=1).float())
        for name in ("contraction", "cosine"):
            values = getattr(measures, name).masked_fill(~asked, float("nan"))
            found[name].append(values.nanmedian(dim=1).values.float())
    return {name: torch.stack(values) for name, values in found.items()}
