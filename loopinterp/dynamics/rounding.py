"""What half precision leaves unseen: where rounding, and not the loop, decides a number."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from loopinterp.dynamics.measures import AT_ROUNDING
from loopinterp.dynamics.regimes import RegimeCriteria
from loopinterp.models.looped_model import bind
from loopinterp.results import Finding

if TYPE_CHECKING:
    from collections.abc import Callable

    from loopinterp.models.looped_model import LoopedModel
    from loopinterp.results import Result
    from loopinterp.tasks.task import Batch

_KEY = "state_dtype"


def coarse_dtype(model: LoopedModel | Any, batch: Batch) -> dict[str, str]:
    """The dtype of a model's states, for a study's provenance; nothing, if it is fine enough.

    It is coarse where its rounding moves a state by more than counts as at rest.
    """
    dtype = bind(model, batch.inputs[:1]).h0.dtype
    coarse = AT_ROUNDING * torch.finfo(dtype).eps > RegimeCriteria().at_rest
    return {_KEY: str(dtype).removeprefix("torch.")} if coarse else {}


def rounding_floor(result: Result) -> tuple[str, float] | None:
    """The coarse dtype of a result's states, and what its rounding moves them by; else None."""
    name = result.provenance.config.get(_KEY)
    return None if name is None else (name, AT_ROUNDING * torch.finfo(getattr(torch, name)).eps)


def with_rounding(findings: Callable[[Any], list[Finding]]) -> Callable[[Any], list[Finding]]:
    """The findings of a study, and after the first where rounding decides them, if it does."""

    @wraps(findings)
    def made(result: Any) -> list[Finding]:
        first, *others = findings(result)
        floor = rounding_floor(result)
        return [first, *others] if floor is None else [first, _finding(*floor), *others]

    return made


def _finding(name: str, share: float) -> Finding:
    text = (
        f"The states are {name}: rounding alone moves a state by up to {share:.2g} of its size in "
        "a loop. Rounding decides residuals, distances and rates below that, and whether a limit "
        "is found to a finer tolerance. Repeat the study with model.float() to resolve them."
    )
    return Finding(text, value=f"{name}: resolved to {share:.2g}")
