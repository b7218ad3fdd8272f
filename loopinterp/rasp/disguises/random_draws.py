"""What disguises draw at random."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.errors import check_integer

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def generator(seed: int) -> torch.Generator:
    """A random stream.

    Raises:
        InputError: the seed is no integer from 0 to 2**63 - 1.
    """
    return torch.Generator().manual_seed(check_integer("seed", seed, least=0, most=2**63 - 1))


def normal(*shape: int, g: torch.Generator) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def random_rotation(size: int, g: torch.Generator) -> Float[Tensor, "size size"]:
    """An orthogonal matrix, each as likely as any other (Mezzadri 2007, math-ph/0609050)."""
    q, r = torch.linalg.qr(normal(size, size, g=g))
    return q * r.diagonal().sign()
