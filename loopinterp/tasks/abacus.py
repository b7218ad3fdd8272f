"""Decimal arithmetic, token by token, in the format of the abacus embeddings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field
from torch.nn.functional import pad

from loopinterp.core.errors import need
from loopinterp.core.settings import settings
from loopinterp.tasks.sampling import (
    carry_over,
    check_digits,
    check_operands,
    choice,
    coins,
    integers,
    join,
    lead,
    lengths,
    n_significant,
    operands_of,
    place_of_equals,
    product_digits,
    same,
    to_digits,
    uniform,
)
from loopinterp.tasks.task import or_text, spell, until
from loopinterp.tasks.token_by_token import TokenByToken

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.tasks.task import Batch

ALPHABET = "0123456789-+*=$"
_EQUALS, _END = (ALPHABET.index(symbol) for symbol in "=$")


class DecimalOperands(TokenByToken):
    """Base of decimal arithmetic in the format of the abacus embeddings (arXiv 2405.17399).

    Tokens, in and out: ``0123456789-+*=$`` (0..14). The inputs hold the answer: its digits are the
    targets from the ``=`` on, then ``$``, also the padding. The length n is the number of digits of
    the longest operand; T(n) is that of the longest answer, as carries may take one column a loop.

    Distributions: ``"mixed"`` (one operand has n digits, the others 1..n), ``"equal"`` (all have
    n), ``"independent"`` (each has 1..n), and the task's hard one. Numbers have no leading zeros,
    except in ``"chain"``.

    Attributes:
        operator: The sign between the operands.
    """

    symbols = ALPHABET
    end = _END
    operator: str
    n_operands: int = 2
    hard: str

    @property
    def distributions(self) -> tuple[str, ...]:
        return ("mixed", "equal", self.hard, "independent")

    @abstractmethod
    def answer_length(self, n: int) -> int:
        """Most digits of an answer."""

    @abstractmethod
    def _solve(self, digits: Tensor, n_digits: Tensor) -> tuple[Tensor, Tensor]:
        """Digits of the answers [batch, width], and their lengths.

        Operands [batch, operand, width] are padded with zeros; ``n_digits`` is [batch, operand].
        """

    @abstractmethod
    def _draw_hard(self, digits: Tensor, generator: torch.Generator) -> Tensor:
        """Operands [batch, operand, width] of the hard distribution."""

    def _answer(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        equals = place_of_equals(_EQUALS, tokens, self.name)
        how = {"operator": ALPHABET.index(self.operator), "n_operands": self.n_operands}
        operands = operands_of(tokens, equals, base=10, task=self.name, **how)
        return equals, *self._solve(*operands)

    def _n_loops(self, n: int) -> int:
        return self.answer_length(n)

    def _n_positions(self, n: int) -> int:
        # The operands, a sign after each, and the longest answer.
        return self.n_operands * (n + 1) + self.answer_length(n)

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        equals = row.index(_EQUALS)
        written = spell(row[:equals], ALPHABET).split(self.operator)
        question = f"{f' {self.operator} '.join(number[::-1] for number in written)} ="
        if answer is None:
            return question
        return f"{question} {spell(until(answer[equals:], _END), ALPHABET, turned=True)}"

    def from_digits(
        self, digits: Int[Tensor, "batch operand width"], n_digits: Int[Tensor, "batch operand"]
    ) -> Batch:
        """The batch of numbers of ``n_digits`` digits, least significant first."""
        shape, each = (list(getattr(x, "shape", ())) for x in (digits, n_digits))
        fit = len(shape) == 3 and each == shape[:2] and each[1] == self.n_operands
        expected = f"shapes [batch, {self.n_operands}, width], [batch, {self.n_operands}]"
        fix = "Stack the operands: torch.stack([a, b], dim=1)."
        need(fit, "digits and n_digits", expected, f"{shape} and {each}", fix)
        check_digits(digits.flatten(0, 1), n_digits.flatten(), 10, "digits")
        return self._written(digits, n_digits, n_digits.amax(dim=1))

    def _written(self, digits: Tensor, n_digits: Tensor, n: Tensor) -> Batch:
        operands = zip(digits.unbind(dim=1), n_digits.unbind(dim=1))
        signs = self.operator * (self.n_operands - 1) + "="  # the one after each operand
        parts = [(x, same(ALPHABET.index(sign), n)) for x, sign in zip(operands, signs)]
        width = self.n_operands * (digits.shape[2] + 1)
        return self._batch(join([x for part in parts for x in part], width=width, fill=_END), n)

    @or_text
    def encode(self, operands: Iterable[Sequence[int]]) -> Batch:
        """The batch of integers >= 0, written without leading zeros."""
        rows = check_operands(operands, self.n_operands)
        # [batch, operand]: as Python writes them
        n_digits = torch.tensor([[len(str(x)) for x in row] for row in rows])
        digits = [to_digits(column, int(n_digits.max()), base=10) for column in zip(*rows)]
        return self.from_digits(torch.stack(digits, dim=1), n_digits)

    def sample_operands(self, *n_digits: int, batch_size: int, generator: torch.Generator) -> Batch:
        """Draw operands of exactly these numbers of digits."""
        k, fix = self.n_operands, f"Pass e.g. {', '.join(['8'] * self.n_operands)}."
        expected = f"{k} lengths, one for each operand"
        need(len(n_digits) == k, "n_digits", expected, str(len(n_digits)), fix)
        each = [lengths(n, batch_size=batch_size, generator=generator) for n in n_digits]
        digits, length = self._digits((batch_size, max(n_digits)), generator), torch.stack(each, 1)
        return self.from_digits(self._lead(digits, length, generator), length)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        k, rows = self.n_operands, len(n)
        digits = self._digits((rows, int(n.max())), generator)
        all_n = n[:, None].expand(-1, k)
        if kind == self.hard:
            return self._written(self._draw_hard(digits, generator), all_n, n)
        # Lengths are drawn between the digits and the leading digits: the order fixes the examples.
        n_drawn = {"mixed": k - 1, "independent": k}.get(kind, 0)
        drawn = [(uniform((rows,), generator) * n).long() + 1 for _ in range(n_drawn)]
        if kind == "mixed":
            longest = integers(0, k, (rows, 1), generator)
            operand = torch.arange(k, device=n.device)
            # The others in their order, and n where the longest is.
            which = torch.where(operand == longest, k - 1, operand - (operand > longest).long())
            n_digits = torch.stack([*drawn, n], dim=1).gather(1, which)
        else:
            n_digits = torch.stack(drawn, dim=1) if drawn else all_n
        return self._written(self._lead(digits, n_digits, generator), n_digits, n)

    def _digits(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        each = [integers(0, 10, shape, generator) for _ in range(self.n_operands)]
        return torch.stack(each, dim=1)

    def _lead(self, digits: Tensor, n_digits: Tensor, generator: torch.Generator) -> Tensor:
        """The digits, without a leading 0 in longer numbers."""
        each = [integers(1, 10, (len(digits),), generator) for _ in range(self.n_operands)]
        return lead(digits, n_digits, torch.stack(each, dim=1))


class _Sum(DecimalOperands):
    operator = "+"
    hard = "chain"

    def answer_length(self, n: int) -> int:
        return n + len(str(self.n_operands - 1))  # k numbers carry at most k - 1 out of n columns

    def _solve(self, digits: Tensor, n_digits: Tensor) -> tuple[Tensor, Tensor]:
        more = len(str(self.n_operands - 1))
        total = carry_over(pad(digits.sum(dim=1), (0, more)), 10)
        return total, torch.maximum(n_digits.amax(dim=1), n_significant(total))

    def _draw_hard(self, digits: Tensor, generator: torch.Generator) -> Tensor:
        # [batch, operand, width]: each column sums to 9, split at random digits; the first column
        # sums to 10 or more, so that its carry runs through all others.
        cuts = pad(digits[:, :-1].sort(dim=1).values, (0, 0, 1, 0))
        digits = pad(cuts, (0, 0, 0, 1), value=9).diff(dim=1)
        rows = (len(digits),)
        a = integers(1, 10, rows, generator)
        digits[:, 0, 0], digits[:, 1, 0] = a, 10 - a + integers(0, 9, rows, generator) % a
        return digits


@settings
class AbacusAddition(_Sum):
    """a + b in decimal, token by token: ``a + b = sum $``, least significant first.

    See :class:`DecimalOperands`. The hard distribution is ``"chain"``: the first digits make a
    carry, which all others propagate. T(n) = n + 1.

    Example:
        >>> task = AbacusAddition()
        >>> batch = task.encode([(95, 8)])
        >>> "".join(ALPHABET[t] for t in batch.inputs[0].tolist())
        '59+8=301$'
        >>> [ALPHABET[t] for t in batch.targets[0].tolist() if t >= 0]
        ['3', '0', '1', '$']
    """

    name = "abacus_addition"
    goal = "add decimal numbers"
    about = "Decimal addition, a+b=sum$ with the least significant digit first, token by token."


@settings
class AbacusSum(_Sum):
    """The sum of ``n_operands`` numbers, token by token: ``a + b + c = sum $``.

    Otherwise like :class:`AbacusAddition`. T(n) = n + 1 up to ten numbers.

    Example:
        >>> task = AbacusSum(n_operands=3)
        >>> task.decode(task.encode([(95, 8, 900)]))
        ['95 + 8 + 900 = 1003']
    """

    name = "abacus_sum"
    goal = "sum several decimal numbers"
    about = "Decimal sum of {self.n_operands} numbers, least significant digit first."

    n_operands: Annotated[int, Field(ge=2)] = 3


@settings
class AbacusMultiplication(DecimalOperands):
    """a * b in decimal, token by token: ``a * b = product $``, least significant first.

    See :class:`DecimalOperands`. The hard distribution is ``"nines"``: both factors have n digits,
    each a 9 with the example's probability (drawn from {.5, .8, .95}), else 1..9: column sums are
    large and carries long. T(n) = 2 n.
    """

    name = "abacus_multiplication"
    goal = "multiply decimal numbers"
    about = "Decimal multiplication, a*b=product$, least significant digit first."
    operator = "*"
    hard = "nines"

    def answer_length(self, n: int) -> int:
        return 2 * n

    def _solve(self, digits: Tensor, n_digits: Tensor) -> tuple[Tensor, Tensor]:
        a, b = digits.unbind(dim=1)
        product = product_digits(a, b, 10)  # [batch, width], with leading zeros
        return product, n_significant(product).clamp(min=1)

    def _draw_hard(self, digits: Tensor, generator: torch.Generator) -> Tensor:
        # [batch, operand, width]: a 9 with the example's probability, else 1..9
        share = choice((0.5, 0.8, 0.95), (len(digits), 1, 1), generator)
        others = integers(1, 10, digits.shape, generator)
        return others.masked_fill(coins(share, digits.shape, generator), 9)
