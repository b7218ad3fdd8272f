"""The directions in which a superposed model holds what stood in more dimensions before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from loopinterp.rasp.disguises.places import ROUNDING, Held, orthonormal

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

RIDGE = 1e-9
"""Keeps matrices invertible while directions are sought."""

RATE = 0.05
"""Learning rate of the search (Adam)."""


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


def sought_frame(
    kept: Float[Tensor, "kept d_model"],
    n_mixed: int,
    loss: Callable[[Frame], Tensor],
    steps: int,
    g: torch.Generator,
) -> Frame:
    """A frame that starts from random orthonormal directions and follows the gradient of a loss.

    Args:
        kept: Directions that keep dimensions of their own.
        n_mixed: Dimensions for all others.
        loss: What is to be small.
        steps: Steps of the search; with 0 the directions are random.
        g: Where they are drawn from.
    """
    d_model = kept.shape[1]
    rest = torch.linalg.svd(kept)[2][len(kept) :] if len(kept) else torch.eye(d_model).double()
    free = torch.randn(len(rest), n_mixed, generator=g, dtype=torch.float64)
    free.requires_grad_()

    def frame() -> Frame:
        return Frame(kept, torch.linalg.qr(free)[0].mT @ rest)

    search = torch.optim.Adam([free], lr=RATE)
    with torch.enable_grad():
        for _ in range(steps if n_mixed < len(rest) else 0):
            search.zero_grad()
            loss(frame()).backward()
            search.step()
    return Frame(kept, frame().mixed.detach())


def told_apart(
    places: list[Held], kept: Float[Tensor, "kept d_model"]
) -> Callable[[Frame], Tensor]:
    r"""The loss of exact frames: :math:`-\sum \log\det` of how each place's content is seen.

    It is least where all that stands in one place is seen at right angles, and without bound where
    two things fall together.
    """
    bases = [orthonormal(held.span - held.span @ kept.mT @ kept) for held in places]

    def loss(frame: Frame) -> Tensor:
        total = frame.mixed.sum() * 0
        for basis in bases:
            seen = basis @ frame.mixed.mT
            total = total - torch.logdet(seen @ seen.mT + RIDGE * torch.eye(len(seen)).double())
        return total

    return loss


def dimensions_needed(places: list[Held], kept: Float[Tensor, "kept d_model"]) -> int:
    """The fewest dimensions in which everything that stands in one place is told apart.

    Reads of it can be the same numbers as before if and only if no two things that may stand in
    one place fall together, so it is the largest dimension of the span of what stands in one.
    """
    return len(kept) + max(
        len(orthonormal(held.span - held.span @ kept.mT @ kept)) for held in places
    )
