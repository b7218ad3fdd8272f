"""Tasks with full-output prediction."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from pydantic import PositiveInt

from loopinterp.core.settings import settings
from loopinterp.tasks.sampling import (
    Sampler,
    check_digits,
    check_tokens,
    cut,
    inside,
    integers,
    join,
    need_form,
    place_of_equals,
    random_bits,
    same,
    uniform,
)
from loopinterp.tasks.task import IGNORE, Batch, spell, until

if TYPE_CHECKING:
    from jaxtyping import Int
    from torch import Tensor


class FullOutput(Sampler):
    """Base of tasks with full-output prediction: the whole answer is read at once.

    It starts at the ``=``; EOS follows up to the padded length. Tokens: the prompt's symbols from 0
    on, ``=``, EOS (also the padding), BOS. Output classes: the answer's symbols, EOS.

    Source: arXiv 2409.15647.

    Attributes:
        n_answer_symbols: How many symbols, from the first, an answer uses.
        question: The question about the prompt, in words.
        least_first: Which of ``"prompt"`` and ``"answer"`` have the least significant digit first.
    """

    symbols: tuple[str, ...]
    n_answer_symbols = 2
    question = "{}"
    least_first: tuple[str, ...] = ()

    @property
    def equals(self) -> int:
        return len(self.symbols)

    @property
    def d_vocab(self) -> int:
        return len(self.symbols) + 3

    @property
    def d_vocab_out(self) -> int:
        return self.n_answer_symbols + 1

    def prompt_length(self, n: int) -> int:
        """Longest prompt of length n."""
        return n

    def answer_length(self, n: int) -> int:
        """Longest answer of length n."""
        return n

    def _n_loops(self, n: int) -> int:
        return n

    def _n_positions(self, n: int) -> int:
        # BOS, the prompt, "=", and room for the answer and one EOS.
        return self.prompt_length(n) + self.answer_length(n) + 2

    @abstractmethod
    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """Answers [batch, width] to prompts of ``n`` symbols, and their lengths."""

    def say(self, row: Sequence[int], answer: Sequence[int] | None) -> str:
        equals = row.index(self.equals)
        space = " " if max(map(len, self.symbols)) > 1 else ""
        prompt_turned, answer_turned = (part in self.least_first for part in ("prompt", "answer"))
        prompt = spell(row[1:equals], self.symbols, separator=space, turned=prompt_turned)
        for operator in {"+", "*"} & {*self.symbols}:
            a, b = prompt.split(operator)[:: -1 if prompt_turned else 1]
            prompt = f"{a} {operator} {b}"
        question = f"{self.question.format(prompt)} ="
        if answer is None:
            return question
        words = self.symbols[: self.n_answer_symbols]
        answer = until(answer[equals:], self.n_answer_symbols)
        return f"{question} {spell(answer, words, separator=space, turned=answer_turned)}"

    def targets(self, inputs: Batch | Tensor) -> Int[Tensor, "batch pos"]:
        """The exact answer from ``=`` on, then EOS; ``IGNORE`` before ``=``."""
        tokens = check_tokens(inputs, self.d_vocab)
        equals, answer, length = self.solve(tokens)
        # [batch, pos]: places counted from the "="
        place = torch.arange(tokens.shape[1], device=tokens.device) - equals[:, None]
        targets = answer.gather(1, place.clamp(0, answer.shape[1] - 1))
        targets = targets.masked_fill(place >= length[:, None], self.n_answer_symbols)
        return targets.masked_fill(place < 0, IGNORE)

    def solve(
        self, tokens: Int[Tensor, "batch pos"]
    ) -> tuple[Int[Tensor, " batch"], Int[Tensor, "batch longest"], Int[Tensor, " batch"]]:
        """Each row's position of ``=``, the answer to the prompt before it, and its length."""
        equals = place_of_equals(self.equals, tokens, self.name)
        n = equals - 1
        need_form((n > 0).all(), self.name, "a prompt between BOS and the '='")
        prompt = cut(tokens, torch.ones_like(n), n)
        expected = f"symbols 0..{self.equals - 1} alone before the '='"
        need_form((prompt < self.equals).all(), self.name, expected)
        return equals, *self._solve(prompt, n)

    def _batch(self, parts: list[tuple[Tensor, Tensor]], n: Tensor, n_loops: Tensor) -> Batch:
        eos, bos = self.equals + 1, self.equals + 2
        rows = [same(bos, n), *parts, same(self.equals, n)]
        tokens = join(rows, width=self.n_positions(int(n.max())), fill=eos)  # [batch, pos]
        return Batch(tokens, self.targets(tokens), n, n_loops, self)


class BitPrompt(FullOutput):
    """A question about n bits: ``BOS b_1 … b_n = EOS …``. T(n) = n.

    Distributions: ``"uniform"`` (fair bits), ``"biased"`` (each example draws its probability of a
    one from {.05, .5, .95}).
    """

    symbols = ("0", "1")
    distributions = ("uniform", "biased")

    def from_bits(self, bits: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Batch:
        """The batch of bits; the first ``n`` of each row count."""
        check_digits(bits, n, 2, "bits")
        return self._batch([(bits, n)], n, n.clone())

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        return self.from_bits(random_bits(kind, len(n), int(n.max()), generator), n)


@settings
class Copy(BitPrompt):
    """The n bits again, each n + 1 positions behind its own; see :class:`BitPrompt`.

    Example:
        >>> batch = Copy().from_bits(torch.tensor([[1, 0, 0]]), torch.tensor([3]))
        >>> batch.inputs.tolist(), batch.targets.tolist()
        ([[4, 1, 0, 0, 2, 3, 3, 3]], [[-100, -100, -100, -100, 1, 0, 0, 2]])
    """

    name = "copy"
    goal = "repeat a string of bits"
    about = "The n bits again, answered from the '=' sign on and closed by EOS."
    question = "copy of {}"

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return prompt, n


@settings
class Parity(BitPrompt):
    """Whether the number of ones is odd: a bit at the ``=``; see :class:`BitPrompt`."""

    name = "parity"
    goal = "tell whether the number of ones is odd"
    about = "Parity of n bits, answered at the '=' sign and closed by EOS."
    question = "parity of {}"

    def answer_length(self, n: int) -> int:
        return 1

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        return (prompt == 1).sum(dim=1, keepdim=True) % 2, torch.ones_like(n)


@settings
class BinarySum(BitPrompt):
    """The number of ones in binary, least significant bit first; see :class:`BitPrompt`.

    Example:
        >>> batch = BinarySum().from_bits(torch.tensor([[1, 1, 0, 1, 1, 1]]), torch.tensor([6]))
        >>> batch.inputs.tolist(), batch.targets[0, 7:].tolist()    # 5 = 101
        ([[4, 1, 1, 0, 1, 1, 1, 2, 3, 3, 3]], [1, 0, 1, 2])
    """

    name = "binary_sum"
    goal = "count ones"
    about = "How many of n bits are ones, in binary, from the '=' sign on and closed by EOS."
    question = "ones in {}"
    least_first = ("answer",)

    def answer_length(self, n: int) -> int:
        return n.bit_length()

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        ones = (prompt == 1).sum(dim=1)
        place = torch.arange(max(int(ones.max()).bit_length(), 1), device=prompt.device)
        shifted = ones[:, None] >> place  # [batch, place]: the number without its lower bits
        return shifted & 1, (shifted > 0).sum(dim=1).clamp(min=1)


@settings
class UniqueSet(FullOutput):
    """The distinct ones of n symbols, by first appearance: ``BOS s_1 … s_n = EOS …``. T(n) = n.

    Distributions: ``"uniform"`` (independent symbols), ``"few"`` (at most 4 symbols per example),
    ``"distinct"`` (a random order of the symbols, repeated), ``"varied"`` (at most k of N symbols,
    drawn with probability ``log(1 + 1/k) / log(N + 1)``).

    Example:
        >>> task = UniqueSet(n_symbols=9)
        >>> batch = task.from_symbols(torch.tensor([[7, 2, 7, 5]]), torch.tensor([4]))
        >>> batch.inputs.tolist(), batch.targets[0, 5:].tolist()
        ([[11, 7, 2, 7, 5, 9, 10, 10, 10, 10]], [7, 2, 5, 9, 9])
    """

    name = "unique_set"
    goal = "list the distinct symbols of a string"
    about = "The distinct ones of n symbols (of {self.n_symbols}), by first appearance."
    question = "distinct ones of {}"
    distributions = ("uniform", "few", "distinct", "varied")

    n_symbols: PositiveInt = 50

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(f"s{i}" for i in range(self.n_symbols))

    @property
    def n_answer_symbols(self) -> int:
        return self.n_symbols

    def from_symbols(self, symbols: Int[Tensor, "batch width"], n: Int[Tensor, " batch"]) -> Batch:
        """The batch of symbols; the first ``n`` of each row count."""
        check_digits(symbols, n, self.n_symbols, "symbols")
        return self._batch([(symbols, n)], n, n.clone())

    def _draw(self, kind: str, n: Tensor, generator: torch.Generator) -> Batch:
        rows, width = len(n), int(n.max())
        drawn = integers(0, self.n_symbols, (rows, width), generator)
        # [batch, n_symbols]: a random order of the symbols, of which the first ones are used
        order = uniform((rows, self.n_symbols), generator).argsort(1)
        if kind == "few":
            drawn = order.gather(1, drawn % min(4, self.n_symbols))
        elif kind == "distinct":
            drawn = order[:, torch.arange(width, device=n.device) % self.n_symbols]
        elif kind == "varied":
            share = uniform((rows, 1), generator)
            # P(used <= k) = log(k + 1) / log(n_symbols + 1)
            used = ((self.n_symbols + 1) ** share).long().clamp(max=self.n_symbols)
            drawn = order.gather(1, drawn % used)
        return self.from_symbols(drawn, n)

    def _solve(self, prompt: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        # [batch, pos, earlier pos]: whether the symbol stood there before
        repeated = (prompt[:, :, None] == prompt[:, None, :]).tril(diagonal=-1)
        new = ~repeated.any(dim=2) & inside(n, prompt.shape[1])
        order = (~new).long().argsort(dim=1, stable=True)  # new symbols first, each in its order
        return prompt.gather(1, order), new.sum(dim=1)
