"""Sorting decimal numbers by next-token prediction, in the format of the abacus embeddings."""

from __future__ import annotations

import reprlib
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import PositiveInt

from loopinterp.core.errors import check_integer, need
from loopinterp.core.settings import settings
from loopinterp.tasks.sampling import (
    check_digits,
    check_tokens,
    inside,
    integers,
    lead,
    need_form,
    pack,
    place_of_equals,
    places,
    split,
    to_digits,
)
from loopinterp.tasks.task import or_text, spell, until
from loopinterp.tasks.token_by_token import TokenByToken

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.tasks.task import Batch

LETTERS = string.ascii_uppercase + string.ascii_lowercase
SYMBOLS = "0123456789,:=$" + LETTERS
_COMMA, _COLON, _EQUALS, _END, _FIRST_LETTER = range(10, 15)


@settings
class AbacusSorting(TokenByToken):
    """The order of n numbers, token by token: ``A:21,B:7,C:03=B,A,C$`` (12, 7, 30).

    The answer is the numbers' letters in ascending order; equal numbers keep theirs. Numbers have
    up to ``n_digits`` digits, the least significant first. Letters are consecutive (``A`` after
    ``z``), from a random one on. The inputs hold the answer, the target from the ``=`` on; ``$``
    closes it, and pads.

    Tokens, in and out: digits 0..9, ``,`` (10), ``:`` (11), ``=`` (12), ``$`` (13), the letters
    A..Z and a..z (14..65). The length n is at most 52. T(n) = n: each loop can choose one number.

    Distributions: ``"uniform"`` (each number has 1..n_digits digits), ``"close"`` (all have
    ``n_digits``, and differ in at most one digit from one drawn number, so that no single digit
    shows their order).

    Source: arXiv 2405.17399 and its code, with 102 letters.

    Example:
        >>> task = AbacusSorting(n_digits=2)
        >>> task.decode(task.encode([[12, 7, 30]]))
        ['A:12, B:7, C:30 = B, A, C']
    """

    name = "abacus_sorting"
    goal = "sort decimal numbers"
    about = "The order of n numbers of up to {self.n_digits} digits, A:21,B:7=B,A$."
    symbols = SYMBOLS
    end = _END
    distributions = ("uniform", "close")

    n_digits: PositiveInt = 10

    def _n_loops(self, n: int) -> int:
        return _check_count(n)

    def longest(self, n: int) -> int:
        return min(n, len(LETTERS))

    def _n_positions(self, n: int) -> int:
        # Of each number its letter, ":", digits and a sign after them; letters and commas.
        return _check_count(n) * (self.n_digits + 3) + 2 * n - 1

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        equals = row.index(_EQUALS)
        numbers = (number.split(":") for number in spell(row[:equals], SYMBOLS).split(","))
        prompt = f"{', '.join(f'{letter}:{digits[::-1]}' for letter, digits in numbers)} ="
        if answer is None:
            return prompt
        return f"{prompt} {spell(until(answer[equals:], _END), SYMBOLS).replace(',', ', ')}"

    def from_digits(
        self,
        digits: Int[Tensor, "batch number width"],
        n_digits: Int[Tensor, "batch number"],
        letters: Int[Tensor, "batch number"],
    ) -> Batch:
        """The batch of numbers, least significant digit first, with their letters' tokens.

        The first ``n_digits`` digits of a number count; 0 after an example's last number.
        """
        shape, *others = (list(getattr(x, "shape", ())) for x in (digits, n_digits, letters))
        fit = len(shape) == 3 and others == [shape[:2]] * 2
        there = n_digits > 0 if fit else torch.zeros(1, 1)  # [batch, number]
        n = there.sum(dim=1)
        fits = n.all() and torch.equal(there, inside(n, there.shape[1]))
        expected = "shapes [batch, number, width], [batch, number] and [batch, number]"
        fix = "Pass a number or more for each example; n_digits is 0 after the last one alone."
        need(fits, "digits and letters", expected, f"{shape} and {others}", fix)
        digits = digits[..., : self.n_digits]
        check_digits(digits.flatten(0, 1), n_digits.flatten().clamp(min=1), 10, "digits")
        check_tokens(letters, self.d_vocab, "letters")
        last = torch.arange(there.shape[1], device=n.device) == n[:, None] - 1
        signs = [letters, torch.full_like(letters, _COLON), torch.where(last, _EQUALS, _COMMA)]
        letter, colon, after = (sign[..., None] for sign in signs)
        # [batch, number, sign]: letter, colon, digits, and a comma or the "=", flattened
        values = torch.cat([letter, colon, digits, after], dim=2).flatten(1)
        one = there[..., None]
        keep = torch.cat([one, one, inside(n_digits, digits.shape[2]), one], dim=2).flatten(1)
        width = int(keep.sum(dim=1).max())
        return self._batch(pack(values, keep, width=width, fill=_END), n)

    @or_text
    def encode(self, numbers: Sequence[Sequence[int]], letters: str = LETTERS) -> Batch:
        """The batch of lists of integers, of any lengths.

        The k-th of the ``letters`` names an example's k-th number.
        """
        rows = [list(example) for example in numbers]
        fits = rows and all(rows) and set(letters) <= set(LETTERS)
        expected = "examples of at least one number each, and letters of A..Z and a..z"
        got = f"{reprlib.repr(numbers)}, {reprlib.repr(letters)}"
        need(fits, "numbers", expected, got, "Pass e.g. [[12, 7, 30]].")
        n = torch.tensor([len(example) for example in rows])
        most = check_integer("numbers of an example", int(n.max()), least=1, most=len(letters))
        there = inside(n, most)
        flat = [x for example in rows for x in example]
        digits = torch.zeros((len(rows), most, self.n_digits), dtype=torch.int64)
        # Numbers one after the other, at the places [batch, number] where there are any.
        digits[there] = to_digits(flat, self.n_digits, base=10)
        n_digits = torch.zeros_like(n)[:, None].repeat(1, most)
        n_digits[there] = torch.tensor([len(str(x)) for x in flat])
        named = torch.tensor([SYMBOLS.index(x, _FIRST_LETTER) for x in letters[:most]])
        return self.from_digits(digits, n_digits, named.expand(len(rows), -1))

    def _answer(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        equals = place_of_equals(_EQUALS, tokens, self.name)
        letters, digits, count = self._numbers(tokens, equals)
        there = inside(count, letters.shape[1])
        order = torch.arange(letters.shape[1], device=tokens.device).expand_as(letters)
        # A stable sort by as many digits as fit into an int64, the least significant ones first.
        for part in digits.split(18, dim=2):
            key = (part * 10 ** torch.arange(part.shape[2], device=tokens.device)).sum(dim=2)
            key = key.masked_fill(~there, torch.iinfo(torch.int64).max)
            # Positions in the order so far, [batch, number]
            order = order.gather(1, key.gather(1, order).argsort(dim=1, stable=True))
        named = letters.gather(1, order)
        # Letters with commas between, [batch, 2 * number]
        answer = torch.stack([named, torch.full_like(named, _COMMA)], 2).flatten(1)
        return equals, answer, 2 * count - 1

    def _numbers(self, tokens: Tensor, equals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Letters [batch, number], digits [batch, number, width], counts."""
        prompt = tokens[:, : int(equals.max()) + 1]
        column = torch.arange(prompt.shape[1], device=tokens.device)
        fine = _follows(tokens.device)[prompt[:, :-1], prompt[:, 1:]]
        fine = fine | (column[1:] > equals[:, None])
        expected = "letter:digits, letter:digits and so on, and then the '='"
        need_form(fine.all() and (prompt[:, 0] >= _FIRST_LETTER).all(), self.name, expected)
        marks = ((prompt == _COMMA) & (column < equals[:, None])) | (column == equals[:, None])
        count = marks.sum(dim=1)
        parts, _ = split(prompt, places(marks, int(count.max())))
        letters = parts[..., 0]
        number = torch.arange(letters.shape[1], device=tokens.device)
        # Missing numbers get values that are no letters and differ.
        each = torch.where(number < count[:, None], letters, -1 - number).sort(dim=1).values
        need_form(each.diff(dim=1).all(), self.name, "another letter for each number")
        return letters, parts[..., 2:], count

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        rows, most, width = len(n), _check_count(int(n.max())), self.n_digits
        first = integers(0, len(LETTERS), (rows, 1), generator)
        number = torch.arange(most, device=n.device)
        # [batch, number]: letters in their order, from a random one on
        letters = (first + number) % len(LETTERS) + _FIRST_LETTER
        leading = integers(1, 10, (rows, most), generator)
        if kind == "uniform":
            n_digits = integers(1, width + 1, (rows, most), generator)
            digits = lead(integers(0, 10, (rows, most, width), generator), n_digits, leading)
        else:
            # [batch, number, width]: the example's number, one digit drawn again
            n_digits = torch.full_like(letters, width)
            model = integers(0, 10, (rows, 1, width), generator).expand(-1, most, -1)
            model = lead(model, n_digits, leading[:, :1].expand(-1, most))
            at = integers(0, width, (rows, most, 1), generator)
            digits = model.scatter(2, at, integers(0, 10, (rows, most, 1), generator))
            # A leading digit drawn as 0 is taken back
            digits = torch.where((digits[..., -1:] > 0) | (width == 1), digits, model)
        return self.from_digits(digits, n_digits * inside(n, most), letters)


def _follows(device: torch.device) -> Tensor:
    """Whether a token (column) may follow another (row) in a prompt."""
    token = torch.arange(len(SYMBOLS), device=device)
    digit, letter = token < 10, token >= _FIRST_LETTER
    follows = torch.zeros((len(token), len(token)), dtype=torch.bool, device=device)
    follows[letter, _COLON] = True
    follows[_COLON] = digit
    follows[digit] = digit | (token == _COMMA) | (token == _EQUALS)
    follows[_COMMA] = letter
    return follows


def _check_count(n: int) -> int:
    fix = "Each number needs a letter of its own: sort fewer at once."
    return check_integer("n", n, most=len(LETTERS), fix=fix)
