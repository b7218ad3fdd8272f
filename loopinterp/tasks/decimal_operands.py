"""What the tasks on decimal numbers share: ``a + b = sum $``, least significant digit first."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from loopinterp.errors import InputError
from loopinterp.tasks.examples_in_words import spell, until
from loopinterp.tasks.integers import check_operands, lead, operand_digits
from loopinterp.tasks.prompt_reading import operands_of, place_of
from loopinterp.tasks.rows import join, same
from loopinterp.tasks.sampling import check_digits, check_length, describe_tensor, integers, lengths
from loopinterp.tasks.token_by_token import TokenByToken

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.tasks.task import Batch

ALPHABET = "0123456789-+*=$"
EQUALS, END = (ALPHABET.index(symbol) for symbol in "=$")


class DecimalOperands(TokenByToken):
    """Base of these tasks, in the format of the abacus embeddings.

    The alphabet is ``0123456789-+*=$`` (tokens 0..14), in and out. The inputs hold the answer too,
    as far as it can be seen: at the ``=`` and at each digit of the answer the next one is asked
    for, at the last one ``$``; nowhere else is there a target. Padding is ``$``.

    The length n is the number of digits of the longest operand. T(n) is the number of digits of
    the longest answer: carries may take one column a loop.

    Distributions: ``"mixed"`` (one operand has n digits, the others 1..n), ``"equal"`` (all have
    n), ``"independent"`` (each has 1..n, whatever the others have; n is then the most there might
    be, and T(n) goes by it), and one that is hard for the task. The leading digit of an operand of
    several digits is not 0, but where a task says so.

    Source: arXiv 2405.17399.

    Attributes:
        operator: What stands between the operands.
        n_operands: How many there are.
        hard: Name of the hard distribution.
    """

    symbols = ALPHABET
    end = END
    operator: str
    n_operands: int = 2
    hard: str

    @property
    def distributions(self) -> tuple[str, ...]:
        return ("mixed", "equal", self.hard, "independent")

    @abstractmethod
    def answer_length(self, n: int) -> int:
        """Most digits that an answer may have."""

    @abstractmethod
    def _solve(self, digits: Tensor, n_digits: Tensor) -> tuple[Tensor, Tensor]:
        """Digits of the answers [batch, width], and how many of each count.

        Operands [batch, operand, width] are padded with zeros; ``n_digits`` [batch, operand].
        """

    @abstractmethod
    def _draw_hard(self, digits: Tensor, generator: torch.Generator) -> Tensor:
        """Operands [batch, operand, width] of the hard distribution, made of random digits."""

    def _answer(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        equals = place_of(EQUALS, tokens, self.name, "'='")
        operands = operands_of(
            tokens,
            equals,
            operator=ALPHABET.index(self.operator),
            base=10,
            task=self.name,
            n_operands=self.n_operands,
        )
        return equals, *self._solve(*operands)

    def n_loops(self, n: int) -> int:
        return self.answer_length(check_length(n))

    def n_positions(self, n: int) -> int:
        """The operands, a sign after each, and the longest answer."""
        return self.n_operands * (check_length(n) + 1) + self.answer_length(n)

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        equals = row.index(EQUALS)
        written = spell(row[:equals], ALPHABET).split(self.operator)
        said = f"{f' {self.operator} '.join(number[::-1] for number in written)} ="
        if answer is None:
            return said
        return f"{said} {spell(until(answer[equals:], END), ALPHABET, turned=True)}"

    def from_digits(
        self, digits: Int[Tensor, "batch operand width"], n_digits: Int[Tensor, "batch operand"]
    ) -> Batch:
        """The batch of given digits, least significant first, of which ``n_digits`` count.

        Raises:
            InputError: they are no digits, or a length does not fit.
        """
        shapes = [list(getattr(x, "shape", ())) for x in (digits, n_digits)]
        if len(shapes[0]) != 3 or shapes[1] != shapes[0][:2] or shapes[1][1] != self.n_operands:
            raise InputError(
                "digits and n_digits",
                expected=f"int64 of shapes [batch, {self.n_operands}, width] and "
                f"[batch, {self.n_operands}]",
                given=" and ".join(map(describe_tensor, (digits, n_digits))),
                fix="Stack the operands: torch.stack([a, b], dim=1).",
            )
        check_digits(digits.flatten(0, 1), n_digits.flatten(), 10, "digits")
        return self._written(digits, n_digits, n_digits.amax(dim=1))

    def _written(self, digits: Tensor, n_digits: Tensor, n: Tensor) -> Batch:
        operands = zip(digits.unbind(dim=1), n_digits.unbind(dim=1))
        signs = self.operator * (self.n_operands - 1) + "="
        parts = [(x, same(ALPHABET.index(sign), n)) for x, sign in zip(operands, signs)]
        width = self.n_operands * (digits.shape[2] + 1)
        return self._batch(join([x for part in parts for x in part], width=width, fill=END), n)

    def encode(self, operands: Sequence[Sequence[int]]) -> Batch:
        """The batch of given integers, each written without leading zeros.

        Raises:
            InputError: no operands, not as many as the task has, or one that is no integer of at
                least 0.
        """
        rows = check_operands(operands, self.n_operands)
        n_digits = torch.tensor([[len(str(x)) for x in row] for row in rows])
        widths = [int(n_digits.max())] * self.n_operands
        return self.from_digits(torch.stack(operand_digits(rows, *widths, base=10), 1), n_digits)

    def sample_operands(self, *n_digits: int, batch_size: int, generator: torch.Generator) -> Batch:
        """Draw operands of exactly so many digits: a cell of the grid of accuracy by lengths.

        Args:
            n_digits: Digits of each operand.
            batch_size: Examples.
            generator: Where what is drawn comes from; examples are on its device.

        Raises:
            InputError: not one length for each operand, or one of the arguments is not its kind.

        Example:
            >>> from loopinterp.tasks import AbacusAddition
            >>> g = torch.Generator().manual_seed(0)
            >>> batch = AbacusAddition().sample_operands(3, 1, batch_size=2, generator=g)
            >>> AbacusAddition().decode(batch.inputs)
            ['794 + 7 =', '430 + 3 =']
        """
        if len(n_digits) != self.n_operands:
            raise InputError(
                "lengths of the operands",
                expected=f"{self.n_operands}, one for each operand",
                given=str(len(n_digits)),
                fix=f"Pass e.g. {', '.join(['8'] * self.n_operands)}.",
            )
        each = [lengths(n, batch_size=batch_size, generator=generator) for n in n_digits]
        digits, length = self._digits((batch_size, max(n_digits)), generator), torch.stack(each, 1)
        return self.from_digits(self._led(digits, length, generator), length)

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        k, rows = self.n_operands, len(n)
        digits = self._digits((rows, int(n.max())), generator)
        all_n = n[:, None].expand(-1, k)
        if kind == self.hard:
            return self._written(self._draw_hard(digits, generator), all_n, n)
        # Drawn after the digits and before the leading ones, in this order ever since.
        drawn = [
            (
                torch.rand((rows,), generator=generator, device=n.device, dtype=torch.float32) * n
            ).long()
            + 1
            for _ in range({"mixed": k - 1, "independent": k}.get(kind, 0))
        ]
        if kind == "mixed":
            longest = integers(0, k, (rows, 1), generator)
            operand = torch.arange(k, device=n.device)
            # The others in their order, and n where the longest is.
            which = torch.where(operand == longest, k - 1, operand - (operand > longest).long())
            n_digits = torch.stack([*drawn, n], dim=1).gather(1, which)
        else:
            n_digits = torch.stack(drawn, dim=1) if drawn else all_n
        return self._written(self._led(digits, n_digits, generator), n_digits, n)

    def _digits(self, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
        """Random digits [batch, operand, width]."""
        each = [integers(0, 10, shape, generator) for _ in range(self.n_operands)]
        return torch.stack(each, dim=1)

    def _led(self, digits: Tensor, n_digits: Tensor, generator: torch.Generator) -> Tensor:
        """The digits without leading zeros."""
        each = [integers(1, 10, (len(digits),), generator) for _ in range(self.n_operands)]
        return lead(digits, n_digits, torch.stack(each, dim=1))
