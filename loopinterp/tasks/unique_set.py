"""The distinct symbols of a sequence, by first appearance, with full-output prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import PositiveInt

from loopinterp.settings import settings
from loopinterp.tasks.full_output import FullOutput
from loopinterp.tasks.sampling import check_digits, inside, integers
from loopinterp.tasks.task import Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


@settings
class UniqueSet(FullOutput):
    """The distinct ones of n symbols, by first appearance: ``BOS s_1 … s_n = EOS …``. T(n) = n.

    Tokens: the symbols 0 .. n_symbols - 1, ``=``, EOS (which is also the padding), BOS. Output
    classes: the symbols, then EOS.

    Distributions: ``"uniform"`` (independent symbols), ``"few"`` (each example uses at most 4 of
    them, so most are seen before), ``"distinct"`` (a random order of the symbols, again and
    again: no two of the first n_symbols are equal), ``"varied"`` (each example draws how many of
    them it uses at most: k of N with probability ``log(1 + 1/k) / log(N + 1)``).

    Args:
        n_symbols: Size of the alphabet.

    Raises:
        ConfigError: ``n_symbols`` is not an integer of at least 1.

    Source: arXiv 2409.15647.

    Example:
        >>> task = UniqueSet(n_symbols=9)
        >>> batch = task.from_symbols(torch.tensor([[7, 2, 7, 5]]), torch.tensor([4]))
        >>> batch.inputs.tolist()
        [[11, 7, 2, 7, 5, 9, 10, 10, 10, 10]]
        >>> batch.targets[0, 5:].tolist()
        [7, 2, 5, 9, 9]
    """

    name = "unique_set"
    question = "distinct ones of {}"
    distributions = ("uniform", "few", "distinct", "varied")

    n_symbols: PositiveInt = 50

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(f"s{i}" for i in range(self.n_symbols))

    @property
    def n_answer_symbols(self) -> int:
        return self.n_symbols

    def describe(self) -> str:
        return f"The distinct ones of n symbols (of {self.n_symbols}), by first appearance."

    def from_symbols(self, symbols: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Batch:
        """The batch of given symbols; only the first ``n`` of each row count.

        Raises:
            InputError: a symbol is not of the alphabet, or a length does not fit.
        """
        check_digits(symbols, n, self.n_symbols, "symbols")
        return self._batch([(symbols, n)], n, n.clone())

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        rows, width, where = len(n), int(n.max()), generator.device
        drawn = integers(0, self.n_symbols, (rows, width), generator)
        order = torch.rand(
            (rows, self.n_symbols), generator=generator, device=where, dtype=torch.float32
        ).argsort(1)
        if kind == "few":
            drawn = order.gather(1, drawn % min(4, self.n_symbols))
        elif kind == "distinct":
            column = torch.arange(width, device=where) % self.n_symbols
            drawn = order[:, column]
        elif kind == "varied":
            share = torch.rand((rows, 1), generator=generator, device=where, dtype=torch.float32)
            used = ((self.n_symbols + 1) ** share).long().clamp(max=self.n_symbols)
            drawn = order.gather(1, drawn % used)
        return self.from_symbols(drawn, n)

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        same = (prompt[:, :, None] == prompt[:, None, :]).tril(diagonal=-1)
        new = ~same.any(dim=2) & inside(n, prompt.shape[1])
        # New symbols come first, each in its order.
        order = (~new).long().argsort(dim=1, stable=True)
        return prompt.gather(1, order), new.sum(dim=1)
