"""The lens that is asked for: by its name, fitted where it has to be, or as an artefact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch

from loopinterp.errors import GREATEST_SEED, InputError, check_choice
from loopinterp.lenses.fitted_lens import FittedLens
from loopinterp.lenses.jacobian_lens import fit_jacobian_lens
from loopinterp.lenses.tuned_lens import fit_tuned_lens
from loopinterp.tasks.task import Batch

LensName = Literal["logit", "coda", "tuned", "jacobian"]
FITTED = ("tuned", "jacobian")
"""Those that have to be fitted."""


def check_lens(lens: LensName | FittedLens | Any) -> str:
    """The name of a lens; raise where there is none such."""
    if isinstance(lens, FittedLens):
        return lens.kind
    check_choice("lens", lens, get_args(LensName))
    return lens


def loops_of_lens(lens: LensName | FittedLens, n_loops: int | None) -> int | None:
    """Loops of a run that is read through a lens: those of its fit, where it is fitted already.

    Raises:
        InputError: If others are asked for.
    """
    if not isinstance(lens, FittedLens):
        return n_loops
    if n_loops not in (None, lens.n_loops):
        raise InputError(
            "n_loops",
            expected=f"the {lens.n_loops} loops of the lens, whose maps lead to that end",
            given=str(n_loops),
            fix=f"Leave n_loops out, or fit a lens with n_loops={n_loops}.",
        )
    return lens.n_loops


def fitted_lens(
    lens: LensName | FittedLens,
    model: Any,
    data: Any,
    *,
    n_loops: int,
    inside: bool,
    fit_on: Any = None,
    n: int | None = None,
    seed: int = 0,
) -> FittedLens | None:
    """The maps of a lens, fitted now if need be; None for the logit and the coda lens.

    Args:
        lens: Its name, or one that is fitted already.
        model: The model that it reads.
        data: What it will read.
        n_loops: Loops of the run.
        inside: Whether it reads layers too.
        fit_on: What to fit on; by default the task that the data is of, with another seed.
        n: Problem length, where a task is given.
        seed: Seed of what is read.

    Raises:
        InputError: If there is nothing to fit it on.
    """
    if isinstance(lens, FittedLens):
        return lens
    if lens not in FITTED:
        return None
    fit: Callable[..., FittedLens] = fit_tuned_lens if lens == "tuned" else fit_jacobian_lens
    on = _to_fit_on(data, fit_on)
    other = (seed + 1_000_003) % GREATEST_SEED
    options: dict[str, Any] = {"n_loops": n_loops, "inside": inside, "seed": other}
    if not isinstance(on, (torch.Tensor, Batch)):
        length = int(data.n[0]) if isinstance(data, Batch) and n is None else n
        options |= {"n": length, "batch_size": 32}
    return fit(model, on, **options)


def _to_fit_on(data: Any, fit_on: Any) -> Any:
    """Examples to fit on that are not those to be read."""
    if fit_on is not None:
        return fit_on
    task = data.task if isinstance(data, Batch) else data
    if task is None or isinstance(task, torch.Tensor):
        raise InputError(
            "fit_on",
            expected="examples to fit the lens on, other than those it reads",
            given="None, and data of no task that more could be drawn from",
            fix="Pass fit_on=other_inputs, or a lens that is fitted already.",
        )
    return task


def of_other_weights(lens: FittedLens, described: dict[str, Any] | str) -> bool:
    """Whether a lens says that it was fitted on other weights than those of a model."""
    fitted_on = lens.made.get("model")
    both = [x.get("weights_sha256") for x in (fitted_on, described) if isinstance(x, dict)]
    return len({*both} - {None}) == 2
