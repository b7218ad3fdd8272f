"""Sorting decimal numbers by next-token prediction, in the format of the abacus embeddings."""

from __future__ import annotations

import reprlib
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import PositiveInt

from loopinterp.core.errors import InputError, check_integer
from loopinterp.core.settings import settings
from loopinterp.tasks.rows import lead, malformed, pack, place_of_equals, places, split, to_digits
from loopinterp.tasks.sampling import check_digits, check_length, check_tokens, inside, integers
from loopinterp.tasks.task import describe_tensor
from loopinterp.tasks.token_by_token import TokenByToken
from loopinterp.tasks.words import spell, until

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor

    from loopinterp.tasks.task import Batch

LETTERS = string.ascii_uppercase + string.ascii_lowercase
SYMBOLS = "0123456789,:=$" + LETTERS
_COMMA, _COLON, _EQUALS, _END, _FIRST_LETTER = range(10, 15)
_DIGITS_AT_ONCE = 18
"""Decimal digits that fit into an int64."""

_KINDS = ["digit"] * 10 + [",", ":", "=", "$"] + ["letter"] * len(LETTERS)
_NEXT = {
    "letter": (":",),
    ":": ("digit",),
    "digit": ("digit", ",", "="),
    ",": ("letter",),
}
_FOLLOWS = [[after in _NEXT.get(kind, ()) for after in _KINDS] for kind in _KINDS]
"""Whether a token (column) may follow another one (row) in a prompt."""


@settings
class AbacusSorting(TokenByToken):
    """The order of n numbers, next token by next token: ``A:21,B:7,C:03=B,A,C$`` (12, 7, 30).

    Each number has a letter; the answer is the letters in rising order of their numbers, with a
    comma between them. Equal numbers keep their order. Numbers are written least significant digit
    first, in up to ``n_digits`` digits. The letters of an example follow each other in the
    alphabet (``A`` after ``z``), from a random one on. The inputs hold the answer too, as far as it
    can be seen: it is asked for from the ``=`` on, and then ``$``. Padding is ``$``.

    Tokens: digits 0..9, ``,`` (10), ``:`` (11), ``=`` (12), ``$`` (13), the letters A..Z and
    a..z (14..65); in and out. The length n is the number of numbers, at most 52. T(n) = n: one
    number a loop can be chosen.

    Distributions: ``"uniform"`` (each number has 1..n_digits digits, whatever the others have),
    ``"close"`` (all have ``n_digits``, and each differs from one that the example draws in one
    digit at most, so that no length and no single digit tells their order).

    Args:
        n_digits: Most digits of a number.

    Raises:
        ConfigError: ``n_digits`` is not an integer of at least 1.

    Source: arXiv 2405.17399 and its code; its alphabet has 102 letters, and its grid of accuracy is
    over ``n_digits`` and n.

    Example:
        >>> task = AbacusSorting(n_digits=2)
        >>> batch = task.encode([[12, 7, 30]])
        >>> "".join(SYMBOLS[t] for t in batch.inputs[0].tolist())
        'A:21,B:7,C:03=B,A,C$'
        >>> task.decode(batch)
        ['A:12, B:7, C:30 = B, A, C']
    """

    name = "abacus_sorting"
    symbols = SYMBOLS
    end = _END
    distributions = ("uniform", "close")

    n_digits: PositiveInt = 10

    def n_loops(self, n: int) -> int:
        return _check_count(n)

    def longest(self, n: int) -> int:
        """As many numbers as there are letters, or n if that is fewer."""
        return min(check_length(n), len(LETTERS))

    def n_positions(self, n: int) -> int:
        """Of each number its letter, ``:``, digits and a sign after them; letters and commas."""
        return _check_count(n) * (self.n_digits + 3) + 2 * n - 1

    def describe(self) -> str:
        return f"The order of n numbers of up to {self.n_digits} digits, A:21,B:7=B,A$."

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
        """The batch of given numbers, least significant digit first, with their letters' tokens.

        Args:
            digits: Of each number the first ``n_digits`` count.
            n_digits: How many; 0 after the last number of an example.
            letters: The token of each number's letter, another one for each.

        Raises:
            InputError: they are no digits or letters, or a length does not fit.
        """
        self._check(digits, n_digits, letters)
        there = n_digits > 0  # [batch, number]
        n = there.sum(dim=1)
        digits = digits[..., : self.n_digits]
        last = torch.arange(there.shape[1], device=n.device) == n[:, None] - 1
        signs = [letters, torch.full_like(letters, _COLON), torch.where(last, _EQUALS, _COMMA)]
        letter, colon, after = (sign[..., None] for sign in signs)
        # [batch, number, sign]: letter, colon, digits, and a comma or the "=", flattened
        values = torch.cat([letter, colon, digits, after], dim=2).flatten(1)
        one = there[..., None]
        keep = torch.cat([one, one, inside(n_digits, digits.shape[2]), one], dim=2).flatten(1)
        width = int(keep.sum(dim=1).max())
        return self._batch(pack(values, keep, width=width, fill=_END), n)

    def _check(self, digits: Tensor, n_digits: Tensor, letters: Tensor) -> None:
        shapes = [list(getattr(x, "shape", ())) for x in (digits, n_digits, letters)]
        fit = len(shapes[0]) == 3 and shapes[1] == shapes[2] == shapes[0][:2]
        there = n_digits > 0 if fit else torch.zeros(1, 1)
        n = there.sum(dim=1)
        if not (bool(n.all()) and torch.equal(there, inside(n, there.shape[1]))):
            raise InputError(
                "digits, n_digits and letters",
                expected="shapes [batch, number, width], [batch, number] and [batch, number], with "
                "n_digits 0 after the last number of an example and nowhere else",
                given=", ".join(map(describe_tensor, (digits, n_digits, letters))),
                fix="Pass at least one number for each example, and no gaps.",
            )
        counted = digits[..., : self.n_digits].flatten(0, 1)
        check_digits(counted, n_digits.flatten().clamp(min=1), 10, "digits")
        check_tokens(letters, self.d_vocab, "letters")

    def encode(self, numbers: Sequence[Sequence[int]], letters: str = LETTERS) -> Batch:
        """The batch of given lists of integers, which may be of different lengths.

        Args:
            numbers: The numbers of each example.
            letters: Their letters, the first one for the first number.

        Raises:
            InputError: no example, one without numbers or with more than there are letters, a
                letter that is none or comes twice, or a number that is no integer of at least 0 or
                has more than ``n_digits`` digits.
        """
        rows = [list(example) for example in numbers]
        if not rows or not all(rows) or not set(letters) <= set(LETTERS):
            raise InputError(
                "numbers",
                expected="examples of at least one number each, and letters of A..Z and a..z",
                given=f"{reprlib.repr(numbers)}, {reprlib.repr(letters)}",
                fix="Pass e.g. [[12, 7, 30]].",
            )
        n = torch.tensor([len(example) for example in rows])
        most = check_integer("numbers of an example", int(n.max()), least=1, most=len(letters))
        there = inside(n, most)
        flat = [x for example in rows for x in example]
        digits = torch.zeros((len(rows), most, self.n_digits), dtype=torch.int64)
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
        # A stable sort by as many digits as fit into an integer, the least significant ones first.
        for part in digits.split(_DIGITS_AT_ONCE, dim=2):
            key = (part * 10 ** torch.arange(part.shape[2], device=tokens.device)).sum(dim=2)
            key = key.masked_fill(~there, torch.iinfo(torch.int64).max)
            order = order.gather(1, key.gather(1, order).argsort(dim=1, stable=True))
        named = letters.gather(1, order)
        return (
            equals,
            torch.stack([named, torch.full_like(named, _COMMA)], 2).flatten(1),
            2 * count - 1,
        )

    def _numbers(self, tokens: Tensor, equals: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Letters [batch, number], digits [batch, number, width], and how many numbers there are.

        Raises where a prompt is not ``letter:digits,…,letter:digits=``, each letter another one.
        """
        prompt = tokens[:, : int(equals.max()) + 1]
        column = torch.arange(prompt.shape[1], device=tokens.device)
        follows = tokens.new_tensor(_FOLLOWS, dtype=torch.bool)  # [token, next token]
        fine = follows[prompt[:, :-1], prompt[:, 1:]] | (column[1:] > equals[:, None])
        if not bool((fine.all(dim=1) & (prompt[:, 0] >= _FIRST_LETTER)).all()):
            raise malformed(self.name, "letter:digits, letter:digits and so on, and then the '='")
        marks = ((prompt == _COMMA) & (column < equals[:, None])) | (column == equals[:, None])
        count = marks.sum(dim=1)
        parts, _ = split(prompt, places(marks, int(count.max())))
        letters = parts[..., 0]
        number = torch.arange(letters.shape[1], device=tokens.device)
        # Missing numbers get values that are no letters and differ.
        each = torch.where(number < count[:, None], letters, -1 - number).sort(dim=1).values
        if bool((each.diff(dim=1) == 0).any()):
            raise malformed(self.name, "another letter for each number")
        return letters, parts[..., 2:], count

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        rows, most, width = len(n), _check_count(int(n.max())), self.n_digits
        first = integers(0, len(LETTERS), (rows, 1), generator)
        number = torch.arange(most, device=n.device)
        letters = (first + number) % len(LETTERS) + _FIRST_LETTER
        leading = integers(1, 10, (rows, most), generator)
        if kind == "uniform":
            n_digits = integers(1, width + 1, (rows, most), generator)
            digits = lead(integers(0, 10, (rows, most, width), generator), n_digits, leading)
        else:
            n_digits = torch.full_like(letters, width)
            model = integers(0, 10, (rows, 1, width), generator).expand(-1, most, -1)
            model = lead(model, n_digits, leading[:, :1].expand(-1, most))
            at = integers(0, width, (rows, most, 1), generator)
            digits = model.scatter(2, at, integers(0, 10, (rows, most, 1), generator))
            digits = torch.where((digits[..., -1:] > 0) | (width == 1), digits, model)
        return self.from_digits(digits, n_digits * inside(n, most), letters)


def _check_count(n: int) -> int:
    """A length, if there are as many letters."""
    fix = "Each number needs a letter of its own: sort fewer at once."
    return check_integer("n", check_length(n), most=len(LETTERS), fix=fix)
