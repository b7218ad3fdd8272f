"""Subspaces of the state: random ones, those that swaps move in, those that probes read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

CONTROL_ENERGY = 0.9
"""A random control of the whole state has as many dimensions as hold this share of its change."""


def random_subspaces(
    count: int, rank: int, d_model: int, generator: torch.Generator
) -> Float[Tensor, "count rank d_model"]:
    """Orthonormal rows of uniformly random subspaces.

    Raises:
        InputError: a rank outside 1..d_model.
    """
    _check_rank(rank, d_model)
    gauss = torch.randn(count, d_model, rank, generator=generator)
    return torch.linalg.qr(gauss).Q.mT


def energy_rank(difference: Float[Tensor, "pair d_model"], share: float) -> int:
    """How many principal directions hold a share of the squared length of the differences.

    Example:
        >>> energy_rank(torch.tensor([[3.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), 0.9)
        1
    """
    energy = torch.linalg.svdvals(difference.double()).square()
    held = energy.cumsum(0) / energy.sum().clamp(min=torch.finfo(energy.dtype).tiny)
    return min(int((held < share).sum()) + 1, len(energy))


def principal_subspace(
    difference: Float[Tensor, "pair d_model"], rank: int
) -> Float[Tensor, "rank d_model"]:
    """The directions that hold the most of the squared length of the differences (uncentred).

    Raises:
        InputError: a rank outside 1..d_model, or more than there are pairs.
    """
    _check_rank(rank, min(difference.shape))
    return torch.linalg.svd(difference, full_matrices=False).Vh[:rank]


def project(
    change: Float[Tensor, "pair d_model"], subspace: Float[Tensor, "... rank d_model"]
) -> Float[Tensor, "pair d_model"]:
    """The part of each change that lies in a subspace.

    Args:
        change: What a swap of the whole state adds.
        subspace: Orthonormal rows. One for all pairs [rank, d_model] or one each
            [pair, rank, d_model].

    Raises:
        InputError: rows that are not orthonormal.

    Example:
        >>> project(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]])).tolist()
        [[0.0, 4.0]]
    """
    check_orthonormal(subspace)
    basis = subspace.to(change)
    return (basis.mT @ (basis @ change[..., None])).squeeze(-1)


def check_orthonormal(rows: Float[Tensor, "... rank d_model"], what: str = "subspace") -> None:
    """Check the rows of a subspace.

    Raises:
        InputError: they are not orthonormal.
    """
    gram = rows.double() @ rows.double().mT
    if not torch.allclose(gram, torch.eye(rows.shape[-2]).to(gram), atol=1e-4):
        raise InputError(
            what,
            expected="orthonormal rows [..., rank, d_model]",
            given="rows that are not",
            fix="Orthonormalise them: torch.linalg.qr(rows.mT).Q.mT.",
        )


def _check_rank(rank: int, most: int) -> None:
    if not 1 <= rank <= most:
        raise InputError(
            "rank",
            expected=f"1..{most}",
            given=str(rank),
            fix="Pass a rank that the space (and the number of pairs) allows.",
        )
