"""Decimal addition by next-token prediction, in the format of the abacus embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from loopinterp.settings import settings
from loopinterp.tasks.examples_in_words import spell, until
from loopinterp.tasks.full_output import answer_from, place_of, split_at
from loopinterp.tasks.integers import carry_over, check_pairs, operand_digits
from loopinterp.tasks.rows import join, same
from loopinterp.tasks.sampling import (
    Sampler,
    check_digits,
    check_length,
    check_tokens,
    inside,
    integers,
)
from loopinterp.tasks.task import IGNORE, Batch

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

ALPHABET = "0123456789-+*=$"
PLUS, EQUALS, END = (ALPHABET.index(symbol) for symbol in "+=$")


@settings
class AbacusAddition(Sampler):
    """a + b in decimal, next token by next token: ``a + b = sum $``, least significant first.

    The alphabet is ``0123456789-+*=$`` (tokens 0..14), in and out. The sum is as long as the
    longer operand, and one digit more if there is a carry out of it. The inputs hold the answer
    too, as far as it can be seen: at the ``=`` and at each digit of the sum the next one is asked
    for, at the last one ``$``; nowhere else is there a target. Padding is ``$``.

    The length n is the number of digits of the longer operand. T(n) = n + 1.

    Distributions: ``"mixed"`` (one operand has n digits, the other 1..n), ``"equal"`` (both have
    n), ``"chain"`` (the first digits make a carry, which all others pass on). The leading digit of
    an operand of several digits is not 0, but in ``"chain"``.

    Source: arXiv 2405.17399.

    Example:
        >>> task = AbacusAddition()
        >>> batch = task.encode([(95, 8)])
        >>> "".join(ALPHABET[t] for t in batch.inputs[0].tolist())
        '59+8=301$'
        >>> [ALPHABET[t] for t in batch.targets[0].tolist() if t >= 0]
        ['3', '0', '1', '$']
    """

    name = "abacus_addition"
    d_vocab = len(ALPHABET)
    d_vocab_out = len(ALPHABET)
    distributions = ("mixed", "equal", "chain")

    def n_positions(self, n: int) -> int:
        """Two operands, ``+``, ``=``, and n + 1 digits of the sum."""
        return 3 * check_length(n) + 3

    def describe(self) -> str:
        return "Decimal addition, a+b=sum$ with the least significant digit first, token by token."

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        plus, equals = row.index(PLUS), row.index(EQUALS)
        a, b = (spell(x, turned=True) for x in (row[:plus], row[plus + 1 : equals]))
        if answer is None:
            return f"{a} + {b} ="
        return f"{a} + {b} = {spell(until(answer[equals:], END), ALPHABET, turned=True)}"

    def from_digits(
        self,
        a: Int[Tensor, "batch width"],
        b: Int[Tensor, "batch width"],
        n_a: Int[Tensor, " batch"],
        n_b: Int[Tensor, " batch"],
    ) -> Batch:
        """The batch of given digits, least significant first, of which ``n_a`` and ``n_b`` count.

        Raises:
            InputError: they are no digits, or a length does not fit.
        """
        for digits, length, what in ((a, n_a, "digits a"), (b, n_b, "digits b")):
            check_digits(digits, length, 10, what)
        n = torch.maximum(n_a, n_b)
        total, length = _sum(a, b, n_a, n_b)
        tokens = join(
            [(a, n_a), same(PLUS, n), (b, n_b), same(EQUALS, n), (total, length)],
            width=self.n_positions(int(n.max())),
            fill=END,
        )
        return Batch(tokens, self.targets(tokens), n, n + 1, self)

    def encode(self, operands: Sequence[tuple[int, int]]) -> Batch:
        """The batch of given integers, each written without leading zeros.

        Raises:
            InputError: no operands, or one that is no integer of at least 0.
        """
        pairs = check_pairs(operands)
        longest = max(len(str(x)) for pair in pairs for x in pair)
        a, b = operand_digits(pairs, longest, longest, 10)
        n_a, n_b = (torch.tensor([len(str(pair[k])) for pair in pairs]) for k in (0, 1))
        return self.from_digits(a, b, n_a, n_b)

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact next token at the ``=`` and at each digit of the sum; else ``IGNORE``.

        It follows from the operands alone: what stands after the ``=`` is not read, and may be
        wrong or missing.

        Raises:
            InputError: the inputs are not tokens of this task, or lack an operand or the ``=``.
        """
        tokens = check_tokens(inputs, len(ALPHABET))
        equals = place_of(EQUALS, tokens, self.name, "'='")
        total, length = _sum(*split_at(PLUS, tokens, equals, self.name))
        place, answer = answer_from(equals, total, length, width=tokens.shape[1], end=END)
        return answer.masked_fill(place > length[:, None], IGNORE)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        rows, shape = (len(n),), (len(n), int(n.max()))
        a, b = integers(0, 10, shape, generator), integers(0, 10, shape, generator)
        if kind == "chain":
            b = 9 - a
            a[:, 0] = integers(1, 10, rows, generator)
            b[:, 0] = 10 - a[:, 0] + integers(0, 9, rows, generator) % a[:, 0]
            return self.from_digits(a, b, n, n)
        n_a, n_b = n, n
        if kind == "mixed":
            share = torch.rand(rows, generator=generator, device=generator.device)
            other = (share * n).long() + 1
            swap = integers(0, 2, rows, generator).bool()
            n_a, n_b = torch.where(swap, other, n), torch.where(swap, n, other)
        for digits, length in ((a, n_a), (b, n_b)):
            leading = (length - 1)[:, None]
            drawn = integers(1, 10, (*rows, 1), generator)
            fresh = torch.where(leading > 0, drawn, digits.gather(1, leading))
            digits.scatter_(1, leading, fresh)
        return self.from_digits(a, b, n_a, n_b)


def _sum(a: Tensor, b: Tensor, n_a: Tensor, n_b: Tensor) -> tuple[Tensor, Tensor]:
    """Digits of the sums [batch, width], and how many of each count."""
    n = torch.maximum(n_a, n_b)
    width = int(n.max()) + 1
    a, b = (
        pad(x * inside(k, x.shape[1]), (0, width - x.shape[1])) for x, k in ((a, n_a), (b, n_b))
    )
    total = carry_over(a + b, 10)
    return total, n + (total.gather(1, n[:, None])[:, 0] > 0)
