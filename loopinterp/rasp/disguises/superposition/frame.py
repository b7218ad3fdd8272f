"""The directions in which a superposed model holds what stood in more dimensions before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.disguises.places import ROUNDING, STATE, Held, Places, orthonormal

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

RIDGE = 1e-9
"""Keeps matrices invertible while directions are sought."""

RATE = 0.05
"""Learning rate of the search (Adam)."""

SETTLED = 150
"""Steps of the search for an exact frame."""


@dataclass(frozen=True, eq=False)
class Frame:
    """Where every direction of an old residual stream stands in a narrower new one.

    Attributes:
        kept: Old directions that have dimensions of their own, orthonormal.
        mixed: What the other old directions are in the remaining dimensions.
    """

    kept: Float[Tensor, "kept d_model"]
    mixed: Float[Tensor, "mixed d_model"]

    @property
    def write(self) -> Float[Tensor, "new_d_model d_model"]:
        """The new stream as a function of the old one."""
        return torch.cat([self.kept, self.mixed])

    def read(self, held: Held, *, smooth: bool = False) -> Float[Tensor, "d_model new_d_model"]:
        r"""How the old stream is best read from the new one, knowing what may stand in it.

        The least-squares solution :math:`X^+ (X W^\top)^+{}^\top`, written for what is mixed: with
        rows X that span all that may stand here and the frame F, :math:`X^\top (F X^\top)^+`.
        It is exact wherever F takes no two of those to the same place.

        Args:
            held: What may stand in the old stream.
            smooth: Add a little to the Gram matrix in place of cutting small singular values, so
                that there are gradients.
        """
        x = held.span - held.span @ self.kept.mT @ self.kept
        seen = x @ self.mixed.mT
        if smooth:
            gram = seen.mT @ seen + RIDGE * torch.eye(seen.shape[1], dtype=seen.dtype)
            mixed = torch.linalg.solve(gram, seen.mT @ x).mT
        else:
            mixed = (torch.linalg.pinv(seen, rtol=ROUNDING) @ x).mT
        return torch.cat([self.kept.mT, mixed], 1)


def exact_frame(
    kept: Float[Tensor, "kept d_model"], places: Places, width: int, g: torch.Generator
) -> Frame:
    r"""A frame in which everything that stands in one place is told apart.

    What stands in the state stays at right angles; all other directions become unit vectors that
    minimise :math:`-\sum \log\det` of how each place's content is seen. That is least where all of
    it is seen at right angles, and without bound where two things fall together.

    Args:
        kept: Directions that have dimensions of their own.
        places: What may stand where.
        width: Dimensions; at least :func:`dimensions_needed`.
        g: Where directions are drawn from.
    """
    state = _without(kept, places.at(*STATE).span)
    rest = _rest(torch.cat([kept, state]))
    upright = torch.eye(width - len(kept), len(state), dtype=torch.float64) @ state
    bases = [_without(kept, held.span) for held in places.distinct()]

    def frame(free: Tensor) -> Frame:
        return Frame(kept, upright + (free / free.norm(dim=0)) @ rest)

    def loss(frame: Frame) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for basis in bases:
            seen = basis @ frame.mixed.mT
            total = total - torch.logdet(seen @ seen.mT + RIDGE * torch.eye(len(seen)).double())
        return total

    return _sought(frame, (width - len(kept), len(rest)), loss, SETTLED if len(rest) else 0, g)


def dense_frame(
    kept: Float[Tensor, "kept d_model"],
    width: int,
    loss: Callable[[Frame], Tensor],
    steps: int,
    g: torch.Generator,
) -> Frame:
    """A frame with fewer dimensions, in which a loss is small.

    Args:
        kept: Directions that have dimensions of their own.
        width: Dimensions.
        loss: What is to be small.
        steps: Steps of the search; with 0 the directions are random.
        g: Where directions are drawn from.
    """
    rest = _rest(kept)

    def frame(free: Tensor) -> Frame:
        return Frame(kept, torch.linalg.qr(free.mT)[0].mT @ rest)

    return _sought(frame, (width - len(kept), len(rest)), loss, steps, g)


def _sought(
    frame: Callable[[Tensor], Frame],
    shape: tuple[int, int],
    loss: Callable[[Frame], Tensor],
    steps: int,
    g: torch.Generator,
) -> Frame:
    """A frame that starts at random and follows the gradient of a loss."""
    free = torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
    search = torch.optim.Adam([free], lr=RATE)
    with torch.enable_grad():
        for _ in range(steps):
            search.zero_grad()
            loss(frame(free)).backward()
            search.step()
    return frame(free.detach())


def dimensions_needed(kept: Float[Tensor, "kept d_model"], places: Places) -> int:
    """The fewest dimensions in which everything that stands in one place is told apart.

    Reads of it can be the same numbers as before if and only if no two things that may stand in
    one place fall together, so it is the largest dimension of the span of what stands in one.
    """
    return len(kept) + max(len(_without(kept, held.span)) for held in places.distinct())


def _without(
    kept: Float[Tensor, "kept d_model"], rows: Float[Tensor, "row d_model"]
) -> Float[Tensor, "rank d_model"]:
    """An orthonormal basis of rows without their parts along kept directions."""
    return orthonormal(rows - rows @ kept.mT @ kept)


def _rest(known: Float[Tensor, "known d_model"]) -> Float[Tensor, "rest d_model"]:
    """An orthonormal basis of all that is at right angles to some orthonormal directions."""
    d_model = known.shape[1]
    if not len(known):
        return torch.eye(d_model, dtype=torch.float64)
    return torch.linalg.svd(known)[2][len(known) :]
