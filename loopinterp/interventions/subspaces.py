"""Subspaces of the state: principal directions, projections, and random changes of equal norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from loopinterp.core.errors import InputError, check_integer

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


def principal_subspace(
    difference: Float[Tensor, "pair d_model"], rank: int
) -> Float[Tensor, "rank d_model"]:
    """The directions that hold the most of the squared length of the differences (uncentred).

    Raises:
        InputError: a rank outside 1..d_model, or more than there are pairs.
    """
    most = min(difference.shape)
    check_integer("rank", rank, least=1, most=most, fix=f"Pass a rank from 1 to {most}.")
    return torch.linalg.svd(difference.double(), full_matrices=False).Vh[:rank].to(difference)


def project(
    change: Float[Tensor, "... site d_model"], subspace: Float[Tensor, "... rank d_model"]
) -> Float[Tensor, "... site d_model"]:
    """The part of each change that lies in a subspace.

    Args:
        change: What an interchange of the whole state adds.
        subspace: Orthonormal rows, or rows of 0: one subspace for all pairs, or one each.

    Example:
        >>> project(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 1.0]])).tolist()
        [[0.0, 4.0]]
    """
    # Coordinates in the subspace, [..., site, rank], and back.
    basis = subspace.to(change)
    return change @ basis.mT @ basis


def random_change(
    change: Float[Tensor, "... d_model"],
    generator: torch.Generator,
    *,
    within: Bool[Tensor, "... d_model"] | None = None,
) -> Float[Tensor, "... d_model"]:
    """A change of the same norm at each place, in a random direction.

    A random subspace of equal rank is a weaker control: where one direction holds nearly all of a
    change, the part along random directions is next to nothing.

    Args:
        change: What is added.
        generator: Draws the directions.
        within: Features that may change, those of ``change`` among them; all if None.
    """
    noise = torch.randn(change.shape, generator=generator, dtype=torch.float32).to(change)
    length = change.norm(dim=-1, keepdim=True)
    if within is not None:
        noise, length = noise * within, torch.where(within.any(-1, keepdim=True), length, 0)
    least = torch.finfo(noise.dtype).tiny  # where nothing may change
    return noise * (length / noise.norm(dim=-1, keepdim=True).clamp(min=least))


def check_orthonormal(rows: Float[Tensor, "... rank d_model"], what: str = "subspace") -> None:
    """Check the rows of a subspace.

    Raises:
        InputError: they are not orthonormal.
    """
    # Scalar products of the rows, [..., rank, rank].
    gram = rows.double() @ rows.double().mT
    if not torch.allclose(gram, torch.eye(rows.shape[-2]).to(gram), atol=1e-4):
        raise InputError(
            what,
            expected="orthonormal rows [..., rank, d_model]",
            given="rows that are not",
            fix="Orthonormalise them: torch.linalg.qr(rows.mT).Q.mT.",
        )


def check_subspace(rows: Any, d_model: int, what: str) -> None:
    """Check a subspace of a model's state that a user gives.

    Raises:
        InputError: it is no tensor of orthonormal rows [rank, d_model], rank 1 .. d_model.
    """
    shape = list(rows.shape) if isinstance(rows, torch.Tensor) else None
    if shape is None or len(shape) != 2 or not 1 <= shape[0] <= d_model or shape[1] != d_model:
        raise InputError(
            what,
            expected=f"rows [rank, d_model] of the model's width {d_model}, rank 1..{d_model}",
            given=type(rows).__name__ if shape is None else f"shape {shape}",
            fix="Give one row for each direction.",
        )
    check_orthonormal(rows, what)
