"""p-hop induction: follow the last earlier occurrence of a symbol, several times over."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field, PositiveInt

from loopinterp.core.errors import need
from loopinterp.core.settings import settings
from loopinterp.tasks.sampling import (
    Sampler,
    check_digits,
    check_tokens,
    inside,
    integers,
    join,
    need_form,
    read_strings,
)
from loopinterp.tasks.task import IGNORE, Batch, or_text, spell

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


@settings
class PHop(Sampler):
    """p hops of induction from every one of n symbols, after a token that says p.

    A hop goes to the position after the last earlier occurrence of the symbol, and the answer is
    the symbol where p hops arrive::

        find(i) = max {j <= i: s_{j-1} = s_i},    answer_i = s_{find(find(... i))}, p times

    A hop without an earlier occurrence breaks the chain off: a class of its own.

    Tokens: symbols 0 .. k - 1, ``p = 1`` to ``p = most_hops`` (k .. k + most_hops - 1), PAD. The
    classes are the symbols, and k for a chain that breaks off. T(n) = most_hops + 1, whatever n:
    one loop finds all preceding symbols, and each later loop makes a hop.

    Distributions: ``"uniform"`` (each example draws p from 1 .. most_hops) and ``"deepest"``
    (p = most_hops). Neighbouring symbols differ, as equal ones would end a chain.

    Source: hop_k of arXiv 2402.09268, answered at every position; p-hop induction of arXiv
    2502.17416.

    Example:
        >>> task = PHop()
        >>> task.decode(task.encode(["abcabd"], hops=1))
        ['1-hop from each of abcabd = ---bc-']
    """

    name = "p_hop"
    goal = "follow repeated symbols back over several hops"
    about = "Where up to {self.most_hops} hops of induction lead, answered at every symbol."
    distributions = ("uniform", "deepest")

    n_symbols: Annotated[int, Field(ge=2, le=26)] = 4
    most_hops: PositiveInt = 16

    @property
    def symbols(self) -> tuple[str, ...]:
        """A word for each token: letters for symbols, digits for hops."""
        letters = string.ascii_lowercase[: self.n_symbols]
        return (*letters, *(str(p) for p in range(1, self.most_hops + 1)), "PAD")

    @property
    def d_vocab(self) -> int:
        return self.n_symbols + self.most_hops + 1

    @property
    def d_vocab_out(self) -> int:
        return self.n_symbols + 1

    @property
    def answer_symbols(self) -> tuple[str, ...]:
        """A word for each class; the last one is for a chain that breaks off."""
        return (*self.symbols[: self.n_symbols], "-")

    def _n_loops(self, n: int) -> int:
        return self.most_hops + 1

    def _n_positions(self, n: int) -> int:
        return n + 1

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        hops = row[0] - self.n_symbols + 1
        real = [token for token in row[1:] if token < self.n_symbols]
        question = f"{hops}-hop from each of {spell(real, self.symbols)} ="
        if answer is None:
            return question
        return f"{question} {spell(answer[1 : len(real) + 1], self.answer_symbols)}"

    @or_text
    def encode(self, words: Sequence[str], *, hops: PositiveInt) -> Batch:
        """The batch of strings of one or more letters, all with that many hops."""
        symbols, n = read_strings(words, "".join(self.symbols[: self.n_symbols]))
        return self.from_symbols(symbols, n, torch.full_like(n, hops))

    def from_symbols(
        self,
        symbols: Int[Tensor, "batch width"],
        n: Int[Tensor, " batch"],
        hops: Int[Tensor, " batch"],
    ) -> Batch:
        """The batch of symbols and hops; the first ``n`` symbols of each row count."""
        check_digits(symbols, n, self.n_symbols, "symbols")
        well_typed = isinstance(hops, torch.Tensor) and hops.dtype == torch.int64
        fits = well_typed and hops.shape == n.shape and (hops >= 1).all()
        expected = f"int64 of shape [{len(n)}] with numbers in 1..{self.most_hops}"
        fix = "Pass p of each example, or a task with more most_hops."
        need(fits and (hops <= self.most_hops).all(), "hops", expected, hops, fix)
        first = (self.n_symbols + hops - 1)[:, None]  # the token that says p, [batch, 1]
        one, width = torch.ones_like(n), symbols.shape[1] + 1
        tokens = join([(first, one), (symbols, n)], width=width, fill=self.d_vocab - 1)
        return Batch(tokens, self.targets(tokens), n, one * self._n_loops(1), self)

    def with_hops(self, inputs: Batch | Tensor, hops: Int[Tensor, " batch"]) -> Batch:
        """The same symbols with other numbers of hops."""
        tokens = self._check_form(inputs)
        n = (tokens[:, 1:] < self.n_symbols).sum(1)
        return self.from_symbols(tokens[:, 1:] % self.n_symbols, n, hops)

    def hops(self, inputs: Batch | Tensor) -> Int[Tensor, " batch"]:
        """p of each example."""
        return self._hops(self._check_form(inputs))

    def _hops(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0] - self.n_symbols + 1

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The symbol that p hops arrive at, or ``n_symbols``; ``IGNORE`` at the first and PAD."""
        tokens = self._check_form(inputs)
        hops, find = self._hops(tokens), self._find(tokens)
        at = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)  # [batch, pos]
        for hop in range(int(hops.max())):
            at = torch.where(hop < hops[:, None], find.gather(1, at), at)
        answer = tokens.gather(1, at).masked_fill(at == 0, self.n_symbols)
        is_letter = tokens < self.n_symbols
        return answer.masked_fill(~is_letter, IGNORE)

    def _find(self, tokens: Tensor) -> Tensor:
        """Where one hop arrives, [batch, pos]; 0 if it finds no occurrence."""
        find = torch.zeros_like(tokens)
        last = tokens.new_full((len(tokens), self.d_vocab), -1)  # [batch, token]
        for pos in range(1, tokens.shape[1]):
            token = tokens[:, pos, None]
            find[:, pos] = last.gather(1, token)[:, 0] + 1
            last.scatter_(1, token, pos)
        return find

    def _check_form(self, inputs: Batch | Tensor) -> Tensor:
        """The tokens, if each row is p, symbols, and PAD."""
        tokens = check_tokens(inputs, self.d_vocab)
        real = tokens[:, 1:] < self.n_symbols
        says_p = (tokens[:, :1] >= self.n_symbols) & (tokens[:, :1] < self.d_vocab - 1)
        padded = tokens[:, 1:] == self.d_vocab - 1
        fits = says_p.all() and torch.equal(real, inside(real.sum(1), real.shape[1]))
        expected = "a number of hops, then symbols, then PAD"
        need_form(tokens.shape[1] and fits and (real | padded).all(), self.name, expected)
        return tokens

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        rows, width = len(n), int(n.max())
        first = integers(0, self.n_symbols, (rows, 1), generator)
        # Steps from one symbol to the next, never 0, [batch, width - 1].
        steps = integers(1, self.n_symbols, (rows, width - 1), generator)
        symbols = torch.cat([first, steps], 1).cumsum(1) % self.n_symbols
        least = 1 if kind == "uniform" else self.most_hops
        hops = integers(least, self.most_hops + 1, (rows,), generator)
        return self.from_symbols(symbols, n, hops)
