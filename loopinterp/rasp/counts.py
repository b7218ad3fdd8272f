"""T(n) as data: how many loops a program needs for an input of length n."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class LoopCount(Protocol):
    """A function of the problem length that can be printed and compared."""

    def __call__(self, n: int) -> int: ...


@dataclass(frozen=True)
class Linear:
    """slope * n + offset, at least 0.

    Example:
        >>> Linear(offset=-1), Linear(offset=-1)(8)
        (n - 1, 7)
        >>> Linear(slope=0, offset=1), Linear(slope=0, offset=1)(8)
        (1, 1)
    """

    slope: int = 1
    offset: int = 0

    def __call__(self, n: int) -> int:
        return max(self.slope * n + self.offset, 0)

    def __repr__(self) -> str:
        if self.slope == 0:
            return str(max(self.offset, 0))
        return _shifted("n" if self.slope == 1 else f"{self.slope} n", self.offset)


@dataclass(frozen=True)
class CeilLog2:
    """The logarithm to base 2 of n + inside, rounded up; 0 where n + inside is below 2.

    Example:
        >>> CeilLog2(inside=-1), [CeilLog2(inside=-1)(n) for n in (1, 2, 3, 9, 10)]
        (ceil(log2(n - 1)), [0, 0, 1, 3, 4])
    """

    inside: int = 0

    def __call__(self, n: int) -> int:
        return max(n + self.inside - 1, 0).bit_length()

    def __repr__(self) -> str:
        return f"ceil(log2({_shifted('n', self.inside)}))"


def _shifted(text: str, by: int) -> str:
    return text if by == 0 else f"{text} {'+' if by > 0 else '-'} {abs(by)}"
