"""What disguises draw at random, and checks of the numbers that they are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


def generator(seed: int) -> torch.Generator:
    """A random stream.

    Raises:
        InputError: the seed is no integer from 0 to 2**63 - 1.
    """
    check_whole("seed", seed, least=0)
    if seed >= 2**63:
        raise InputError(
            "seed", expected="an integer below 2**63", given=str(seed), fix="Pass a smaller one."
        )
    return torch.Generator().manual_seed(seed)


def check_whole(what: str, value: object, *, least: int) -> None:
    """Check that a size is an integer that is large enough.

    Raises:
        InputError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(
            what,
            expected=f"an integer >= {least}",
            given=repr(value),
            fix=f"Pass {what}={least} or more.",
        )


def random_rotation(size: int, g: torch.Generator) -> Float[Tensor, "size size"]:
    """An orthogonal matrix, each as likely as any other (Mezzadri 2007, math-ph/0609050)."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=g, dtype=torch.float64))
    return q * r.diagonal().sign()
